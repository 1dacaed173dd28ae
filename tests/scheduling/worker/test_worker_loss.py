"""Workers and slots that die, freeze and return: their work runs elsewhere, each result arrives
once, and no call waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import (
    begun,
    counts,
    dies_first,
    exits,
    go,
    segfaults,
    starts,
    until,
    waits,
)
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.transport.loop import Loop

Start = Callable[..., Child]


@pytest.mark.processes("scheduling")
@pytest.mark.killed("scheduling")
def test_killed_worker_loses_nothing_and_returns(start_worker: Start, tmp_path: Path) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        workers = [start_worker(dispatcher.address, index=index) for index in range(2)]
        until(lambda: dispatcher.num_workers == 2)
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(4)]
        until(lambda: len(begun(tmp_path)) == 2)
        assert not coordinator.done()
        os.kill(workers[0].pid, signal.SIGKILL)
        until(lambda: dispatcher.num_workers == 1)
        start_worker(dispatcher.address, index=0)
        # the lost function has begun again, or another one has begun
        until(lambda: len(begun(tmp_path)) == 3)
        go(tmp_path)
        assert coordinator.fetch(values) == ["0", "1", "2", "3"]
        coordinator.join(20)
        assert sorted(row.name for row in dispatcher.snapshot().workers) == ["worker:0", "worker:1"]


# -- slots -----------------------------------------------------------------------------------------

DEATHS = pytest.mark.parametrize(
    ("how", "text"),
    [(exits, "exit code 7"), (segfaults, "killed by SIGSEGV")],
    ids=["os._exit", "segfault"],
)


@DEATHS
def test_function_that_ends_its_process_runs_again(
    cluster: zd.local_cluster, tmp_path: Path, how: Callable[[], None], text: str
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
def test_fatal_function_fails_with_exit_codes(
    cluster: zd.local_cluster, tmp_path: Path, how: Callable[[], None], text: str
) -> None:
    def poison() -> None:
        import sys

        print("the last words", file=sys.stderr)
        how()

    with ClusterCoordinator(cluster) as coordinator:
        good = [coordinator.schedule(counts, (tmp_path, str(i), 0.01)) for i in range(20)]
        before = cluster.dispatcher.snapshot().slot_deaths
        bad = coordinator.schedule(poison)
        with pytest.raises(
            errors.WorkerLost, match=rf"poison was started 3 times.*worker:\d \({text}\)"
        ) as caught:
            bad.get(20)
        assert [start.exit_code for start in caught.value.starts] == [
            7 if how is exits else -signal.SIGSEGV
        ] * 3
        assert all(start.worker.startswith("worker:") for start in caught.value.starts)
        assert "the last words" in str(caught.value)
        if how is segfaults:
            assert "Fatal Python error: Segmentation fault" in str(caught.value)
        with pytest.raises(errors.WorkerLost):
            coordinator.join(20)
        record = cluster.dispatcher.snapshot()
        assert record.slot_deaths == before + 3
        assert record.last_slot_death is not None
        assert record.last_slot_death[:2] == (
            caught.value.starts[-1].worker,
            caught.value.starts[-1].exit_code,
        )
        assert all(value.done() for value in good)
        assert coordinator.fetch([coordinator.schedule(int, (str(i),)) for i in range(8)]) == list(
            range(8)
        )
        coordinator.join(20)
        assert max(starts(tmp_path, str(i)) for i in range(20)) == 1


def test_poisonous_argument_is_charged(cluster: zd.local_cluster) -> None:
    """The argument kills its process while it is unpickled, before the function begins."""
    with ClusterCoordinator(cluster) as coordinator:
        with pytest.raises(errors.WorkerLost, match="was started 3 times"):
            coordinator.schedule(int, (Poison(),)).get(20)
        with pytest.raises(errors.WorkerLost):
            coordinator.join(20)
        assert coordinator.schedule(int).get(20) == 0


class Poison:
    def __reduce__(self) -> Any:
        return exits, ()


# -- no worker -------------------------------------------------------------------------------------


def test_waiting_work_fails_without_workers() -> None:
    with (
        zd.DispatchServer() as dispatcher,
        ClusterCoordinator(dispatcher, cluster_lost_limit_s=0.2) as coordinator,
    ):
        until(lambda: coordinator.snapshot().connected)
        value = coordinator.schedule(int)
        text = r"the cluster was without any worker for 0\.2 s"
        with pytest.raises(errors.UnavailableError, match=text):
            value.get(20)
        with pytest.raises(errors.UnavailableError, match=text):
            coordinator.join(20)
        coordinator.join(20)
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            until(lambda: coordinator.snapshot().workers)
            assert coordinator.schedule(int).get(20) == 0


def test_cluster_lost_without_work_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time counts from the first work, so a worker that registers a moment later is in time."""
    now = Loop.now
    with zd.DispatchServer() as dispatcher, monkeypatch.context() as patch:
        # it begins long before the others
        patch.setattr(Loop, "now", lambda self: now(self) - 100.0)
        coordinator = ClusterCoordinator(dispatcher, cluster_lost_limit_s=15.0)
        until(lambda: coordinator.snapshot().connected)
        patch.undo()
        value = coordinator.schedule(int)
        with coordinator, zd.WorkerServer(WorkerConfig(dispatcher.address)):
            assert value.get(20) == 0
