"""Workers beside the reader: tf.data service's own tests (local_workers_test.py,
multi_process_cluster_test.py), row by row.

No cluster lives longer than its test here: whatever worker there is in this process counts as
local.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import MultiProcessCluster, TestCluster, values
from zmqdist.data import Dataset
from zmqdist.data.service import ShardingPolicy, distribute
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

# What a local reader leaves ends a little after it.
pytestmark = pytest.mark.shares_cluster

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy
TEN = list(range(10))


def local(
    cluster: MultiProcessCluster | TestCluster, dataset: Dataset, mode: Any = OFF, **options: Any
) -> Dataset:
    return cluster.distribute(dataset, mode, target_workers="LOCAL", **options)


@pytest.mark.parametrize(("near", "far"), [(3, 0), (1, 1)])
def test_local_workers(near: int, far: int) -> None:
    read_locally(near, far)


def read_locally(near: int, far: int) -> None:
    """And RepeatedDataset, PrefetchingDataset, MultipleEpochs, DynamicSharding, EmptyDataset."""
    with MultiProcessCluster(near, far) as cluster:
        dataset = local(cluster, Dataset.range(10))
        assert sorted(values(dataset)) == sorted(near * TEN)
        assert sorted(values(dataset.repeat(5))) == sorted(near * TEN * 5)
        assert sorted(values(dataset.prefetch(10))) == sorted(near * TEN)
        for _ in range(10):
            assert sorted(values(dataset)) == sorted(near * TEN)
        assert sorted(values(local(cluster, Dataset.range(100), DYNAMIC))) == list(range(100))
        assert values(local(cluster, Dataset.range(0))) == []


@pytest.mark.parametrize(("near", "far"), [(0, 1), (1, 0), (1, 3), (3, 1)])
def test_non_local_read(near: int, far: int) -> None:
    """And testCluster."""
    with MultiProcessCluster(near, far) as cluster:
        assert sorted(
            values(cluster.distribute(Dataset.range(10), target_workers="any"))
        ) == sorted((near + far) * TEN)


def rows() -> list[np.ndarray[Any, Any]]:
    return [np.full(2, x) for x in range(4)]


SOURCES = [
    Dataset.from_tensor_slices(np.stack(rows())),
    Dataset.from_source(rows()),
    Dataset.from_tensors(rows()[1]).repeat(4),
    Dataset.range(4).map(lambda x: np.full(2, x)),
]
CACHE = SOURCES[3].cache().repeat(2)
"""Portions cannot be cut from it."""


@pytest.mark.parametrize("delivery", ["at_most_once", "exactly_once"])
def test_local_elements_may_be_written(
    delivery: str,
) -> None:
    once = delivery == "exactly_once"
    with TestCluster(1) as cluster:
        for dataset in SOURCES if once else [*SOURCES, CACHE]:
            options = {"processing_mode": DYNAMIC, "delivery": delivery} if once else {}
            check_private(dataset, cluster.distribute(dataset, **options))


def check_private(dataset: Dataset, distributed: Dataset) -> None:
    wanted = sorted(array.tolist() for array in dataset)
    for _ in range(3):
        found = []
        for array in distributed:
            found.append(array.tolist())
            if array.flags.writeable:
                array[...] = -1
        assert sorted(found) == wanted


def test_local_read_needs_local_worker() -> None:
    with MultiProcessCluster(0, 1, worker_addresses=["localhost"]) as cluster:
        with pytest.raises(
            InvalidArgumentError, match=r"Local reads require local tf\.data workers, but no"
        ):
            values(local(cluster, Dataset.range(10)))
        static = cluster.distribute(Dataset.range(20), FILE_OR_DATA)
        text = r"Static sharding policy <FILE_OR_DATA> requires local tf\.data workers"
        with pytest.raises(InvalidArgumentError, match=text):
            values(static)


def test_worker_of_other_dispatcher_is_not_local() -> None:
    with (
        TestCluster(1),
        MultiProcessCluster(0, 1) as cluster,
        pytest.raises(InvalidArgumentError, match="no local worker is found"),
    ):
        values(local(cluster, Dataset.range(10)))


def test_local_worker_may_know_other_address() -> None:
    with TestCluster(1) as cluster:
        address = cluster.dispatcher.address.replace("localhost", "127.0.0.1")
        assert (
            values(Dataset.range(10).apply(distribute(OFF, address, target_workers="LOCAL"))) == TEN
        )


def test_unknown_protocol_is_not_found() -> None:
    with MultiProcessCluster(0, 1) as cluster:
        for protocol in ("local", "carrier pigeon"):
            dataset = cluster.distribute(Dataset.range(10), data_transfer_protocol=protocol)
            text = rf"Protocol '{protocol}' is not available for worker 'localhost:\d+'"
            with pytest.raises(NotFoundError, match=text):
                values(dataset)


def test_inconsistent_target_workers() -> None:
    with MultiProcessCluster(3, 0) as cluster:
        assert sorted(
            values(cluster.distribute(Dataset.range(10), target_workers="AUTO", job_name="job"))
        )
        for target in ("ANY", "LOCAL"):
            other = cluster.distribute(Dataset.range(10), target_workers=target, job_name="job")
            text = f"but found an existing job with different parameters: Existing target workers: <AUTO>; got <{target}>"
            with pytest.raises(InvalidArgumentError, match=text):
                values(other)


def test_coordinated_read() -> None:
    with MultiProcessCluster(3, 0) as cluster:
        dataset = local(
            cluster, Dataset.range(10).repeat(), job_name="job", consumer_index=0, num_consumers=2
        )
        with pytest.raises(
            InvalidArgumentError, match="Coordinated reads require non-local workers"
        ):
            next(iter(dataset))


# -- LocalTaskGarbageCollect -----------------------------------------------------------------------


@pytest.fixture(params=[(1, 0), (1, 1)], ids=["one", "with a remote one"])
def cluster(request: pytest.FixtureRequest) -> Iterator[MultiProcessCluster]:
    with MultiProcessCluster(*request.param) as made:
        yield made


ENDLESS = Dataset.range(1 << 55)


def take(iterator: Iterator[Any], count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


@pytest.mark.parametrize("name", [None, "shared"])
def test_local_task_garbage_collect_multiple_epochs(
    cluster: MultiProcessCluster, name: str | None
) -> None:
    """And MultipleEpochsSharedJob."""
    dataset = local(cluster, ENDLESS, job_name=name)
    for _ in range(5):
        with iter(dataset) as iterator:
            assert take(iterator, 10) == TEN


def test_local_task_garbage_collect_repeat_distributed_dataset(
    cluster: MultiProcessCluster,
) -> None:
    dataset = local(cluster, Dataset.range(10)).repeat(3)
    assert values(dataset) == TEN * 3


def test_local_task_garbage_collect_read_from_deleted_task(cluster: MultiProcessCluster) -> None:
    first, second = (local(cluster, ENDLESS, job_name="shared") for _ in range(2))
    with iter(first) as iterator:
        assert take(iterator, 10) == TEN
    # The task of this iteration went with its first reader.
    with (
        iter(second) as iterator,
        pytest.raises(FailedPreconditionError, match=r"which has been deleted\."),
    ):
        next(iterator)


@pytest.mark.parametrize("what", ["worker", "dispatcher"])
def test_local_tasks_of_epochs_are_collected_after_restart(
    cluster: MultiProcessCluster, what: str
) -> None:
    """WorkerRestart and DispatcherRestart."""
    dataset = local(cluster, ENDLESS)
    with iter(dataset) as iterator:
        assert take(iterator, 10) == TEN
    if what == "worker":
        cluster.restart_local_workers()
    else:
        cluster.restart_dispatcher()
    with iter(dataset) as iterator:
        assert take(iterator, 10) == TEN


# -- workers that are stuck ------------------------------------------------------------------------
