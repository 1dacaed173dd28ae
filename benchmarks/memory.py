"""What do a million queued no-op tasks cost the dispatcher, and what is left of them?

The dispatcher has a process of its own. Workers are started when all tasks are queued, so that the queue really is that long.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from zmqdist.coordinator import ClusterCoordinator
from zmqdist.observe.bench import FULL, Figure, Plan, nothing

TASKS = 1_000_000
TASKS_QUICK = 50_000
SETTLE_S = 10.0
"""Memory that is given back is given back within this time."""
MB = 1e6


def measure(plan: Plan) -> list[Figure]:
    """The dispatcher's resident memory before, at its peak, and after the results were taken."""
    count = TASKS if plan is FULL else TASKS_QUICK
    with _role("dispatcher", "--port", "0") as (dispatcher, line):
        address = line.rpartition("zmq://")[2]
        with ClusterCoordinator(address, cluster_lost_limit_s=600.0) as coordinator:
            coordinator.done()
            before = _memory(dispatcher.pid, "VmRSS")
            start = time.perf_counter()
            values = [coordinator.schedule(nothing) for _ in range(count)]
            scheduled_s = time.perf_counter() - start
            with _role("worker", "--dispatcher", address), _role("worker", "--dispatcher", address):
                coordinator.join()
                taken_s = time.perf_counter() - start
                coordinator.fetch(values)
                del values
                after = _settled(dispatcher.pid, before)
        peak = _memory(dispatcher.pid, "VmHWM")
    name = f"dispatcher, {count:,} queued tasks"
    return [
        Figure(f"{name}: memory at its peak", "MB", peak / MB, None, "before", before / MB, None, peak / before),
        Figure(f"{name}: memory afterwards", "MB", after / MB, None, "before", before / MB, None, after / before),
        Figure(f"{name}: memory of one", "bytes", (peak - before) / count),
        Figure(f"{name}: scheduled", "tasks/s", count / scheduled_s),
        Figure(f"{name}: done after", "s", taken_s),
    ]


@contextmanager
def _role(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`zmqdist ARGUMENTS` and the first line that it says; ended when left."""
    command = [sys.executable, "-m", "zmqdist_cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        try:
            if not line:
                raise RuntimeError(f"{' '.join(arguments)} ended before it had begun")
            yield process, line
        finally:
            process.terminate()


def _memory(pid: int, key: str) -> int:
    """Bytes, as the kernel counts them."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def _settled(pid: int, before: int) -> int:
    """The least that it has within SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    least = _memory(pid, "VmRSS")
    while least > before and time.monotonic() < until:
        time.sleep(0.2)
        least = min(least, _memory(pid, "VmRSS"))
    return least
