"""A dispatcher process that is killed and started again while work goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.scheduling.work import Settled, counts, starts, until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child

StartWorker = Callable[..., Child]
StartDispatcher = Callable[..., "subprocess.Popen[str]"]


def kill_dispatchers(
    kills: int,
    port: int,
    start_worker: StartWorker,
    start_dispatcher: StartDispatcher,
    folder: Path,
) -> None:
    """Check that work continues over so many deaths of the dispatcher, and that each result arrives
    once."""
    config = {"port": port, "lease_s": 2.0}
    address = f"127.0.0.1:{port}"
    # even while the dispatcher starts
    workers = [start_worker(address, index=index) for index in range(2)]
    dispatcher = start_dispatcher(**config)
    with ClusterCoordinator(address, cluster_lost_limit_s=60.0) as coordinator:
        coordinator.schedule(int).get(40)
        values = [coordinator.schedule(counts, (folder, str(i), 0.01)) for i in range(60)]
        values.append(coordinator.schedule(np.ones, (1_000_000,)))
        settled = Settled(values)
        until(lambda: sum(value.done() for value in values) > 5)
        for _ in range(kills):
            os.kill(dispatcher.pid, signal.SIGKILL)
            dispatcher.wait()
            dispatcher = start_dispatcher(**config)
        more = [coordinator.schedule(counts, (folder, f"more{i}")) for i in range(10)]
        coordinator.join(30)
        assert coordinator.fetch(values[:-1]) == [str(i) for i in range(60)]
        assert values[-1].get().sum() == 1_000_000
        assert coordinator.fetch(more) == [f"more{i}" for i in range(10)]
        until(lambda: min(settled.counts) == 1)
        assert max(settled.counts) == 1
        assert min(starts(folder, str(i)) for i in range(60)) == 1
        assert not any(worker.ended.is_set() for worker in workers)
