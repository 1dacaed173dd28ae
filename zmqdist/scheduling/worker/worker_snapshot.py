"""The record that `WorkerServer.snapshot` returns."""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist.scheduling.shared.store import Holdings
from zmqdist.scheduling.worker.slot import SlotRow


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The running and waiting work of a worker, and the data that it holds, at one moment.

    Attributes:
      registered: whether the worker is registered with a dispatcher and connected to it.
      leaving: whether the worker is leaving, and accepts no more work.
      running: the number of slots that run an item, plus the number of items that wait for a slot.
      waiting: the number of items that wait for a slot.
      waiting_pinned: the number of waiting items that are pinned to this worker. They begin first.
      slots: each slot, in order.
      functions: the number of functions that coordinators have sent.
      results: the number of large results that the worker holds. The worker frees a result when the
        coordinator has received it, but a kept result only when the coordinator releases it.
      held: figures of the large parts that the worker holds: parts of results, and parts of
        arguments that were fetched.
      fetched: the number of held parts that were fetched from other processes for the slots.
      fetched_bytes: the bytes of the fetched parts.
      fetches: the number of parts that were fetched so far.
      resources: the number of resources that exist in the worker; None if slots are processes,
        because each slot has its own resources.
      slot_deaths: the number of slot processes that ended without being killed by the worker.
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
