"""Why work waits: the reasons that the facts name, from the queues and leases of a dispatcher. No I/O.

`zmqdist/observe/wait_reasons.py` has a sentence for each reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zmqdist.limits import WAITING_ROWS_MAX
from zmqdist.scheduling.dispatcher.demands import NO_WORKER_HAS
from zmqdist.scheduling.dispatcher.machine import Dispatch
from zmqdist.scheduling.dispatcher.records import RUNNING, SessionQueue, WorkerLoad
from zmqdist.scheduling.shared.quantities import amounts_text


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """Work of one coordinator that waits for the same reason.

    Attributes:
      reason: a key of `REASONS` (zmqdist/observe/wait_reasons.py).
      detail: what exactly it waits for, such as the name of a worker; "" if the reason says it all.
    """

    coordinator: int
    count: int
    reason: str
    detail: str


def waiting_rows(dispatch: Dispatch) -> tuple[tuple[WaitingRow, ...], int]:
    """Return the reasons why work waits, the most work first, and how many rows were left out.
    Looks at every queue and lease, but not at every waiting item."""
    counts: Counter[tuple[int, str, str]] = Counter()
    for session in dispatch.sessions.values():
        for part in session.with_detached:
            for queue in part.queues.values():
                if queue.bands:
                    reason, detail = _why_queued(dispatch, queue)
                    counts[session.coordinator, reason, detail] += queue.count
        if session.program.waits_for_input:
            counts[session.coordinator, "input", ""] += session.program.waits_for_input
        if dispatch.is_ending(session) and session.outstanding:
            counts[session.coordinator, "ending_round", ""] += session.outstanding
    for load in dispatch.loads.values():
        reason, detail = ("window", "") if load.reachable else ("away", load.name)
        for lease in load.leases.values():
            if lease.state not in RUNNING:
                counts[lease.session.coordinator, reason, detail] += 1
    rows = [WaitingRow(at[0], count, at[1], at[2]) for at, count in counts.most_common()]
    return tuple(rows[:WAITING_ROWS_MAX]), max(0, len(rows) - WAITING_ROWS_MAX)


def _why_queued(dispatch: Dispatch, queue: SessionQueue) -> tuple[str, str]:
    """Return (reason, detail) of the work of a queue."""
    placement, loads = dispatch.placement, dispatch.loads.values()
    if queue.request:
        pinned = f" of {queue.worker}" if queue.worker else ""
        why = placement.demands.why(queue)
        has = f": {placement.demands.stocks.text()}" if why == NO_WORKER_HAS else ""
        if loads:
            return "resources", f"each needs {amounts_text(queue.request)}{pinned}; {why}{has}"
    elif queue.near:
        return "inputs_elsewhere", queue.near
    if queue.worker:
        return "pinned", _pinned_detail(queue.worker, [*loads])
    usable = [load for load in loads if load.reachable and not load.member.leaving]
    if not usable:
        return "no_worker", f"{len(loads)} are away or leave" if loads else ""
    if all(load.waiting and not load.admits(queue.session.depth) for load in usable):
        return "nested_bound", ""
    return "all_busy", ""


def _pinned_detail(worker: str, loads: list[WorkerLoad]) -> str:
    load = next((load for load in loads if load.name == worker), None)
    if load is None:
        return f"{worker}, which is not there"
    if not load.reachable:
        return f"{worker}, which is away"
    return f"{worker}, which leaves" if load.member.leaving else f"{worker}, which is busy"
