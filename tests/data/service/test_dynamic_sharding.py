"""Positions dealt out: tf.data service's own tests of dynamic sharding (dynamic_sharding_test.py),
row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import TestCluster, values
from zmqdist.data import Dataset, TextLineDataset
from zmqdist.data.service import ShardingPolicy
from zmqdist.errors import UnimplementedError

# Tasks go on in the cluster's workers when their readers have gone.
pytestmark = pytest.mark.shares_cluster

DYNAMIC = ShardingPolicy.DYNAMIC
numbers = iter(range(1_000_000))


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[int], TestCluster]]:
    """Without a journal: each question for positions would wait for the disk."""
    made: dict[int, TestCluster] = {}

    def of(workers: int) -> TestCluster:
        return made.get(workers) or made.setdefault(
            workers, TestCluster(workers, work_dir="", fault_tolerant_mode=False)
        )

    yield of
    for cluster in made.values():
        cluster.close()


@pytest.fixture
def one(clusters: Callable[[int], TestCluster]) -> TestCluster:
    return clusters(1)


@pytest.fixture
def two(clusters: Callable[[int], TestCluster]) -> TestCluster:
    return clusters(2)


@pytest.fixture
def three(clusters: Callable[[int], TestCluster]) -> TestCluster:
    return clusters(3)


def dealt(cluster: TestCluster, dataset: Dataset, **options: Any) -> Dataset:
    return cluster.distribute(dataset, DYNAMIC, **{"job_name": f"job-{next(numbers)}", **options})


def constant(value: Any) -> Dataset:
    return Dataset.from_tensors(value)


@pytest.mark.parametrize("mode", [DYNAMIC, "distributed_epoch"])
@pytest.mark.parametrize("name", ["basic", None])
def test_basic(two: TestCluster, mode: Any, name: str | None) -> None:
    """And NoJobName, DistributedEpoch."""
    name = name and f"{name}-{mode}"
    assert sorted(values(two.distribute(Dataset.range(100), mode, job_name=name))) == list(
        range(100)
    )


def test_tensor_slices(two: TestCluster) -> None:
    assert Counter(values(dealt(two, Dataset.from_tensor_slices([5, 1, 2, 4])))) == Counter(
        [5, 1, 2, 4]
    )


@pytest.mark.parametrize(
    "inner",
    [
        lambda dataset: dataset.interleave(constant, cycle_length=2),
        lambda dataset: dataset.interleave(constant, cycle_length=2, num_parallel_calls=2),
        lambda dataset: dataset.flat_map(constant),
        lambda dataset: dataset.flat_map(lambda x: Dataset.from_tensor_slices([x])),
    ],
    ids=["interleave", "parallel_interleave", "flat_map", "flat_map_slices"],
)
def test_inner_datasets_are_not_split(
    two: TestCluster, inner: Callable[[Dataset], Dataset]
) -> None:
    """Interleave, ParallelInterleave, FlatMap."""
    assert Counter(values(dealt(two, inner(Dataset.from_tensor_slices([1, 5, 0]))))) == Counter(
        [1, 5, 0]
    )


def test_group_by_window(two: TestCluster) -> None:
    """The zipped range is whole in each window."""
    dataset = Dataset.from_tensor_slices(["a", "b", "c", "d"]).group_by_window(
        key_func=lambda x: np.int64(0),
        reduce_func=lambda key, window: Dataset.zip(window, Dataset.range(100)),
        window_size=4,
    )
    assert len(list(dealt(two, dataset))) == 4


def test_repeat_before_distribution(two: TestCluster) -> None:
    assert Counter(values(dealt(two, Dataset.range(20).repeat(5)))) == Counter(list(range(20)) * 5)


def test_repeat_after_distribution(two: TestCluster) -> None:
    assert Counter(values(dealt(two, Dataset.range(20)).repeat(5))) == Counter(list(range(20)) * 5)


def test_shuffle_and_repeat(two: TestCluster) -> None:
    dataset = Dataset.range(20).shuffle(20).repeat(5)
    assert Counter(values(dealt(two, dataset))) == Counter(list(range(20)) * 5)


def test_forever_repeat(two: TestCluster) -> None:
    with iter(dealt(two, Dataset.range(20).repeat())) as iterator:
        counts = Counter(int(next(iterator)) for _ in range(1000))
    assert sorted(counts) == list(range(20))
    assert min(counts.values()) > 25


def test_forever_repeat_few_elements() -> None:
    with TestCluster(5, work_dir="", fault_tolerant_mode=False) as cluster:
        # One at a time: nothing is buffered of those that stop.
        iterator = iter(dealt(cluster, Dataset.range(1).repeat(), max_outstanding_requests=1))
        assert {int(next(iterator)) for _ in range(20)} == {0}
        for number in range(1, 5):
            cluster.stop_worker(number)
        assert {int(next(iterator)) for _ in range(20)} == {0}
        iterator.close()


def test_zip(one: TestCluster) -> None:
    dataset = Dataset.zip(Dataset.range(10), Dataset.range(10))
    assert [(int(a), int(b)) for a, b in dealt(one, dataset)] == [(i, i) for i in range(10)]


def test_nested_zip(one: TestCluster) -> None:
    a = Dataset.range(10)
    dataset = Dataset.zip((a, a, (a, a), a))
    read = [(int(x[0]), int(x[1]), tuple(map(int, x[2])), int(x[3])) for x in dealt(one, dataset)]
    assert read == [(i, i, (i, i), i) for i in range(10)]


def test_imbalanced_zip(one: TestCluster) -> None:
    dataset = Dataset.zip(Dataset.range(200), Dataset.range(1000))
    assert [(int(a), int(b)) for a, b in dealt(one, dataset)] == [(i, i) for i in range(200)]


def test_imbalanced_zip_and_repeat(one: TestCluster) -> None:
    dataset = Dataset.zip(Dataset.range(60), Dataset.range(300)).repeat(3)
    assert [(int(a), int(b)) for a, b in dealt(one, dataset)] == [(i, i) for i in range(60)] * 3


def test_imbalanced_zip_multi_worker(three: TestCluster) -> None:
    dataset = Dataset.zip(Dataset.range(200), Dataset.range(1000))
    assert len(list(dealt(three, dataset))) == 200


def test_zip_different_rates(three: TestCluster) -> None:
    every_tenth = Dataset.range(100).filter(lambda x: x % 10 == 0)
    dataset = Dataset.zip(Dataset.range(100), every_tenth)
    assert len(list(dealt(three, dataset))) == 10


R = Dataset.range(200)
ALIGNED = [
    Dataset.zip(R, R),
    Dataset.zip(R, R.map(lambda x: x, num_parallel_calls=2).prefetch(3)),
    Dataset.zip(Dataset.from_tensor_slices(np.arange(200)), Dataset.counter()),
    R.map(lambda x: x).enumerate(),
]
COUNTED = [
    Dataset.zip(R.shuffle(200).batch(200).map(np.sort).unbatch(), R),
    Dataset.zip(R, R.filter(lambda x: x >= 0)),
    R.filter(lambda x: True).enumerate(),
]
PAIRS = [(x, x) for x in range(200)]


def rows(dataset: Dataset) -> list[tuple[int, int]]:
    return [(int(x), int(y)) for x, y in dataset]


@pytest.mark.parametrize("pairs", ALIGNED + COUNTED)
def test_pairs_stay_pairs_with_two_workers(two: TestCluster, pairs: Dataset) -> None:
    assert sorted(rows(dealt(two, pairs))) == PAIRS


@pytest.mark.parametrize("options", [{"delivery": "exactly_once"}, {"ordered": True}], ids=str)
def test_pairs_of_single_positions_are_read_in_portions(
    two: TestCluster, options: dict[str, Any]
) -> None:
    for pairs in ALIGNED:
        assert sorted(rows(dealt(two, pairs, **options))) == PAIRS


@pytest.mark.parametrize("pairs", COUNTED)
def test_zip_of_unequal_sources_has_no_portions(two: TestCluster, pairs: Dataset) -> None:
    with pytest.raises(
        UnimplementedError, match=r"^(zip|enumerate)\(\).*put it behind distribute\(\)"
    ):
        rows(dealt(two, pairs, ordered=True))


def test_choices_among_finite_datasets_are_made_once(two: TestCluster) -> None:
    order = Dataset.from_tensor_slices(np.array([0, 1, 1, 0, 1] * 10))
    chosen = Dataset.choose_from_datasets([R, R.map(lambda x: -x)], order)
    assert Counter(values(dealt(two, chosen))) == Counter(values(chosen))


def test_zip_different_repeats(three: TestCluster) -> None:
    dataset = Dataset.zip(Dataset.range(50), Dataset.range(10).repeat(10))
    assert len(list(dealt(three, dataset))) == 50


def test_sample_from_datasets(three: TestCluster) -> None:
    datasets = [constant(i).repeat() for i in range(3)]
    dataset = Dataset.sample_from_datasets(datasets, weights=[0.6, 0.3, 0.1], seed=1).take(200)
    counts = Counter(values(dealt(three, dataset)))
    assert counts[0] > counts[1] > counts[2] > 0


@pytest.mark.parametrize("workers", [1, 3])
def test_choose_from_datasets(clusters: Callable[[int], TestCluster], workers: int) -> None:
    """The stream of choices is whole in each worker."""
    words = ["a", "b", "c"]
    choices = np.random.default_rng(3).integers(3, size=15)
    dataset = Dataset.choose_from_datasets(
        [constant(word).repeat() for word in words], Dataset.from_tensor_slices(choices)
    )
    read = list(map(str, dealt(clusters(workers), dataset)))
    expected = [words[choice] for choice in choices]
    assert (read if workers == 1 else sorted(read)) == (
        expected if workers == 1 else sorted(expected * workers)
    )


def test_enumerate_replicate_on_split(three: TestCluster) -> None:
    """Every worker counts for itself."""
    counts: Counter[int] = Counter()
    with iter(dealt(three, Dataset.from_tensors(0).repeat().enumerate())) as iterator:
        while min(counts[index] for index in range(10)) < 3:
            counts[int(next(iterator)[0])] += 1
    assert {counts[index] for index in range(10)} == {3}


@pytest.mark.parametrize("workers", [1, 3])
def test_concatenate(clusters: Callable[[int], TestCluster], workers: int) -> None:
    dataset = Dataset.range(100).concatenate(Dataset.range(100, 200))
    read = values(dealt(clusters(workers), dataset))
    assert (read if workers == 1 else sorted(read)) == list(range(200))


@pytest.mark.parametrize("written", [False, True])
def test_snapshot(two: TestCluster, tmp_path: Path, written: bool) -> None:
    dataset = Dataset.range(100).snapshot(str(tmp_path))
    if written:
        assert len(list(dataset)) == 100
    with pytest.raises(
        UnimplementedError, match="Splitting is not implemented for snapshot datasets"
    ):
        list(dealt(two, dataset))


def test_distributed_dataset(two: TestCluster) -> None:
    below = two.distribute(Dataset.range(100), "parallel_epochs")
    with pytest.raises(
        UnimplementedError,
        match="Cannot create split providers for dataset of type DataServiceDataset",
    ):
        list(dealt(two, below.map(lambda x: x + 1)))


def test_generator_cannot_be_split(two: TestCluster) -> None:
    dataset = Dataset.from_generator(lambda: iter(range(3)), output_types=np.int64)
    with pytest.raises(UnimplementedError, match="generator"):
        list(dealt(two, dataset))


def test_flat_map_with_repeat(three: TestCluster) -> None:
    dataset = Dataset.range(5).flat_map(
        lambda _: Dataset.from_tensor_slices(["a", "b", "c"]).repeat(10)
    )
    assert Counter(map(str, dealt(three, dataset))) == Counter({"a": 50, "b": 50, "c": 50})


def test_shuffle_files(three: TestCluster, tmp_path: Path) -> None:
    for file in range(5):
        (tmp_path / f"file-{file}").write_text("".join(f"{file}-{record}\n" for record in range(5)))
    names = sorted(map(str, tmp_path.iterdir()))
    dataset = (
        Dataset.from_tensor_slices(names).shuffle(5).interleave(TextLineDataset, cycle_length=5)
    )
    read = [
        line.decode() if isinstance(line, bytes) else str(line) for line in dealt(three, dataset)
    ]
    assert sorted(read) == [f"{file}-{record}" for file in range(5) for record in range(5)]
