"""Optimizers against their formulas, one element at a time; dense and sparse, in place and into
other memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from zmqdist.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer, RMSprop, schedules
from zmqdist.specs import IndexedSlices
from zmqdist.update_rules import PIECE, summed

ALL = [
    SGD(0.1),
    Momentum(0.1, 0.8),
    Momentum(0.1, 0.8, nesterov=True),
    SGD(0.1, 0.8, nesterov=True),
    SGD(schedules.ExponentialDecay(0.1, 5, 0.5), 0.8),
    Adagrad(0.1),
    RMSprop(0.1, 0.8),
    RMSprop(0.1, 0.8, 0.5, centered=True),
    Adam(0.1, 0.8, 0.9),
]


def reference(optimizer: Optimizer, x: float, grads: list[float]) -> float:
    """One element, by the formula that the class tells."""
    a, b, c = getattr(optimizer, "initial_accumulator_value", 0.0), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        scheduled = optimizer.learning_rate
        rate = scheduled if isinstance(scheduled, float) else scheduled(t - 1)
        match optimizer:
            case (
                SGD(momentum=momentum, nesterov=nesterov)
                | Momentum(momentum=momentum, nesterov=nesterov)
            ):
                a = momentum * a - rate * g
                x += momentum * a - rate * g if nesterov else a
            case RMSprop(rho=rho, momentum=momentum, epsilon=epsilon, centered=centered):
                a = rho * a + (1 - rho) * g * g
                b = rho * b + (1 - rho) * g if centered else 0.0
                c = momentum * c + rate * g / math.sqrt(a - b * b + epsilon)
                x -= c
            case Adagrad(epsilon=epsilon):
                a += g * g
                x -= rate * g / math.sqrt(a + epsilon)
            case Adam(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon):
                a = beta_1 * a + (1 - beta_1) * g
                b = beta_2 * b + (1 - beta_2) * g * g
                x -= (
                    rate * math.sqrt(1 - beta_2**t) / (1 - beta_1**t) * a / (math.sqrt(b) + epsilon)
                )
    return x


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
def test_dense_steps_follow_formula(optimizer: Optimizer) -> None:
    rng = np.random.default_rng(1)
    start, grads = rng.normal(size=7), rng.normal(size=(30, 7))
    value = start.copy()
    slots = optimizer.slots(value)
    for step, grad in enumerate(grads, 1):
        optimizer.update(value, grad, slots, step)
    expected = [reference(optimizer, start[i], grads[:, i].tolist()) for i in range(7)]
    np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
def test_sparse_steps_touch_named_rows_only(
    optimizer: Optimizer,
) -> None:
    rng = np.random.default_rng(2)
    start = rng.normal(size=(5, 3))
    value = start.copy()
    slots = optimizer.slots(value)
    grads = [rng.normal(size=(3, 3)) for _ in range(4)]
    for step, grad in enumerate(grads, 1):
        optimizer.update(value, IndexedSlices(grad, np.array([4, 1, 4])), slots, step)
    for column in range(3):
        twice = [grad[0, column] + grad[2, column] for grad in grads]
        once = [grad[1, column] for grad in grads]
        assert value[4, column] == pytest.approx(reference(optimizer, start[4, column], twice))
        assert value[1, column] == pytest.approx(reference(optimizer, start[1, column], once))
    untouched = [0, 2, 3]
    np.testing.assert_array_equal(value[untouched], start[untouched])
    for name, slot in slots.items():
        assert (slot[untouched] == optimizer.slot_values[name]).all()


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
def test_pieces_equal_whole_and_out_spares_value(
    optimizer: Optimizer,
) -> None:
    count = PIECE * 2 + 3
    rng = np.random.default_rng(3)
    start, grad = rng.normal(size=(count,)).astype("f4"), rng.normal(size=(count,)).astype("f4")
    value, out = start.copy(), np.empty_like(start)
    optimizer.update(value, grad, optimizer.slots(value), 1, out=out)
    np.testing.assert_array_equal(value, start)
    optimizer.update(value, grad, optimizer.slots(value), 1)
    np.testing.assert_array_equal(value, out)
    for index in (0, PIECE - 1, PIECE, count - 1):
        assert out[index] == pytest.approx(
            reference(optimizer, float(start[index]), [float(grad[index])]), rel=1e-4
        )


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 2)])
def test_shapes_and_float32_are_kept(shape: tuple[int, ...], optimizer: Optimizer) -> None:
    value = np.ones(shape, "f4")
    slots = optimizer.slots(value)
    optimizer.update(value, np.ones(shape, "f4"), slots, 1)
    assert value.dtype == np.float32
    assert all(slot.dtype == np.float32 and slot.shape == shape for slot in slots.values())
    assert value.size == 0 or (value < 1).all()


@pytest.mark.parametrize("optimizer", ALL, ids=repr)
def test_optimizer_survives_wire(optimizer: Optimizer) -> None:
    rule = Optimizer.from_wire(*optimizer.to_wire())
    assert dataclasses.asdict(rule) == dataclasses.asdict(optimizer)
    assert type(rule) is type(optimizer).__bases__[0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(-1), "learning_rate is -1, wants a number of 0 or more"),
        (lambda: SGD(math.nan), "learning_rate is nan"),
        (lambda: SGD("fast"), "learning_rate is 'fast'"),  # type: ignore[arg-type]
        (lambda: Adam(beta_1=1), "beta_1 is 1, wants a number from 0 to below 1"),
        (lambda: Momentum(nesterov=1), "nesterov is 1, wants True or False"),  # type: ignore[arg-type]
        (lambda: Optimizer.from_wire("Best", {}), "no optimizer 'Best'"),
        (lambda: Optimizer().to_wire(), "is none of SGD, Momentum, Adagrad, RMSprop, Adam"),
        (lambda: type("SGD", (SGD,), {})().to_wire(), "is none of SGD, Momentum"),
        (lambda: Optimizer.from_wire("SGD", {"beta": 1}), "no optimizer 'SGD' with"),
    ],
)
def test_wrong_optimizer_is_refused_at_construction(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_rows_of_same_index_are_summed() -> None:
    indices, rows = summed(IndexedSlices(np.arange(8).reshape(4, 2), np.array([3, 0, 3, 2])))
    assert dict(zip(indices.tolist(), rows.tolist(), strict=True)) == {
        0: [2, 3],
        2: [6, 7],
        3: [4, 6],
    }


RATES = [
    (schedules.ExponentialDecay(0.1, 4, 0.5), {0: 0.1, 2: 0.1 * 0.5**0.5, 8: 0.025}),
    (schedules.ExponentialDecay(0.1, 4, 0.5, staircase=True), {3: 0.1, 4: 0.05, 7: 0.05}),
    (schedules.InverseTimeDecay(0.1, 4, 1.0), {0: 0.1, 4: 0.05, 2: 0.1 / 1.5}),
    (schedules.InverseTimeDecay(0.1, 4, 1.0, staircase=True), {3: 0.1, 4: 0.05}),
    (schedules.PolynomialDecay(0.1, 4, 0.02, 2.0), {0: 0.1, 2: 0.04, 4: 0.02, 9: 0.02}),
    (schedules.PolynomialDecay(0.1, 4, 0.0, cycle=True), {4: 0.0, 6: 0.025, 8: 0.0}),
    (schedules.PiecewiseConstantDecay([1, 3], [0.3, 0.2, 0.1]), {1: 0.3, 2: 0.2, 3: 0.2, 4: 0.1}),
    (schedules.CosineDecay(0.1, 4, 0.5), {0: 0.1, 2: 0.075, 4: 0.05, 9: 0.05}),
    (schedules.CosineDecay(0.0, 4, 0.0, 0.2, 2), {0: 0.0, 1: 0.1, 2: 0.2, 4: 0.1, 6: 0.0}),
]


@pytest.mark.parametrize(("schedule", "rates"), RATES)
def test_schedule_gives_rate_of_step(
    schedule: schedules.LearningRateSchedule, rates: dict[int, float]
) -> None:
    back = schedules.LearningRateSchedule.from_wire(*schedule.to_wire())
    assert back == schedule
    assert {step: back(step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: schedules.ExponentialDecay(-1, 2, 3), "initial_learning_rate is -1, wants a fin"),
        (lambda: schedules.ExponentialDecay(1, 0, 3), "decay_steps is 0, wants a number above 0"),
        (lambda: schedules.CosineDecay(1, 2, "x"), "alpha is 'x', wants a finite"),  # type: ignore[arg-type]
        (lambda: schedules.ExponentialDecay(1, 2, 3, 1), "staircase is 1, wants True or False"),  # type: ignore[arg-type]
        (lambda: schedules.PiecewiseConstantDecay([2, 1], [1, 1, 1]), "list of increasing num"),
        (lambda: schedules.PiecewiseConstantDecay([2], [1]), "1 boundaries need one value more"),
        (lambda: schedules.PiecewiseConstantDecay([2], 1), "values is 1, wants a list"),  # type: ignore[arg-type]
        (lambda: schedules.LearningRateSchedule.from_wire("X", []), "no schedule 'X' with 0"),
        (lambda: SGD(schedules.LearningRateSchedule()).to_wire(), "LearningRateSchedule is none"),
    ],
)
def test_wrong_schedule_is_refused_at_construction(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
