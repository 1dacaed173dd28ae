"""What a ps tells of its variables for the facts of a dispatcher."""

from __future__ import annotations

import time
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.variables.conftest import SESSION, Make
from tests.variables.test_steps import push
from zmqdist.limits import PS_LOOP_BYTES_MAX, VARIABLES_SHOWN_MAX
from zmqdist.messages import ServerFacts
from zmqdist.optimizers import Adam
from zmqdist.tasks.server import Server
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref

WAIT_S = 0.05


def facts(client: PsClient) -> ServerFacts:
    return msgspec.msgpack.decode(client.facts(inf).get_value(), type=ServerFacts)


def add(client: PsClient, ref: Ref, value: Any) -> None:
    client.update([(ref, c.add(ref, value))]).get_value()


def test_variable_has_its_figures(ps: Server, client: PsClient, make: Make) -> None:
    ref = make(np.zeros((2, 3)), "f8", "weights")
    for _ in range(3):
        add(client, ref, np.ones((2, 3)))
    told = facts(client)
    (row,) = told.variables
    assert (told.name, told.variables_more) == ("ps:0", 0)
    assert (row.session, row.name, row.shape, row.dtype) == (SESSION, "weights", (2, 3), "float64")
    assert (row.bytes, row.updates, row.waits_s) == (48, 3, 0.0)


def test_bytes_of_variable_include_its_slots(client: PsClient, make: Make) -> None:
    ref = make(np.zeros(100))
    client.update([(ref, c.apply(ref, Adam(), np.ones(100, "f4")))]).get_value()
    assert facts(client).variables[0].bytes == 3 * 400


def test_methods_of_ps_have_figures(client: PsClient, make: Make) -> None:
    ref = make([10])
    for _ in range(5):
        add(client, ref, [1])
    rows = {row.method: row for row in facts(client).methods}
    update = rows["zmqdist.ps.update"]
    assert (update.count, update.failed, update.in_flight) == (5, 0, 0)
    assert sum(count for _, count in update.buckets) == 5
    assert 0 < update.max_s <= update.sum_s < 10


def test_first_update_of_step_waits_for_the_last(client: PsClient, make: Make) -> None:
    ref = make([10])
    sent_at = time.monotonic()
    first = push(client, ref, [1], 0)
    client.read([ref]).get_value()  # the ps has it
    began = time.monotonic()
    while time.monotonic() < began + WAIT_S:
        assert facts(client).variables[0].waits_s == 0
    push(client, ref, [3], 0).get_value()
    first.get_value()
    assert WAIT_S <= facts(client).variables[0].waits_s <= time.monotonic() - sent_at


def test_large_update_waits_for_a_thread(client: PsClient, make: Make) -> None:
    ref = make(np.zeros(PS_LOOP_BYTES_MAX, "f4"))
    add(client, ref, np.ones(PS_LOOP_BYTES_MAX, "f4"))
    assert 0 < facts(client).variables[0].waits_s < 10


def test_largest_variables_are_shown(client: PsClient, make: Make) -> None:
    for _ in range(VARIABLES_SHOWN_MAX + 2):
        make([0])
    make(np.zeros(1000), name="large")
    told = facts(client)
    assert (len(told.variables), told.variables_more) == (VARIABLES_SHOWN_MAX, 3)
    assert told.variables[0].name == "large"


@pytest.mark.parametrize("action", ["drop", "close"])
def test_variable_that_is_gone_is_not_shown(client: PsClient, make: Make, action: str) -> None:
    ref = make([10])
    (client.drop([ref]) if action == "drop" else client.close_session(SESSION)).get_value()
    assert facts(client).variables == []
