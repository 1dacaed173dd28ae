"""Values and datasets of which each worker has its own, while workers are lost, return and join."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator import helpers
from tests.scheduling.work import begun, go, until, waits
from zmqdist import data, errors
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index
from zmqdist.scheduling.coordinator.remote_value import RemoteValueStatus

# its dispatcher may start another thread of a pool
pytestmark = [pytest.mark.timeout(90), pytest.mark.shares_cluster]


@pytest.fixture
def replaced() -> Iterator[zd.local_cluster]:
    """Two workers that a test may kill; they come back."""
    with zd.local_cluster(workers=2) as cluster:
        yield cluster


def test_resource_of_down_worker_is_aborted(
    replaced: zd.local_cluster,
) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        earlier = coordinator.create_per_worker_resource(helpers.counter)
        assert earlier.fetch(20) == [0, 0]
        replaced.kill_worker(1)
        until(lambda: helpers.statuses(earlier) == ["READY", "ABORTED"])
        later = coordinator.create_per_worker_resource(helpers.counter)
        assert later[1].status is RemoteValueStatus.ABORTED
        assert later[0].fetch(20) == 0
        replaced.restart_worker(1)
        until(lambda: helpers.statuses(later) == ["READY", "READY"])
        assert later.fetch(20) == [0, 0]


def test_joining_worker_builds_existing_resources(replaced: zd.local_cluster) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        counters = coordinator.create_per_worker_resource(helpers.counter)
        assert len(counters) == 2
        assert replaced.add_worker() == 2
        until(lambda: len(counters) == 3)
        assert counters.fetch(20) == [0, 0, 0]
        assert coordinator.schedule(helpers.of_worker, (counters,), worker=2).fetch(20) == (2, 2)


def test_wait_for_resource_ends_when_its_worker_is_lost(
    replaced: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        values = coordinator.create_per_worker_resource(waits, (tmp_path, "x"))
        until(lambda: len(begun(tmp_path)) == 2)
        outcomes: list[BaseException | None] = []
        waiter = threading.Thread(target=lambda: outcomes.append(values[0].exception(20)))
        waiter.start()
        replaced.kill_worker(0)
        waiter.join(20)
        assert isinstance(outcomes[0], errors.CancelledError)
        go(tmp_path)


def asked_slowly(folder: Path) -> Any:
    class Slow:
        def __reduce__(self) -> Any:
            waits(folder, "asked")
            return int, ()

    return Slow()


def test_fetch_of_resource_ends_when_its_worker_is_lost(
    replaced: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        values = coordinator.create_per_worker_resource(asked_slowly, (tmp_path,))
        outcomes: list[BaseException] = []

        def fetch() -> None:
            try:
                values[0].get(20)
            except errors.OpError as error:
                outcomes.append(error)

        waiter = threading.Thread(target=fetch)
        waiter.start()
        until(lambda: begun(tmp_path))
        replaced.kill_worker(0)
        waiter.join(20)
        assert isinstance(outcomes[0], errors.CancelledError)
        assert "worker:0 is lost" in str(outcomes[0])
        go(tmp_path)


def test_resource_without_workers_is_aborted() -> None:
    with (
        zd.local_cluster(workers=1) as cluster,
        ClusterCoordinator(cluster, cluster_lost_limit_s=3600) as coordinator,
    ):
        earlier = coordinator.create_per_worker_resource(helpers.counter)
        assert earlier.fetch(20) == [0]
        cluster.kill_worker(0)
        until(lambda: helpers.statuses(earlier) == ["ABORTED"])
        later = coordinator.create_per_worker_resource(helpers.counter)
        assert helpers.statuses(later) == ["ABORTED"]
        cluster.restart_worker(0)
        until(lambda: helpers.statuses(later) == ["READY"])
        assert later.fetch(20) == [0]


def test_shards_follow_workers_at_each_new_iterator() -> None:
    """A joining worker has no share before the next iterator; a gap in the indices loses nothing."""
    with zd.local_cluster(workers=3) as cluster, ClusterCoordinator(cluster) as coordinator:
        cluster.kill_worker(1)
        until(lambda: len(coordinator.workers()) == 2)
        dataset = coordinator.create_per_worker_dataset(data.Dataset.range(10), shard=True)
        iterator = iter(dataset)
        shares = helpers.schedule_on(coordinator, (0, 2), helpers.elements, iterator)
        assert sorted(chain(*coordinator.fetch(shares))) == list(range(10))
        cluster.add_worker()
        assert coordinator.schedule(helpers.elements, (iterator,), worker=3).fetch(20) == []
        until(lambda: len(coordinator.workers()) == 3)
        iterator = iter(dataset)
        shares = helpers.schedule_on(coordinator, (0, 2, 3), helpers.elements, iterator)
        assert sorted(chain(*coordinator.fetch(shares))) == list(range(10))


def test_restarted_worker_restarts_iterator(tmp_path: Path) -> None:
    def dataset_fn() -> Any:
        (tmp_path / f"made-{get_current_worker_index()}-{len(list(tmp_path.iterdir()))}").touch()
        return data.Dataset.range(100)

    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        assert [
            coordinator.schedule(helpers.first, (iterator,), worker=0).fetch(20) for _ in range(3)
        ] == [0, 1, 2]
        cluster.kill_worker(0)
        later = coordinator.schedule(helpers.first, (iterator,), worker=0)
        assert coordinator.schedule(helpers.first, (iterator,)).fetch(20) == 0
        cluster.restart_worker(0)
        assert later.fetch(20) == 0
        assert len(list(tmp_path.glob("made-0-*"))) == 2
        coordinator.join()


def test_iterators_created_while_worker_is_down() -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        dataset = coordinator.create_per_worker_dataset(data.Dataset.range(100))
        iterators = [iter(dataset)]
        coordinator.schedule(helpers.first, (iterators[0],)).fetch(20)
        cluster.kill_worker(0)
        iterators += [iter(dataset), iter(dataset)]
        values = [
            coordinator.schedule(helpers.first, (iterators[number % 3],)) for number in range(9)
        ]
        cluster.restart_worker(0)
        coordinator.join()
        assert all(value.done() for value in values)
        assert coordinator.schedule(helpers.first, (iterators[2],), worker=0).fetch(20) >= 0
