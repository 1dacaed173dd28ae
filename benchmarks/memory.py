"""How much memory does a queued task take, and how much of it is not freed after the task?

For each system, the figure is the memory of all its processes (client, broker and workers) for each
no-op task that waits behind two tasks that do not end. For zmqdist's dispatcher, in a process of
its own, two more figures are its memory with very many queued tasks, and after the results were
taken. In this measurement workers start only when all tasks are queued, so that the queue has its
full length.
"""

from __future__ import annotations

import time

from benchmarks import roles
from benchmarks.measuring import Case, Figure, Plan, Question
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.observe.bench import nothing

SETTLE_S = 10.0
"""Seconds within which the dispatcher returns unused memory to the kernel."""
MB = 1e6


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{plan.queued_each:,} tasks", {"count": plan.queued_each})]


def dispatcher(plan: Plan) -> list[Figure]:
    """Return figures of the dispatcher's resident memory before the tasks, at its peak, and after
    the results were fetched."""
    count = plan.queued
    with roles.role("dispatcher", "--port", "0") as (pid, address):
        with ClusterCoordinator(address, cluster_lost_limit_s=600.0) as coordinator:
            coordinator.done()
            before = roles.memory(pid, "VmRSS")
            start = time.perf_counter()
            values = [coordinator.schedule(nothing) for _ in range(count)]
            scheduled_s = time.perf_counter() - start
            with (
                roles.role("worker", "--dispatcher", address),
                roles.role("worker", "--dispatcher", address),
            ):
                coordinator.join()
                taken_s = time.perf_counter() - start
                coordinator.fetch(values)
                del values
                after = _settled(pid, before)
        peak = roles.memory(pid, "VmHWM")

    def figure(case: str, unit: str, value: float) -> Figure:
        return Figure("memory", f"dispatcher, {count:,} tasks: {case}", "zmqdist", unit, value)

    return [
        figure("each queued task", "bytes", (peak - before) / count),
        figure("before", "MB", before / MB),
        figure("at its peak", "MB", peak / MB),
        figure("afterwards", "MB", after / MB),
        figure("scheduling", "tasks/s", count / scheduled_s),
        figure("all done after", "s", taken_s),
    ]


QUESTION = Question(
    "memory",
    "Memory of a queued no-op task, all processes",
    "bytes",
    cases=cases,
    blocks=1,
    fresh=True,
    own=dispatcher,
)


def _settled(pid: int, before: int) -> int:
    """Return the least resident memory that the process has within SETTLE_S. Return early when it
    has no more than `before`."""
    until = time.monotonic() + SETTLE_S
    least = roles.memory(pid, "VmRSS")
    while least > before and time.monotonic() < until:
        time.sleep(0.2)
        least = min(least, roles.memory(pid, "VmRSS"))
    return least
