"""The replies that the machines of tasks return. Their field `reply` is the handle of the request,
as in element_replies.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(slots=True)
class GiveElements:
    """Reply with some elements, in order. rounds_machine.py and portions_machine.py define the
    `tag` for their kinds of tasks."""

    reply: Any
    elements: list[Any]
    tag: Any = None


@dataclass(slots=True)
class GiveSkip:
    """Reply that the task has no elements at the moment."""

    reply: Any
    tag: Any = None


@dataclass(slots=True)
class GiveEnd:
    """Reply that the task has no more elements."""

    reply: Any


@dataclass(slots=True)
class GiveError:
    """Reply with an error: an element could not be computed, the task cannot continue, or the
    request was wrong."""

    reply: Any
    error: BaseException


TaskReply: TypeAlias = GiveElements | GiveSkip | GiveEnd | GiveError
