"""Datasets of which each worker has its own: what can be one, its iterators, their ends, and how
workers share one."""

from __future__ import annotations

import gc
import logging
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator import helpers
from tests.scheduling.work import until
from zmqdist import data, errors, limits
from zmqdist.coordinator import ClusterCoordinator, PerWorkerValues
from zmqdist.scheduling.coordinator.remote_value import RemoteValueStatus
from zmqdist.specs import TensorSpec

# its dispatcher may start another thread of a pool
pytestmark = [pytest.mark.timeout(90), pytest.mark.shares_cluster]

WORKERS = 3
KINDS = ["function", "dataset"]


@pytest.fixture
def coordinator(any_queue: ClusterCoordinator) -> ClusterCoordinator:
    return any_queue


def source_of_kind(kind: str, fn: Any) -> Any:
    """As a function or as the dataset that it makes."""
    return fn if kind == "function" else fn()


# -- what can be one -------------------------------------------------------------------------------


def test_worker_index_dataset_fn(coordinator: ClusterCoordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(helpers.shard_by_index))
    sums = helpers.schedule_on(coordinator, range(WORKERS), helpers.total, iterator)
    assert sorted(coordinator.fetch(sums)) == [12, 15, 18]
    coordinator.join()


def test_input_function(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(helpers.one_to_two)
    for _ in range(2):
        assert coordinator.schedule(helpers.first, (iter(dataset),)).fetch(20) == 1
    coordinator.join()


@pytest.mark.parametrize("kind", KINDS)
def test_input_function_with_map(coordinator: ClusterCoordinator, kind: str) -> None:
    dataset = coordinator.create_per_worker_dataset(source_of_kind(kind, helpers.mapped))
    assert coordinator.schedule(helpers.first, (iter(dataset),)).fetch(20) == 10


@pytest.mark.parametrize("kind", KINDS)
def test_datasets_shuffled_differently(coordinator: ClusterCoordinator, kind: str) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(source_of_kind(kind, helpers.shuffled)))
    orders = coordinator.fetch(helpers.schedule_on(coordinator, (0, 1), helpers.elements, iterator))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] != orders[1]


def test_pass_dataset_to_create_per_worker_dataset(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(data.Dataset.range(1, 11).batch(4))
    np.testing.assert_array_equal(
        coordinator.schedule(helpers.first, (iter(dataset),)).fetch(20), [1, 2, 3, 4]
    )


@pytest.mark.parametrize(
    "source",
    [
        helpers.generated,
        lambda: [0, 1, 2],
        lambda: iter(range(3)),
        [0, 1, 2],
        np.arange(3),
        range(3),
    ],
    ids=["generator", "function of a list", "function of an iterator", "list", "array", "range"],
)
def test_iterables_can_be_datasets(in_three: ClusterCoordinator, source: Any) -> None:
    dataset = in_three.create_per_worker_dataset(source)
    for _ in range(2):
        assert in_three.schedule(helpers.elements, (iter(dataset),), worker=1).fetch(20) == [
            0,
            1,
            2,
        ]


def test_dataset_partially_created_on_coordinator(in_three: ClusterCoordinator) -> None:
    captured = data.Dataset.range(5)
    dataset = in_three.create_per_worker_dataset(lambda: captured.map(lambda x: x * 2))
    assert in_three.schedule(helpers.total, (iter(dataset),)).fetch(20) == 20
    lock = threading.Lock()
    with pytest.raises(errors.InvalidArgumentError, match="lock"):
        in_three.create_per_worker_dataset(lambda: captured.map(lambda x: (x, lock)))


def test_dataset_is_as_at_creation(in_three: ClusterCoordinator) -> None:
    source = [1, 2, 3]
    dataset = in_three.create_per_worker_dataset(source)
    source.append(100)
    assert in_three.schedule(helpers.total, (iter(dataset),)).fetch(20) == 6


@pytest.mark.parametrize(
    "source", [3, "abc", {"a": 1}, iter([1]), None], ids=lambda source: type(source).__name__
)
def test_dataset_of_other_types_is_refused(in_three: ClusterCoordinator, source: Any) -> None:
    with pytest.raises(ValueError, match="Unexpected dataset type"):
        in_three.create_per_worker_dataset(source)


def test_dataset_function_with_parameters_is_refused(in_three: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="is called without arguments"):
        in_three.create_per_worker_dataset(lambda count: data.Dataset.range(count))
    assert in_three.create_per_worker_dataset(lambda count=3: data.Dataset.range(count)) is not None


def test_function_without_dataset_fails_its_users(
    in_three: ClusterCoordinator,
) -> None:
    iterator = iter(in_three.create_per_worker_dataset(helpers.not_a_dataset))
    in_three.join()
    result = in_three.schedule(helpers.first, (iterator,))
    with pytest.raises(errors.ClosureInputError, match="let it return a Dataset") as caught:
        in_three.join()
    assert isinstance(caught.value.original_exception, TypeError)
    assert isinstance(result.exception(), errors.ClosureInputError)


def test_large_captured_dataset_warns(
    in_three: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "DEFINITION_BYTES_WARNED", 2**20)
    captured = np.arange(2**20)
    with caplog.at_level(logging.WARNING, "zmqdist.coordinator"):
        dataset = in_three.create_per_worker_dataset(
            lambda: data.Dataset.from_tensor_slices(captured).take(2)
        )
    assert "each worker gets a copy" in caplog.text
    assert in_three.schedule(helpers.total, (iter(dataset),)).fetch(20) == 1


# -- iterators -------------------------------------------------------------------------------------


def test_multiple_datasets(coordinator: ClusterCoordinator) -> None:
    low = coordinator.create_per_worker_dataset(lambda: data.Dataset.range(0, 5))
    high = coordinator.create_per_worker_dataset(lambda: data.Dataset.range(5, 10))
    first, second = iter(low), iter(high)
    assert coordinator.schedule(helpers.add_firsts, (first, second)).fetch(20) == 5
    first = iter(low)
    assert coordinator.schedule(helpers.add_firsts, (first, second)).fetch(20) >= 5


def test_iterators_are_independent(in_three: ClusterCoordinator) -> None:
    dataset = in_three.create_per_worker_dataset(data.Dataset.range(10))
    early, late = iter(dataset), iter(dataset)
    values = [
        in_three.schedule(helpers.first, (iterator,), worker=0)
        for iterator in (early, early, late, early)
    ]
    assert in_three.fetch(values) == [0, 1, 0, 2]


def test_iterator_continues_from_function_to_function(
    coordinator: ClusterCoordinator, three_processes: zd.local_cluster
) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(data.Dataset.range(100)))
    values = [coordinator.schedule(helpers.first, (iterator,)) for _ in range(50)]
    coordinator.join()
    firsts = [int(value.fetch()) for value in values]
    assert all(firsts.count(number) <= WORKERS for number in firsts)
    rest = coordinator.fetch(
        helpers.schedule_on(coordinator, range(WORKERS), helpers.elements, iterator)
    )
    snapshot = three_processes.dispatcher.snapshot()
    assert sorted([*firsts, *chain(*rest)]) == sorted(list(range(100)) * WORKERS), (
        firsts,
        rest,
        snapshot.losses,
    )


def test_iterator_end_is_out_of_range_error(
    in_three: ClusterCoordinator,
) -> None:
    iterator = iter(in_three.create_per_worker_dataset(data.Dataset.range(2)))
    assert in_three.schedule(helpers.elements, (iterator,), worker=0).fetch(20) == [0, 1]
    assert in_three.schedule(helpers.elements, (iterator,), worker=0).fetch(20) == []
    in_three.schedule(helpers.first, (iterator,), worker=0)
    with pytest.raises(errors.OutOfRangeError):
        in_three.join()
    in_three.join()


def test_iterator_has_no_elements_on_coordinator(in_three: ClusterCoordinator) -> None:
    iterator = iter(in_three.create_per_worker_dataset(data.Dataset.range(2)))
    assert isinstance(iterator, PerWorkerValues)
    assert len(iterator) == WORKERS
    with pytest.raises(NotImplementedError, match="scheduled functions"):
        next(iterator)
    with pytest.raises(NotImplementedError):
        iterator.get_next()
    with pytest.raises(NotImplementedError):
        list(iterator)


def test_dataset_cannot_be_iterated_in_function(in_three: ClusterCoordinator) -> None:
    dataset = in_three.create_per_worker_dataset(data.Dataset.range(2))
    for step in (lambda: next(iter(dataset)), lambda captured=dataset: next(iter(captured))):
        with pytest.raises(RuntimeError, match="cannot iterate over a per-worker dataset"):
            in_three.schedule(step).fetch(20)
        with pytest.raises(RuntimeError):
            in_three.join()


def test_iterator_cannot_be_returned(in_three: ClusterCoordinator) -> None:
    iterator = iter(in_three.create_per_worker_dataset(data.Dataset.range(2)))
    with pytest.raises(errors.InvalidArgumentError, match="return its elements"):
        in_three.schedule(helpers.identity, (iterator,)).fetch(20)
    with pytest.raises(errors.InvalidArgumentError):
        in_three.join()


def test_repeated_iterator_creation(coordinator: ClusterCoordinator) -> None:
    before = coordinator.fetch(
        helpers.schedule_on(coordinator, range(WORKERS), helpers.living_objects)
    )
    dataset = coordinator.create_per_worker_dataset(lambda: data.Dataset.range(1, 100))
    for _ in range(10):
        iterator = iter(dataset)
        for _ in range(11):
            coordinator.schedule(helpers.first, (iterator,))
        coordinator.join()
    del iterator
    gc.collect()
    until(lambda: coordinator.snapshot().resources == 0)
    until(
        lambda: (
            coordinator.fetch(
                helpers.schedule_on(coordinator, range(WORKERS), helpers.living_objects)
            )
            == before
        ),
        "iterators at the workers",
    )


def test_dataset_function_is_called_once_per_iterator(
    in_three: ClusterCoordinator, tmp_path: Path
) -> None:
    def dataset_fn() -> Any:
        helpers.logged_counter(tmp_path)
        return data.Dataset.range(100)

    iterator = iter(in_three.create_per_worker_dataset(dataset_fn))
    for _ in range(50):
        in_three.schedule(helpers.first, (iterator,))
    in_three.join()
    until(
        lambda: not any(iterator[at].status is RemoteValueStatus.NOT_READY for at in range(WORKERS))
    )
    assert len(list(tmp_path.glob("built-*"))) == WORKERS
    assert not list(tmp_path.glob("built-*-1"))


# -- build and specs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_per_worker_dataset_build(in_three: ClusterCoordinator, kind: str) -> None:
    datasets = in_three.create_per_worker_dataset(source_of_kind(kind, helpers.one_to_two)).build()
    assert isinstance(datasets, PerWorkerValues)
    for _ in range(2):
        assert in_three.schedule(helpers.first_of_dataset, (datasets,), worker=0).fetch(20) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_element_spec_is_that_of_dataset(in_three: ClusterCoordinator, kind: str) -> None:
    dataset = in_three.create_per_worker_dataset(source_of_kind(kind, helpers.one_to_two))
    assert dataset.element_spec == TensorSpec((), np.int64)


def test_element_spec_needs_dataset(in_three: ClusterCoordinator) -> None:
    for source in ([1, 2], helpers.generated):
        with pytest.raises(NotImplementedError, match="no spec"):
            _ = in_three.create_per_worker_dataset(source).element_spec


# -- shared by the workers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [data.Dataset.range(23), list(range(23)), helpers.generated],
    ids=["dataset", "list", "generator"],
)
def test_shards_have_each_element_once(coordinator: ClusterCoordinator, source: Any) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(source, shard=True))
    shares = helpers.schedule_on(coordinator, range(WORKERS), helpers.elements, iterator)
    whole = range(3) if source is helpers.generated else range(23)
    assert sorted(chain(*coordinator.fetch(shares))) == list(whole)


@pytest.mark.parametrize(
    "source",
    [
        data.Dataset.range(100).shuffle(100),
        lambda: data.Dataset.range(10).flat_map(
            lambda x: data.Dataset.range(10 * x, 10 * x + 10).shuffle(10)
        ),
        data.Dataset.range(100).map(lambda x: x, num_parallel_calls=4, deterministic=False),
        helpers.shared_dataset,
    ],
    ids=["shuffle", "shuffle in a function", "map in any order", "the same object each time"],
)
def test_shards_share_one_order(coordinator: ClusterCoordinator, source: Any) -> None:
    dataset = coordinator.create_per_worker_dataset(source, shard=True)
    for _ in range(2):
        iterator = iter(dataset)
        shares = helpers.schedule_on(coordinator, range(WORKERS), helpers.elements, iterator)
        assert sorted(chain(*coordinator.fetch(shares))) == list(range(100))


# -- lost workers ----------------------------------------------------------------------------------
