"""Figures of this machine: each beside the same work on bare ZeroMQ, or on the standard library, in interleaved blocks of one run.

Machines are shared and noisy: only the ratio counts, and it is the median over the blocks. Nothing here is asserted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.local_cluster import local_cluster
from zmqdist.net.bare import BareClient
from zmqdist.rpc.client import Client, ZmqClient

SMALL = b"x" * 24
"""About what a call of two small integers weighs."""


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
      ours, other: median of each; None where there is nothing to compare with.
      ratio: median of the paired ratios ours / other, of the blocks of this run.
    """

    what: str
    unit: str
    ours: float
    other: float | None = None
    against: str = ""
    ratio: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    blocks: int = 15
    calls: int = 200
    tasks: int = 20_000
    megabytes: tuple[int, ...] = (1, 16, 64)
    starts: int = 5

    @classmethod
    def quick(cls) -> Size:
        """Enough to see that it works; the figures mean little."""
        return cls(blocks=3, calls=20, tasks=500, megabytes=(1,), starts=1)


_SERVER = """
import sys
from zmqdist.rpc.server import Server
server = Server.create("zmq", "127.0.0.1:0")
server.register("echo", lambda value: value, inline=True)
server.register("echo_pool", lambda value: value)
server.start()
print(server.address, flush=True)
sys.stdin.read()
server.stop()
"""


def measure(size: Size, address: str | None = None) -> Iterator[Figure]:
    """All figures, one after the other; the calls against the server at `address` where one is given."""
    yield from calls(size, address)
    if address is None:
        yield from tasks(size)
        yield start(size)
        yield from imported(size)


@contextmanager
def _child(*command: str) -> Iterator[str]:
    """A helper process; gives its first line."""
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.communicate()


def _block(fn: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each of `count` calls."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        fn()
        taken.append((time.perf_counter() - began) * 1e6)
    return taken


def _paired(what: str, unit: str, against: str, ours: list[list[float]], other: list[list[float]]) -> Figure:
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(ours, other, strict=True)]
    flat = sorted(value for block in ours for value in block)
    return Figure(
        what,
        unit,
        statistics.median(flat),
        statistics.median(value for block in other for value in block),
        against,
        statistics.median(ratios),
        flat[int(len(flat) * 0.99)] if len(flat) > 20 else None,
    )


def calls(size: Size, address: str | None = None) -> Iterator[Figure]:
    """Blocking and pipelined calls against bare ZeroMQ; both servers in processes of their own."""
    with _child("-m", "zmqdist.net.bare") as port, _child("-c", _SERVER) as ours:
        bare = BareClient(int(port))
        with Client.create("zmq", address or ours, timeout_in_ms=10_000) as client:
            yield from _calls(size, client, bare)
            yield from _bandwidth(size, client, bare)
        bare.close()


def _calls(size: Size, client: ZmqClient, bare: BareClient) -> Iterator[Figure]:
    blocking: Any = client
    for what, fn in (
        ("blocking call, inline handler", lambda: blocking.echo_blocking(1)),
        ("blocking call, handler in a thread", lambda: blocking.echo_pool_blocking(1)),
    ):
        ours, other = [], []
        for _ in range(size.blocks + 1):
            other.append(_block(lambda: bare.call(SMALL), size.calls))
            ours.append(_block(fn, size.calls))
        yield _paired(what, "us", "bare ROUTER/DEALER", ours[1:], other[1:])  # the first block warms up
    ours, other = [], []
    count = size.calls * 5
    for _ in range(size.blocks + 1):
        other.append([count / (_seconds(lambda: bare.many(SMALL, count)))])
        ours.append([count / _seconds(lambda: _pipelined(blocking, count))])
    yield _paired(f"calls, {count} outstanding", "calls/s", "bare, one message a call", ours[1:], other[1:])


def _pipelined(client: Any, count: int) -> None:
    for answer in [client.echo(1) for _ in range(count)]:
        answer.get_value()


def _seconds(fn: Callable[[], object]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def _bandwidth(size: Size, client: ZmqClient, bare: BareClient) -> Iterator[Figure]:
    blocking: Any = client
    for megabytes in size.megabytes:
        array = np.ones(megabytes * 2**17)
        payload = array.tobytes()
        ours, other = [], []
        for _ in range(min(size.blocks, 7) + 1):
            other.append([2 * len(payload) / _seconds(lambda: bare.call(payload)) / 1e9])  # noqa: B023
            ours.append([2 * len(payload) / _seconds(lambda: blocking.echo_blocking(array)) / 1e9])  # noqa: B023
        yield _paired(f"echo of {megabytes} MiB, there and back", "GB/s", "bare, one frame", ours[1:], other[1:])


def tasks(size: Size) -> Iterator[Figure]:
    """Scheduled no-op functions on two worker processes against a ProcessPoolExecutor of two."""
    with (
        local_cluster(workers=2) as cluster,
        ClusterCoordinator(cluster) as coordinator,
        ProcessPoolExecutor(2) as pool,
    ):
        ours, other = [], []
        for _ in range(min(size.blocks, 7) + 1):
            few = max(1, size.tasks // 10)  # the pool is slower: the same number would take minutes
            other.append([few / _seconds(lambda: [f.result() for f in [pool.submit(int, 1) for _ in range(few)]])])  # noqa: B023
            ours.append([size.tasks / _seconds(lambda: _schedule(coordinator, size.tasks))])
        yield _paired("no-op tasks, 2 worker processes", "tasks/s", "ProcessPoolExecutor(2)", ours[1:], other[1:])
        ours, other = [], []
        for _ in range(size.blocks + 1):
            other.append(_block(lambda: pool.submit(int, 1).result(), size.calls // 4 + 1))
            ours.append(_block(lambda: coordinator.schedule(int, (1,)).fetch(), size.calls // 4 + 1))
        yield _paired("round trip of one task", "us", "ProcessPoolExecutor(2)", ours[1:], other[1:])


def _schedule(coordinator: ClusterCoordinator, count: int) -> None:
    values = [coordinator.schedule(int, (number,)) for number in range(count)]
    assert [value.fetch() for value in values] == list(range(count)), "a result is wrong"


_FIRST = """
import zmqdist
with zmqdist.local_cluster(workers=2) as cluster, zmqdist.coordinator.ClusterCoordinator(cluster) as coordinator:
    coordinator.schedule(int, (1,)).fetch()
    print("first", flush=True)
"""


def start(size: Size) -> Figure:
    """From the start of Python to the first result of two worker processes."""
    taken = []
    for _ in range(size.starts):
        began = time.perf_counter()
        with _child("-c", _FIRST) as line:
            assert line == "first", "the cluster did not start"
            taken.append(time.perf_counter() - began)
    return Figure("start of Python to the first result, 2 workers", "s", statistics.median(taken))


def imported(size: Size) -> Iterator[Figure]:
    """What `import zmqdist` takes beyond NumPy; then with its main names, which are loaded at first use."""
    names = "zmqdist.coordinator; zmqdist.rpc; zmqdist.local_cluster"
    for what, code in (
        ("import zmqdist, beyond NumPy", "import numpy; import zmqdist"),
        ("the same and its main names in use", f"import numpy; import zmqdist; {names}"),
    ):
        alone, all_ = [], []
        for _ in range(2 * size.starts + 1):
            alone.append(_seconds(lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True)))
            all_.append(_seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True)))  # noqa: B023
        beyond = statistics.median(mine - theirs for mine, theirs in zip(all_, alone, strict=True))
        yield Figure(what, "s", beyond, statistics.median(alone), "Python and NumPy alone")


def machine() -> str:
    """One line about where this was measured."""
    return f"{os.cpu_count()} cores, Python {sys.version_info[0]}.{sys.version_info[1]}, NumPy {np.__version__}"
