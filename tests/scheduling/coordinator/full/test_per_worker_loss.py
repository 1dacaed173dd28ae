"""Values of which each worker has its own, while workers are lost, come back and come anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator import per_worker_work as work
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.remote_value import RemoteValueStatus

# its dispatcher may start another thread of a pool
pytestmark = [pytest.mark.timeout(90), pytest.mark.shares_cluster]


@pytest.fixture
def replaced() -> Iterator[zd.local_cluster]:
    """Two workers that a test may kill; they come back."""
    with zd.local_cluster(workers=2) as cluster:
        yield cluster


def test_a_resource_made_while_a_worker_is_down_is_aborted_there_at_once_and_built_when_it_is_back(
    replaced: zd.local_cluster,
) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        earlier = coordinator.create_per_worker_resource(work.counter)
        assert earlier.fetch(20) == [0, 0]
        replaced.kill_worker(1)
        until(lambda: work.statuses(earlier) == ["READY", "ABORTED"])
        later = coordinator.create_per_worker_resource(work.counter)
        assert later[1].status is RemoteValueStatus.ABORTED
        assert later[0].fetch(20) == 0
        replaced.restart_worker(1)
        until(lambda: work.statuses(later) == ["READY", "READY"])
        assert later.fetch(20) == [0, 0]


def test_a_newcomer_has_the_resources_that_there_are(replaced: zd.local_cluster) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        counters = coordinator.create_per_worker_resource(work.counter)
        assert len(counters) == 2
        assert replaced.add_worker() == 2
        until(lambda: len(counters) == 3)
        assert counters.fetch(20) == [0, 0, 0]
        assert coordinator.schedule(work.of_worker, (counters,), worker=2).fetch(20) == (2, 2)


def test_who_waits_for_a_value_is_told_when_its_worker_is_lost(
    replaced: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        values = coordinator.create_per_worker_resource(waits, (tmp_path, "x"))
        until(lambda: len(begun(tmp_path)) == 2)
        asked: list[BaseException | None] = []
        asker = threading.Thread(target=lambda: asked.append(values[0].exception(20)))
        asker.start()
        replaced.kill_worker(0)
        asker.join(20)
        assert isinstance(asked[0], errors.CancelledError)
        go(tmp_path)


def asked_slowly(folder: Path) -> Any:
    class Slow:
        def __reduce__(self) -> Any:
            waits(folder, "asked")
            return int, ()

    return Slow()


def test_who_asks_for_a_value_is_told_when_its_worker_is_lost_meanwhile(
    replaced: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(replaced) as coordinator:
        values = coordinator.create_per_worker_resource(asked_slowly, (tmp_path,))
        asked: list[BaseException] = []

        def ask() -> None:
            try:
                values[0].get(20)
            except errors.OpError as error:
                asked.append(error)

        asker = threading.Thread(target=ask)
        asker.start()
        until(lambda: begun(tmp_path))
        replaced.kill_worker(0)
        asker.join(20)
        assert isinstance(asked[0], errors.CancelledError)
        assert "worker:0 is lost" in str(asked[0])
        go(tmp_path)


def test_a_resource_made_while_all_workers_are_down_is_aborted_and_made_when_one_is_back() -> None:
    with (
        zd.local_cluster(workers=1) as cluster,
        ClusterCoordinator(cluster, cluster_lost_limit_s=3600) as coordinator,
    ):
        earlier = coordinator.create_per_worker_resource(work.counter)
        assert earlier.fetch(20) == [0]
        cluster.kill_worker(0)
        until(lambda: work.statuses(earlier) == ["ABORTED"])
        later = coordinator.create_per_worker_resource(work.counter)
        assert work.statuses(later) == ["ABORTED"]
        cluster.restart_worker(0)
        until(lambda: work.statuses(later) == ["READY"])
        assert later.fetch(20) == [0]
