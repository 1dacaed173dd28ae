"""The record that `WorkerServer.snapshot` returns."""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist.scheduling.worker.slot import SlotRow
from zmqdist.scheduling.worker.store import Holdings


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The running and waiting work of a worker, and the data that it holds, at one moment.

    Attributes:
      registered: whether the worker is registered with a dispatcher and connected to it.
      leaving: whether the worker is leaving, and accepts no more work.
      running: slots that run an item, plus items that wait for a slot.
      waiting: items that wait for a slot.
      waiting_pinned: those of the waiting items that are pinned to this worker; they begin first.
      slots: each slot, in order.
      functions: functions that coordinators have sent.
      results: large results that the worker holds. A result leaves when its coordinator has received it. A kept result leaves when its
        coordinator releases it.
      held: large parts that the worker holds: of results, and of arguments that were fetched.
      fetched: those of the held parts that were fetched from other processes for the slots.
      fetched_bytes: the bytes of the fetched parts.
      fetches: the number of parts that were fetched so far.
      resources: resources of coordinators that exist in the worker; None if slots are processes, because each slot has its own.
      slot_deaths: slot processes that ended without being killed by the worker.
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
