"""What does the dispatcher cost as the cluster and the queue grow?

First, simulated workers and a simulated coordinator drive the dispatcher's machine in virtual time,
so that one core can simulate ten thousand workers and a million queued tasks. The figures are the
processor time of a task, of a heartbeat and of a registering worker, and the bytes of a worker and
of a queued task. A message returns one task of 10 ms, or twenty tasks of 0.1 ms, as from real
workers.

Then real processes and sockets are measured. The figures are the processor time of a no-op task in
each process, and the share of a core that the heartbeats of very many connections cost a dispatcher
that does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

from benchmarks import crowd, simulated
from benchmarks.measuring import Figure, Plan, Question
from benchmarks.roles import processor_s, role
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.observe.bench import nothing

SLOW_S, QUICK_S = 0.01, 0.0001
ONE, TWENTY = "one result a message", "20 results a message"
FEW = 10
BY_WORKERS, BY_QUEUE = (
    "a task by number of workers",
    f"a task by tasks queued at the start, {FEW} workers",
)
TASKS = 50_000
CROWD_MAX = 1000
"""The most real connections. Each of them needs one to three file descriptors at each end."""


def measure(plan: Plan) -> list[Figure]:
    """Return all figures. The number of workers varies with a fixed queue, and the length of the
    queue with a fixed number of workers."""
    return [*_tasks(plan), *_others(plan), *_memory(plan), *_processes(plan), *_crowds(plan)]


def _tasks(plan: Plan) -> Iterator[Figure]:
    queued = plan.tasks[-1] // 10
    for workers in plan.workers:
        yield from _task(BY_WORKERS, ONE, workers, simulated.cost_of_tasks(workers, queued, SLOW_S))
    for workers in plan.workers:
        # Schedule many quick tasks for each worker, because the window of a worker needs time to
        # grow. With few tasks, only the start and the end of the work would be measured.
        tasks = max(queued, plan.tasks[0] * workers)
        if tasks <= plan.tasks[-1]:
            yield from _task(
                BY_WORKERS, TWENTY, workers, simulated.cost_of_tasks(workers, tasks, QUICK_S)
            )
    for tasks in plan.tasks[:-1]:
        # the longest queue would take a minute, and gives the same result
        yield from _task(BY_QUEUE, ONE, tasks, simulated.cost_of_tasks(FEW, tasks, SLOW_S))
    for tasks in plan.tasks:
        yield from _task(BY_QUEUE, TWENTY, tasks, simulated.cost_of_tasks(FEW, tasks, QUICK_S))


def _task(case: str, series: str, at: int, cost: simulated.Cost) -> Iterator[Figure]:
    yield Figure("scale", case, series, "us", cost.machine_us, at=at)
    yield Figure(
        "scale", case, f"{series}, with the codec", "us", cost.machine_us + cost.codec_us, at=at
    )


def _others(plan: Plan) -> Iterator[Figure]:
    for workers in plan.workers:
        idle, busy = (
            simulated.cost_of_beats(workers, 0),
            simulated.cost_of_beats(workers, 3 * workers),
        )
        yield Figure(
            "scale",
            "a beat or a joining worker by number of workers",
            "beat, idle",
            "us",
            idle,
            at=workers,
        )
        yield Figure(
            "scale",
            "a beat or a joining worker by number of workers",
            "beat, busy",
            "us",
            busy,
            at=workers,
        )
        joining = simulated.cost_of_joins(workers)
        yield Figure(
            "scale",
            "a beat or a joining worker by number of workers",
            "join",
            "us",
            joining,
            at=workers,
        )


def _memory(plan: Plan) -> Iterator[Figure]:
    for workers in plan.workers:
        if workers >= 100 or workers == plan.workers[-1]:
            size = simulated.memory_of_workers(workers)
            yield Figure(
                "scale",
                "memory of a worker by number of workers",
                "machine",
                "bytes",
                size,
                at=workers,
            )
    for tasks in plan.tasks:
        size = simulated.memory_of_tasks(tasks)
        yield Figure(
            "scale", "memory of a queued task by queue", "machine", "bytes", size, at=tasks
        )


def _processes(plan: Plan) -> Iterator[Figure]:
    count = min(plan.queued, TASKS)
    with (
        role("dispatcher", "--port", "0") as (dispatcher, address),
        ClusterCoordinator(address) as coordinator,
    ):
        worker = ("worker", "--dispatcher", address)
        with role(*worker) as (first, _), role(*worker) as (second, _):

            def work() -> tuple[float, float, float]:
                before = (
                    process_time(),
                    processor_s(dispatcher),
                    processor_s(first) + processor_s(second),
                )
                coordinator.fetch([coordinator.schedule(nothing) for _ in range(count)])
                after = (
                    process_time(),
                    processor_s(dispatcher),
                    processor_s(first) + processor_s(second),
                )
                mine, theirs, workers = (
                    late - early for late, early in zip(after, before, strict=True)
                )
                return mine, theirs, workers

            work()  # a warm-up: connections are made, functions are sent, and windows grow
            spent = work()
    case = "processor time of a no-op task, 2 workers"
    for name, seconds in zip(
        ("coordinator", "dispatcher", "workers without their slots"), spent, strict=True
    ):
        yield Figure("scale", case, name, "us", seconds / count * 1e6)


def _crowds(plan: Plan) -> Iterator[Figure]:
    case = "heartbeats of real connections, share of a core"
    for workers in plan.workers:
        if workers <= CROWD_MAX:
            share = crowd.watched(workers)
            yield Figure("scale", case, "idle", "%", 100 * share.idle, at=workers)
            yield Figure("scale", case, "with beats", "%", 100 * share.beats, at=workers)


QUESTION = Question("scale", "The dispatcher's cost as it grows", "", own=measure)
