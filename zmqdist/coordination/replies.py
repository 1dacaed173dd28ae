"""Replies of machines to requests that may wait: each reply is an effect that names the request by
its ticket.

The names of tasks are in this module, too, because all these machines use them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import msgspec

Ticket: TypeAlias = Hashable
"""The runtime's object for one request. A machine replies to each ticket once, or drops the
ticket.
"""

Task: TypeAlias = tuple[str, int]
"""A task of a cluster, as (job, index)."""

NAMES_LISTED_MAX = 20
"""The largest number of tasks that a text names. Further tasks are only counted."""


class ReplyValue(msgspec.Struct, frozen=True):
    """Reply to the request of this ticket with this value."""

    ticket: Ticket
    value: Any = None


class Fail(msgspec.Struct, frozen=True):
    """Reply to the request of this ticket with this error: a code of zmqdist.errors, and a text."""

    ticket: Ticket
    code: int
    message: str


Effect: TypeAlias = ReplyValue | Fail


def task_name(task: Task) -> str:
    """Return the text form of a task: "worker:1" for ("worker", 1)."""
    return f"{task[0]}:{task[1]}"


def task_names(tasks: Iterable[Task]) -> str:
    """Return a text with the names of these tasks, in this order: the first NAMES_LISTED_MAX names,
    and the number of other tasks."""
    names = [task_name(task) for task in tasks]
    more = len(names) - NAMES_LISTED_MAX
    return (
        ", ".join(names[:NAMES_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")
        if names
        else "none"
    )
