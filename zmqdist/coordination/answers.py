"""What machines answer to questions that may wait: effects that name a question by its ticket.

Also the names of tasks, which those machines share.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Ticket: TypeAlias = Hashable
"""One question; the shell's own object. It is answered once, or dropped."""

Task: TypeAlias = tuple[str, int]
"""(job, index)."""

NAMES_LISTED_MAX = 20
"""Tasks that a text names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Give this value to who asked."""

    ticket: Ticket
    value: Any = None


@dataclass(frozen=True, slots=True)
class Fail:
    """Give this error to who asked: a code of zmqdist.errors, and a text."""

    ticket: Ticket
    code: int
    message: str


Effect: TypeAlias = Answer | Fail


def named(task: Task) -> str:
    """("worker", 1) as people write it: "worker:1"."""
    return f"{task[0]}:{task[1]}"


def listed(tasks: Iterable[Task]) -> str:
    """The names of tasks, in the order that is given."""
    names = [named(task) for task in tasks]
    more = len(names) - NAMES_LISTED_MAX
    return ", ".join(names[:NAMES_LISTED_MAX]) + (f" and {more} more" if more > 0 else "") if names else "none"
