"""The present state of a coordinator in figures: the record that `ClusterCoordinator.snapshot`
returns, and the gauges of metrics.py.

Any thread may read the state while the loop changes it. Each figure is exact at some moment, but
figures that the lock does not guard may be from different moments.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from zmqdist import errors
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime, opened
from zmqdist.scheduling.coordinator.work import State
from zmqdist.scheduling.shared.store import Holdings

GAUGE_MS: Final = 2_000
"""The time limit in milliseconds for the dispatcher's reply when a gauge is read."""


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshot:
    """The work, waiting threads and held data of a coordinator.

    Attributes:
      connected: whether the connection to a dispatcher is up and the dispatcher has registered this
        coordinator.
      workers: the number of workers that the dispatcher has reported.
      scheduled: work items that were scheduled since the coordinator was made. Builds and reads of
        resources are not counted.
      unfinished: scheduled work items that have not ended.
      queued: an upper bound of the unfinished work items in the dispatcher's queue, computed from
        the dispatcher's latest report.
      queue_bytes: bytes of the arguments of unfinished work, shared data counted once;
        `queue_bytes_max` bounds it.
      busy: whether a thread is in `schedule` or `join`, or pickles a resource or dataset. Any other
        thread has to wait before it does so.
      waiting_for_room: threads in `schedule` that wait for room in the queue.
      waiting_for_end: threads in `join`, `done` or `schedule` that wait for the end of work or of a
        round.
      failed: whether the round has failed, and `schedule`, `join` or `done` has yet to raise the
        error.
      ending: whether the coordinator has requested the end of a round that may still have executing
        functions.
      rounds_ended: rounds that have ended with an error.
      waiting_for_inputs: work items that are not submitted, because an input is pending, or because
        their next retry is not due.
      records: the records of work items: of those that have not ended, of those whose value a worker
        keeps or has lost, and of those that the dispatcher has yet to give up.
      held: figures of the large arguments, functions, inputs and definitions of resources that the
        coordinator holds.
      kept: values that workers keep for this coordinator.
      functions: functions of this coordinator that the cluster knows.
      functions_pickled: how many times a function was pickled.
      resources: per-worker resources, iterators and datasets included.
      memories: processes whose shared memory is mapped for results.
      connections: connections to workers for results. The connection to the dispatcher is not
        counted.
    """

    connected: bool
    workers: int
    scheduled: int
    unfinished: int
    queued: int
    queue_bytes: int
    busy: bool
    waiting_for_room: int
    waiting_for_end: int
    failed: bool
    ending: bool
    rounds_ended: int
    waiting_for_inputs: int
    records: int
    held: Holdings
    kept: int
    functions: int
    functions_pickled: int
    resources: int
    memories: int
    connections: int


def snapshot_of(runtime: CoordinatorRuntime, resources: int) -> CoordinatorSnapshot:
    """Return an immutable record of the coordinator's present state. Any thread may call this, even
    after the coordinator was closed."""
    machine = runtime.machine
    # without the lock, because a million records may be counted
    kept_values = sum(work.state is State.KEPT for work in list(machine.works.values()))
    with runtime.lock:
        return CoordinatorSnapshot(
            connected=machine.registered and not runtime.closed,
            workers=machine.workers,
            scheduled=runtime.progress.scheduled,
            unfinished=runtime.progress.unfinished,
            queued=0 if runtime.closed else machine.queued + len(runtime.outbox),
            queue_bytes=runtime.queue.counted_bytes,
            busy=runtime.schedule_lock.locked(),
            waiting_for_room=runtime.progress.waiting_for_room,
            waiting_for_end=runtime.progress.waiting - runtime.progress.waiting_for_room,
            failed=bool(runtime.failures),
            ending=machine.ending,
            rounds_ended=runtime.progress.rounds_ended,
            waiting_for_inputs=machine.waiting,
            records=len(machine.works) + len(runtime.outbox),
            held=runtime.store.holdings,
            kept=kept_values,
            functions=len(runtime.functions),
            functions_pickled=runtime.functions.pickles,
            resources=resources,
            memories=runtime.result_fetcher.memories,
            connections=runtime.result_fetcher.connections,
        )


def _inflight(runtime: CoordinatorRuntime) -> int:
    """Return how many functions of a coordinator workers have. Only the dispatcher knows it, so it
    is asked."""
    if not runtime.machine.registered or runtime.pid != os.getpid():
        return 0
    try:
        rows = runtime.call_dispatcher("facts", timeout_ms=GAUGE_MS)["coordinators"]
    except errors.OpError:  # the dispatcher is lost, and so are its queue and leases
        return 0
    out: int = sum(row["out"] for row in rows if row["coordinator"] == runtime.machine.coordinator)
    return min(out, runtime.progress.unfinished)


def _inflight_of_all() -> int:
    return sum(_inflight(runtime) for runtime in list(opened) if not runtime.closed)


metrics.GAUGES["queued_closures"] = lambda: max(
    0, sum(runtime.progress.unfinished for runtime in list(opened)) - _inflight_of_all()
)
metrics.GAUGES["inflight_closures"] = _inflight_of_all
