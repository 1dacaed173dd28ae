"""The part of the worker's machine that decides about functions that wait for results of other
work: which slot counts as busy, when an extra slot starts and ends, and which work may begin. No
I/O.

Theory of operation
    A function that schedules work and waits for the results needs its slot's process, but no core.
    While it waits, its slot gets no items and does not count as busy. If fewer slots than
    configured are left, an extra slot starts. When the wait is over, the function goes on at once,
    although another may run in its place. Extra slots get items only while fewer functions run than
    the worker has slots, and end after EXTRA_IDLE_S without items.
    The number of extra slots is bounded. At the bound (scheduling/shared/nested_bound.py) only work
    begins that is deeper than each waiting function of this worker. The deepest of them waits for
    such work, and any other work might begin to wait as well. A function that would leave no slot
    for other work may not wait.

Promises, which continue those of machine.py, checked by
tests/scheduling/worker/test_machine.py and tests/sim
    P14 a slot gets no items while its function waits
    P15 work begins in an idle slot only while fewer functions run, not counting those that wait,
        than there are places
    P16 there are at most `extra_max` extra slots
    P17 at least one slot's function does not wait, so nested work can always begin
    P18 at the bound only work begins that is deeper than each function that waits
    P19 an extra slot without items ends after EXTRA_IDLE_S
"""

from __future__ import annotations

from zmqdist.scheduling.shared import nested_bound
from zmqdist.scheduling.worker.records import Slot, SlotState
from zmqdist.scheduling.worker.worker_events import Effect, EndSlot, Spawn

EXTRA_IDLE_S = 5.0
"""Seconds without items after which an extra slot ends. To start one takes some milliseconds."""


class NestedSlots:
    """The waits and the extra slots of one worker; the module's docstring has the rules.

    Args:
      slots: the records of all slots. The configured slots are first; extra slots are added.
      extra_max: the largest number of extra slots.

    Attributes:
      in_use: whether a function waits or an extra slot exists. While it is False, the other
        attributes and methods have no effect on the worker.
      at_bound: whether only work deeper than `floor` may begin (P18).
      floor: at the bound, the depth of the deepest function that waits.
      places: the number of functions that may run at a time, not counting those that wait.
    """

    def __init__(self, slots: list[Slot], extra_max: int) -> None:
        self.in_use = self.at_bound = False
        self.floor = 0
        self.places = self._own = len(slots)
        self._slots = slots
        self._extra_max = extra_max
        self._depths: dict[int, int] = {}
        """The depths of the functions that wait, by slot."""

    @property
    def deadline(self) -> float | None:
        """The time at which `end_idle` must be called; None means never."""
        if not self.in_use:
            return None
        return min((slot.reported_at + EXTRA_IDLE_S for slot in self._idle_extra), default=None)

    def begin_wait(self, slot: Slot, position: int, depth: int) -> str:
        """Record that the function at `position` waits, or return why it may not (P17)."""
        if not slot.given or slot.given[0][0] != position or slot.waits_at:
            return ""  # the worker has dropped its lease
        if len(self._depths) + 1 >= self._own + self._extra_max:
            return (
                f"a function at depth {depth} of nested work may not wait for results: "
                f"{len(self._depths)} functions of this worker wait already, and its last slot "
                f"must stay free for their work. Schedule fewer levels, or raise nested_slots_max "
                f"of the worker, which is {self._extra_max}"
            )
        slot.waits_at = position
        self._depths[slot.index] = depth
        self._recount()
        return ""

    def end_wait(self, slot: Slot) -> None:
        """Record that the function of a slot does not wait any more."""
        if slot.waits_at:
            slot.waits_at = 0
            del self._depths[slot.index]
            self._recount()

    def may_begin(self, slot: Slot) -> bool:
        """Return whether an item may be given to a slot that can take one (P14, P15)."""
        if slot.waits_at:
            return False
        return bool(slot.given) or self._running < self.places

    def start_extra(self, waiting_items: int) -> list[Effect]:
        """Start extra slots for the items that no slot can take."""
        present = [slot for slot in self._slots if slot.state is not SlotState.ABSENT]
        free = [slot for slot in present if not slot.waits_at]
        unused = sum(not slot.given for slot in free)
        missing = min(self.places - len(free), waiting_items - unused)
        effects: list[Effect] = []
        while missing > 0:
            missing -= 1
            slot = next((slot for slot in self._slots if slot.state is SlotState.ABSENT), None)
            if slot is None:
                slot = Slot(len(self._slots), SlotState.ABSENT)
                self._slots.append(slot)
            slot.enter(SlotState.STARTING)
            effects.append(Spawn(slot.index))
        return effects

    def end_idle(self, now: float) -> list[Effect]:
        """End the extra slots that had no items for EXTRA_IDLE_S (P19)."""
        effects: list[Effect] = []
        for slot in self._idle_extra:
            if slot.reported_at + EXTRA_IDLE_S <= now:
                slot.enter(SlotState.ENDING)
                effects.append(EndSlot(slot.index))
        return effects

    def replaced(self, slot: Slot) -> list[Effect]:
        """Replace a slot whose process has died. An extra slot is started again only when it is
        needed."""
        self.end_wait(slot)
        devices = slot.next_devices
        if slot.index < self._own or devices:
            self._slots[slot.index] = Slot(slot.index, devices=devices)
            return [Spawn(slot.index, devices)]
        self._slots[slot.index] = Slot(slot.index, SlotState.ABSENT)
        self._recount()
        return []

    @property
    def _running(self) -> int:
        return sum(bool(slot.given) and not slot.waits_at for slot in self._slots)

    @property
    def _idle_extra(self) -> list[Slot]:
        return [
            slot
            for slot in self._slots[self._own :]
            if slot.state is SlotState.READY and not slot.given
        ]

    def _recount(self) -> None:
        waiting = len(self._depths)
        self.at_bound = nested_bound.at_bound(waiting, self._extra_max)
        self.floor = max(self._depths.values()) if self.at_bound else 0
        self.places = nested_bound.places(self._own, waiting, self._extra_max)
        extra = self._slots[self._own :]
        self.in_use = waiting > 0 or any(s.state is not SlotState.ABSENT for s in extra)
