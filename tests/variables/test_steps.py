"""Synchronous training at a ps: the mean of k gradients, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers import internal_client_with
from tests.variables.conftest import Make
from zmqdist.errors import (
    InvalidArgumentError,
    PSUnavailableError,
    ResourceExhaustedError,
    UnknownError,
)
from zmqdist.limits import PS_STEPS_OPEN_MAX
from zmqdist.optimizers import SGD
from zmqdist.specs import IndexedSlices
from zmqdist.variables import client as c
from zmqdist.variables.client import PsCall, PsClient, Ref


def push(
    client: PsClient, refs: Ref | list[Ref], gradient: Any, step: int, k: int = 2, **how: Any
) -> PsCall:
    message = [
        (ref, c.apply(ref, SGD(1.0), gradient))
        for ref in (refs if isinstance(refs, list) else [refs])
    ]
    return client.update(message, step=step, workers_per_step=k, **how)


def value_of(client: PsClient, ref: Ref) -> list[Any]:
    value: list[Any] = client.read([ref]).get_value()[0][1].tolist()
    return value


@pytest.mark.parametrize("copies", [1, 1 << 18])
def test_last_gradient_applies_the_mean(copies: int, client: PsClient, make: Make) -> None:
    ref = make(np.full(copies, 10))
    first = push(client, ref, np.full(copies, 1), 0)
    assert client.read([ref]).get_value()[0][0] == 1
    assert not first.done()
    second = push(client, ref, np.full(copies, 3), 0, want=True)
    assert first.get_value() == [(2, True, None)]
    assert (second.get_value()[0].value == 8).all()


def test_mean_of_integers_rounds_to_zero(client: PsClient, make: Make) -> None:
    ref = make([0], "i8")
    for gradient in (2, 5):
        started = client.update([(ref, c.add(ref, [gradient]))], step=0, workers_per_step=2)
    started.get_value()
    assert value_of(client, ref) == [3]


def test_late_gradient_is_dropped(client: PsClient, make: Make) -> None:
    ref = make([10])
    for gradient in (1, 3):
        started = push(client, ref, [gradient], 0)
    assert started.get_value()[0].applied
    assert push(client, ref, [100], 0).get_value() == [(2, False, None)]
    assert value_of(client, ref) == [8]


def test_gradient_of_overtaken_step_is_late(client: PsClient, make: Make) -> None:
    ref = make([10])
    behind = push(client, ref, [100], 0)
    ahead = [push(client, ref, [1], 1) for _ in range(2)]
    assert behind.get_value() == [(2, False, None)]
    assert [each.get_value() for each in ahead] == [[(2, True, None)]] * 2
    assert value_of(client, ref) == [9]


def test_sparse_mean_counts_missing_rows_as_zero(client: PsClient, make: Make) -> None:
    ref = make([[10, 10], [10, 10], [10, 10]])
    gradients = [
        IndexedSlices(np.array([[2, 2], [2, 2]]), np.array([0, 0])),
        IndexedSlices(np.array([[4, 4], [2, 2]]), np.array([1, 0])),
    ]
    for started in [push(client, ref, gradient, 0) for gradient in gradients]:
        started.get_value()
    assert value_of(client, ref) == [[7, 7], [8, 8], [10, 10]]


def test_update_waits_for_all_its_variables(client: PsClient, make: Make) -> None:
    first, second = make([10]), make([20])
    both = push(client, [first, second], [2], 0)
    push(client, first, [4], 0).get_value()
    assert value_of(client, second) == [20]
    assert not both.done()
    push(client, second, [6], 0).get_value()
    assert both.get_value() == [(2, True, None), (2, True, None)]
    assert (value_of(client, first), value_of(client, second)) == ([7], [16])


def test_function_gets_the_mean(client: PsClient, make: Make) -> None:
    def take(value: Any, gradient: Any, slots: dict[str, Any], step: int) -> Any:
        if gradient[0] == 0:
            raise ValueError("no slope")
        return value - gradient

    ref = make([10])
    message = [
        client.update([(ref, c.apply(ref, take, [g]))], step=0, workers_per_step=2) for g in (1, 3)
    ]
    assert [each.get_value()[0].version for each in message] == [2, 2]
    message = [
        client.update([(ref, c.apply(ref, take, [g]))], step=1, workers_per_step=2) for g in (-1, 1)
    ]
    for each in message:
        with pytest.raises(UnknownError, match="no slope"):
            each.get_value()
    assert value_of(client, ref) == [8]


def test_unfit_gradient_counts_for_nothing(client: PsClient, make: Make) -> None:
    ref = make([[10]])
    waiting = push(client, ref, [[2]], 0)
    wrong: list[tuple[c.Change, int, int, str]] = [
        (c.assign(ref, [[1]]), 0, 2, "cannot be part of a synchronous step"),
        (c.apply(ref, SGD(1.0), [[1]]), 0, 3, "waits for 2 gradients, and this request says 3"),
        (
            c.apply(ref, SGD(1.0), IndexedSlices([[1]], [0])),
            0,
            2,
            "dense gradients and sparse gradients",
        ),
        (c.apply(ref, SGD(1.0), IndexedSlices([[1]], [5])), 0, 2, "index 5 is out of range"),
    ]
    for change, step, k, text in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            client.update([(ref, change)], step=step, workers_per_step=k).get_value()
    push(client, ref, [[4]], 0).get_value()
    assert waiting.get_value() == [(2, True, None)]
    assert value_of(client, ref) == [[7]]


def test_open_steps_are_bounded(client: PsClient, make: Make) -> None:
    ref = make([10])
    waiting = [push(client, ref, [1], step) for step in range(PS_STEPS_OPEN_MAX)]
    with pytest.raises(ResourceExhaustedError, match="wait for gradients already"):
        push(client, ref, [1], PS_STEPS_OPEN_MAX).get_value()
    client.drop([ref]).get_value()
    for each in waiting:
        with pytest.raises(PSUnavailableError, match="was dropped"):
            each.get_value()


def test_keyed_gradient_counts_once(client: PsClient, make: Make) -> None:
    ref = make([10])
    again = [push(client, ref, [2], 0, key="worker 0, step 0") for _ in range(2)]
    push(client, ref, [4], 0).get_value()
    assert [each.get_value() for each in again] == [[(2, True, None)]] * 2
    assert value_of(client, ref) == [7]


def test_step_leaves_gradients_unchanged(
    client: PsClient, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sent one may have to ask again: it keeps the memory, which is shared."""
    ref = make(np.zeros(1 << 18))
    client.read([ref]).get_value()  # the ps has shown that it can open shared memory
    sent: list[Any] = []
    packed = c.internal_client.packed

    def seen(*args: Any, **how: Any) -> Any:
        body, sources = packed(*args, **how)
        sent.extend(sources)
        return body, sources

    monkeypatch.setattr(c, "internal_client", internal_client_with(packed=seen))
    both = [push(client, ref, np.full(1 << 18, gradient), 0) for gradient in (1, 3)]
    assert [each.get_value()[0].applied for each in both] == [True, True]
    assert [set(source.array().view("f4").tolist()) for source in sent] == [{1.0}, {3.0}]


def test_mean_of_scalars(client: PsClient, make: Make) -> None:
    ref = make(10)
    both = [push(client, ref, gradient, 0) for gradient in (1, 3)]
    assert [each.get_value()[0].applied for each in both] == [True, True]
    assert value_of(client, ref) == 8
