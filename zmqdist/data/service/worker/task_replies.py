"""The replies that the machines of tasks decide on. `reply` identifies the request; element_replies.py sends the reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(slots=True)
class GiveElements:
    """Reply with some elements, in order. Each kind of task has its own `tag`: see rounds_machine.py and portions_machine.py."""

    reply: Any
    elements: list[Any]
    tag: Any = None


@dataclass(slots=True)
class GiveSkip:
    """Reply that there are no elements now."""

    reply: Any
    tag: Any = None


@dataclass(slots=True)
class GiveEnd:
    """Reply that the task has no more elements."""

    reply: Any


@dataclass(slots=True)
class GiveError:
    """Reply with an error: an element could not be computed, the task cannot continue, or the request was wrong."""

    reply: Any
    error: BaseException


TaskReply: TypeAlias = GiveElements | GiveSkip | GiveEnd | GiveError
