"""Tags of workers: tf.data service's own tests (worker_tags_test.py), row by row.

COLOCATED workers serve the readers of their own process; those without the tag serve everybody.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.data.service.helpers import READ_AHEAD, MultiProcessCluster, TestCluster, values
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy

# What a local reader leaves ends a little after it.
pytestmark = pytest.mark.shares_cluster

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy
TAGS = ["COLOCATED"]
TEN = list(range(10))


def test_read_from_local_worker() -> None:
    with MultiProcessCluster(1, 3, TAGS) as cluster:
        for target in ("AUTO", "LOCAL"):
            dataset = cluster.distribute(Dataset.range(10), target_workers=target)
            assert values(dataset) == TEN
        assert sorted(
            values(cluster.distribute(Dataset.range(10), target_workers="ANY"))
        ) == sorted(4 * TEN)


def test_read_from_local_and_non_tpu_workers() -> None:
    with MultiProcessCluster(1, 3, TAGS) as cluster:
        cluster.start_remote_worker()
        assert sorted(values(cluster.distribute(Dataset.range(10)))) == sorted(2 * TEN)


def test_local_worker_has_no_tag() -> None:
    with MultiProcessCluster(0, 2, TAGS) as cluster:
        cluster.start_local_worker()
        assert values(cluster.distribute(Dataset.range(10))) == TEN


def test_local_worker_dynamic_sharding() -> None:
    """Workers that nobody reads from take no positions."""
    with MultiProcessCluster(1, 2, TAGS) as cluster:
        assert sorted(values(cluster.distribute(Dataset.range(100), DYNAMIC))) == list(range(100))


def test_local_worker_static_sharding() -> None:
    with MultiProcessCluster(1, 4, TAGS, worker_addresses=["localhost"] * 5) as cluster:
        assert values(cluster.distribute(Dataset.range(100), FILE_OR_DATA)) == list(
            range(0, 100, 5)
        )


def test_coordinated_read() -> None:
    """All consumers read from all workers, whatever their tags."""
    pytest.importorskip("zmqdist.data.service.worker.rounds_task")
    with MultiProcessCluster(1, 1, TAGS) as cluster:
        options: dict[str, Any] = {"job_name": "rounds", "num_consumers": 1}
        dataset = Dataset.range(1 << 55).repeat()
        with iter(cluster.distribute(dataset, OFF, consumer_index=0, **options)) as iterator:
            read: Counter[int] = Counter()
            while (
                min(read[x] for x in TEN) < 2
            ):  # a worker that is late skips rounds, in which only the other one gives
                read[int(next(iterator))] += 1
        assert max(read.values()) == 2


def test_add_remote_workers_mid_job() -> None:
    with MultiProcessCluster(1, 0, TAGS) as cluster:
        count = 4 * READ_AHEAD
        with iter(cluster.distribute(Dataset.range(count))) as iterator:
            read = [int(next(iterator)) for _ in range(50)]
            for tags in ((), (), TAGS, TAGS):
                cluster.start_remote_worker(tags)
            read += map(int, iterator)
        assert sorted(read) == sorted(3 * list(range(count)))


def test_multiple_tags() -> None:
    with MultiProcessCluster(1, 2, ["other", "colocated"]) as cluster:
        assert values(cluster.distribute(Dataset.range(10))) == TEN


def test_unused_tags() -> None:
    with MultiProcessCluster(1, 3, ["green", "fast"]) as cluster:
        assert sorted(values(cluster.distribute(Dataset.range(10)))) == sorted(4 * TEN)


def test_invalid_tag() -> None:
    with (
        TestCluster(0) as cluster,
        pytest.raises(RuntimeError, match=r"Worker tags cannot be empty\."),
    ):
        cluster.add_worker(worker_tags=[""])
