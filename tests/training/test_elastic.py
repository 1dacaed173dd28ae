"""Tasks that come, go, die and come back while a program runs: contract 10.6 (elastic_test.py) and
10.7 (get_task_states_test.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.conftest import Cluster
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index
from zmqdist.training.cluster_connection import ClusterConnection

Clusters = Callable[..., Cluster]
Connect = Callable[..., ClusterConnection]


class Counter:
    """Counts in a folder: one file for each run of a step, which a worker that is killed cannot
    lose."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.release = folder / "release"

    def step(self) -> None:
        from uuid import uuid4

        (self.folder / f"run-{uuid4()}").touch()

    def endless(self) -> None:
        self.step()
        while not self.release.exists() and not zd.cancelled():
            threading.Event().wait(0.01)

    @property
    def count(self) -> int:
        return len(list(self.folder.glob("run-*")))


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path)


def missed(found: ClusterConnection) -> list[int]:
    """The places of the tasks that are not there. A probe gives up after a second, which a busy
    machine may take."""
    return [place for place, state in enumerate(found.task_states()) if state is not None]


def is_back(found: ClusterConnection) -> None:
    eventually(lambda: not missed(found), "all tasks are there", 30.0)


def test_worker_addition_between_functions(
    cluster: Clusters, connected: Connect, counter: Counter
) -> None:
    servers = cluster(1, 1)
    found = connected(servers.spec)
    with ClusterCoordinator(found) as coordinator:
        for _ in range(2):
            coordinator.schedule(counter.step)
        coordinator.join(30)
        assert found.add_worker(servers.add(1)) == 1
        is_back(found)
        assert list(found.workers) == [0, 1]
        for _ in range(2):
            coordinator.schedule(counter.step)
        coordinator.join(30)
    assert counter.count == 4


def test_worker_addition_midst_function(
    cluster: Clusters, connected: Connect, counter: Counter
) -> None:
    servers = cluster(1, 1)
    found = connected(servers.spec)
    with ClusterCoordinator(found) as coordinator:
        for _ in range(4):
            coordinator.schedule(counter.endless)
        eventually(lambda: counter.count == 1, "one runs")
        assert not coordinator.done()
        found.add_worker(servers.add(1))
        eventually(lambda: counter.count == 2, "the new worker runs one, too", 30.0)
        counter.release.touch()
        coordinator.join(30)
    assert counter.count == 4


def test_worker_restore_with_same_name(
    cluster: Clusters, connected: Connect, counter: Counter
) -> None:
    servers = cluster(1, 1)
    found = connected(servers.spec)
    with ClusterCoordinator(found) as coordinator:
        for _ in range(2):
            coordinator.schedule(counter.step)
        coordinator.join(30)
        servers.kill("worker", 0)
        for _ in range(2):
            coordinator.schedule(counter.step)
        servers.start("worker", 0)
        coordinator.join(60)
    assert counter.count == 4


def test_worker_restore_with_another_name(
    cluster: Clusters, connected: Connect, counter: Counter
) -> None:
    servers = cluster(1, 1)
    found = connected(servers.spec)
    with ClusterCoordinator(found) as coordinator:
        for _ in range(2):
            coordinator.schedule(counter.step)
        coordinator.join(30)
        servers.kill("worker", 0)
        for _ in range(2):
            coordinator.schedule(counter.step)
        assert found.add_worker(servers.add(1)) == 1
        found.remove_worker(0)
        coordinator.join(60)
    assert list(found.workers) == [1]
    is_back(found)
    assert len(found.task_states()) == 2
    assert counter.count == 4


def test_worker_returns_at_another_address(cluster: Clusters, connected: Connect) -> None:
    servers = cluster(2, 1)
    found = connected(servers.spec)
    servers.kill("worker", 1)
    assert found.add_worker(servers.add(1), index=1) == 1
    is_back(found)
    assert list(found.workers) == [0, 1]


def test_first_returning_worker_works_at_once(
    cluster: Clusters, connected: Connect, counter: Counter
) -> None:
    """F-3."""
    servers = cluster(2, 1)
    found = connected(servers.spec)
    with ClusterCoordinator(found) as coordinator:
        servers.kill("worker", 0)
        servers.kill("worker", 1)
        coordinator.schedule(counter.step)
        servers.start("worker", 1)
        coordinator.join(60)
    assert counter.count == 1
    eventually(lambda: missed(found) == [0], "only the other one is missed")


def test_removed_worker_stays_a_server(cluster: Clusters, connected: Connect) -> None:
    servers = cluster(2, 1)
    found = connected(servers.spec)
    found.remove_worker(1)
    with ClusterCoordinator(found) as coordinator:
        eventually(lambda: coordinator.workers() == ["worker:0"], "it leaves")
    is_back(found)
    assert len(found.task_states()) == 2
    with pytest.raises(ValueError, match=r"there is no worker 1 in this cluster; it has \[0\]"):
        found.remove_worker(1)
    assert servers.tasks["worker", 0].check_alive("worker:1")
    assert found.add_worker(servers.spec["worker"][1]) in (1, 2)
    is_back(found)


def test_worker_with_values_needs_force(
    cluster: Clusters,
) -> None:
    servers = cluster(1, 1)
    with zd.ParameterServerStrategy(servers.spec, timeout=60) as strategy:
        coordinator = ClusterCoordinator(strategy)
        kept = coordinator.schedule(get_current_worker_index, keep=True)
        coordinator.join()
        with pytest.raises(errors.DrainRefusedError) as caught:
            coordinator.remove_worker(0)
        assert caught.value.values == (f"get_current_worker_index-{kept.work}",)
        assert (list(strategy.cluster.workers), coordinator.workers()) == ([0], ["worker:0"])
        coordinator.remove_worker(0, force=True)
        assert not strategy.cluster.workers


def test_coordinator_adds_and_removes_workers(cluster: Clusters) -> None:
    """F-7. One that is removed is not invited again."""
    servers = cluster(1, 1)
    with zd.ParameterServerStrategy(servers.spec, timeout=60) as strategy:
        coordinator = ClusterCoordinator(strategy)
        assert coordinator.add_worker(servers.add(1)) == 1  # type: ignore[attr-defined]
        eventually(lambda: coordinator.workers() == ["worker:0", "worker:1"], "it comes")
        coordinator.remove_worker("worker:0")
        eventually(lambda: coordinator.workers() == ["worker:1"], "it leaves")
        assert coordinator.fetch(
            [coordinator.schedule(get_current_worker_index) for _ in range(3)]
        ) == [1, 1, 1]
        eventually(lambda: strategy.task_states() == [None, None], "all tasks are there")
        with pytest.raises(ValueError, match="no worker 0"):
            coordinator.remove_worker(0)


@pytest.mark.parametrize("by", ["coordinator", "strategy"])
def test_program_stops_the_servers(cluster: Clusters, by: str) -> None:
    """CC-6."""
    servers = cluster(1, 1)
    strategy = zd.ParameterServerStrategy(servers.spec, timeout=60)
    ends: Any = ClusterCoordinator(strategy) if by == "coordinator" else strategy
    for _ in range(2):
        ends.close(shutdown_cluster=True)
    assert servers.ended()
    with pytest.raises(errors.FailedPreconditionError, match="closed"):
        strategy.coordinator.schedule(int)


@pytest.mark.parametrize(("address", "index"), [("nowhere", None), ("127.0.0.1:1", -1)])
def test_bad_worker_is_refused(
    cluster: Clusters, connected: Connect, address: str, index: int | None
) -> None:
    found = connected(cluster(1, 1).spec)
    with pytest.raises((errors.InvalidArgumentError, ValueError)):
        found.add_worker(address, index)
    assert list(found.workers) == [0]


def test_states_of_healthy_tasks(cluster: Clusters, connected: Connect) -> None:
    found = connected(cluster(2, 2).spec)
    eventually(lambda: found.task_states() == [None] * 4, "all tasks are there")


@pytest.mark.parametrize(
    ("job", "index", "place"),
    [("worker", 0, 0), ("ps", 0, 2), ("ps", 1, 3)],
)
def test_state_of_preempted_task(
    cluster: Clusters, connected: Connect, job: str, index: int, place: int
) -> None:
    """Also of ps 0, which nothing else depends on."""
    servers = cluster(2, 2)
    found = connected(servers.spec)
    servers.kill(job, index)
    eventually(lambda: missed(found) == [place], "the loss of this one is seen")
    lost = found.task_states()[place]
    assert isinstance(lost, errors.UnavailableError)
    assert f"/job:{job}/replica:0/task:{index}" in lost.message
    servers.start(job, index)
    is_back(found)
