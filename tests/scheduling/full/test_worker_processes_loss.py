"""Worker processes that are killed, freeze and return; each test has processes of its own."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, counts, dies_first, exits, starts, until, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child
from zmqdist.scheduling.coordinator.result_fetcher import ResultFetcher
from zmqdist.scheduling.shared.config import DispatcherConfig

Start = Callable[..., Child]


def running_row(dispatcher: zd.DispatchServer) -> Any:
    """Return the row of a worker that runs a function."""
    return until(lambda: [row for row in dispatcher.snapshot().workers if row.running])[0]


def test_worker_killed_between_functions_is_not_missed(start_worker: Start, tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        first, _ = (
            start_worker(dispatcher.address, index=0),
            start_worker(dispatcher.address, index=1),
        )
        until(lambda: dispatcher.num_workers == 2)
        for name in "ab":
            coordinator.schedule(counts, (tmp_path, name))
        coordinator.join(20)
        os.kill(first.pid, signal.SIGKILL)
        for name in "cd":
            coordinator.schedule(counts, (tmp_path, name))
        coordinator.join(20)
        assert [starts(tmp_path, name) for name in "abcd"] == [1, 1, 1, 1]
        until(lambda: dispatcher.num_workers == 1)
        assert dispatcher.snapshot().losses_count == 1


def test_returned_worker_is_enough(start_worker: Start, tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        workers = [start_worker(dispatcher.address) for _ in range(2)]
        until(lambda: dispatcher.num_workers == 2)
        values = [coordinator.schedule(counts, (tmp_path, str(i), 0.05)) for i in range(20)]
        until(lambda: list(tmp_path.glob("count-*")))
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        until(lambda: dispatcher.num_workers == 0)
        start_worker(dispatcher.address)
        assert coordinator.fetch(values) == [str(i) for i in range(20)]
        coordinator.join(20)
        started = [starts(tmp_path, str(i)) for i in range(20)]
        assert min(started) == 1
        # each slot ran one function when the workers died; the others had not begun
        assert sum(started) <= 20 + 2


def test_user_error_is_raised_despite_lost_worker(start_worker: Start, tmp_path: Path) -> None:
    config = DispatcherConfig(lease_s=60.0)
    with (
        zd.DispatchServer(config) as dispatcher,
        ClusterCoordinator(dispatcher, cancel_grace_s=0.1) as coordinator,
    ):
        workers = [start_worker(dispatcher.address, index=index) for index in range(2)]
        until(lambda: dispatcher.num_workers == 2)
        long = coordinator.schedule(writes, (tmp_path,))
        until(lambda: begun(tmp_path))
        row = running_row(dispatcher)
        coordinator.schedule(int, ("x",)).exception(20)
        os.kill(workers[int(row.name[-1])].pid, signal.SIGKILL)
        with pytest.raises(ValueError, match="invalid literal"):
            # far less than the lease, because the dispatcher knows that the process has ended
            coordinator.join(20)
        before = written(tmp_path)
        with pytest.raises(errors.CancelledError):
            long.get(0)
        assert coordinator.schedule(int).get(20) == 0
        coordinator.join(20)
        assert written(tmp_path) == before


def test_frozen_worker_is_lost_with_its_functions(start_worker: Start, tmp_path: Path) -> None:
    """After SIGSTOP the process exists and its connection is open, but it is silent. After SIGCONT
    its late messages have no effect."""
    config = DispatcherConfig(lease_s=1.0, reconnect_grace_s=0.2)
    with (
        zd.DispatchServer(config) as dispatcher,
        ClusterCoordinator(dispatcher, cancel_grace_s=0.1) as coordinator,
    ):
        worker = start_worker(dispatcher.address, index=0)
        value = coordinator.schedule(writes, (tmp_path,))
        until(lambda: written(tmp_path) > 300)
        os.kill(worker.pid, signal.SIGSTOP)
        coordinator.schedule(int, ("x",))
        until(lambda: dispatcher.num_workers == 0)
        start_worker(dispatcher.address, index=0)
        until(lambda: dispatcher.num_workers == 1)
        value.cancel()  # the new worker may have got the work first
        with pytest.raises(ValueError, match="invalid literal"):
            coordinator.join(20)
        with pytest.raises(errors.CancelledError):
            value.get(0)
        before = written(tmp_path)
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.ended.wait(20)  # another worker has taken its name
        assert coordinator.schedule(int).get(20) == 0
        coordinator.join(20)
        assert written(tmp_path) == before
        until(lambda: dispatcher.num_workers == 1)


def test_worker_frozen_after_registration_joins_again(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It freezes before its connection has sent a heartbeat."""
    import zmqdist.transport.router as router

    monkeypatch.setattr(router, "HEARTBEAT_SERVER_S", 0.3)
    monkeypatch.setattr(router, "HEARTBEAT_TIMEOUT_S", 0.3)
    config = DispatcherConfig(lease_s=1.0, reconnect_grace_s=0.1)
    with zd.DispatchServer(config) as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        worker = start_worker(dispatcher.address, index=0)
        until(lambda: dispatcher.num_workers == 1)
        os.kill(worker.pid, signal.SIGSTOP)
        value = coordinator.schedule(os.getpid)
        until(lambda: dispatcher.num_workers == 0)
        os.kill(worker.pid, signal.SIGCONT)
        until(lambda: dispatcher.num_workers == 1)
        assert value.get(20)
        coordinator.join(20)
        # on a host that is busy for a whole lease, the worker is lost once more
        assert dispatcher.snapshot().losses_count >= 1


def test_work_behind_fatal_function_is_not_charged(tmp_path: Path) -> None:
    """There is one slot: all functions are in the same queue as the one that kills the process
    again and again."""
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = []
        for i in range(12):
            values.append(coordinator.schedule(dies_first, (tmp_path, f"bad{i}", 2, exits)))
            values.append(coordinator.schedule(counts, (tmp_path, str(i))))
        coordinator.join(50)
        assert coordinator.fetch(values[1::2]) == [str(i) for i in range(12)]
        # An outcome that had not been reported when the slot died comes from a second start.
        assert min(starts(tmp_path, str(i)) for i in range(12)) == 1


def hold_the_gil(seconds: int) -> int:
    return int(ctypes.PyDLL(None).sleep(seconds))


def test_function_with_gil_is_no_dead_worker(start_worker: Start) -> None:
    """It holds the GIL for longer than all leases; the slot of one worker is a process, that of the
    other a thread."""
    config = DispatcherConfig(lease_s=3.0, reconnect_grace_s=0.1)
    with zd.DispatchServer(config) as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        for processes in (True, False):
            start_worker(dispatcher.address, processes=processes)
        until(lambda: dispatcher.num_workers == 2)
        pids = {row.pid for row in dispatcher.snapshot().workers}
        values = [coordinator.schedule(hold_the_gil, (7,)) for _ in range(2)]
        assert coordinator.fetch(values) == [0, 0]
        coordinator.join(20)
        assert {row.pid for row in dispatcher.snapshot().workers} == pids
        assert dispatcher.snapshot().losses_count == 0


def test_result_lost_during_fetch_is_computed_again(
    start_worker: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    def large(seconds: float) -> Any:
        counts(tmp_path, "large", seconds)
        return np.ones(1_000_000)

    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        worker = start_worker(dispatcher.address, index=0)
        until(lambda: dispatcher.num_workers == 1)
        real_fetch = ResultFetcher.fetch
        calls: list[Any] = []

        def killed_first(self: ResultFetcher, *args: Any) -> Any:
            """The result is ready, and no byte of it has been copied, when its worker dies."""
            if not calls:
                calls.append(args)
                os.kill(worker.pid, signal.SIGKILL)
                worker.ended.wait(20)
                start_worker(dispatcher.address, index=0)
            return real_fetch(self, *args)

        monkeypatch.setattr(ResultFetcher, "fetch", killed_first)
        value = coordinator.schedule(large, (0.0,))
        assert len(value.get(20)) == 1_000_000
        coordinator.join(20)
        assert calls
        assert starts(tmp_path, "large") == 2
