"""Workers and slots that die, freeze and come back: the work runs elsewhere, each result comes once, nobody waits for ever."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.dispatch.work import begun, counts, dies_first, exits, go, segfaults, starts, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.dispatch.config import DispatcherConfig, WorkerConfig
from zmqdist.launch.children import Child

Start = Callable[..., Child]


def running_row(dispatcher: zd.DispatchServer) -> Any:
    """The row of a worker that runs something."""
    return until(lambda: [row for row in dispatcher.snapshot().workers if row.running])[0]


def test_a_worker_killed_between_functions_is_not_missed(start_worker: Start, tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        first, _ = start_worker(dispatcher.address, index=0), start_worker(dispatcher.address, index=1)
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


def test_a_worker_killed_in_the_middle_loses_nothing_and_returns_under_its_index(
    start_worker: Start, tmp_path: Path
) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        workers = [start_worker(dispatcher.address, index=index) for index in range(2)]
        until(lambda: dispatcher.num_workers == 2)
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(4)]
        until(lambda: len(begun(tmp_path)) == 2)
        assert not coordinator.done()
        os.kill(workers[0].pid, signal.SIGKILL)
        until(lambda: dispatcher.num_workers == 1)
        start_worker(dispatcher.address, index=0)
        until(lambda: len(begun(tmp_path)) == 3)  # the function that was lost has begun again, or another one
        go(tmp_path)
        assert coordinator.fetch(values) == ["0", "1", "2", "3"]
        coordinator.join(20)
        assert sorted(row.name for row in dispatcher.snapshot().workers) == ["worker:0", "worker:1"]


def test_all_workers_killed_and_one_back_is_enough(start_worker: Start, tmp_path: Path) -> None:
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
        assert sum(started) <= 20 + 2  # one function a slot ran when they died; the others had not begun


def test_a_user_error_is_told_although_a_worker_was_lost_in_the_same_round(start_worker: Start, tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher, cancel_grace_s=0.1) as coordinator:
        workers = [start_worker(dispatcher.address, index=index) for index in range(2)]
        until(lambda: dispatcher.num_workers == 2)
        long = coordinator.schedule(writes, (tmp_path,))
        until(lambda: begun(tmp_path))
        row = running_row(dispatcher)
        coordinator.schedule(int, ("x",)).exception(20)
        os.kill(workers[int(row.name[-1])].pid, signal.SIGKILL)
        with pytest.raises(ValueError, match="invalid literal"):
            coordinator.join(5)  # far less than the lease: that the process has ended is known
        before = written(tmp_path)
        with pytest.raises(errors.CancelledError):
            long.get(0)
        assert coordinator.schedule(int).get(20) == 0
        coordinator.join(20)
        assert written(tmp_path) == before


def test_a_frozen_worker_is_lost_and_what_it_ran_has_ended_by_its_lease(start_worker: Start, tmp_path: Path) -> None:
    """SIGSTOP: the process is there and its connection is open, but nobody answers. Thawed, it has no effect."""
    config = DispatcherConfig(lease_s=1.0, reconnect_grace_s=0.2)
    with zd.DispatchServer(config) as dispatcher, ClusterCoordinator(dispatcher, cancel_grace_s=0.1) as coordinator:
        worker = start_worker(dispatcher.address, index=0)
        value = coordinator.schedule(writes, (tmp_path,))
        until(lambda: written(tmp_path) > 300)  # long enough for the connection to have told how often it beats
        os.kill(worker.pid, signal.SIGSTOP)
        coordinator.schedule(int, ("x",))
        until(lambda: dispatcher.num_workers == 0)
        start_worker(dispatcher.address, index=0)
        until(lambda: dispatcher.num_workers == 1)
        value.cancel()  # it may have been given to the new one first
        with pytest.raises(ValueError, match="invalid literal"):
            coordinator.join(20)
        with pytest.raises(errors.CancelledError):
            value.get(0)
        before = written(tmp_path)
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.ended.wait(20)  # its name has been taken by another
        assert coordinator.schedule(int).get(20) == 0
        coordinator.join(20)
        assert written(tmp_path) == before
        assert dispatcher.num_workers == 1


def test_a_worker_that_freezes_as_soon_as_it_is_there_is_lost_and_joins_again_when_it_thaws(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its connection has told how often it beats."""
    import zmqdist.net.router as router

    monkeypatch.setattr(router, "HEARTBEAT_SERVER_S", 0.3)
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
        assert dispatcher.snapshot().losses_count == 1


# -- slots ----------------------------------------------------------------------------------------------------------

DEATHS = pytest.mark.parametrize(
    ("how", "told"),
    [(exits, "exit code 7"), (segfaults, "killed by SIGSEGV")],
    ids=["os._exit", "segfault"],
)


@DEATHS
def test_a_function_that_ends_its_process_runs_again_and_no_other_is_touched(
    cluster: zd.local_cluster, tmp_path: Path, how: Callable[[], None], told: str
) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        others = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(2)]
        until(lambda: len(begun(tmp_path)) == 2)
        before = cluster.dispatcher.snapshot().losses_count
        bad = coordinator.schedule(dies_first, (tmp_path, "bad", 2, how))
        assert bad.get(20) == "bad"
        go(tmp_path)
        assert coordinator.fetch(others) == ["0", "1"]
        coordinator.join(20)
        assert len(begun(tmp_path)) == 2
        assert cluster.dispatcher.snapshot().losses_count == before


@DEATHS
def test_a_function_that_always_ends_its_process_fails_with_what_is_known(
    cluster: zd.local_cluster, tmp_path: Path, how: Callable[[], None], told: str
) -> None:
    def poison() -> None:
        import sys

        print("the last words", file=sys.stderr)
        how()

    with ClusterCoordinator(cluster) as coordinator:
        good = [coordinator.schedule(counts, (tmp_path, str(i), 0.01)) for i in range(20)]
        bad = coordinator.schedule(poison)
        with pytest.raises(errors.WorkerLost, match=rf"poison was started 3 times.*worker:\d \({told}\)") as caught:
            bad.get(20)
        assert [start.exit_code for start in caught.value.starts] == [7 if how is exits else -signal.SIGSEGV] * 3
        assert all(start.worker.startswith("worker:") for start in caught.value.starts)
        assert "the last words" in str(caught.value)
        if how is segfaults:
            assert "Fatal Python error: Segmentation fault" in str(caught.value)
        with pytest.raises(errors.WorkerLost):
            coordinator.join(20)
        assert all(value.done() for value in good)
        assert coordinator.fetch([coordinator.schedule(int, (str(i),)) for i in range(8)]) == list(range(8))
        coordinator.join(20)
        assert max(starts(tmp_path, str(i)) for i in range(20)) == 1


def test_what_waited_behind_a_function_that_ends_its_process_is_not_charged(tmp_path: Path) -> None:
    """One slot: everything stands in the same queue as what kills the process, again and again."""
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = []
        for i in range(12):
            values.append(coordinator.schedule(dies_first, (tmp_path, f"bad{i}", 2, exits)))
            values.append(coordinator.schedule(counts, (tmp_path, str(i))))
        coordinator.join(30)
        assert coordinator.fetch(values[1::2]) == [str(i) for i in range(12)]
        # An outcome that had not been reported when the slot died comes from a second start.
        assert min(starts(tmp_path, str(i)) for i in range(12)) == 1


def test_a_poisonous_argument_is_charged_and_not_the_worker(cluster: zd.local_cluster) -> None:
    """It kills its process while it is unpickled, before the function begins."""
    with ClusterCoordinator(cluster) as coordinator:
        with pytest.raises(errors.WorkerLost, match="was started 3 times"):
            coordinator.schedule(int, (Poison(),)).get(20)
        with pytest.raises(errors.WorkerLost):
            coordinator.join(20)
        assert coordinator.schedule(int).get(20) == 0


class Poison:
    def __reduce__(self) -> Any:
        return exits, ()


def hold_the_gil(seconds: int) -> int:
    return int(ctypes.PyDLL(None).sleep(seconds))


def test_a_function_that_holds_the_gil_is_not_a_dead_worker(start_worker: Start) -> None:
    """For longer than all leases; one worker has its slot as a process, the other as a thread of its own."""
    config = DispatcherConfig(lease_s=0.5, reconnect_grace_s=0.1)
    with zd.DispatchServer(config) as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        for processes in (True, False):
            start_worker(dispatcher.address, processes=processes)
        until(lambda: dispatcher.num_workers == 2)
        pids = {row.pid for row in dispatcher.snapshot().workers}
        values = [coordinator.schedule(hold_the_gil, (3,)) for _ in range(2)]
        assert coordinator.fetch(values) == [0, 0]
        coordinator.join(20)
        assert {row.pid for row in dispatcher.snapshot().workers} == pids
        assert dispatcher.snapshot().losses_count == 0


def test_a_worker_that_dies_with_a_result_that_is_being_fetched_runs_the_function_again(
    start_worker: Start, tmp_path: Path
) -> None:
    import numpy as np

    def large(seconds: float) -> Any:
        counts(tmp_path, "large", seconds)
        return np.ones(1_000_000)

    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        worker = start_worker(dispatcher.address, index=0)
        until(lambda: dispatcher.num_workers == 1)
        ask = coordinator._shell._fetching.ask
        asked: list[Any] = []

        def killed_first(*told: Any) -> Any:
            """The result is ready and nothing of it has been copied when its worker dies."""
            if not asked:
                asked.append(told)
                os.kill(worker.pid, signal.SIGKILL)
                worker.ended.wait(20)
                start_worker(dispatcher.address, index=0)
            return ask(*told)

        coordinator._shell._fetching.ask = killed_first  # type: ignore[method-assign]
        value = coordinator.schedule(large, (0.0,))
        assert len(value.get(20)) == 1_000_000
        coordinator.join(20)
        assert asked
        assert starts(tmp_path, "large") == 2


# -- nobody there ---------------------------------------------------------------------------------------------------


def test_without_any_worker_for_too_long_what_waits_fails() -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher, cluster_lost_limit_s=0.2) as coordinator:
        value = coordinator.schedule(int)
        told = r"the cluster was without any worker for 0\.2 s"
        with pytest.raises(errors.UnavailableError, match=told):
            value.get(20)
        with pytest.raises(errors.UnavailableError, match=told):
            coordinator.join(20)
        coordinator.join(20)
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            assert coordinator.schedule(int).get(20) == 0


def test_a_cluster_that_is_gone_while_nothing_waits_is_not_missed(start_worker: Start) -> None:
    """The clock begins with the work, so a worker that comes a moment later is in time."""
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher, cluster_lost_limit_s=15.0) as coordinator:
        coordinator._shell._machine._alone_since -= 100.0  # type: ignore[operator]
        value = coordinator.schedule(int)
        start_worker(dispatcher.address, processes=False)
        assert value.get(20) == 0
