"""The end of processes that functions have started, and of a worker whose zygote was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, until, waits, writes
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child


def forks_and_returns_twice() -> bool:
    return os.fork() == 0


def starts_a_process_that_writes(folder: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=writes, args=(folder,))
    process.start()
    process.join()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_forked_child_takes_no_work_of_its_slot() -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        for _ in range(3):
            assert coordinator.schedule(forks_and_returns_twice).get(20) is False
            assert coordinator.fetch(coordinator.map(int, range(1000))) == list(range(1000))
        coordinator.join(20)


def test_processes_of_function_end_with_its_slot(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1) as cluster,
        ClusterCoordinator(cluster, cancel_grace_s=0.1) as coordinator,
    ):
        value = coordinator.schedule(starts_a_process_that_writes, (tmp_path,))
        (pid,) = until(lambda: begun(tmp_path))
        value.cancel()
        with pytest.raises(errors.CancelledError):
            value.get(20)
        until(lambda: not is_alive(pid))


def test_worker_ends_without_its_zygote(start_worker: Callable[..., Child], tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        worker = start_worker(dispatcher.address, slots=2)
        zygote = coordinator.schedule(os.getppid).get(20)
        value = coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        os.kill(zygote, signal.SIGKILL)
        assert worker.ended.wait(20)
        start_worker(dispatcher.address)
        (tmp_path / "go").touch()
        assert value.get(20) == "x"


def test_more_slots_than_zygote_orders_start(
    start_worker: Callable[..., Child],
) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        start_worker(dispatcher.address, slots=290)
        assert coordinator.schedule(int, ("5",)).get(50) == 5
