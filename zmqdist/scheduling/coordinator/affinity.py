"""The options of work items, and the workers that pinned work waits for. Work without options needs
no code of this module.

Theory of operation
    A coordinator that watches the members gets a Members message from the dispatcher for each
    worker that joins or is lost. The first Members after each CoordinatorRegistered is a complete
    list. This module computes changes as the difference from the members known before, so that the
    changes are right even after another dispatcher has taken over.
    A worker is *missed* while it is absent and unfinished work is pinned to it. While no worker at
    all is present, the limit for missed workers does not apply, because the limit for a lost
    cluster does (P6 of closures.py). When the first worker joins, the times of all missed workers
    start again.

Not here: how work ends when its worker is missed for too long (closures.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.messages import Item, Members

Joined: TypeAlias = "tuple[str, int, int, str]"
"""A worker that is present: (name, incarnation, pid, host)."""
Left: TypeAlias = "tuple[str, int, str]"
"""A worker that has left: (name, incarnation, reason)."""


class WorkOptions(NamedTuple):
    """The options of a work item, in the order of the last fields of `messages.Submit`. A work item
    without options is *plain*.

    Detached work belongs to no round: it takes no room in the queue, its error fails no round, and
    the end of a round does not cancel it.
    """

    worker: str = ""
    priority: int = 0
    detached: bool = False

    @classmethod
    def checked(cls, worker: int | str | None, priority: int) -> WorkOptions:
        """Return the checked options, or PLAIN for the defaults. Raises ValueError if an option is
        invalid, TypeError if its type is.
        """
        if not -(2**31) <= whole("priority", priority) < 2**31:
            raise ValueError(
                f"priority is {priority}, wants a whole number from -2**31 to 2**31 - 1"
            )
        if worker is None and not priority:
            return PLAIN
        return cls("" if worker is None else worker_name(worker), index(priority))


PLAIN: Final = WorkOptions()


def whole(name: str, value: Any) -> int:
    """Return a whole number of any kind as an int. Raises TypeError with the `name` of the option
    for anything else, also for True and False.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r:.100}, wants a whole number") from None


def worker_name(worker: int | str) -> str:
    """Return a worker's name, such as "worker:1". Raises ValueError if `worker` is neither an index
    nor the name of a worker.
    """
    name = worker if isinstance(worker, str) else f"worker:{whole('worker', worker)}"
    if (
        re.fullmatch(
            "(?!(ps|chief|evaluator|dispatcher):)[A-Za-z_][A-Za-z0-9_.-]*:(0|[1-9][0-9]{0,8})", name
        )
        is None
    ):
        raise ValueError(
            f'worker is {worker!r}, wants the index of a worker or its name, as "worker:1"'
        )
    return name


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The program has scheduled these work items, each (work, fn, payload), in the order of their
    work numbers.

    Attributes:
      keep: the work numbers of the items whose values stay with their workers.
      options: the options of the items that are not plain, by work number.
    """

    items: list[tuple[int, int, bytes]]
    keep: Sequence[int] = ()
    options: Mapping[int, WorkOptions] | None = None


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Some workers have joined or left. The first MembersChanged may list no worker."""

    joined: list[Joined]
    left: list[Left]


class WorkerAffinity:
    """The options of unfinished work, and the workers that are present or missed.

    Attributes:
      recovery_limit_s: how long a worker may be missed. None means that the coordinator does not
        watch the members and misses no worker.
      options: the options of unfinished work items that are not plain, by work number.
      detached: the unfinished work items that belong to no round.
      members_known: whether a dispatcher has reported the members.
      members: the workers that are present, by name.
    """

    def __init__(self, recovery_limit_s: float | None) -> None:
        self.options: dict[int, WorkOptions] = {}
        self.detached: set[int] = set()
        self.members: dict[str, Joined] = {}
        self.recovery_limit_s = recovery_limit_s
        self._pinned: dict[str, set[int]] = {}
        self._missing_since: dict[str, float] = {}
        """The time since which each worker is missed. Invariant: the keys are keys of `_pinned`,
        and not keys of `members`."""
        self.members_known = False
        self._next_is_complete = True
        """Whether the next Members message lists all workers."""

    @property
    def deadline(self) -> float | None:
        """The earliest time at which a worker will have been missed for too long. None means
        never.
        """
        if not self._missing_since or self.recovery_limit_s is None:
            return None
        return min(self._missing_since.values()) + self.recovery_limit_s

    def add(self, options: Mapping[int, WorkOptions], now: float) -> None:
        """Record the options of scheduled work items, by work number."""
        self.options.update(options)
        for work, (worker, _, detached) in options.items():
            if detached:
                self.detached.add(work)
            if worker:
                self._pinned.setdefault(worker, set()).add(work)
                if worker not in self.members:
                    self._missing_since.setdefault(worker, now)

    def ended(self, work: int) -> bool:
        """Forget a work item that has ended, and return whether it was detached."""
        options = self.options.pop(work, None)
        if options is None:
            return False
        worker = options.worker
        if worker:
            works = self._pinned[worker]
            works.discard(work)
            if not works:
                del self._pinned[worker]
                self._missing_since.pop(worker, None)
        self.detached.discard(work)
        return options.detached

    def grouped(self, items: list[Item]) -> Iterable[tuple[WorkOptions, list[Item]]]:
        """Group work items by their options, in the order of the items."""
        if not self.options:
            return [(PLAIN, items)]
        groups: dict[WorkOptions, list[Item]] = {}
        for item in items:
            groups.setdefault(self.options.get(item[0], PLAIN), []).append(item)
        return groups.items()

    def within(self, width: int, unfinished: int, unsent: dict[int, None]) -> dict[int, None]:
        """Return the unsent work to send now: all detached work, and other work until the
        dispatcher has `width` items of other work."""
        first = dict.fromkeys(sorted(self.detached & unsent.keys()))
        room = width - (unfinished - len(self.detached)) + (len(unsent) - len(first))
        first.update(
            islice(((work, None) for work in unsent if work not in self.detached), max(0, room))
        )
        return first

    def expect_all_members(self) -> None:
        """Have `update_members` treat the next Members message as a complete list of workers."""
        self._next_is_complete = True

    def update_members(self, members: Members, now: float) -> MembersChanged | None:
        """Apply a Members message and return the workers that have joined or left.

        Return None if no worker has joined or left. For the very first message, return a
        MembersChanged even if it lists no worker.
        """
        before = self.members
        after = {} if self._next_is_complete else dict(before)
        departures = {name: (incarnation, reason) for name, incarnation, reason in members.left}
        for name, (incarnation, _) in departures.items():
            if name in after and after[name][1] == incarnation:
                del after[name]
        after.update((member[0], member) for member in members.joined)
        known_before, self.members_known, self._next_is_complete = self.members_known, True, False
        left = []
        for name, member in before.items():
            if name not in after or after[name][1] != member[1]:
                _, reason = departures.get(name, (0, "the dispatcher does not know it any more"))
                left.append((name, member[1], reason))
        joined = [m for m in after.values() if m[0] not in before or before[m[0]][1] != m[1]]
        self.members = after
        # No worker was present until now, so each missing worker gets its full time to return.
        if len(after) and not len(before):
            self._missing_since = dict.fromkeys(self._missing_since, now)
        for name in self._pinned:
            if name in after:
                self._missing_since.pop(name, None)
            else:
                self._missing_since.setdefault(name, now)
        return MembersChanged(joined, left) if joined or left or not known_before else None

    def overdue(self, now: float) -> list[tuple[str, list[int]]]:
        """Return each worker that was missed for too long, with its pinned work in order of work
        numbers. The caller must call `ended` for this work."""
        limit_s = self.recovery_limit_s
        if limit_s is None:
            return []
        overdue = [name for name, since in self._missing_since.items() if since + limit_s <= now]
        return [(name, sorted(self._pinned[name])) for name in overdue]
