"""Fixed shares: tf.data service's own tests of static sharding (auto_shard_test.py), row by row.

Five workers, one of them in this process: as its readers do where trainers have a worker beside
them, these read from that one. NoLocalWorkers is in test_local_workers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.data.service.helpers import MultiProcessCluster, TestCluster, values
from zmqdist.data import Dataset, TextLineDataset
from zmqdist.data.experimental import SHARD_HINT
from zmqdist.data.service import ShardingPolicy
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster

OFF, DYNAMIC, FILE, DATA, FILE_OR_DATA, HINT = ShardingPolicy
WORKERS = 5
TOO_FEW = r"not enough for the required 5 shards/workers\."


@contextmanager
def cluster_of(
    index: int, addresses: Sequence[str] = ("localhost",) * WORKERS
) -> Iterator[MultiProcessCluster]:
    """Five workers, the one with this place in this process."""
    with MultiProcessCluster(0, 0, worker_addresses=list(addresses)) as cluster:
        for number in range(WORKERS):
            if number == index:
                cluster.start_local_worker()
            else:
                cluster.start_remote_worker()
        yield cluster


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[int], MultiProcessCluster]]:
    """Module scope, but one at a time: what is local must be that cluster's."""
    made: list[Any] = []

    def of(index: int) -> MultiProcessCluster:
        if not made or made[0] != index:
            close()
            context = cluster_of(index)
            made[:] = [index, context, context.__enter__()]
        return made[2]  # type: ignore[no-any-return]

    def close() -> None:
        if made:
            made[1].__exit__(None, None, None)
            made.clear()

    yield of
    close()


@pytest.fixture
def at_1(clusters: Callable[[int], MultiProcessCluster]) -> MultiProcessCluster:
    return clusters(1)


@pytest.fixture
def at_3(clusters: Callable[[int], MultiProcessCluster]) -> MultiProcessCluster:
    return clusters(3)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Ten files of ten records: record 7 of file 3 is "3-7"."""
    folder = tmp_path_factory.mktemp("files")
    for file in range(10):
        (folder / f"file-{file}").write_text("".join(f"{file}-{record}\n" for record in range(10)))
    return sorted(map(str, folder.iterdir()))


def records(files: Sequence[int], numbers: Sequence[int] = range(10)) -> list[str]:
    return [f"{file}-{record}" for file in files for record in numbers]


def lines(dataset: Dataset) -> list[str]:
    return [line.decode() if isinstance(line, bytes) else str(line) for line in dataset]


# -- ranges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [DATA, FILE_OR_DATA])
def test_range_dataset_auto_shard(at_1: MultiProcessCluster, policy: ShardingPolicy) -> None:
    assert values(at_1.distribute(Dataset.range(20), policy)) == [1, 6, 11, 16]


def test_range_dataset_file_shard(at_1: MultiProcessCluster) -> None:
    with pytest.raises(NotFoundError, match="Found an unshardable source dataset"):
        values(at_1.distribute(Dataset.range(20), FILE))


@pytest.mark.parametrize("index", [SHARD_HINT, 0])
def test_range_dataset_shard_hint(at_1: MultiProcessCluster, index: int) -> None:
    assert values(at_1.distribute(Dataset.range(20).shard(SHARD_HINT, index), HINT)) == [
        1,
        6,
        11,
        16,
    ]


def test_invalid_worker_index_using_shard_hint(at_1: MultiProcessCluster) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"Index must be between 0 and 4 \(currently index = -1\)\."
    ):
        values(at_1.distribute(Dataset.range(20).shard(5, SHARD_HINT), HINT))


def test_missing_shard_hint_reads_all(at_1: MultiProcessCluster) -> None:
    assert values(at_1.distribute(Dataset.range(20).shard(1, 0), HINT)) == list(range(20))


@pytest.mark.parametrize("policy", [OFF, FILE_OR_DATA])
def test_shard_hint_used_in_wrong_sharding_policy(
    at_1: MultiProcessCluster, policy: ShardingPolicy
) -> None:
    dataset = at_1.distribute(Dataset.range(20).shard(SHARD_HINT, SHARD_HINT), policy)
    with pytest.raises(
        FailedPreconditionError, match=r"with `.*ShardingPolicy\.HINT` processing mode\."
    ):
        values(dataset)


def test_off_policy_does_not_shard(at_1: MultiProcessCluster) -> None:
    assert values(at_1.distribute(Dataset.range(20), OFF, target_workers="LOCAL")) == list(
        range(20)
    )


def test_enumerate_sharding_policies(at_1: MultiProcessCluster, names: list[str]) -> None:
    for policy in ShardingPolicy:
        dataset = Dataset.from_tensor_slices(names).flat_map(TextLineDataset)
        assert lines(at_1.distribute(dataset, policy)), policy


def test_batch_dataset(at_1: MultiProcessCluster) -> None:
    assert values(at_1.distribute(Dataset.range(20).batch(3), FILE_OR_DATA)) == [
        [3, 4, 5],
        [18, 19],
    ]


def test_concatenate_and_zip_dataset(at_1: MultiProcessCluster) -> None:
    """And ZipDataset."""
    twice = Dataset.range(20).concatenate(Dataset.range(20))
    assert values(at_1.distribute(twice, DATA)) == [1, 6, 11, 16] * 2
    pairs = Dataset.zip(Dataset.range(20), Dataset.range(20))
    assert [(int(a), int(b)) for a, b in at_1.distribute(pairs, FILE_OR_DATA)] == [
        (i, i) for i in (1, 6, 11, 16)
    ]


def test_empty_dataset(at_1: MultiProcessCluster) -> None:
    assert values(at_1.distribute(Dataset.range(0), FILE_OR_DATA)) == []


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FILE, FILE_OR_DATA])
def test_tf_record_dataset_auto_shard(
    at_3: MultiProcessCluster, names: list[str], policy: ShardingPolicy
) -> None:
    dataset = Dataset.from_tensor_slices(names).flat_map(TextLineDataset)
    assert lines(at_3.distribute(dataset, policy)) == records([3, 8])


@pytest.mark.parametrize("policy", [FILE, FILE_OR_DATA])
def test_tf_record_dataset_shuffle_file_list(
    at_3: MultiProcessCluster, names: list[str], policy: ShardingPolicy
) -> None:
    dataset = Dataset.list_files(names, shuffle=True).flat_map(TextLineDataset)
    assert sorted(lines(at_3.distribute(dataset, policy))) == records([3, 8])


def test_tf_record_dataset_data_shard(at_3: MultiProcessCluster, names: list[str]) -> None:
    dataset = Dataset.from_tensor_slices(names).flat_map(TextLineDataset)
    assert lines(at_3.distribute(dataset, DATA)) == records(range(10), [3, 8])


def test_tf_record_dataset_hint_data_shard(at_3: MultiProcessCluster, names: list[str]) -> None:
    dataset = (
        Dataset.from_tensor_slices(names).flat_map(TextLineDataset).shard(SHARD_HINT, SHARD_HINT)
    )
    assert lines(at_3.distribute(dataset, HINT)) == records(range(10), [3, 8])


def test_tf_record_dataset_hint_file_shard(at_3: MultiProcessCluster, names: list[str]) -> None:
    dataset = (
        Dataset.from_tensor_slices(names).shard(SHARD_HINT, SHARD_HINT).flat_map(TextLineDataset)
    )
    assert lines(at_3.distribute(dataset, HINT)) == records([3, 8])


def test_tf_record_dataset_no_shard(at_3: MultiProcessCluster, names: list[str]) -> None:
    dataset = Dataset.from_tensor_slices(names).flat_map(TextLineDataset)
    assert lines(at_3.distribute(dataset, OFF, target_workers="LOCAL")) == records(range(10))


def test_interleave_dataset(at_3: MultiProcessCluster, names: list[str]) -> None:
    dataset = Dataset.from_tensor_slices(names).interleave(TextLineDataset, cycle_length=10)
    assert lines(at_3.distribute(dataset, FILE)) == [
        f"{file}-{record}" for record in range(10) for file in (3, 8)
    ]


@pytest.mark.parametrize("policy", [FILE, FILE_OR_DATA, HINT])
def test_fewer_files_than_workers(
    at_3: MultiProcessCluster, names: list[str], policy: ShardingPolicy
) -> None:
    few = Dataset.list_files(names[:4], shuffle=False)
    few = few.shard(SHARD_HINT, SHARD_HINT) if policy is HINT else few
    with pytest.raises(InvalidArgumentError, match=TOO_FEW):
        lines(at_3.distribute(few.flat_map(TextLineDataset), policy))


def test_fewer_files_than_workers_data_shard(at_3: MultiProcessCluster, names: list[str]) -> None:
    dataset = Dataset.list_files(names[:4], shuffle=False).flat_map(TextLineDataset)
    assert lines(at_3.distribute(dataset, DATA)) == records(range(4), [3, 8])


# -- the list of workers ---------------------------------------------------------------------------


@pytest.mark.parametrize("addresses", [["localhost:worker"] * 5, ["elsewhere"] * 5])
def test_invalid_ports(addresses: list[str]) -> None:
    """And WorkerNotFound."""
    with (
        TestCluster(0, worker_addresses=addresses) as cluster,
        pytest.raises(RuntimeError, match=r"The worker's address is not configured"),
    ):
        cluster.add_worker()


def test_empty_worker_list() -> None:
    with TestCluster(1, worker_addresses=[], deployment_mode="COLOCATED") as cluster:
        dataset = cluster.distribute(Dataset.range(20), FILE_OR_DATA)
        with pytest.raises(
            NotFoundError, match=r"Worker localhost:\d+ is not in the workers list\."
        ):
            values(dataset)


def test_more_workers_than_configured() -> None:
    with TestCluster(1, worker_addresses=["localhost:%port%"]) as cluster:
        with pytest.raises(
            RuntimeError, match=r"other workers are already running at the configured host"
        ):
            cluster.add_worker()
        assert cluster.num_registered_workers() == 1


def test_single_worker_has_whole_share() -> None:
    with TestCluster(1, worker_addresses=["localhost"], deployment_mode="COLOCATED") as cluster:
        assert values(cluster.distribute(Dataset.range(20), FILE_OR_DATA)) == list(range(20))


@pytest.mark.parametrize("policy", [DATA, FILE_OR_DATA])
def test_read_from_any_worker(policy: ShardingPolicy, names: list[str]) -> None:
    with TestCluster(WORKERS, worker_addresses=["localhost"] * WORKERS) as cluster:
        assert sorted(values(cluster.distribute(Dataset.range(20), policy))) == list(range(20))
        dataset = Dataset.from_tensor_slices(names).flat_map(TextLineDataset)
        assert sorted(lines(cluster.distribute(dataset, policy))) == records(range(10))


def test_worker_at_another_port_keeps_its_share() -> None:
    with TestCluster(3, worker_addresses=["localhost"] * 3) as cluster:
        dataset = cluster.distribute(Dataset.range(9), DATA)
        assert sorted(values(dataset)) == list(range(9))
        cluster.restart_worker(1, use_same_port=False)
        assert sorted(values(dataset)) == list(range(9))


def test_places_survive_the_dispatcher(tmp_path: Path) -> None:
    with TestCluster(3, worker_addresses=["localhost"] * 3) as cluster:
        cluster.restart_dispatcher()
        assert sorted(values(cluster.distribute(Dataset.range(9), DATA))) == list(range(9))
        with pytest.raises(RuntimeError, match="other workers are already running"):
            cluster.add_worker()
