"""Functions with GPUs while dispatcher, workers and slots are killed: no two processes have one GPU
at a time, and each value arrives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from tests.scheduling.dispatcher_kills import StartDispatcher, StartWorker
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator


def exclusive(folder: Path, number: int) -> int:
    """Lock a file for each GPU while this function runs. The kernel drops the locks of a process
    that is killed."""
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    with contextlib.ExitStack() as stack:
        for gpu in gpus:
            file = stack.enter_context(open(folder / gpu, "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another process has it
        with open(folder / "pids", "a") as pids:
            pids.write(f"{os.getpid()}\n")
        time.sleep(0.02)
    return number * len(gpus)


@pytest.mark.timeout(120)
def test_gpu_is_never_shared_whoever_is_killed(
    port: int,
    start_worker: StartWorker,
    start_dispatcher: StartDispatcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"GPU-{os.getpid()}-{time.monotonic_ns()}-{n}" for n in range(4)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    config = {"port": port, "lease_s": 2.0, "attempts_max": 20}
    address = f"127.0.0.1:{port}"
    options = {"slots": 2, "resources": {"gpu": 2}}
    workers = [start_worker(address, index=index, **options) for index in range(2)]
    dispatcher = start_dispatcher(**config)
    with ClusterCoordinator(address, cluster_lost_limit_s=60.0) as coordinator:
        values = [
            coordinator.schedule(exclusive, (tmp_path, n), resources={"gpu": 1 + n % 2})
            for n in range(150)
        ]
        for done, victim in enumerate(("slot", "worker", "dispatcher", "slot", "dispatcher"), 1):
            until(lambda done=done: sum(value.done() for value in values) > 20 * done)
            if victim == "dispatcher":
                os.kill(dispatcher.pid, signal.SIGKILL)
                dispatcher.wait()
                dispatcher = start_dispatcher(**config)
            elif victim == "worker":
                os.kill(workers[0].pid, signal.SIGKILL)
                until(workers[0].ended.is_set)
                workers[0] = start_worker(address, index=0, **options)
            else:
                pid = int((tmp_path / "pids").read_text().split()[-1])
                with contextlib.suppress(ProcessLookupError):  # another needed its slot
                    os.kill(pid, signal.SIGKILL)
        coordinator.join(60)
        assert coordinator.fetch(values) == [n * (1 + n % 2) for n in range(150)]
