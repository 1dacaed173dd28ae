"""What a coordinator is at: the record behind `ClusterCoordinator.snapshot`, and the gauges of metrics.py.

Any thread reads here while the loop goes on. Each figure is true at its moment; of one that the lock does not guard, two may be of
different moments.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime, opened
from zmqdist.scheduling.worker.store import Holdings


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshot:
    """What a coordinator has, waits for and holds.

    Attributes:
      connected: a dispatcher has taken this coordinator, and the connection to it stands.
      workers: how many the dispatcher has told of.
      scheduled: pieces of work since the coordinator was made; without what it schedules for resources.
      unfinished: of these, the ones that have not ended.
      queued: of these, the ones that have not left the queue for a worker, as far as the dispatcher has told; never too few.
      queue_bytes: of the arguments of unfinished work, shared ones once: what `queue_bytes_max` bounds.
      busy: a thread is in `schedule` or `join`; another one that calls these waits for it.
      waiting_for_room: threads in `schedule` that wait for room in the queue.
      waiting_for_end: threads in `join` or `done` that wait for work to end, or for the end of a round.
      failed: a piece of work has failed, and no call has raised its error yet.
      ending: the coordinator has asked for the end of a round, and something of it may still be executing.
      rounds_ended: how many rounds have ended with an error.
      planned: pieces of work with inputs, retries, a time-out or a lineage that are remembered: until their end; with a lineage for as
        long as their value is used.
      waiting_for_inputs: of these, the ones that are not handed in because an input has not ended.
      attempts: of these, the ones that are handed in and have not ended.
      held: large arguments, functions and inputs that are held for unfinished work.
      owners: pieces of work for which something is held.
      values: RemoteValues that have not been settled.
      called_back: of these, the ones with callbacks.
      kept: values that stay with their workers for this coordinator.
      functions: functions that the cluster knows from this coordinator.
      functions_pickled: how often a function was pickled.
      resources: per-worker resources, iterators and datasets included.
      memories: processes whose shared memory is open for results.
      connections: connections to workers for results, beside the one to the dispatcher.
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
    planned: int
    waiting_for_inputs: int
    attempts: int
    held: Holdings
    owners: int
    values: int
    called_back: int
    kept: int
    functions: int
    functions_pickled: int
    resources: int
    memories: int
    connections: int


def snapshot_of(runtime: CoordinatorRuntime, resources: int) -> CoordinatorSnapshot:
    """An immutable record of now. In any thread, also after the coordinator was closed."""
    machine, plans = runtime.machine.closures, runtime.plans
    with runtime.lock:
        return CoordinatorSnapshot(
            connected=machine.enlisted and not runtime.closed,
            workers=machine.workers,
            scheduled=runtime.scheduled,
            unfinished=runtime.scheduled - runtime.resolved,
            queued=_queued(runtime),
            queue_bytes=runtime.queue_bytes.held,
            busy=runtime.schedule_lock.locked(),
            waiting_for_room=runtime.waiting_for_room,
            waiting_for_end=runtime.waiting - runtime.waiting_for_room,
            failed=bool(runtime.failures),
            ending=machine.ending,
            rounds_ended=runtime.rounds_ended,
            planned=len(plans) + len(plans.planned),
            waiting_for_inputs=runtime.machine.plans.waiting,
            attempts=len(runtime.machine.plans.attempts),
            held=runtime.store.holdings,
            owners=len(runtime.held_by_work),
            values=len(runtime.values),
            called_back=len(runtime.with_callbacks),
            kept=machine.kept,
            functions=len(runtime.functions),
            functions_pickled=runtime.functions.pickles,
            resources=resources,
            memories=runtime.fetching.memories,
            connections=runtime.fetching.connections,
        )


def _queued(runtime: CoordinatorRuntime) -> int:
    return 0 if runtime.closed else runtime.machine.closures.queued + len(runtime.outbox)


metrics.GAUGES["queued_closures"] = lambda: sum(map(_queued, list(opened)))
metrics.GAUGES["inflight_closures"] = lambda: sum(
    each.scheduled - each.resolved - _queued(each) for each in list(opened)
)
