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
      heard_at: when it last reported.
      wanted_back: leases that go back to the dispatcher when they turn out not to have begun.
      cut: leases to be cut off: lease -> when its grace ends.
      told: position up to which starts have been reported.
      killed: its process is being ended by us.
      orphan: it runs a function (in a thread) of which the dispatcher knows nothing.
    """

    index: int
    ready: bool = False
    given: deque[tuple[int, Leased]] = field(default_factory=deque)
    position: int = 0
    batch: int = 1
    heard_at: float = 0.0
    known: set[tuple[int, int]] = field(default_factory=set)
    reclaiming: bool = False
    wanted_back: set[int] = field(default_factory=set)
    cut: dict[int, float] = field(default_factory=dict)
    told: int = 0
    killed: bool = False
    orphan: bool = False
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
        return None if lease is None or self.killed else self.cut.get(lease)

    @property
    def row(self) -> SlotRow:
        state = "running" if self.given else "idle"
        if self.orphan:
            state = "left over"
        elif self.killed:
            state = "ending"
        elif not self.ready:
            state = "starting"
        return SlotRow(state, len(self.given))

    def leases(self) -> list[int]:
        return [item[0] for _, item in self.given]

    def took(self, count: int, now: float, *, was_idle: bool) -> None:
        """It was given so many."""
        if was_idle:
            self._since = self.heard_at = now
            self._count = 0
        self._count += count

    def tune(self, now: float, *, several: bool) -> None:
        """Some have ended: follow the speed of the work, up by doubling, down at once."""
        each_s = (now - self._since) / max(1, self._count - len(self.given))
        fits = SLOT_BATCH_MAX if each_s <= 0 else int(SLOT_BATCH_S / each_s)
        self.batch = max(1, min(fits, self.batch * 2, SLOT_BATCH_MAX)) if several else 1
        self._restart(now)

    def ends(self, lease: int) -> bool:
        """It has this no more, and nothing is asked about it any more: whether it was to be cut off."""
        self.wanted_back.discard(lease)
        return self.cut.pop(lease, None) is not None

    def begun(self, position: int | None = None) -> list[int]:
        """Leases that have begun and were not told of yet: up to a position that was seen, else the first."""
        if position is None:
            position = self.given[0][0] if self.given else 0
        news = [item[0] for at, item in self.given if self.told < at <= position]
        self.told = max(self.told, position) if news else self.told
        return news

    def begun_of(self, wanted: Container[int]) -> list[int]:
        """Those that have begun as far as is known, told of or not: what was told may have been lost with its connection."""
        if self.running in wanted:
            self.begun()
        return [item[0] for at, item in self.given if at <= self.told and item[0] in wanted]

    def unbegun(self) -> set[int]:
        """Leases that it has not begun as far as is known; the first of what it has is running."""
        begun = max(self.told, self.given[0][0]) if self.given else 0
        return {item[0] for at, item in self.given if at > begun}

    def take_unbegun(self, position: int, now: float) -> list[Leased]:
        """It begins nothing after `position`: the newest of what it had, newest first."""
        self.reclaiming = False
        self.heard_at = now
        taken = []
        while self.given and self.given[-1][0] > position:
            taken.append(self.given.pop()[1])
        self.batch = 1
        self._restart(now)
        return taken

    def _restart(self, now: float) -> None:
        self._since = now
        self._count = len(self.given)
