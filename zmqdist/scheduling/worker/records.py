"""The records of the worker's machine: the queue of work that waits for a slot, the start delay, and
the items, the speed and the reported starts of each slot. No I/O.

The position of an item is its number among all items that the slot was given, from 1. The first
item that a slot has is the running item.

Not here: when a slot gets which work, and how its outcomes are handled (machine.py).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Final, NamedTuple

from zmqdist.messages import Leased
from zmqdist.scheduling.worker.worker_events import Kill
from zmqdist.transitions import enter

SLOT_BATCH_MAX = 512
"""The largest number of items in a batch for a slot."""
SLOT_BATCH_S = 0.01
"""Seconds that a batch for a slot should take."""


class SlotRow(NamedTuple):
    """One slot in a snapshot.

    Attributes:
      state: "starting" (the slot's process is not ready), "idle", "running", "ending" (the process
        is being killed), "left over" (the slot is a thread, and still runs a function whose lease
        the worker has dropped), "waiting" (its function waits for results of other work) or
        "absent" (an extra slot that has no process).
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
    """The worker has killed or ended its process. Another slot takes its place."""
    ABSENT = "absent"
    """It is an extra slot, and has no process."""


_S = SlotState
SLOT_TRANSITIONS: Final[Mapping[SlotState, frozenset[SlotState]]] = {
    _S.STARTING: frozenset({_S.READY}),
    _S.READY: frozenset({_S.RECLAIMING, _S.LEFT_OVER, _S.ENDING}),
    _S.RECLAIMING: frozenset({_S.READY, _S.ENDING}),
    _S.LEFT_OVER: frozenset({_S.READY}),
    _S.ENDING: frozenset(),
    _S.ABSENT: frozenset({_S.STARTING}),
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
      waits_at: the position of the item whose function waits for results of other work; 0 while
        none does.
      devices: the devices that its process may use; () for a slot of work without devices.
      next_devices: while the slot is ENDING, the devices of the slot that takes its place.
      over_memory: the item whose function is ended for its use of memory, and the reason.
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
    waits_at: int = 0
    devices: tuple[int, ...] = ()
    next_devices: tuple[int, ...] = ()
    over_memory: tuple[int, str] = (0, "")
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
            state = "waiting" if self.waits_at else "running" if self.given else "idle"
        return SlotRow(state, len(self.given))

    def leases(self) -> list[int]:
        return [item[0] for _, item in self.given]

    def note_handout(self, count: int, now: float, *, was_idle: bool) -> None:
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

    def take_starts(self, position: int | None = None) -> list[int]:
        """Return the leases up to `position` whose start was not reported yet, and mark them as
        reported. If `position` is None, only the first item counts as begun."""
        if position is None:
            position = self.given[0][0] if self.given else 0
        new = [item[0] for at, item in self.given if self.reported_to < at <= position]
        self.reported_to = max(self.reported_to, position) if new else self.reported_to
        return new

    def begun_among(self, leases: Container[int]) -> list[int]:
        """Return the leases in `wanted` that are known to have begun, even if they were reported
        before.

        An earlier report may have been lost with its connection.
        """
        if self.running in leases:
            self.take_starts()
        return [item[0] for at, item in self.given if at <= self.reported_to and item[0] in leases]

    def unbegun(self) -> set[int]:
        """Return the leases that are not known to have begun. The first item of the slot counts as
        begun."""
        # P10: the first item may have begun although the worker has not seen its start.
        begun_position = max(self.reported_to, self.given[0][0]) if self.given else 0
        return {item[0] for at, item in self.given if at > begun_position}

    def take_unbegun(self, position: int, now: float) -> list[Leased]:
        """Remove the items after `position`, which the slot will not begin, and return these items,
        newest first."""
        if self.state is _S.RECLAIMING:
            self.enter(_S.READY)
        self.reported_at = now
        removed_items = []
        while self.given and self.given[-1][0] > position:
            removed_items.append(self.given.pop()[1])
        self.batch = 1
        self._restart(now)
        return removed_items

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


def slots_to_change(slots: Iterable[Slot], devices: tuple[int, ...]) -> list[Slot]:
    """Return the idle slots whose processes must end so that an item with these devices can begin,
    and set their `next_devices`. One of them gets the devices, unless a slot has them or waits for
    them. The others have some of the devices, whose memory their processes may still occupy.
    """
    idle = [slot for slot in slots if slot.state is _S.READY and not slot.given]
    others = set(devices)
    overlapping = [
        slot for slot in idle if slot.devices != devices and not others.isdisjoint(slot.devices)
    ]
    suited = any(
        slot.next_devices == devices
        if slot.state is _S.ENDING
        else slot.devices == devices and not slot.given
        for slot in slots
    )
    # Prefer a slot that has to end anyway, then one of the other kind.
    candidates = overlapping or sorted(idle, key=lambda slot: bool(slot.devices) == bool(devices))
    if suited or not candidates:
        return overlapping
    candidates[0].next_devices = devices
    return overlapping or candidates[:1]


class WaitingWork(deque[Leased]):
    """The queue of a worker: the work that waits for a slot, in the order in which it will begin.
    Nested work is first, the deepest before all other, then pinned work (P9, P13 of machine.py).

    Attributes:
      pinned: the leases of pinned work, in the queue or at a slot. Some of these leases may have
        ended.
      report_before_start: the leases in the queue whose start must be reported before their items
        begin.
      depths: the depths of leases of nested work, in the queue or at a slot. Some of these leases
        may have ended.
      announced: the latest lease whose start was reported while its item waited here. No item is
        put before this item, because it counts as begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.report_before_start: set[int] = set()
        self.depths: dict[int, int] = {}
        self.announced = 0

    @property
    def pinned_is_next(self) -> bool:
        """Whether the next item is pinned work."""
        return bool(self.pinned) and bool(self) and self[0][0] in self.pinned

    @property
    def pinned_waiting(self) -> int:
        """The number of items of pinned work in the queue."""
        return sum(item[0] in self.pinned for item in self) if self.pinned else 0

    def may_begin_below(self, depth: int) -> bool:
        """Return whether the next item is deeper than `depth`, or counts as begun."""
        if not self:
            return False
        return self.depths.get(self[0][0], 0) > depth or self._head_is_announced() > 0

    def count_below(self, depth: int) -> int:
        """Return the number of items that are deeper than `depth`."""
        return sum(self.depths.get(item[0], 0) > depth for item in self)

    def above(self, depth: int) -> set[int]:
        """Return the leases of the items that are not deeper than `depth`, without pinned ones."""
        return {
            item[0]
            for item in self
            if self.depths.get(item[0], 0) <= depth and item[0] not in self.pinned
        }

    def put(
        self, items: list[Leased], *, report_before_start: bool, pinned: bool, depth: int = 0
    ) -> None:
        """Add items that the dispatcher has assigned."""
        if report_before_start:
            self.report_before_start.update(item[0] for item in items)
        if pinned:
            self.pinned.update(item[0] for item in items)
        if depth:
            self.depths.update((item[0], depth) for item in items)
        if self.depths:
            self._put_in_order(items)
        elif pinned:
            self._put_pinned(items)
        else:
            self.extend(items)

    def put_back(self, items: list[Leased]) -> None:
        """Put back items that a slot has not begun; `items` begins with the oldest item. Pinned
        items are sorted by lease into the other pinned items. The rest come before all other items
        that are not pinned, because the slots got the older items first."""
        if self.depths:
            self._put_in_order(items)
            return
        # P9: pinned items begin in the order of their assignment, whichever slot had them.
        pinned = self.pinned and [item for item in items if item[0] in self.pinned]
        if pinned:
            self._put_pinned(pinned)
            items = [item for item in items if item[0] not in self.pinned]
        index = (
            sum(1 for _ in takewhile(self._goes_first, self))
            if self.pinned
            else self._head_is_announced()
        )
        self.rotate(-index)
        self.extendleft(reversed(items))
        self.rotate(index)

    def take_out(self, leases: Container[int]) -> list[int]:
        """Remove the items with these leases, and return the leases that were in the queue."""
        removed_leases = [item[0] for item in self if item[0] in leases]
        if removed_leases:
            rest = [item for item in self if item[0] not in leases]
            self.clear()
            self.extend(rest)
            self.report_before_start.difference_update(removed_leases)
            self.pinned.difference_update(removed_leases)
            for lease in removed_leases:
                self.depths.pop(lease, None)
        return removed_leases

    def empty(self) -> list[int]:
        """Remove all items, and return their leases."""
        leases = [item[0] for item in self]
        self.clear()
        self.report_before_start.clear()
        self.pinned.difference_update(leases)
        for lease in leases:
            self.depths.pop(lease, None)
        return leases

    def _head_is_announced(self) -> int:
        return int(bool(self) and self[0][0] == self.announced)

    def _goes_first(self, item: Leased) -> bool:
        return item[0] in self.pinned or item[0] == self.announced

    def _put_in_order(self, items: Iterable[Leased]) -> None:
        """Add items while there is nested work. Lease numbers only rise, so equal items are in the
        order of their assignment."""
        head = [self.popleft()] if self._head_is_announced() else []
        depths, pinned = self.depths, self.pinned
        rest = sorted(
            [*self, *items],
            key=lambda item: (-depths.get(item[0], 0), item[0] not in pinned, item[0]),
        )
        self.clear()
        self.extend(head + rest)

    def _put_pinned(self, items: Iterable[Leased]) -> None:
        # The dispatcher knows that the announced item begins next (P6), so it stays first.
        head = [self.popleft()] if self._head_is_announced() else []
        # Lease numbers only rise, so this is the order of assignment.
        pinned = sorted([*items, *(item for item in self if item[0] in self.pinned)])
        rest = [item for item in self if item[0] not in self.pinned]
        self.clear()
        self.extend(head + pinned + rest)


class Stagger:
    """The start delay of one worker, which decides when the worker may begin the work that it has
    received. If it is configured, the workers begin a coordinator's first work one after the other.

    Args:
      delay_s: worker i delays the first work of each coordinator by i * `delay_s`; 0 means no
        delay.
      delay_max_s: the longest delay; 0 means no bound.

    Attributes:
      until: the time at which the worker may begin work; None while no delay is in force.
    """

    def __init__(self, delay_s: float = 0.0, delay_max_s: float = 0.0) -> None:
        self.until: float | None = None
        self._delay_s = delay_s
        self._delay_max_s = delay_max_s or inf
        self._coordinators: set[int] = set()

    def note_arrival(self, items: Iterable[Leased], index: int, now: float) -> None:
        """Record that work has arrived at the worker with this index. The first work of a
        coordinator begins the delay."""
        # Without a delay no item is looked at, because this runs for each message.
        coordinators = {item[1] for item in items} if self._delay_s else self._coordinators
        if not coordinators <= self._coordinators:
            self._coordinators |= coordinators
            self.until = max(self.until or 0.0, now + min(index * self._delay_s, self._delay_max_s))

    def delays(self, now: float) -> bool:
        """Return whether the worker must not begin work yet."""
        if self.until is not None and now >= self.until:
            self.until = None
        return self.until is not None
