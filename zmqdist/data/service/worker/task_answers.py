"""What the machines of tasks answer to readers. `reply` stands for a question; element_replies.py carries the answer out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(slots=True)
class GiveElements:
    """Some elements, in order; `tag` says what they are parts of."""

    reply: Any
    elements: list[Any]
    tag: Any = None


@dataclass(slots=True)
class GiveSkip:
    """There is nothing now."""

    reply: Any
    tag: Any = None


@dataclass(slots=True)
class GiveEnd:
    """There is nothing more in this task."""

    reply: Any


@dataclass(slots=True)
class GiveError:
    """One element could not be computed, or the task cannot go on, or the question was wrong."""

    reply: Any
    error: BaseException


TaskAnswer: TypeAlias = GiveElements | GiveSkip | GiveEnd | GiveError
