"""The record that `WorkerServer.snapshot` returns."""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist.scheduling.worker.slot import SlotRow
from zmqdist.scheduling.worker.store import Holdings


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What a worker runs, has waiting and holds at one moment.

    Attributes:
      registered: whether it is registered with a dispatcher and connected to it.
      leaving: whether it leaves, and takes no more work.
      running: slots that run an item, plus items that wait for a slot.
      waiting: items that wait for a slot.
      waiting_pinned: those of them that are pinned to this worker; they go first.
      slots: each slot, in order.
      functions: functions that it has from coordinators.
      results: large results that it holds until their coordinator has received them, or releases those that it keeps.
      held: large parts that it holds: of results, and of arguments that were fetched.
      fetched: those of them that were fetched from other processes for the slots.
      fetched_bytes: the bytes of those.
      fetches: how many parts were fetched so far.
      resources: resources of coordinators that exist here; None if slots are processes, because each slot has its own.
      slot_deaths: slot processes that ended and were not killed by the worker.
    """

    registered: bool
    leaving: bool
    running: int
    waiting: int
    waiting_pinned: int
    slots: tuple[SlotRow, ...]
    functions: int
    results: int
    held: Holdings
    fetched: int
    fetched_bytes: int
    fetches: int
    resources: int | None
    slot_deaths: int
