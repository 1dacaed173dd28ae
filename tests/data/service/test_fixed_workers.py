"""A fixed list of workers: who may come, and the share that each has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.service.helpers import TestCluster, until, values
from tests.ports import free_port
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy
from zmqdist.errors import NotFoundError

DATA = ShardingPolicy.DATA


def cluster_of(addresses: list[str], count: int, **options: Any) -> TestCluster:
    return TestCluster(count, worker_addresses=addresses, deployment_mode=None, **options)


def test_shares_cover_dataset_once() -> None:
    with cluster_of(["localhost"] * 3, 3) as cluster:
        assert sorted(values(cluster.distribute(Dataset.range(20), DATA))) == list(range(20))


def test_share_follows_index_in_list() -> None:
    ports = [free_port() for _ in range(2)]
    with cluster_of([f"localhost:{port}" for port in ports], 0) as cluster:
        cluster.add_worker(port=ports[1])
        assert values(cluster.distribute(Dataset.range(10), DATA)) == [1, 3, 5, 7, 9]
        cluster.add_worker(port=ports[0])
        cluster.stop_worker(0)
        assert values(cluster.distribute(Dataset.range(10), DATA)) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("addresses", [["localhost:worker"], ["elsewhere"], ["localhost:1"]])
def test_unlisted_worker_is_refused(addresses: list[str]) -> None:
    with cluster_of(addresses, 0) as cluster:
        with pytest.raises(RuntimeError, match="The worker's address is not configured"):
            cluster.add_worker()
        assert cluster.num_registered_workers() == 0


def test_surplus_worker_waits_for_room() -> None:
    with cluster_of(["localhost"], 1) as cluster:
        with pytest.raises(
            RuntimeError, match="other workers are already running at the configured host"
        ):
            cluster.add_worker()
        cluster.restart_worker(0, use_same_port=False)
        assert values(cluster.distribute(Dataset.range(5), DATA)) == list(range(5))


def test_static_share_needs_list() -> None:
    with (
        cluster_of([], 1) as cluster,
        pytest.raises(NotFoundError, match="is not in the workers list"),
    ):
        next(iter(cluster.distribute(Dataset.range(5), DATA)))


def places_of(cluster: TestCluster, count: int) -> dict[str, int]:
    """Index by address, as soon as so many workers are known."""
    until(lambda: len(cluster.dispatcher.data_snapshot().workers) == count)
    return {worker.address: worker.index for worker in cluster.dispatcher.data_snapshot().workers}


def test_places_outlive_the_dispatcher() -> None:
    with cluster_of(["localhost"] * 2, 2) as cluster:
        # both are in the journal
        assert sorted(values(cluster.distribute(Dataset.range(20), DATA))) == list(range(20))
        places = places_of(cluster, 2)
        cluster.restart_dispatcher()
        for index in (1, 0):
            cluster.restart_worker(index)
        assert places_of(cluster, 2) == places
        assert sorted(values(cluster.distribute(Dataset.range(20), DATA))) == list(range(20))
