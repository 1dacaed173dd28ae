"""How long does it take to start and stop the servers of a cluster in one process, and to read a
variable whose parts are on many servers?

These are the two benchmarks in TensorFlow's tests of its servers. In the first, a worker and ten ps
are made and stopped, fifty times. In the second, a session reads a variable that has a thousand
parts on a hundred ps, and joins the parts. Each figure is the median.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

import zmqdist as zd
from benchmarks.measuring import Figure, Plan, Question

PARTS = 1000
SERVERS = 100
FLOATS = (1, 512, 32_768, 131_072)


def measure(plan: Plan) -> list[Figure]:
    """Return all figures. They are those of zmqdist alone."""
    return [_starts(50 if plan.blocks > 3 else 5), *_reads(plan)]


def _starts(count: int) -> Figure:
    def once() -> None:
        with ExitStack() as stack:
            _cluster(stack, 10)

    return Figure(
        "servers", "made and stopped: 1 worker and 10 ps", "zmqdist", "s", _timed(once, count)
    )


def _reads(plan: Plan) -> list[Figure]:
    figures = []
    with ExitStack() as stack:
        session = stack.enter_context(zd.Session(_cluster(stack, SERVERS)))
        places = [(f"part{number}", f"ps:{number % SERVERS}") for number in range(PARTS)]
        for floats in FLOATS:
            if floats * 4 * PARTS > plan.sizes[-1]:
                continue
            for name, task in places:
                session.assign(name, np.zeros(floats, np.float32), task=task)

            def read() -> Any:
                return np.concatenate([session.read(name, task=task) for name, task in places])

            case = f"reading a variable in {PARTS} parts on {SERVERS} ps, by floats of a part"
            figures.append(
                Figure("servers", case, "zmqdist", "s", _timed(read, plan.blocks), at=floats)
            )
    return figures


def _cluster(stack: ExitStack, count: int) -> zd.Server:
    """Start one worker and `count` ps in this process. Return the worker."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count + 1)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    cluster = {"worker": addresses[:1], "ps": addresses[1:]}
    for index in range(count):
        stack.enter_context(zd.Server(cluster, "ps", index))
    return stack.enter_context(zd.Server(cluster, "worker", 0))


def _timed(fn: Callable[[], object], count: int) -> float:
    """Call `fn` `count` times, after one call that is not counted. Return the median of the seconds
    of a call."""
    fn()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - began)
    return median(taken)


QUESTION = Question(
    "servers", "A cluster of servers in one process", "", own=measure, curve="floats of a part"
)
