"""Options of scheduled work, and the workers that it waits for: the part of closures.py that plain work never meets.

Theory of operation
    The dispatcher tells a coordinator that watches who has come and who is lost (Members); after each Enlisted it tells all that are
    there. So what has changed is the difference to what was known before, whichever dispatcher tells it.
    A worker is missed from the moment on at which it was known to be gone, or at which work was pinned to it while it was not there.
    While there is no worker at all nobody is missed: that is another time-out (closures P6), and starts the clocks anew.

Not here: what becomes of work whose worker is missed for too long (closures.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from zmqdist.messages import Item, Members

Joined: TypeAlias = "tuple[str, int, int, str]"
Left: TypeAlias = "tuple[str, int, str]"


class WorkOptions(NamedTuple):
    """How a piece of work is to be scheduled, where not like any other; `messages.Submit` tells what they mean."""

    worker: str = ""
    priority: int = 0
    apart: bool = False


PLAIN: Final = WorkOptions()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The user scheduled work: (work, fn, payload); work numbers grow. Values of `keep` stay with their worker.

    `options` are those of work that has some.
    """

    items: list[tuple[int, int, bytes]]
    keep: Sequence[int] = ()
    options: Mapping[int, WorkOptions] | None = None


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Workers that are there now, (name, incarnation, pid, host), and workers that are no more, (name, incarnation, reason)."""

    joined: list[Joined]
    left: list[Left]


class Pins:
    """What is known of unfinished work that has options.

    Attributes:
      recovery_limit_s: how long a worker may be missed; None where members are not watched, and none ever is.
      options: of unfinished work, by its number; plain work is not in it.
      apart: the numbers of that which is apart.
      told: whether a dispatcher has said who is there.
      members: name -> (name, incarnation, pid, host) of the workers that are there.
    """

    def __init__(self, recovery_limit_s: float | None) -> None:
        self.options: dict[int, WorkOptions] = {}
        self.apart: set[int] = set()
        self.members: dict[str, Joined] = {}
        self.recovery_limit_s = recovery_limit_s
        self._pinned: dict[str, set[int]] = {}
        self._missing_since: dict[str, float] = {}
        """Workers that have work pinned to them and are not there: since when."""
        self.members_known = False
        self._next_is_complete = True
        """Whether the next Members tells all that are there."""

    @property
    def deadline(self) -> float | None:
        """When somebody will have been missed for too long; None for never."""
        if not self._missing_since or self.recovery_limit_s is None:
            return None
        return min(self._missing_since.values()) + self.recovery_limit_s

    def add(self, options: Mapping[int, WorkOptions], now: float) -> None:
        """Work with options was scheduled."""
        self.options.update(options)
        for work, (worker, _, apart) in options.items():
            if apart:
                self.apart.add(work)
            if worker:
                self._pinned.setdefault(worker, set()).add(work)
                if worker not in self.members:
                    self._missing_since.setdefault(worker, now)

    def ended(self, work: int) -> bool:
        """A piece of work has ended; whether it was apart."""
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
        self.apart.discard(work)
        return options.apart

    def grouped(self, items: list[Item]) -> Iterable[tuple[WorkOptions, list[Item]]]:
        """Work by its options, each in the order in which it was."""
        if not self.options:
            return [(PLAIN, items)]
        groups: dict[WorkOptions, list[Item]] = {}
        for item in items:
            groups.setdefault(self.options.get(item[0], PLAIN), []).append(item)
        return groups.items()

    def within(self, width: int, unfinished: int, unsent: dict[int, None]) -> dict[int, None]:
        """What of the unsent work may be sent where no more than `width` may be with the dispatcher; what is apart is not counted."""
        first = dict.fromkeys(sorted(self.apart & unsent.keys()))
        room = width - (unfinished - len(self.apart)) + (len(unsent) - len(first))
        first.update(islice(((work, None) for work in unsent if work not in self.apart), max(0, room)))
        return first

    def expect_all_members(self) -> None:
        """The next Members tells all that are there."""
        self._next_is_complete = True

    def update_members(self, members: Members, now: float) -> MembersChanged | None:
        """What has changed, also when nothing has but is told for the first time; else None for nothing."""
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
        if len(after) and not len(before):  # there was no worker at all: all clocks start anew
            self._missing_since = dict.fromkeys(self._missing_since, now)
        for name in self._pinned:
            if name in after:
                self._missing_since.pop(name, None)
            else:
                self._missing_since.setdefault(name, now)
        return MembersChanged(joined, left) if joined or left or not known_before else None

    def overdue(self, now: float) -> list[tuple[str, list[int]]]:
        """Workers that were missed for too long, and what is pinned to each, oldest first; `ended` is called for that."""
        limit_s = self.recovery_limit_s
        if limit_s is None:
            return []
        overdue = [name for name, since in self._missing_since.items() if since + limit_s <= now]
        return [(name, sorted(self._pinned[name])) for name in overdue]
