"""ordered=True: the order of the pipeline itself, whatever the number of workers and whoever
dies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import TestCluster, values
from tests.zygote import ServerProcess
from zmqdist.data import Dataset
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.errors import AbortedError

ORDERED = {"processing_mode": ShardingPolicy.DYNAMIC, "ordered": True}
COUNT = 16_000


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(2, fault_tolerant_mode=False) as cluster:
        yield cluster


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_order_is_that_of_pipeline(workers: int) -> None:
    dataset = Dataset.range(COUNT).filter(lambda x: x % 7 > 2).repeat(2)
    with TestCluster(workers, fault_tolerant_mode=False) as cluster:
        assert values(cluster.distribute(dataset, **ORDERED)) == values(dataset)


def test_errors_have_their_place_in_the_order(cluster: TestCluster) -> None:
    def checked(x: Any) -> Any:
        if x % 10 == 3:
            raise ValueError("no")
        return x

    dataset = Dataset.range(50).map(checked)
    read: list[Any] = []
    iterator = iter(cluster.distribute(dataset, **ORDERED))
    while True:
        try:
            read.append(int(next(iterator)))
        except StopIteration:
            break
        except Exception:
            read.append(None)
    assert read == [None if x % 10 == 3 else x for x in range(50)]


def test_workers_come_and_go_and_the_order_stays(cluster: TestCluster) -> None:
    iterator = iter(cluster.distribute(Dataset.range(COUNT), **ORDERED))
    read = [int(next(iterator)) for _ in range(1000)]
    cluster.stop_worker(0)
    read += [int(next(iterator)) for _ in range(1000)]
    cluster.add_worker()
    cluster.add_worker()
    assert read + [int(x) for x in iterator] == list(range(COUNT))


def test_killed_worker_keeps_order(cluster: TestCluster) -> None:
    other = ServerProcess("worker", dispatcher_address=cluster.dispatcher_address())
    try:
        iterator = iter(cluster.distribute(Dataset.range(COUNT), **ORDERED))
        read = [int(next(iterator)) for _ in range(2000)]
        other.kill()
        assert read + [int(x) for x in iterator] == list(range(COUNT))
    finally:
        other.stop()


def test_restarted_dispatcher_keeps_order() -> None:
    with TestCluster(2) as cluster:
        iterator = iter(cluster.distribute(Dataset.range(COUNT), **ORDERED))
        read = [int(next(iterator)) for _ in range(1000)]
        cluster.restart_dispatcher()
        assert read + [int(x) for x in iterator] == list(range(COUNT))


@pytest.mark.parametrize("workers", [1, 3])
def test_consumers_have_fixed_streams(workers: int) -> None:
    length = COUNT // 256
    dataset = Dataset.range(COUNT)
    wanted = [[x for x in range(COUNT) if x // length % 2 == consumer] for consumer in range(2)]
    with TestCluster(workers, fault_tolerant_mode=False) as cluster:
        streams: list[Any] = [None, None]

        def read(consumer: int) -> None:
            streams[consumer] = values(
                cluster.distribute(
                    dataset, **ORDERED, job_name="job", consumer_index=consumer, num_consumers=2
                )
            )

        threads = [threading.Thread(target=read, args=(consumer,)) for consumer in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert streams == wanted


def test_consumers_end_one_by_one(cluster: TestCluster) -> None:
    told = {"job_name": "job", "num_consumers": 2}
    assert values(cluster.distribute(Dataset.range(10), **ORDERED, **told, consumer_index=1)) == [
        1,
        3,
        5,
        7,
        9,
    ]
    assert values(cluster.distribute(Dataset.range(10), **ORDERED, **told, consumer_index=0)) == [
        0,
        2,
        4,
        6,
        8,
    ]


def test_second_reader_takes_over(cluster: TestCluster) -> None:
    dataset = Dataset.range(COUNT)
    first, second = (iter(cluster.distribute(dataset, **ORDERED, job_name="job")) for _ in range(2))
    read = [int(next(first)) for _ in range(1000)]
    rest = [int(x) for x in second]
    assert rest == list(range(rest[0], COUNT))
    assert rest[0] <= len(read)
    with pytest.raises(AbortedError, match="Another reader has taken over"):
        for _ in first:
            pass
    first.close()


def test_waiting_elements_are_bounded_in_bytes(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.data.service.reader.exactly_once_machine.LATER_BYTES_MAX", 1)
    dataset = Dataset.range(3000).map(lambda x: np.full(1000, x))
    assert [int(x[0]) for x in cluster.distribute(dataset, **ORDERED)] == list(range(3000))
