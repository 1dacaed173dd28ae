"""What a worker is at: the record behind `WorkerServer.snapshot`."""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist.scheduling.worker.slot import SlotRow
from zmqdist.scheduling.worker.store import Holdings


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What a worker runs, has waiting and holds.

    Attributes:
      registered: a dispatcher has taken it, and the connection to that one stands.
      leaving: it was told to leave, and takes no more work.
      running: slots that run something, and what waits for them.
      waiting: pieces of work that wait for a slot.
      waiting_pinned: of these, the ones for this very worker, which go first.
      slots: each slot, in order.
      functions: functions that it has from coordinators.
      results: large results that are here until their coordinator has them, or lets go of those that stay.
      held: large parts that are here: of results, and of arguments that were fetched.
      fetched: of these, the parts of arguments that were fetched from other processes for the slots.
      fetched_bytes: of those.
      fetches: how often such a part was fetched.
      resources: resources of coordinators that exist here; None where slots are processes, which have their own.
      slot_deaths: slot processes that ended without being told to.
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
