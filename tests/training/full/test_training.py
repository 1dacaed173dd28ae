"""Training until a model has learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.optimizers import SGD

pytestmark = pytest.mark.shares_cluster

Dataset = zd.data.Dataset


@pytest.mark.parametrize("cut", [False, True])
def test_model_learns(made: Any, processes: zd.local_cluster, cut: bool) -> None:
    strategy = made(
        (lambda shape, dtype: [2] + [1] * (len(shape) - 1)) if cut else None, cluster=processes
    )
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
        coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(dataset_fn)
        )
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
