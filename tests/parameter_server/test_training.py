"""Whole training programs: per-worker datasets, replicas, variables on servers, metrics that workers update."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.optimizers import SGD

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
def test_distributed_datasets_in_a_dataset_function_and_given_directly(
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


def test_the_element_spec_of_a_per_worker_dataset_is_that_of_the_dataset(
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


def test_a_dataset_function_cannot_make_variables(strategy: zd.ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)

    def dataset_fn() -> Any:
        zd.Variable(0.0)
        return Dataset.range(3)

    made = coordinator.create_per_worker_dataset(dataset_fn)
    with pytest.raises(ValueError, match="dataset function cannot make a Variable"):
        iter(made)._values[0].get()


def test_steps_over_a_distributed_dataset_reduce_and_add(replicated: zd.ParameterServerStrategy) -> None:
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


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_learns(made: Any, processes: zd.local_cluster, cut: bool) -> None:
    strategy = made((lambda shape, dtype: [2] + [1] * (len(shape) - 1)) if cut else None, cluster=processes)
    coordinator = ClusterCoordinator(strategy)
    truth = np.array([[1.0], [-2.0], [0.5], [3.0]])
    with strategy.scope():
        w = zd.Variable(np.zeros((4, 1)), name="w")
        steps, loss_sum = zd.Variable(0, name="steps"), zd.Variable(0.0, name="loss")

    def dataset_fn(context: Any) -> Any:
        x = np.random.default_rng(7).normal(size=(64, 4))
        data = Dataset.from_tensor_slices({"x": x, "y": x @ truth})
        return data.shuffle(64).repeat().batch(context.get_per_replica_batch_size(16))

    iterator = iter(
        coordinator.create_per_worker_dataset(lambda: strategy.distribute_datasets_from_function(dataset_fn))
    )

    def step(iterator: Any) -> Any:
        def replica(batch: Any) -> Any:
            error = batch["x"] @ w.numpy() - batch["y"]
            strategy.apply(SGD(0.2), [(2 * batch["x"].T @ error / len(error), w)])
            return np.mean(error**2)

        loss = strategy.reduce("MEAN", strategy.run(replica, (next(iterator),)), axis=None)
        steps.assign_add(1)
        loss_sum.assign_add(loss)
        return float(loss)

    losses = []
    for _ in range(3):
        loss_sum.assign(0.0)
        results = [coordinator.schedule(step, (iterator,)) for _ in range(10)]
        coordinator.join()
        losses.append(sum(coordinator.fetch(results)))
        assert loss_sum.numpy() == pytest.approx(losses[-1])
    assert steps.numpy() == 30
    assert losses[2] < losses[0] / 100
    assert w.numpy() == pytest.approx(truth, abs=0.1)


# -- of each worker ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, ()])
def test_each_worker_has_a_variable_of_its_own(anywhere: zd.ParameterServerStrategy, shape: Any) -> None:
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
    assert anywhere.extended._variable_count == 0


def test_a_variable_of_each_worker_is_not_trainable_and_wants_a_strategy(strategy: zd.ParameterServerStrategy) -> None:
    with strategy.scope(), pytest.raises(ValueError, match="trainable"):
        zd.Variable(0.0, trainable=True, per_worker_variable=True)
    with strategy.scope(), pytest.raises(ValueError, match="initial_value"):
        zd.Variable(per_worker_variable=True)
    with pytest.raises(ValueError, match="needs a strategy"):
        zd.Variable(0.0, per_worker_variable=True)


def test_a_resource_of_each_worker_is_used_by_capture(strategy: zd.ParameterServerStrategy) -> None:
    table = strategy.per_worker_resource(lambda n: {"one": n}, 1)
    assert ClusterCoordinator(strategy).schedule(lambda key: table[key], ("one",)).fetch() == 1
