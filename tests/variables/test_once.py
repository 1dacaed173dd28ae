"""Updates with a key, and what of them comes back with a variable that was lost: a new session
stands for the server's next life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.variables.conftest import PROGRAM, SESSION, Make
from zmqdist.errors import InvalidArgumentError
from zmqdist.optimizers import SGD
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref

LIFE = SESSION + 1


def back(client: PsClient, refs: list[Ref], moment: list[Any]) -> list[Ref]:
    """The variables made anew from what `saved` gave."""
    client.open(PROGRAM, LIFE)
    again = [replace(ref, session=LIFE) for ref in refs]
    for ref, (_, value, slots, once) in zip(again, moment, strict=True):
        client.create(ref, value, (1000, slots, once)).get_value()
    return again


def saved(client: PsClient, refs: list[Ref]) -> list[Any]:
    moment: list[Any] = client.saved(refs).get_value()
    return moment


def values(client: PsClient, refs: list[Ref]) -> list[Any]:
    return [value.tolist() for _, value in client.read(refs).get_value()]


@pytest.mark.parametrize("copies", [1, 1 << 18])
def test_saved_update_is_skipped(copies: int, client: PsClient, make: Make) -> None:
    ref = make(np.zeros(copies))
    change = c.add(ref, np.ones(copies))
    assert client.update([(ref, change)], key="a").get_value() == [(2, True, None)]
    (again,) = back(client, [ref], saved(client, [ref]))
    assert client.update([(again, change)], key="a").get_value() == [(2, True, None)]
    ((version, value),) = client.read([again]).get_value()
    assert (version, (value == 1).all()) == (1000, True)
    assert client.update([(again, change)], key="b").get_value() == [(1001, True, None)]


def test_update_reaches_the_variable_without_it(client: PsClient, make: Make) -> None:
    refs = [make([0]), make([0])]
    before = saved(client, refs[1:])
    changes = [(ref, c.add(ref, [1])) for ref in refs]
    client.update(changes, key="a").get_value()
    again = back(client, refs, saved(client, refs[:1]) + before)
    message = client.update([(ref, c.add(ref, [1])) for ref in again], key="a").get_value()
    assert message == [(2, True, None), (1001, True, None)]
    assert values(client, again) == [[1], [1]]


def test_record_survives_a_second_loss(client: PsClient, make: Make) -> None:
    ref = make([0])
    client.update([(ref, c.add(ref, [1]))], key="a").get_value()
    again = back(client, [ref], saved(client, [ref]))
    assert saved(client, again)[0][3] == saved(client, [ref])[0][3] != b""


def test_failed_swap_is_not_repeated(client: PsClient, make: Make) -> None:
    ref = make([0])
    assert not client.update([(ref, c.swap(ref, [5], version=7))], key="a").get_value()[0].applied
    (again,) = back(client, [ref], saved(client, [ref]))
    assert client.update([(again, c.swap(again, [5], version=1000))], key="a").get_value() == [
        (1, False, None)
    ]


def test_saved_gradient_counts_once(client: PsClient, make: Make) -> None:
    def push(ref: Ref, gradient: int, step: int, key: str) -> Any:
        return client.update(
            [(ref, c.apply(ref, SGD(1.0), [gradient]))], step=step, workers_per_step=2, key=key
        )

    ref = make([10])
    for started in [push(ref, 1, 0, "a"), push(ref, 3, 0, "b")]:
        assert started.get_value() == [(2, True, None)]
    (again,) = back(client, [ref], saved(client, [ref]))
    assert push(again, 1, 0, "a").get_value() == [(2, True, None)]
    assert push(again, 100, 0, "c").get_value() == [(1000, False, None)]  # the step is over
    assert values(client, [again]) == [[8]]


def test_variable_without_keys_saves_nothing(client: PsClient, make: Make) -> None:
    ref = make([0])
    client.update([(ref, c.add(ref, [1]))]).get_value()
    assert saved(client, [ref])[0][3] == b""


def test_damaged_record_is_refused(client: PsClient, make: Make) -> None:
    ref = make([0])
    client.open(PROGRAM, LIFE)
    with pytest.raises(InvalidArgumentError, match="saved list of a variable's updates is damaged"):
        client.create(replace(ref, session=LIFE), np.zeros(1, "f4"), (2, {}, b"{")).get_value()
