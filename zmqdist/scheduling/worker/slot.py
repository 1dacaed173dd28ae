"""The worker's record of one slot: the slot's items and speed, and which starts were reported.

The position of an item is its number among all items that the slot was given, from 1. The first
item that a slot has is the running item.

Not here: which work a slot gets, and how its outcomes are handled (machine.py).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from zmqdist.messages import Leased
from zmqdist.scheduling.worker.worker_events import Kill
from zmqdist.transitions import enter

SLOT_BATCH_MAX = 512
"""The largest number of items in a batch for a slot."""
SLOT_BATCH_S = 0.005
"""Seconds that a batch for a slot should take."""


class SlotRow(NamedTuple):
    """One slot in a snapshot.

    Attributes:
      state: "starting" (the slot's process is not ready), "idle", "running", "ending" (the process
        is being killed) or "left over" (the slot is a thread, and still runs a function whose lease
        the worker has dropped).
      given: the number of items that the slot has. The first of these items runs.
    """

    state: str
    given: int


class SlotState(enum.Enum):
    """The state of a slot of a worker."""

    STARTING = "starting"
    """Its process or thread is not ready."""
    READY = "ready"
    """It can get items."""
    RECLAIMING = "reclaiming"
    """A Reclaim is in progress. Meanwhile the slot gets no items."""
    LEFT_OVER = "left over"
    """It is a thread, and runs a function whose lease the worker has dropped."""
    ENDING = "ending"
    """The worker has killed its process. Another slot takes its place."""


_S = SlotState
SLOT_TRANSITIONS: Final[Mapping[SlotState, frozenset[SlotState]]] = {
    _S.STARTING: frozenset({_S.READY}),
    _S.READY: frozenset({_S.RECLAIMING, _S.LEFT_OVER, _S.ENDING}),
    _S.RECLAIMING: frozenset({_S.READY, _S.ENDING}),
    _S.LEFT_OVER: frozenset({_S.READY}),
    _S.ENDING: frozenset(),
}


@dataclass(slots=True)
class Slot:
    """The state of one slot.

    Attributes:
      given: (position, item) of each item that the slot has, in order.
      position: the position of the newest item.
      batch: the number of items that the slot should have at a time.
      reported_at: when the slot last reported an outcome, or got work after it was idle.
      known: the functions that were sent to the slot, as (coordinator, number).
      to_return: the leases that must go back to the dispatcher if their items have not begun.
      abort_at: the time when the grace of each aborted lease ends.
      reported_to: the position up to which starts were reported.
    """

    index: int
    state: SlotState = SlotState.STARTING
    given: deque[tuple[int, Leased]] = field(default_factory=deque)
    position: int = 0
    batch: int = 1
    reported_at: float = 0.0
    known: set[tuple[int, int]] = field(default_factory=set)
    to_return: set[int] = field(default_factory=set)
    abort_at: dict[int, float] = field(default_factory=dict)
    reported_to: int = 0
    _since: float = 0.0
    _count: int = 0

    def enter(self, state: SlotState) -> None:
        self.state = enter(SLOT_TRANSITIONS, self.state, state, "slot", self.index)

    @property
    def running(self) -> int | None:
        """The lease of the item that runs; None if the slot is idle."""
        return self.given[0][1][0] if self.given else None

    @property
    def kill_at(self) -> float | None:
        """The time at which the slot's process must be killed, because its running item was
        aborted; None means never."""
        lease = self.running
        return None if lease is None or self.state is _S.ENDING else self.abort_at.get(lease)

    @property
    def row(self) -> SlotRow:
        state = self.state.value
        if self.state in (_S.READY, _S.RECLAIMING):
            state = "running" if self.given else "idle"
        return SlotRow(state, len(self.given))

    def leases(self) -> list[int]:
        return [item[0] for _, item in self.given]

    def note_given(self, count: int, now: float, *, was_idle: bool) -> None:
        """Record that the slot was given `count` more items."""
        if was_idle:
            self._since = self.reported_at = now
            self._count = 0
        self._count += count

    def tune(self, now: float, *, several: bool) -> None:
        """Adapt `batch` to the time that items take. Call it after items have ended. `batch` grows
        at most twofold, and shrinks at once.

        With `several=False` the slot gets one item at a time: `batch` is always 1.
        """
        each_s = (now - self._since) / max(1, self._count - len(self.given))
        fits = SLOT_BATCH_MAX if each_s <= 0 else int(SLOT_BATCH_S / each_s)
        self.batch = max(1, min(fits, self.batch * 2, SLOT_BATCH_MAX)) if several else 1
        self._restart(now)

    def forget_lease(self, lease: int) -> bool:
        """Forget the requests to return or abort a lease that the slot no longer has. Return
        whether the lease was aborted."""
        self.to_return.discard(lease)
        return self.abort_at.pop(lease, None) is not None

    def take_begun(self, position: int | None = None) -> list[int]:
        """Return the leases up to `position` whose start was not reported yet, and mark them as
        reported. If `position` is None, only the first item counts as begun."""
        if position is None:
            position = self.given[0][0] if self.given else 0
        new = [item[0] for at, item in self.given if self.reported_to < at <= position]
        self.reported_to = max(self.reported_to, position) if new else self.reported_to
        return new

    def begun_among(self, wanted: Container[int]) -> list[int]:
        """Return the leases in `wanted` that are known to have begun, even if they were reported
        before.

        An earlier report may have been lost with its connection.
        """
        if self.running in wanted:
            self.take_begun()
        return [item[0] for at, item in self.given if at <= self.reported_to and item[0] in wanted]

    def unbegun(self) -> set[int]:
        """Return the leases that are not known to have begun. The first item of the slot counts as
        begun."""
        begun = max(self.reported_to, self.given[0][0]) if self.given else 0
        return {item[0] for at, item in self.given if at > begun}

    def take_unbegun(self, position: int, now: float) -> list[Leased]:
        """Remove the items after `position`, which the slot will not begin, and return these items,
        newest first."""
        if self.state is _S.RECLAIMING:
            self.enter(_S.READY)
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


def kill_overdue(slots: Iterable[Slot], now: float) -> list[Kill]:
    """Return a Kill for each slot that runs an aborted item whose grace is over."""
    effects = []
    for slot in slots:
        if slot.kill_at is not None and slot.kill_at <= now:
            slot.enter(_S.ENDING)
            effects.append(Kill(slot.index))
    return effects
