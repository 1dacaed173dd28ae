"""Every wait of a task, and of a session with it, takes the same time-outs, and refuses the same
ones."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import count
from math import inf
from typing import Any

import numpy as np
import pytest

from tests.tasks.helpers import cluster
from tests.time_outs import LONG, OVER, REFUSED, check_long, check_over, check_refused
from zmqdist.errors import InvalidArgumentError
from zmqdist.tasks.server import Server
from zmqdist.tasks.session import Session

Made = Callable[..., Server]
Servers = list[Server]


@pytest.fixture
def pair(made: Made) -> Servers:
    return cluster(made, 2)


WAITS: dict[str, tuple[Callable[[Server, str, Any], Any], Callable[[Server, str], Any]]] = {
    "barrier": (
        lambda server, name, timeout: server.barrier(name, timeout),
        lambda other, name: other.barrier(name),
    ),
    "recv": (
        lambda server, name, timeout: server.recv("worker:1", name, timeout),
        lambda other, name: other.send(1, "worker:0", name).get_value(),
    ),
    "get of a key": (
        lambda server, name, timeout: server.coordination.kv.get(name, timeout),
        lambda other, name: other.coordination.kv.set(name, 1),
    ),
}
"""The wait of worker:0, and what worker:1 does to end it."""


@pytest.mark.parametrize("wait", WAITS)
def test_waits_take_equal_time_outs(pair: Servers, wait: str) -> None:
    waits, ends = WAITS[wait]
    server, other = pair
    names = map("name{}".format, count())
    for timeout in REFUSED:
        check_refused(lambda timeout: waits(server, next(names), timeout), timeout)
    for timeout in OVER:
        check_over(lambda timeout: waits(server, next(names), timeout), timeout)
    for timeout in LONG:
        name = next(names)
        check_long(
            lambda timeout, name=name: waits(server, name, timeout),
            timeout,
            lambda name=name: ends(other, name),
        )  # type: ignore[misc]


ALONE: dict[str, Callable[[Server, Any], Any]] = {
    "send": lambda server, timeout: server.send(1, "worker:0", "tag", timeout).get_value(),
    "all_reduce": lambda server, timeout: server.all_reduce(1.0, timeout=timeout),
    "all_gather": lambda server, timeout: server.all_gather(np.ones(1), timeout=timeout),
    "broadcast": lambda server, timeout: server.broadcast(1.0, timeout=timeout),
    "all_to_all": lambda server, timeout: server.all_to_all(np.ones(1), timeout=timeout),
    "broadcast_object": lambda server, timeout: server.broadcast_object("x", timeout=timeout),
    "all_gather_object": lambda server, timeout: server.all_gather_object("x", timeout=timeout),
}


@pytest.mark.parametrize("wait", ALONE)
def test_local_waits_take_equal_time_outs(made: Made, wait: str) -> None:
    (server,) = cluster(made, 1)
    for timeout in REFUSED:
        check_refused(lambda timeout: ALONE[wait](server, timeout), timeout)
    for timeout in LONG:
        ALONE[wait](server, timeout)


def test_join_takes_equal_time_outs(made: Made) -> None:
    (server,) = cluster(made, 1)
    for timeout in REFUSED:
        check_refused(server.join, timeout)
    for timeout in OVER:
        check_over(server.join, timeout)
    for timeout in LONG:
        check_long(server.join, timeout, server.stop)


SESSION: dict[str, Callable[[Session, Any], Any]] = {
    "run": lambda session, timeout_in_ms: session.run(int, timeout_in_ms=timeout_in_ms),
    "assign": lambda session, timeout_in_ms: session.assign("v", 1, timeout_in_ms=timeout_in_ms),
    "variables": lambda session, timeout_in_ms: session.variables(timeout_in_ms=timeout_in_ms),
    "list_tasks": lambda session, timeout_in_ms: session.list_tasks(timeout_in_ms),
}


@pytest.mark.parametrize("operation", SESSION)
def test_session_milliseconds_are_numbers(made: Made, operation: str) -> None:
    (server,) = cluster(made, 1)
    with Session(server) as session:
        for timeout in [*REFUSED, None]:
            with pytest.raises(
                InvalidArgumentError,
                match="timeout_in_ms: a time-out is a number of milliseconds, 0 for none",
            ):
                SESSION[operation](session, timeout)
        for timeout in [
            0,
            -1,
            -inf,
            *LONG[1:],
            np.float32(60_000),
            Fraction(10**6, 3),
            Decimal("60000.5"),
        ]:
            SESSION[operation](session, timeout)
