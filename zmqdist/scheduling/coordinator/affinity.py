"""The workers that are present, and those that pinned work waits for.

Theory of operation
    A coordinator that watches the members gets a Members message from the dispatcher for each
    worker that joins or is lost. The first Members after each CoordinatorRegistered is a complete
    list. This module computes changes as the difference from the members known before, so that the
    changes are right even after another dispatcher has taken over.
    A worker is *missed* while it is absent and unfinished work is pinned to it. While no worker at
    all is present, the limit for missed workers does not apply, because the limit for a lost
    cluster does (P6 of machine.py). When the first worker joins, the times of all missed workers
    start again.

Not here: how work ends when its worker is missed for too long (machine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from zmqdist.messages import Members
from zmqdist.scheduling.coordinator.work import Work

Joined: TypeAlias = "tuple[str, int, int, str, int]"
"""A worker that is present: (name, incarnation, pid, host, number of slots)."""
Left: TypeAlias = "tuple[str, int, str]"
"""A worker that has left: (name, incarnation, reason)."""


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Some workers have joined or left. The first MembersChanged may list no worker."""

    joined: list[Joined]
    left: list[Left]


class WorkerAffinity:
    """The workers that are present or missed, and the work that is pinned to them.

    Attributes:
      recovery_limit_s: how long a worker may be missed. None means that the coordinator does not
        watch the members and misses no worker.
      members_known: whether a dispatcher has reported the members.
      members: the workers that are present, by name.
      missing_since: the time since which each worker is missed. Its keys are pinned workers that are
        not present.
    """

    def __init__(self, recovery_limit_s: float | None) -> None:
        self.members: dict[str, Joined] = {}
        self.recovery_limit_s = recovery_limit_s
        self._pinned: dict[str, set[Work]] = {}
        self.missing_since: dict[str, float] = {}
        self.members_known = False
        self._next_is_complete = True
        """Whether the next Members message lists all workers."""

    @property
    def deadline(self) -> float | None:
        """The earliest time at which a worker will have been missed for too long. None means
        never.
        """
        if not self.missing_since or self.recovery_limit_s is None:
            return None
        return min(self.missing_since.values()) + self.recovery_limit_s

    def pin(self, work: Work, worker: str, now: float) -> None:
        """Record that an attempt of this work item needs this worker."""
        self._pinned.setdefault(worker, set()).add(work)
        if worker not in self.members:
            self.missing_since.setdefault(worker, now)

    def unpin(self, work: Work, worker: str) -> None:
        """Record that the attempt has ended."""
        works = self._pinned[worker]
        works.discard(work)
        if not works:
            del self._pinned[worker]
            self.missing_since.pop(worker, None)

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
            self.missing_since = dict.fromkeys(self.missing_since, now)
        for name in self._pinned:
            if name in after:
                self.missing_since.pop(name, None)
            else:
                self.missing_since.setdefault(name, now)
        return MembersChanged(joined, left) if joined or left or not known_before else None

    def overdue(self, now: float) -> list[tuple[str, list[Work]]]:
        """Return each worker that was missed for too long, with its pinned work in order of work
        numbers."""
        limit_s = self.recovery_limit_s
        if limit_s is None:
            return []
        overdue = [name for name, since in self.missing_since.items() if since + limit_s <= now]
        return [(name, sorted(self._pinned[name], key=attrgetter("number"))) for name in overdue]
