"""Workers beside the reader, where most workers are processes of their own: rows of
local_workers_test.py of tf.data service."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.data.service.helpers import MultiProcessCluster, values
from tests.data.service.test_local_workers import HINT, OFF, TEN, local, read_locally, take
from zmqdist.data import Dataset
from zmqdist.data.experimental import SHARD_HINT

# What a local reader leaves ends a little after it.
pytestmark = pytest.mark.shares_cluster


def test_local_worker_among_many_is_read() -> None:
    with MultiProcessCluster(1, 5) as cluster:
        assert values(local(cluster, Dataset.range(10), data_transfer_protocol="local")) == TEN


def test_multiple_consumers() -> None:
    with MultiProcessCluster(1, 3) as cluster:
        datasets = [
            cluster.distribute(Dataset.range(100), OFF, job_name="shared") for _ in range(8)
        ]
        iterators = [iter(dataset) for dataset in datasets]
        read: list[int] = []
        threads = [
            threading.Thread(target=lambda each=each: read.extend(map(int, each)))
            for each in iterators
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(read) == sorted(list(range(100)) * 4)


def test_anonymous_job_with_different_target_workers() -> None:
    with MultiProcessCluster(3, 3, deployment_mode=None) as cluster:
        for target, factor in (("ANY", 6), ("AUTO", 6), ("LOCAL", 3)):
            assert sorted(
                values(cluster.distribute(Dataset.range(10), target_workers=target))
            ) == sorted(factor * TEN)


def test_distribute_nonblocking_with_stuck_workers() -> None:
    """One of six never gives anything, and only one question may be outstanding."""
    addresses = ["localhost"] * 6

    def sleep_in_the_first(x: Any) -> Any:
        import time

        while not x:
            time.sleep(1)
        return x

    with MultiProcessCluster(0, 6, worker_addresses=addresses, deployment_mode=None) as cluster:
        dataset = Dataset.range(6).shard(SHARD_HINT, SHARD_HINT).repeat().map(sleep_in_the_first)
        with iter(cluster.distribute(dataset, HINT, max_outstanding_requests=1)) as iterator:
            assert 0 not in take(iterator, 100)


@pytest.mark.parametrize(("near", "far"), [(1, 0), (1, 3), (3, 3)])
def test_local_workers(near: int, far: int) -> None:
    read_locally(near, far)
