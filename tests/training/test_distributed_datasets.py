"""Datasets for the replicas of a worker: how elements are dealt to them, and where they may be
iterated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.parameter_server import InputContext, PerReplica

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them

Dataset = zd.data.Dataset


@pytest.fixture(params=[1, 2])
def replicated(request: pytest.FixtureRequest, made: Any) -> zd.ParameterServerStrategy:
    """A strategy with one or two replicas on a worker."""
    strategy: zd.ParameterServerStrategy = made(replicas_per_worker=request.param)
    return strategy


def _on_worker(strategy: zd.ParameterServerStrategy, fn: Any, *args: Any) -> Any:
    return ClusterCoordinator(strategy).schedule(fn, args).fetch()


def test_coordinator_cannot_iterate(
    strategy: zd.ParameterServerStrategy,
) -> None:
    dataset = Dataset.range(3)
    for distributed in (
        strategy.experimental_distribute_dataset(dataset),
        strategy.distribute_datasets_from_function(lambda context: dataset),
        strategy.experimental_distribute_datasets_from_function(lambda context: dataset),
    ):
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iter(distributed)


def test_batch_is_split_between_replicas(replicated: zd.ParameterServerStrategy) -> None:
    distributed = replicated.experimental_distribute_dataset(Dataset.range(1, 11).batch(4))

    def first_and_last(given: Any) -> Any:
        made_here = replicated.experimental_distribute_dataset(Dataset.range(1, 11).batch(4))
        batches = [replicated.experimental_local_results(batch) for batch in given]
        here = [replicated.experimental_local_results(batch) for batch in made_here]
        return batches[0], batches[-1], len(batches), len(here)

    first, last, count, here = _on_worker(replicated, first_and_last, distributed)
    assert np.concatenate(first).tolist() == [1, 2, 3, 4]
    assert np.concatenate(last).tolist() == [9, 10]
    assert len(first) == replicated.num_replicas_in_sync
    assert count == here == 3


def test_replicas_take_elements_in_turn(
    replicated: zd.ParameterServerStrategy,
) -> None:
    count = replicated.num_replicas_in_sync

    def dataset_fn(context: InputContext) -> Any:
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        return Dataset.range(6).batch(context.get_per_replica_batch_size(2))

    def elements() -> Any:
        distributed = replicated.distribute_datasets_from_function(dataset_fn)
        return [replicated.experimental_local_results(element) for element in distributed]

    found = _on_worker(replicated, elements)
    assert len(found[0]) == count
    assert [np.concatenate(element).tolist() for element in found] == [[0, 1], [2, 3], [4, 5]]


def test_replicas_without_element_get_no_rows(made: Any) -> None:
    strategy = made(replicas_per_worker=2)

    def elements() -> Any:
        distributed = strategy.distribute_datasets_from_function(
            lambda context: Dataset.from_tensor_slices({"x": np.arange(6.0).reshape(3, 2)})
        )
        return [strategy.experimental_local_results(element) for element in distributed]

    (one, two), (three, nothing) = _on_worker(strategy, elements)
    assert [each["x"].tolist() for each in (one, two, three)] == [
        [0.0, 1.0],
        [2.0, 3.0],
        [4.0, 5.0],
    ]
    assert nothing["x"].shape == (0,)


def test_replica_steps_take_parts_of_a_batch(
    replicated: zd.ParameterServerStrategy,
) -> None:
    with replicated.scope():
        v = zd.Variable(np.zeros(1, np.int64), aggregation="sum")

    def step() -> Any:
        iterator = iter(replicated.experimental_distribute_dataset(Dataset.range(8).batch(4)))
        total = 0
        for batch in iterator:
            parts = replicated.run(
                lambda part: v.assign_add(part.sum(keepdims=True)).dtype and part.sum(), (batch,)
            )
            total += replicated.reduce("SUM", parts, axis=None)
        return total

    assert _on_worker(replicated, step) == 28
    assert v.numpy().tolist() == [28]


def test_element_spec_is_that_of_the_dataset(replicated: zd.ParameterServerStrategy) -> None:
    dataset = Dataset.range(8).batch(4)
    assert replicated.experimental_distribute_dataset(dataset).element_spec == dataset.element_spec
    assert (
        replicated.distribute_datasets_from_function(lambda context: dataset).element_spec
        == dataset.element_spec
    )


def test_components_of_none_are_none_for_each_replica(
    replicated: zd.ParameterServerStrategy,
) -> None:
    def elements() -> Any:
        pairs = Dataset.range(3).map(lambda x: (x, None)).batch(2)
        batches = replicated.experimental_distribute_dataset(pairs)
        parts = replicated.distribute_datasets_from_function(lambda _: pairs)
        step = lambda batch: replicated.run(lambda x, y: y is None, args=batch)
        return [
            replicated.experimental_local_results(step(batch))
            for source in (batches, parts)
            for batch in source
        ]

    assert all(map(all, _on_worker(replicated, elements)))


def test_global_batch_size_must_divide() -> None:
    context = InputContext(num_replicas_in_sync=2)
    assert context.get_per_replica_batch_size(8) == 4
    with pytest.raises(ValueError, match="7 cannot be divided by 2"):
        context.get_per_replica_batch_size(7)


def test_scalars_cannot_be_split(made: Any) -> None:
    strategy = made(replicas_per_worker=2)
    with pytest.raises(ValueError, match="batch the dataset"):
        _on_worker(
            strategy, lambda: list(strategy.experimental_distribute_dataset(Dataset.range(3)))
        )
    with pytest.raises(ValueError, match="batch"):
        ClusterCoordinator(strategy).join()


def test_values_from_a_function_per_replica(
    replicated: zd.ParameterServerStrategy,
) -> None:
    values = replicated.experimental_distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    count = replicated.num_replicas_in_sync
    assert replicated.experimental_local_results(values) == tuple(
        (number, count) for number in range(count)
    )
    assert isinstance(values[0], PerReplica) == (count > 1)
