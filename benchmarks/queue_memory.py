"""What a million queued no-op tasks cost the dispatcher, which has a process of its own, and what is left of them afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from zmqdist.coordinator import ClusterCoordinator
from zmqdist.observe.bench import Figure
from zmqdist.rpc.client import Client

TASKS = 1_000_000
COMMAND = [sys.executable, "-m", "zmqdist_cli"]


def run() -> Iterator[Figure]:
    dispatcher = subprocess.Popen([*COMMAND, "dispatcher"], stdout=subprocess.PIPE, text=True)
    workers: list[subprocess.Popen[str]] = []
    try:
        assert dispatcher.stdout is not None
        address = dispatcher.stdout.readline().split("zmq://")[1].split()[0]
        with ClusterCoordinator(address) as coordinator, Client.create("zmq", address) as client:
            before = _resident_mb(dispatcher.pid)
            began = time.perf_counter()
            values = [coordinator.schedule(int, (number,)) for number in range(TASKS)]
            scheduled_s = time.perf_counter() - began
            while client.status_blocking()["queued"] < TASKS:  # type: ignore[attr-defined]
                time.sleep(0.1)
            full = _resident_mb(dispatcher.pid)
            workers = [
                subprocess.Popen([*COMMAND, "worker", "--dispatcher", address], stdout=subprocess.DEVNULL, text=True)
                for _ in range(2)
            ]
            began = time.perf_counter()
            coordinator.join()
            ran_s = time.perf_counter() - began
            assert values[-1].fetch() == TASKS - 1
            time.sleep(1.0)
            after = _resident_mb(dispatcher.pid)
    finally:
        for process in (*workers, dispatcher):
            process.terminate()
            process.wait()
    yield Figure("schedule() with a full queue behind it", "calls/s", TASKS / scheduled_s)
    yield Figure("the million run by 2 workers, their start included", "tasks/s", TASKS / ran_s)
    yield Figure("dispatcher with a million queued", "MB", full, before, "before", full / before)
    yield Figure("a queued task", "bytes", (full - before) * 1e6 / TASKS)
    yield Figure("dispatcher afterwards", "MB", after, before, "before", after / before)


def _resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmRSS"].split()[0]) * 1024 / 1e6
