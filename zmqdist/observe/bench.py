"""Measurements of the speed of zmqdist on this host, as ratios to simpler techniques that are
measured in the same run.

Rules
    zmqdist and the other technique run alternately in short blocks, and the ratio is the median of
    the blocks' ratios. The speed of a shared host varies from second to second, but the variation
    affects both techniques equally. Therefore compare only ratios. All preparations are made before
    a block: connections are open, workers run, and workers have the functions.

Not here: the start of a cluster. The caller passes a running cluster, because this folder may not
import launch/. Start-up time, imports and memory are measured in benchmarks/, which is not
installed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np

from zmqdist.addresses import join_address
from zmqdist.observe.status import Table
from zmqdist.rpc import Client, StatusOrResult
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.transport.endpoint import split
from zmqdist.transport.pyzmq_echo import BareClient

MIB: Final = 2**20
REPLY_MS: Final = 30_000
"""Time limit of a call to a peer, in milliseconds."""


@dataclass(frozen=True)
class BenchPlan:
    """The amounts that a benchmark measures. Each block is run once with zmqdist and once with the
    other technique.

    Attributes:
      blocks: number of blocks for each comparison.
      calls: number of blocking calls in a block.
      window: number of calls that are in flight at a time.
      windows: number of windows in a block of pipelined calls.
      tasks: number of scheduled functions in a block. The process pool runs a fifth of this number.
      sizes: sizes of large results, in bytes.
      transfers: number of transfers of each size.
    """

    blocks: int
    calls: int
    window: int
    windows: int
    tasks: int
    sizes: tuple[int, ...]
    transfers: int


FULL: Final = BenchPlan(15, 400, 1000, 5, 20_000, (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB), 7)
QUICK: Final = BenchPlan(5, 200, 500, 2, 5_000, (MIB, 16 * MIB), 5)


@dataclass(frozen=True)
class Figure:
    """The result of one comparison.

    Attributes:
      name: what is measured, such as "blocking call, inline handler".
      unit: the unit of the figures. If the unit ends in "/s", larger figures are better, otherwise
        smaller figures are.
      ours, ours_p99: the median of zmqdist, and the 99th percentile of its single calls, which is
        None if single calls are not measured.
      against: name of the other technique. "" means that there is none.
      theirs, theirs_p99: the median and the percentile of the other technique.
      ratio: zmqdist's figure divided by that of the other technique, as the median over the blocks.
        None if there is no other technique.
    """

    name: str
    unit: str
    ours: float
    ours_p99: float | None = None
    against: str = ""
    theirs: float | None = None
    theirs_p99: float | None = None
    ratio: float | None = None


def table(figures: list[Figure]) -> Table:
    """Return a table with one row for each figure."""
    columns = ("question", ">zmqdist", ">p99", "unit", "against", ">that", ">p99", ">ratio")
    return Table(
        f"{machine()}; medians; the ratio is the figure of zmqdist divided by that of the other "
        f"technique",
        columns,
        tuple(
            (
                figure.name,
                shown(figure.ours),
                shown(figure.ours_p99),
                figure.unit,
                figure.against or "-",
                shown(figure.theirs),
                shown(figure.theirs_p99),
                "-" if figure.ratio is None else f"{figure.ratio:.2f} x",
            )
            for figure in figures
        ),
    )


def as_json(figures: list[Figure]) -> str:
    """Return the figures and the description of this host as one JSON object."""
    return json.dumps(
        {"machine": machine(), "figures": [asdict(figure) for figure in figures]}, indent=2
    )


def machine() -> str:
    """Return one line that describes this host and its software."""
    cores = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return f"{cores}, Python {platform.python_version()}, NumPy {np.__version__}"


def shown(number: float | None) -> str:
    """Return a figure with about three significant digits: "0.123", "12.3", "123", "12,345"."""
    if number is None:
        return "-"
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2 if abs(number) >= 1 else 3
    return f"{number:,.{digits}f}"


# -- calls, with a peer ----------------------------------------------------------------------------


def measure_calls(peer: str, plan: BenchPlan) -> list[Figure]:
    """Measure blocking and pipelined calls to a peer, and compare them with a bare echo in the
    peer's process (peer.py). This blocks until all measurements are made.

    Raises:
      OpError: the peer cannot be reached.
      ValueError: the server at this address is not a peer.
    """
    with Client.create("zmq", peer, "zmqdist bench", REPLY_MS) as client:
        if not hasattr(client, "bare_port_blocking"):
            client.methods()  # raises OpError if no server replies
            raise ValueError(
                f"the server at {peer} is no peer of a benchmark: start `zmqdist bench --serve "
                f"HOST:PORT` on that host"
            )
        bare_port = int(client.call("bare_port").get_value()[0])
        with BareClient(join_address(split(peer)[0], bare_port)) as bare:
            methods: Any = client
            return [
                _blocking("blocking call, inline handler", methods.echo_blocking, bare, plan),
                _blocking(
                    "blocking call, handler in a thread", methods.echo_pool_blocking, bare, plan
                ),
                _pipelined(methods.echo, bare, plan),
            ]


def _blocking(
    name: str, call: Callable[[int], object], bare: BareClient, plan: BenchPlan
) -> Figure:
    return _latency(
        name,
        lambda: _timed(lambda: call(7), plan.calls),
        lambda: bare.round_trips(plan.calls),
        plan,
    )


def _pipelined(
    start_call: Callable[[int], StatusOrResult], bare: BareClient, plan: BenchPlan
) -> Figure:
    count = plan.window * plan.windows

    def ours() -> float:
        start = perf_counter()
        for _ in range(plan.windows):
            for result in [start_call(7) for _ in range(plan.window)]:
                result.get_value()
        return count / (perf_counter() - start)

    name = f"calls, {plan.window:,} on the way"
    return rates(
        name,
        "calls/s",
        ours,
        "bare pyzmq",
        lambda: count / bare.pipelined(count, plan.window),
        plan.blocks,
    )


# -- tasks, with a cluster -------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing. Measurements schedule this function, because they then measure only the cost of
    scheduling."""


@functools.lru_cache(maxsize=1)
def _cached_array(byte_count: int) -> np.ndarray[Any, Any]:
    return np.ones(byte_count, np.uint8)


def large(byte_count: int) -> np.ndarray[Any, Any]:
    """Return a large array. Each slot makes the array once, so that later calls measure only its
    transfer."""
    return _cached_array(byte_count)


@contextlib.contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Return a context manager that delays Ctrl-C until the with-statement ends. Processes that are
    started inside the with-statement ignore Ctrl-C, because each would otherwise print a traceback.
    """
    received: list[int] = []
    # only the main thread may set a signal handler
    main = threading.current_thread() is threading.main_thread()
    handler = (
        signal.signal(signal.SIGINT, lambda number, _: received.append(number)) if main else None
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if received:
            signal.raise_signal(signal.SIGINT)


def measure_tasks(cluster: Any, plan: BenchPlan) -> list[Figure]:
    """Measure how many no-op functions per second a cluster runs, including the fetch of all
    results. Compare this rate with that of a pool of two processes. This blocks until all
    measurements are made.

    Args:
      cluster: a target for ClusterCoordinator, with two worker processes.
    """
    pool_tasks = max(1, plan.tasks // 5)
    # The pool's processes are spawned, because a fork of a process with threads is unsafe. They
    # import this module, as workers do.
    with _interrupts_delayed():  # Ctrl-C inside the constructor would leave a semaphore behind
        pool = ProcessPoolExecutor(2, get_context("spawn"))
    with ClusterCoordinator(cluster) as coordinator, pool:

        def ours() -> float:
            start = perf_counter()
            values = [coordinator.schedule(nothing) for _ in range(plan.tasks)]
            coordinator.join()
            for value in values:
                value.fetch()
            return plan.tasks / (perf_counter() - start)

        def theirs() -> float:
            start = perf_counter()
            with _interrupts_delayed():
                futures = [pool.submit(nothing) for _ in range(pool_tasks)]
            for future in futures:
                future.result()
            return pool_tasks / (perf_counter() - start)

        return [
            rates(
                "no-op tasks, 2 workers",
                "tasks/s",
                ours,
                "ProcessPoolExecutor(2)",
                theirs,
                plan.blocks,
            )
        ]


def measure_round_trip(cluster: Any, peer: str, plan: BenchPlan) -> list[Figure]:
    """Measure the time from `schedule` to the result of a no-op function, one function at a time.
    Compare this time with that of a bare round trip to a peer. A scheduled function needs two round
    trips.
    """
    with ClusterCoordinator(cluster) as coordinator, bare_of(peer) as bare:

        def ours() -> list[float]:
            return _timed(lambda: coordinator.schedule(nothing).fetch(), plan.calls)

        return [
            _latency("task, schedule to result", ours, lambda: bare.round_trips(plan.calls), plan)
        ]


def measure_results(cluster: Any, peer: str, plan: BenchPlan) -> list[Figure]:
    """Measure the transfer of large results from a worker. Compare it with the transfer of a frame
    over a bare socket."""
    with ClusterCoordinator(cluster) as coordinator, bare_of(peer) as bare:
        return [_result(coordinator, bare, size, plan.transfers) for size in plan.sizes]


def _result(coordinator: ClusterCoordinator, bare: BareClient, size: int, transfers: int) -> Figure:
    def ours() -> float:
        start = perf_counter()
        array = coordinator.schedule(large, (size,)).fetch()
        took = perf_counter() - start
        assert array.nbytes == size
        return size / took / 1e9

    # a warm-up, in which each slot makes its array
    coordinator.fetch(coordinator.map(large, [size] * 4))
    name = f"result of {size // MIB} MiB" if size >= MIB else f"result of {size:,} bytes"
    return rates(name, "GB/s", ours, "bare pyzmq", lambda: size / bare.fetch(size) / 1e9, transfers)


def bare_of(peer: str) -> BareClient:
    """Return a client of the bare echo in a peer's process (peer.py). The caller closes the client,
    or uses it in a with-statement."""
    with Client.create("zmq", peer, "zmqdist bench", REPLY_MS) as client:
        return BareClient(
            join_address(split(peer)[0], int(client.call("bare_port").get_value()[0]))
        )


# -- blocks and medians ----------------------------------------------------------------------------


def _timed(call: Callable[[], object], count: int) -> list[float]:
    """Call the function `count` times, and return the seconds that each call took."""
    took = []
    for _ in range(count):
        start = perf_counter()
        call()
        took.append(perf_counter() - start)
    return took


def _latency(
    name: str, ours: Callable[[], list[float]], bare: Callable[[], list[float]], plan: BenchPlan
) -> Figure:
    pairs = _alternating(ours, bare, plan.blocks)
    mine = [second * 1e6 for block, _ in pairs for second in block]
    theirs = [second * 1e6 for _, block in pairs for second in block]
    ratio = median(median(block) / median(bare_block) for block, bare_block in pairs)
    return Figure(
        name, "us", median(mine), p99(mine), "bare pyzmq", median(theirs), p99(theirs), ratio
    )


def rates(
    name: str,
    unit: str,
    ours: Callable[[], float],
    against: str,
    theirs: Callable[[], float],
    blocks: int,
) -> Figure:
    """Call two functions in alternating blocks, and compare the rates that they return. A higher
    rate is better."""
    pairs = _alternating(ours, theirs, blocks)
    ratio = median(mine / their_rate for mine, their_rate in pairs)
    mine, their_rate = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    return Figure(name, unit, mine, None, against, their_rate, None, ratio)


def _alternating(
    ours: Callable[[], Any], theirs: Callable[[], Any], blocks: int
) -> list[tuple[Any, Any]]:
    """Call two functions `blocks` times each, in alternating order, after one call of each as a
    warm-up. Return the pairs of results."""
    ours()
    theirs()
    pairs = []
    for number in range(blocks):
        if number % 2:
            their_result = theirs()
            pairs.append((ours(), their_result))
        else:
            mine = ours()
            pairs.append((mine, theirs()))
    return pairs


def p99(values: list[float]) -> float:
    """Return the 99th percentile of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
