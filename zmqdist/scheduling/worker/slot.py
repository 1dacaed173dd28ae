"""What a worker knows of one of its slots: what it was given, how quick it is, what has been said about it.

Positions count the items given to a slot, from 1. A slot works in order, so the first of what it has is running.

Not here: which work it gets, and what its outcomes mean (worker.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from zmqdist.messages import Leased

SLOT_BATCH_MAX = 512
SLOT_BATCH_S = 0.005
"""A batch for a slot should take about this long."""


class SlotRow(NamedTuple):
    """One slot in a snapshot.

    Attributes:
      state: "starting": its process is not there yet; "idle"; "running"; "ending": it is being killed; "left over": its function belongs to
        a dispatcher that has gone, and cannot be killed because the slot is a thread.
      given: pieces of work that it has; the first of them runs.
    """

    state: str
    given: int


@dataclass(slots=True)
class Slot:
    """See the module's docstring.

    Attributes:
      given: (position, item) of what it has, in order.
      position: of the newest.
      batch: how many it should have.
      reported_at: when it last reported.
      to_return: leases that go back to the dispatcher when they turn out not to have begun.
      abort_at: leases to be cut off: lease -> when its grace ends.
      reported_to: position up to which starts have been reported.
      killed: its process is being ended by us.
      abandoned: it runs a function (in a thread) of which the dispatcher knows nothing.
    """

    index: int
    ready: bool = False
    given: deque[tuple[int, Leased]] = field(default_factory=deque)
    position: int = 0
    batch: int = 1
    reported_at: float = 0.0
    known: set[tuple[int, int]] = field(default_factory=set)
    reclaiming: bool = False
    to_return: set[int] = field(default_factory=set)
    abort_at: dict[int, float] = field(default_factory=dict)
    reported_to: int = 0
    killed: bool = False
    abandoned: bool = False
    _since: float = 0.0
    _count: int = 0

    @property
    def running(self) -> int | None:
        """The lease that runs; None when it has nothing."""
        return self.given[0][1][0] if self.given else None

    @property
    def kill_at(self) -> float | None:
        """When what runs is to be cut off."""
        lease = self.running
        return None if lease is None or self.killed else self.abort_at.get(lease)

    @property
    def row(self) -> SlotRow:
        state = "running" if self.given else "idle"
        if self.abandoned:
            state = "left over"
        elif self.killed:
            state = "ending"
        elif not self.ready:
            state = "starting"
        return SlotRow(state, len(self.given))

    def leases(self) -> list[int]:
        return [item[0] for _, item in self.given]

    def note_given(self, count: int, now: float, *, was_idle: bool) -> None:
        """It was given so many."""
        if was_idle:
            self._since = self.reported_at = now
            self._count = 0
        self._count += count

    def tune(self, now: float, *, several: bool) -> None:
        """Some have ended: follow the speed of the work, up by doubling, down at once."""
        each_s = (now - self._since) / max(1, self._count - len(self.given))
        fits = SLOT_BATCH_MAX if each_s <= 0 else int(SLOT_BATCH_S / each_s)
        self.batch = max(1, min(fits, self.batch * 2, SLOT_BATCH_MAX)) if several else 1
        self._restart(now)

    def forget_lease(self, lease: int) -> bool:
        """It has this no more, and nothing is asked about it any more: whether it was to be cut off."""
        self.to_return.discard(lease)
        return self.abort_at.pop(lease, None) is not None

    def take_begun(self, position: int | None = None) -> list[int]:
        """Leases that have begun and were not told of yet: up to a position that was seen, else the first."""
        if position is None:
            position = self.given[0][0] if self.given else 0
        new = [item[0] for at, item in self.given if self.reported_to < at <= position]
        self.reported_to = max(self.reported_to, position) if new else self.reported_to
        return new

    def begun_among(self, wanted: Container[int]) -> list[int]:
        """Those that have begun as far as is known, told of or not: what was told may have been lost with its connection."""
        if self.running in wanted:
            self.take_begun()
        return [item[0] for at, item in self.given if at <= self.reported_to and item[0] in wanted]

    def unbegun(self) -> set[int]:
        """Leases that it has not begun as far as is known; the first of what it has is running."""
        begun = max(self.reported_to, self.given[0][0]) if self.given else 0
        return {item[0] for at, item in self.given if at > begun}

    def take_unbegun(self, position: int, now: float) -> list[Leased]:
        """It begins nothing after `position`: the newest of what it had, newest first."""
        self.reclaiming = False
        self.reported_at = now
        taken = []
        while self.given and self.given[-1][0] > position:
            taken.append(self.given.pop()[1])
        self.batch = 1
        self._restart(now)
        return taken

    def _restart(self, now: float) -> None:
        self._since = now
        self._count = len(self.given)
