"""Optimizers as Keras programs use them: apply_gradients, iterations, schedules, constraints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.optimizers import SGD, Adam, schedules

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them


def test_iterations_count_steps_of_all_workers(made: Any) -> None:
    strategy = made()
    coordinator = ClusterCoordinator(strategy)
    optimizer = SGD(1.0)
    with strategy.scope():
        v = zd.Variable(0.0)
        assert optimizer.iterations.task is not None
    for _ in range(6):
        coordinator.schedule(lambda: optimizer.apply_gradients([(-1.0, v), (None, v)]))
    coordinator.join()
    assert (int(optimizer.iterations), float(v)) == (6, 6.0)


def test_iterations_count_a_synchronous_step_once(made: Any) -> None:
    strategy = made(aggregate="sync", workers_per_step=2)
    coordinator = ClusterCoordinator(strategy)
    optimizer = SGD(1.0)
    with strategy.scope():
        v = zd.Variable(0.0)
        assert int(optimizer.iterations) == 0

    def train(worker: int, steps: int) -> None:
        for step in range(steps):
            optimizer.apply_gradients([(-1.0 - 2 * worker, v)], step=step)

    for worker in range(2):
        coordinator.schedule(train, (worker, 3))
    coordinator.join()
    assert (int(optimizer.iterations), float(v)) == (3, 6.0)


def test_scheduled_function_makes_no_iterations(made: Any) -> None:
    coordinator = ClusterCoordinator(made())
    optimizer = SGD(1.0)
    coordinator.schedule(lambda: int(optimizer.iterations))
    with pytest.raises(RuntimeError, match="a Variable cannot be made in a scheduled function"):
        coordinator.join()


def test_schedule_counts_steps_at_the_server(made: Any) -> None:
    strategy = made()
    with strategy.scope():
        v, w = zd.Variable(0.0), zd.Variable(0.0)
    optimizer = SGD(schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25]))
    for _ in range(3):
        optimizer.apply_gradients([(-1.0, v)])
    optimizer.apply_gradients([(-1.0, v), (-1.0, w)])
    assert (float(v), float(w)) == (2.0, 1.0)


def test_momentum_may_begin_later() -> None:
    v = zd.Variable(0.0)
    for optimizer in (SGD(1.0), SGD(1.0, momentum=0.5), SGD(1.0, momentum=0.5), SGD(1.0)):
        optimizer.apply_gradients([(-1.0, v)])
    assert float(v) == 1 + 1 + 1.5 + 1


@pytest.mark.parametrize("pairs", [[], [(None, "v")]])
def test_step_without_gradients_is_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match="grads_and_vars: no gradients"):
        SGD().apply_gradients(pairs)


def test_checkpoint_holds_iterations(tmp_path: Path) -> None:
    optimizer, v = SGD(1.0), zd.Variable(0.0)
    checkpoint = zd.checkpoint.Checkpoint(optimizer=optimizer, model=[v])
    checkpoint.save(tmp_path / "before")
    optimizer.apply_gradients([(1.0, v)])
    checkpoint.restore(checkpoint.save(tmp_path / "after")).assert_consumed()
    other = SGD(1.0)
    zd.checkpoint.Checkpoint(optimizer=other).restore(tmp_path / "after")
    assert (int(other.iterations), int(optimizer.iterations)) == (1, 1)
    checkpoint.restore(tmp_path / "before")
    assert (int(optimizer.iterations), float(v)) == (0, 0.0)


@pytest.mark.parametrize("apply", ["apply", "strategy", "apply_gradients"])
def test_constraint_holds_after_each_step(made: Any, apply: str) -> None:
    strategy = made(lambda shape, dtype: [2] + [1] * (len(shape) - 1))
    with strategy.scope():
        table = zd.Variable(np.full((4, 2), 0.5), constraint=lambda value: np.clip(value, 0, 1))
        scalar = zd.Variable(0.5, constraint=np.abs)
    local = zd.Variable(0.5, constraint=np.abs)
    optimizer, rows = Adam(10.0), zd.IndexedSlices(np.full((1, 2), -1.0), np.array([3]))
    pairs = [(rows, table), (1.0, scalar), (1.0, local)]
    for _ in range(2):
        if apply == "strategy":
            strategy.apply(optimizer, pairs)
        elif apply == "apply_gradients":
            optimizer.apply_gradients(pairs)
        else:
            for grad, variable in pairs:
                variable.apply(optimizer, grad)
    assert table.numpy().tolist() == [[0.5, 0.5]] * 3 + [[1, 1]]
    assert float(scalar) == float(local) == pytest.approx(0.5, abs=1e-3)


def test_constraint_travels_with_the_handle(made: Any) -> None:
    strategy = made()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(0.0, constraint=lambda value: np.minimum(value, 1))
    coordinator.schedule(lambda: v.apply(SGD(1.0), -5.0))
    coordinator.join()
    assert float(v) == 1.0


def test_function_of_program_is_not_constrained() -> None:
    v = zd.Variable(0.0, constraint=np.abs)
    v.apply(lambda value, grad, slots, step: value - grad, 1.0)
    assert float(v) == -1.0


def test_arguments_of_variable_have_the_order_of_tensorflow() -> None:
    v = zd.Variable(1, True, True, "/cpu:0", "w", None, np.float32, None, np.abs, "auto", "sum", ())
    assert (v.name, v.dtype, v.trainable, v.aggregation) == ("w", np.float32, True, "sum")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"validate_shape": False}, "validate_shape=False: the shape of a variable never changes"),
        ({"variable_def": 1}, "variable_def describes a variable of a graph"),
    ],
)
def test_argument_of_graphs_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zd.Variable(1.0, **wrong)
