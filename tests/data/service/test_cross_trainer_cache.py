"""The cross-trainer cache: trainers of one job read the same elements, computed once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import TestCluster
from zmqdist.data import Dataset
from zmqdist.data.service import (
    CrossTrainerCache,
    ShardingPolicy,
    from_dataset_id,
    register_dataset,
)
from zmqdist.errors import InvalidArgumentError

ENDLESS = Dataset.range(10_000_000).repeat()
ELEMENT_BYTES = 64
"""What a number weighs in a cache."""


def shared(
    cluster: TestCluster, dataset: Dataset = ENDLESS, trainer: str = "Trainer 1", **options: Any
) -> Dataset:
    """The dataset as one trainer reads it."""
    told = {"job_name": "job", "cross_trainer_cache": CrossTrainerCache(trainer), **options}
    read: Dataset = cluster.distribute(dataset, **told)
    return read


@contextmanager
def opened(*datasets: Dataset) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [stack.enter_context(iter(each)) for each in datasets]


def first(iterator: Any, count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    with TestCluster(num_workers=1) as made:
        yield made


def small(window_bytes: int, **options: Any) -> TestCluster:
    return TestCluster(
        num_workers=1, worker_options={"cross_trainer_cache_size_bytes": window_bytes}, **options
    )


def test_trainers_read_the_same_elements(cluster: TestCluster) -> None:
    with opened(shared(cluster), shared(cluster, trainer="Trainer 2")) as (one, two):
        assert first(one, 10) == list(range(10))
        assert first(two, 10) == list(range(10))


def test_trainers_may_read_by_id(cluster: TestCluster) -> None:
    id_ = register_dataset(cluster.target, ENDLESS)
    read = [
        from_dataset_id(
            ShardingPolicy.OFF,
            cluster.target,
            id_,
            ENDLESS.element_spec,
            job_name="job",
            cross_trainer_cache=CrossTrainerCache(trainer),
        )
        for trainer in ("Trainer 1", "Trainer 2")
    ]
    with opened(*read) as (one, two):
        assert first(one, 10) == first(two, 10) == list(range(10))


def test_cache_without_compression(cluster: TestCluster) -> None:
    with opened(*(shared(cluster, trainer=trainer, compression=None) for trainer in "ab")) as (
        one,
        two,
    ):
        assert first(one, 10) == first(two, 10) == list(range(10))


def test_jobs_of_different_names_have_caches_of_their_own(cluster: TestCluster) -> None:
    reads = [shared(cluster, trainer=trainer, job_name=f"job {trainer}") for trainer in "ab"]
    with opened(*reads) as (one, two):
        assert first(one, 10) == first(two, 10) == list(range(10))


def test_elements_without_cache_go_to_one_reader(cluster: TestCluster) -> None:
    with opened(cluster.distribute(ENDLESS, job_name="job")) as (one,):
        assert first(one, 10) == list(range(10))
        with opened(cluster.distribute(ENDLESS, job_name="job")) as (two,):
            assert first(two, 1)[0] >= 10


def test_trainer_gets_element_once(cluster: TestCluster) -> None:
    with opened(shared(cluster)) as (one,):
        assert first(one, 10) == list(range(10))
        with opened(shared(cluster)) as (two,):
            assert first(two, 1)[0] >= 10


def test_many_trainers_in_step_read_the_same_from_a_small_window() -> None:
    wide = ENDLESS.map(lambda x: np.full(1000, x))
    window = ((os.cpu_count() or 1) + 8) * 8200
    with (
        small(window) as cluster,
        opened(*(shared(cluster, wide, f"Trainer {n}") for n in range(20))) as readers,
    ):
        for step in range(50):
            assert [int(next(each)[0]) for each in readers] == [step] * 20


def test_slow_trainer_misses_elements() -> None:
    with small(500) as cluster:
        with opened(shared(cluster)) as (fast,):
            assert first(fast, 200) == list(range(200))
            with opened(shared(cluster, trainer="Trainer 2")) as (slow,):
                seen = first(slow, 200)
        assert seen[0] > 0
        assert seen == sorted(set(seen))


def test_small_cache_serves_many_trainers() -> None:
    with (
        small(500) as cluster,
        opened(*(shared(cluster, trainer=f"Trainer {n}") for n in range(8))) as readers,
    ):
        for each in readers:
            seen = first(each, 200)
            assert seen == sorted(set(seen))


def test_trainers_see_the_same_order_of_a_shuffled_dataset(cluster: TestCluster) -> None:
    shuffled = Dataset.range(10_000_000).repeat().shuffle(100)
    with opened(*(shared(cluster, shuffled, trainer) for trainer in "ab")) as (one, two):
        assert first(one, 10) == first(two, 10)


def test_workers_have_windows_of_their_splits() -> None:
    with TestCluster(num_workers=2) as cluster:
        reads = [
            shared(cluster, trainer=trainer, processing_mode=ShardingPolicy.DYNAMIC)
            for trainer in "ab"
        ]
        with opened(*reads) as (one, two):
            assert set(first(one, 100)) & set(first(two, 100))


def test_trainers_must_expect_the_compression_that_elements_have(cluster: TestCluster) -> None:
    with opened(shared(cluster)) as (one,):
        first(one, 1)
        with (
            pytest.raises(InvalidArgumentError, match="Data type mismatch"),
            opened(shared(cluster, trainer="Trainer 2", compression=None)) as (two,),
        ):
            first(two, 1)


def fails(dataset: Dataset, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text), opened(dataset) as (iterator,):
        next(iterator)


def test_cache_needs_named_job(cluster: TestCluster) -> None:
    read = shared(cluster, job_name=None)
    fails(read, r"Cross-trainer caching requires named jobs. Got empty `job_name`.")


@pytest.mark.parametrize("count", [0, 10])
def test_cache_needs_infinite_dataset(cluster: TestCluster, count: int) -> None:
    fails(shared(cluster, Dataset.range(count)), "requires the input dataset to be infinite.")


def test_dataset_of_unknown_length_is_read_to_its_end(cluster: TestCluster) -> None:
    read = shared(cluster, Dataset.range(10).filter(lambda x: True))
    with opened(read) as (iterator,):
        assert first(iterator, 10) == list(range(10))
        with pytest.raises(
            InvalidArgumentError, match=r"requires the input dataset to be infinite."
        ):
            next(iterator)


def test_cache_refuses_second_pass(cluster: TestCluster) -> None:
    read = shared(cluster)
    for _ in range(2):
        with opened(read) as (iterator,):
            first(iterator, 1)
    fails(
        read, r"requires infinite datasets and disallows multiple repetitions of the same dataset."
    )


def test_reads_cannot_be_coordinated(cluster: TestCluster) -> None:
    fails(shared(cluster, consumer_index=0, num_consumers=1), "does not support coordinated reads.")


def test_readers_of_a_job_agree_whether_there_is_a_cache(cluster: TestCluster) -> None:
    with opened(shared(cluster)) as (one,):
        first(one, 1)
        fails(
            cluster.distribute(ENDLESS, job_name="job"),
            "Existing cross-trainer cache: <enabled>; got <disabled>",
        )


@pytest.mark.parametrize("trainer", ["", None])
def test_trainer_needs_name(trainer: Any) -> None:
    with pytest.raises(ValueError, match=r"cross-trainer cache requires a non-empty trainer ID."):
        CrossTrainerCache(trainer)


def test_restarted_worker_begins_new_window() -> None:
    # The iteration of a worker that is away for longer than `worker_timeout_ms` ends: here it
    # waits.
    with (
        small(16 * ELEMENT_BYTES, worker_timeout_ms=None) as cluster,
        opened(shared(cluster)) as (iterator,),
    ):
        assert first(iterator, 100) == list(range(100))
        cluster.restart_worker(0)
        while next(iterator) != 0:
            pass
        assert first(iterator, 100) == list(range(1, 101))


def test_restarted_dispatcher_keeps_cache(cluster: TestCluster) -> None:
    with opened(shared(cluster)) as (iterator,):
        assert first(iterator, 100) == list(range(100))
        cluster.restart_dispatcher()
        assert first(iterator, 100) == list(range(100, 200))
