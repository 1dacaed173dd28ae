"""Datasets of which each worker has its own, while workers are lost, come back and come anew."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator import per_worker_work as work
from tests.scheduling.work import until
from zmqdist import data
from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index

# its dispatcher may start another thread of a pool
pytestmark = [pytest.mark.timeout(90), pytest.mark.shares_cluster]


def test_a_newcomer_has_no_share_before_the_next_iterator_and_gaps_in_the_indices_lose_nothing() -> (
    None
):
    with zd.local_cluster(workers=3) as cluster, ClusterCoordinator(cluster) as coordinator:
        cluster.kill_worker(1)
        until(lambda: len(coordinator.workers()) == 2)
        dataset = coordinator.create_per_worker_dataset(data.Dataset.range(10), shard=True)
        iterator = iter(dataset)
        shares = [
            coordinator.schedule(work.elements, (iterator,), worker=index) for index in (0, 2)
        ]
        assert sorted(chain(*coordinator.fetch(shares))) == list(range(10))
        cluster.add_worker()
        assert coordinator.schedule(work.elements, (iterator,), worker=3).fetch(20) == []
        until(lambda: len(coordinator.workers()) == 3)
        iterator = iter(dataset)
        shares = [
            coordinator.schedule(work.elements, (iterator,), worker=index) for index in (0, 2, 3)
        ]
        assert sorted(chain(*coordinator.fetch(shares))) == list(range(10))


def test_iterators_begin_anew_where_a_worker_was_started_again(tmp_path: Path) -> None:
    def dataset_fn() -> Any:
        (tmp_path / f"made-{get_current_worker_index()}-{len(list(tmp_path.iterdir()))}").touch()
        return data.Dataset.range(100)

    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        assert [
            coordinator.schedule(work.first, (iterator,), worker=0).fetch(20) for _ in range(3)
        ] == [0, 1, 2]
        cluster.kill_worker(0)
        later = coordinator.schedule(work.first, (iterator,), worker=0)
        assert coordinator.schedule(work.first, (iterator,)).fetch(20) == 0
        cluster.restart_worker(0)
        assert later.fetch(20) == 0
        assert len(list(tmp_path.glob("made-0-*"))) == 2
        coordinator.join()


def test_iterators_of_several_generations_while_a_worker_is_down() -> None:
    with zd.local_cluster(workers=2) as cluster, ClusterCoordinator(cluster) as coordinator:
        dataset = coordinator.create_per_worker_dataset(data.Dataset.range(100))
        iterators = [iter(dataset)]
        coordinator.schedule(work.first, (iterators[0],)).fetch(20)
        cluster.kill_worker(0)
        iterators += [iter(dataset), iter(dataset)]
        asked = [coordinator.schedule(work.first, (iterators[number % 3],)) for number in range(9)]
        cluster.restart_worker(0)
        coordinator.join()
        assert all(value.done() for value in asked)
        assert coordinator.schedule(work.first, (iterators[2],), worker=0).fetch(20) >= 0
