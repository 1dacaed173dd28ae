"""Coordinated reads: the k-th elements of all consumers are of one group, whatever happens to
workers and dispatchers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import TestCluster
from tests.zygote import ServerProcess
from zmqdist.data import INFINITE_CARDINALITY, Dataset, Options
from zmqdist.data.service import ShardingPolicy, distribute
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError


def numbered_groups(consumers: int) -> Dataset:
    """0, 1, ... n-1 first, then n consecutive numbers from anywhere: each worker its own."""
    starts = Dataset.from_tensors(np.int64(0)).concatenate(any_numbers())
    return starts.flat_map(lambda x: Dataset.range(x * consumers, (x + 1) * consumers))


def any_numbers() -> Dataset:
    """Different ones on each worker."""
    options = Options()
    options.experimental_external_state_policy = "IGNORE"
    return Dataset.random().with_options(options)


class Consumers:
    """All consumers of a job. `read` gives one element of each."""

    def __init__(self, iterators: list[Any]) -> None:
        self.iterators = iterators
        self.groups: list[list[Any]] = []

    def read(self, count: int = 1) -> list[list[Any]]:
        new = [[next(each) for each in self.iterators] for _ in range(count)]
        self.groups += new
        return new

    def read_until_zeros(self, count: int) -> None:
        """Until the first group of so many workers was seen."""
        seen = 0
        while seen < count:
            seen += self.read()[0][0] == 0

    def check(self) -> None:
        """Every group that was ever read is one of consecutive numbers."""
        for group in self.groups:
            assert [int(each) for each in group] == list(
                range(int(group[0]), int(group[0]) + len(group))
            )


@contextmanager
def reading(
    cluster: TestCluster | ServerProcess,
    consumers: int,
    dataset: Dataset | None = None,
    mode: ShardingPolicy = ShardingPolicy.OFF,
    **options: Any,
) -> Iterator[Consumers]:
    made = dataset or numbered_groups(consumers)
    address = cluster.address if isinstance(cluster, ServerProcess) else cluster.target
    with ExitStack() as stack:
        yield Consumers(
            [
                stack.enter_context(
                    iter(made.apply(distribute(mode, address, "test", index, consumers, **options)))
                )
                for index in range(consumers)
            ]
        )


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("consumers", [1, 2, 5])
def test_consumers_read_groups_of_consecutive_elements(workers: int, consumers: int) -> None:
    with TestCluster(num_workers=workers) as cluster, reading(cluster, consumers) as read:
        read.read(100)
        read.check()


def test_program_may_interleave_all_consumers() -> None:
    """tf.data's own way to read all of them; each waits for the others."""
    with TestCluster(num_workers=1) as cluster:

        def consumer(index: Any) -> Dataset:
            service = distribute(ShardingPolicy.OFF, cluster.target, "test", int(index), 3)
            return numbered_groups(3).apply(service)

        together = Dataset.range(3).interleave(consumer, cycle_length=3, num_parallel_calls=3)
        with iter(together) as iterator:
            groups = [[int(next(iterator)) for _ in range(3)] for _ in range(20)]
    assert groups == [[group[0], group[0] + 1, group[0] + 2] for group in groups]


def test_restarted_consumer_is_refused() -> None:
    with TestCluster(num_workers=1) as cluster, reading(cluster, 3) as read:
        read.read(10)
        with (
            reading(cluster, 3) as again,
            pytest.raises(FailedPreconditionError, match="current round has already reached"),
        ):
            again.read()


def test_batches_of_step_share_bucket() -> None:
    hosts, replicas = 2, 3
    batch = hosts * replicas

    def sequences() -> Dataset:
        lengths = any_numbers().map(lambda x: np.int64(x % 40 + 1))
        return lengths.map(lambda n: np.zeros(n, np.int64))

    bucketed = (
        sequences()
        .bucket_by_sequence_length(
            len, [10, 20, 30], [4] * 4, drop_remainder=True, pad_to_bucket_boundary=False
        )
        .group_by_window(bucket_of, lambda _, window: window.batch(1), window_size=batch)
        .unbatch()
    )
    with TestCluster(num_workers=4) as cluster, reading(cluster, batch, bucketed) as read:
        for group in read.read(12):
            assert len({bucket_of(each) for each in group}) == 1


def bucket_of(sequences: Any) -> np.int64:
    return np.int64(min((sequences.shape[1] - 1) // 10, 3))


def test_finite_dataset_is_refused() -> None:
    finite = Dataset.range(100)
    with (
        TestCluster(num_workers=1) as cluster,
        reading(cluster, 1, finite) as read,
        pytest.raises(
            FailedPreconditionError,
            match=r"Round robin reads require that the input dataset has infinite cardinality, "
            r"but the dataset has "
            r"cardinality 100. Consider adding `.repeat\(\)`",
        ),
    ):
        read.read()


def test_ending_dataset_fails_all_consumers() -> None:
    ends = Dataset.range(10).filter(lambda x: True)
    with TestCluster(num_workers=1) as cluster, reading(cluster, 2, ends) as read:
        assert read.read(5) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        for _ in range(2):
            with pytest.raises(
                FailedPreconditionError, match="end of sequence on a round-robin read iterator"
            ):
                read.read()


def test_cardinality_is_infinite() -> None:
    with TestCluster(num_workers=1) as cluster:
        read = cluster.distribute(
            Dataset.range(10).filter(lambda x: True),
            job_name="test",
            consumer_index=0,
            num_consumers=1,
        )
        assert read.cardinality() == INFINITE_CARDINALITY


def test_local_workers_alone_cannot_be_wanted() -> None:
    with (
        TestCluster(num_workers=1) as cluster,
        pytest.raises(InvalidArgumentError, match="Coordinated reads require non-local workers"),
        reading(cluster, 1, target_workers="LOCAL") as read,
    ):
        read.read()


@pytest.mark.parametrize("new", [1, 3, 10])
def test_added_workers_join_at_the_same_round_for_all(new: int) -> None:
    with TestCluster(num_workers=3) as cluster, reading(cluster, 7) as read:
        read.read_until_zeros(3)
        for _ in range(new):
            cluster.add_worker()
        read.read_until_zeros(new)
        read.check()


def test_lost_worker_rejoins_rounds() -> None:
    with TestCluster(num_workers=3) as cluster, reading(cluster, 7) as read:
        read.read_until_zeros(3)
        cluster.stop_worker(1)
        read.read(20)
        cluster.restart_worker(1)
        read.read_until_zeros(1)
        read.check()


@pytest.mark.parametrize("mode", [ShardingPolicy.OFF, ShardingPolicy.DYNAMIC])
def test_workers_and_dispatcher_come_and_go_and_groups_stay_pure(mode: ShardingPolicy) -> None:
    with TestCluster(num_workers=3) as cluster, reading(cluster, 7, mode=mode) as read:
        read.read(20)
        for index in range(3):
            cluster.stop_worker(index)
            read.read(20)
            cluster.restart_worker(index)
            read.read(20)
        cluster.add_worker()
        cluster.restart_dispatcher()
        for index in range(3):
            cluster.stop_worker(index)
        read.read(20)
        read.check()


def test_groups_stay_pure_when_workers_are_cut_off_at_any_moment() -> None:
    with TestCluster(num_workers=2) as cluster, reading(cluster, 5) as read:
        for round_ in range(6):
            read.read(7)
            cluster.restart_worker(round_ % 2, use_same_port=bool(round_ % 3))
        read.read_until_zeros(1)
        read.check()


def test_reading_begins_before_there_are_workers() -> None:
    with TestCluster(num_workers=0) as cluster, reading(cluster, 3) as read:
        cluster.add_worker()
        read.read(10)
        read.check()
        cluster.add_worker()
        read.read_until_zeros(1)
        read.check()


def test_pipeline_error_reaches_all_consumers() -> None:
    def fails_at_6(x: Any) -> Any:
        if x == 6:
            raise ValueError("six")
        return x

    with (
        TestCluster(num_workers=1) as cluster,
        reading(cluster, 2, Dataset.counter().map(fails_at_6)) as read,
    ):
        assert read.read(3) == [[0, 1], [2, 3], [4, 5]]
        for _ in range(2):
            for iterator in read.iterators:
                with pytest.raises(Exception, match="six"):
                    next(iterator)
