"""How fast are variables of parameter servers: small additions, rows of a table, and whole arrays?

Two ps run in processes of their own. Each figure is compared, in blocks that take turns, with an
upper bound: calls that send the same bytes and return them, the same computation in this process,
or a memcpy. `ratio` is the part of the upper bound that zmqdist reaches.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

import numpy as np

import zmqdist as zd
from benchmarks.measuring import Figure, Plan, Question
from zmqdist.optimizers import SGD
from zmqdist.rpc import internal_client
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref, client_of

TABLE_ROWS: Final = 2**20
ROW_FLOATS: Final = 64
ROWS: Final = 4096
"""Number of rows in a step."""

SMALL: Final = 500
"""Number of additions in a block."""

PS: Final = """
import sys
import zmqdist as zd
server = zd.Server({"ps": ["127.0.0.1:0"]}, "ps", 0, start=False)
server._node.service.register("echo", lambda value: value)
server._node.service.register("small_echo", lambda value: value, inline=True)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""

Sides = dict[str, Callable[[], object]]


def measure(plan: Plan) -> list[Figure]:
    """Return all figures."""
    with ExitStack() as stack:
        ps = [_started(stack, number) for number in range(2)]
        figures = _small(plan, *ps[0])
        figures += _sparse(plan, ps)
        figures += _dense(plan, ps)
    return figures


def _started(stack: ExitStack, number: int) -> tuple[PsClient, str]:
    command = [sys.executable, "-c", PS]
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.terminate)
    assert process.stdout is not None
    client = client_of(process.stdout.readline().strip())
    stack.callback(client.close)
    client.open(1, 1)
    return client, f"ps:{number}"


def _variable(client: PsClient, task: str, number: int, shape: tuple[int, ...]) -> Ref:
    ref = Ref(f"v{number}", shape, np.dtype("f4"), task, client.address, 1, number)
    client.create(ref, np.ones(shape, "f4")).get_value()
    return ref


def _small(plan: Plan, client: PsClient, task: str) -> list[Figure]:
    ref, one = _variable(client, task, 0, (4,)), np.ones(4, "f4")

    def add() -> Any:
        return client.update([(ref, c.add(ref, one))], still=True)

    def echo() -> Any:
        return internal_client.start(client._rpc, "small_echo", one, still=True)

    def one_by_one(start: Callable[[], Any]) -> None:
        for _ in range(SMALL):
            start().get_value()

    def together(start: Callable[[], Any]) -> None:
        for started in [start() for _ in range(SMALL)]:
            started.get_value()

    found = []
    for case, way in (
        ("small additions, one by one", one_by_one),
        ("small additions, 500 on the way", together),
    ):
        sides: Sides = {"zmqdist": lambda way=way: way(add), "calls": lambda way=way: way(echo)}  # type: ignore[misc]
        found += _compared(plan, case, "/s", SMALL, sides)
    return found


def _sparse(plan: Plan, ps: list[tuple[PsClient, str]]) -> list[Figure]:
    rows, part = TABLE_ROWS // len(ps), ROWS // len(ps)
    refs = [_variable(client, task, 1, (rows, ROW_FLOATS)) for client, task in ps]
    rng = np.random.default_rng(0)
    batches = [[rng.choice(rows, part, replace=False) for _ in ps] for _ in range(16)]
    grad, table, turn = (
        np.ones((part, ROW_FLOATS), "f4"),
        np.ones((TABLE_ROWS, ROW_FLOATS), "f4"),
        [0],
    )

    def batch() -> list[Any]:
        turn[0] += 1
        return batches[turn[0] % len(batches)]

    def step() -> None:
        places = list(zip([client for client, _ in ps], refs, batch(), strict=True))
        _all([client.rows([(ref, indices)]) for client, ref, indices in places])
        changes = [
            c.apply(ref, SGD(0.1), zd.IndexedSlices(grad, indices)) for _, ref, indices in places
        ]
        _all(
            [
                client.update([(ref, each)], still=True)
                for (client, ref, _), each in zip(places, changes, strict=True)
            ]
        )

    def echo() -> None:
        _all([internal_client.start(client._rpc, "echo", grad, still=True) for client, _ in ps])

    def here() -> None:
        for number, indices in enumerate(batch()):
            taken = table[indices + number * rows]
            table[indices + number * rows] = taken - 0.1 * grad

    sides: Sides = {"zmqdist": step, "calls": echo, "this process": here}
    return _compared(plan, "rows of 64 floats, pulled and pushed", "rows/s", ROWS, sides)


def _dense(plan: Plan, ps: list[tuple[PsClient, str]]) -> list[Figure]:
    nbytes = plan.sizes[-1]
    floats = nbytes // 4 // len(ps)
    refs = [_variable(client, task, 2, (floats,)) for client, task in ps]
    grad, source, target = (
        np.ones(floats, "f4"),
        np.ones(2 * floats, "f4"),
        np.zeros(2 * floats, "f4"),
    )
    kept: list[Any] = []

    def push_and_pull() -> None:
        places = list(zip([client for client, _ in ps], refs, strict=True))
        _all([client.update([(ref, c.sub(ref, grad))], still=True) for client, ref in places])
        kept[:] = _all([client.read([ref]) for client, ref in places])

    def echo() -> None:
        kept[:] = _all(
            [internal_client.start(client._rpc, "echo", grad, still=True) for client, _ in ps]
        )

    sides: Sides = {
        "zmqdist": push_and_pull,
        "calls": echo,
        "memcpy": lambda: np.copyto(target, source),
    }
    case = f"an array of {nbytes >> 20} MiB, pushed and pulled"
    return _compared(plan, case, "GB/s", nbytes / 1e9, sides)


def _all(started: list[Any]) -> list[Any]:
    return [each.get_value() for each in started]


def _compared(plan: Plan, case: str, unit: str, amount: float, sides: Sides) -> list[Figure]:
    """Return a figure of each side: the amount of work that it does in a second, and zmqdist's
    speed divided by its speed."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(plan.blocks + 1):
        for name, fn in sides.items():
            began = time.perf_counter()
            fn()
            if block:
                # the first block is not counted, because it uses memory that was never touched
                taken[name].append(time.perf_counter() - began)
    ours = taken["zmqdist"]
    figures = []
    for name, times in taken.items():
        ratio = (
            None if name == "zmqdist" else median(t / o for t, o in zip(times, ours, strict=True))
        )
        figures.append(Figure("variables", case, name, unit, amount / median(times), ratio=ratio))
    return figures


QUESTION = Question("variables", "Variables of two parameter servers", "", own=measure)
