"""Whole training programs: per-worker datasets, replicas, variables on servers, metrics that
workers update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them

Dataset = zd.data.Dataset


@pytest.fixture(params=[1, 2])
def replicated(request: pytest.FixtureRequest, made: Any) -> zd.ParameterServerStrategy:
    """A strategy with one or two replicas on a worker."""
    strategy: zd.ParameterServerStrategy = made(replicas_per_worker=request.param)
    return strategy


def _first(strategy: zd.ParameterServerStrategy, per_worker_dataset: Any) -> Any:
    """The first element at some worker, of all its replicas."""
    iterator = iter(per_worker_dataset)

    def step(iterator: Any) -> Any:
        return strategy.experimental_local_results(next(iterator))

    return ClusterCoordinator(strategy).schedule(step, (iterator,)).fetch()


@pytest.mark.parametrize("from_function", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_distributed_datasets_on_workers(
    replicated: zd.ParameterServerStrategy, from_function: bool, inside: bool
) -> None:
    coordinator = ClusterCoordinator(replicated)
    dataset = Dataset.range(1, 11).batch(4)

    def distributed() -> Any:
        if from_function:
            return replicated.distribute_datasets_from_function(
                lambda context: Dataset.range(1, 11).batch(context.get_per_replica_batch_size(4))
            )
        return replicated.experimental_distribute_dataset(dataset)

    made = coordinator.create_per_worker_dataset(distributed if inside else distributed())
    first = _first(replicated, made)
    assert len(first) == replicated.num_replicas_in_sync
    assert np.concatenate(first).tolist() == [1, 2, 3, 4]


def test_element_spec_of_per_worker_dataset(
    replicated: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(replicated)
    dataset = Dataset.range(1, 11).batch(4)
    for source in (
        replicated.experimental_distribute_dataset(dataset),
        lambda: replicated.experimental_distribute_dataset(dataset),
        dataset,
    ):
        assert coordinator.create_per_worker_dataset(source).element_spec == dataset.element_spec


def test_dataset_function_makes_no_variable(strategy: zd.ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)

    def dataset_fn() -> Any:
        zd.Variable(0.0)
        return Dataset.range(3)

    made = coordinator.create_per_worker_dataset(dataset_fn)
    message = "ValueError.*dataset function cannot make a Variable"
    with pytest.raises(errors.ClosureInputError, match=message):
        coordinator.schedule(next, (iter(made),)).fetch()
    with pytest.raises(errors.ClosureInputError, match=message):
        coordinator.join()


def test_steps_over_distributed_dataset(
    replicated: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(replicated)
    with replicated.scope():
        v = zd.Variable(np.zeros(1, np.int64), aggregation="only_first_replica")

    def dataset_fn() -> Any:
        return replicated.distribute_datasets_from_function(
            lambda context: Dataset.from_tensors(np.array([2])).repeat()
        )

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))

    def step(iterator: Any) -> Any:
        values = replicated.run(lambda x: x, (next(iterator),))
        v.assign_add(np.asarray(replicated.reduce("MEAN", values, axis=None)).astype(np.int64))

    for total in (10, 20):
        for _ in range(5):
            coordinator.schedule(step, (iterator,))
        coordinator.join()
        assert v.numpy().tolist() == [total]


# -- of each worker --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, ()])
def test_per_worker_variables_are_separate(
    anywhere: zd.ParameterServerStrategy, shape: Any
) -> None:
    coordinator = ClusterCoordinator(anywhere)
    with anywhere.scope():
        v = zd.Variable(lambda: np.int64(0), shape=shape, per_worker_variable=True, name="mine")
        w = zd.Variable(5, per_worker_variable=True)
    assert v.name == "mine"
    assert v.read_all() == [0, 0]
    assert w.read_all() == [5, 5]

    def step(given: Any) -> Any:
        v.assign_add(1)
        assert given is v
        return v.device, zd.coordinator.get_current_worker_index()

    for count in range(1, 5):
        device, index = coordinator.schedule(step, (v,)).fetch()
        assert device == f"/job:worker/replica:0/task:{index}/device:CPU:0"
        coordinator.join()
        assert sum(v.read_all()) == count
    assert not anywhere.placement


def test_returned_per_worker_variable_is_a_value(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(anywhere)
    with anywhere.scope():
        v = zd.Variable(np.arange(3), per_worker_variable=True)
    value, also = coordinator.schedule(lambda: (v.assign_add([1, 1, 1]), {"v": v})).fetch()
    assert type(value) is np.ndarray
    assert value.tolist() == also["v"].tolist() == [1, 2, 3]
    coordinator.join()


def test_per_worker_variable_is_not_trainable(
    strategy: zd.ParameterServerStrategy,
) -> None:
    with strategy.scope(), pytest.raises(ValueError, match="trainable"):
        zd.Variable(0.0, trainable=True, per_worker_variable=True)
    with strategy.scope(), pytest.raises(ValueError, match="initial_value"):
        zd.Variable(per_worker_variable=True)
    with pytest.raises(ValueError, match="needs a strategy"):
        zd.Variable(0.0, per_worker_variable=True)


def test_per_worker_resource_by_capture(strategy: zd.ParameterServerStrategy) -> None:
    table = strategy.per_worker_resource(lambda n: {"one": n}, 1)
    assert ClusterCoordinator(strategy).schedule(lambda key: table[key], ("one",)).fetch() == 1
