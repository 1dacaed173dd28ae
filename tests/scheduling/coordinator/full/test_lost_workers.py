"""`run`, `gather`, `wait` and `as_completed` when workers, slots or the cluster die in their
middle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import in_thread
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index

pytestmark = pytest.mark.timeout(120)


def dies_on(index: int, folder: Path) -> int:
    here = get_current_worker_index()
    if here == index:
        os._exit(7)
    waits(folder, str(here))
    return here


def test_run_names_worker_that_dies(tmp_path: Path) -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        thread, outcomes = in_thread(lambda: coordinator.options(name="probe").run(waits, tmp_path))
        until(lambda: len(begun(tmp_path)) == 2)
        cluster.kill_worker(1)
        until(lambda: coordinator.workers() == ["worker:0"])
        assert not outcomes, "the other call goes on"
        go(tmp_path)
        thread.join(60)
        (error,) = outcomes
        assert isinstance(error, errors.UnavailableError)
        assert "probe at worker:1: the worker was lost before the function ended" in str(error)
        assert list(error.failures) == ["worker:1"]  # type: ignore[attr-defined]
        assert coordinator.run(abs, -1) == {"worker:0": 1}
        coordinator.join(20)


def test_run_names_worker_whose_slot_dies_repeatedly(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    go(tmp_path)
    with pytest.raises(
        errors.WorkerLost, match="dies_on at worker:1 was started 3 times"
    ) as caught:
        in_processes.run(dies_on, 1, tmp_path)
    assert list(caught.value.failures) == ["worker:1"]  # type: ignore[attr-defined]
    assert in_processes.run(abs, -1) == {"worker:0": 1, "worker:1": 1}


def test_thousand_values_survive_death_of_worker(tmp_path: Path) -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        values = coordinator.map(waits, [tmp_path] * 1000, map(str, range(1000)))
        until(lambda: len(begun(tmp_path)) == 2)
        thread, outcomes = in_thread(lambda: coordinator.gather(values, timeout=100))
        cluster.kill_worker(0)
        go(tmp_path)
        search = coordinator.as_completed(values, timeout=100)
        assert sorted(int(value.result()) for value in search) == list(range(1000))
        assert coordinator.wait(values, timeout=100) == (values, [])
        thread.join(60)
        assert outcomes == [[str(number) for number in range(1000)]]


def test_waits_end_when_cluster_is_lost(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1) as cluster,
        ClusterCoordinator(cluster, cluster_lost_limit_s=1.0) as coordinator,
    ):
        value = coordinator.submit(waits, tmp_path)
        until(lambda: begun(tmp_path))
        calls = [
            lambda: coordinator.gather([value]),
            lambda: coordinator.wait([value]),
            lambda: list(coordinator.as_completed([value])),
            lambda: coordinator.run(abs, -1),
        ]
        waiting = [in_thread(call) for call in calls]
        cluster.dispatcher.stop()
        cluster.kill_worker(0)
        for thread, _ in waiting:
            thread.join(60)
        gathered, wait_outcome, completed, ran = [outcomes for _, outcomes in waiting]
        assert isinstance(gathered[0], errors.UnavailableError)
        assert wait_outcome == [([value], [])]
        assert completed == [[value]]
        assert isinstance(ran[0], errors.UnavailableError)
        with pytest.raises(errors.UnavailableError):
            coordinator.join(20)
