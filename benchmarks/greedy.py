"""What does a client that sends very many calls at once cost the other clients, and the server?

A server has two threads, and a method that gets an array and sleeps for a while. One client sends
all of its calls with arrays at once, more than the server can answer during the measurement.
Another client sends small calls to the same threads, one after the other. Arrays travel by sockets,
so that they are in the server's own memory.

    python -m benchmarks.greedy    run the server, which prints its address, until standard input ends
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np

import zmqdist as zd
from benchmarks.measuring import Figure, Plan, Question
from benchmarks.roles import memory
from zmqdist.observe.bench import p99

THREADS = 2
WORK_S = 0.05
PIECE = 8 * 2**20
ASKS = 100
"""Number of calls of the other client while it is the only client."""
MB = 1e6


def measure(plan: Plan) -> list[Figure]:
    """Return all figures. They are those of zmqdist alone."""
    pieces = plan.greedy_bytes // PIECE
    with (
        _served() as (pid, address),
        zd.rpc.Client.create("zmq", address) as greedy,
        zd.rpc.Client.create("zmq", address) as modest,
    ):
        before = memory(pid, "VmRSS")
        alone = [_asked(modest) for _ in range(ASKS)]
        array = zd.freeze(np.zeros(PIECE, np.uint8))
        calls = [greedy.work(array) for _ in range(pieces)]
        behind = [_asked(modest)]
        while not calls[-1].done():
            behind.append(_asked(modest))
        for call in calls:
            call.get_value()
        peak = memory(pid, "VmHWM")
    sent = f"{plan.greedy_bytes // 2**20:,} MiB at once"
    return [
        Figure(
            "greedy",
            "the other one's wait: nobody else asks",
            "zmqdist",
            "ms",
            median(alone) * 1e3,
            p99(alone) * 1e3,
        ),
        Figure(
            "greedy",
            f"the other one's wait: {sent}",
            "zmqdist",
            "ms",
            median(behind) * 1e3,
            p99(behind) * 1e3,
        ),
        Figure("greedy", f"the server's memory: {sent}", "zmqdist", "MB", (peak - before) / MB),
    ]


def _asked(client: zd.rpc.Client) -> float:
    began = time.perf_counter()
    client.call("small").get_value()
    return time.perf_counter() - began


@contextmanager
def _served() -> Iterator[tuple[int, str]]:
    """Return a context manager that runs the server in a process of its own, and yields the pid and
    the address of the server."""
    command = [sys.executable, "-m", "benchmarks.greedy"]
    environment = {**os.environ, "ZMQDIST_ARENA": "off"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError("the server ended before it had begun")
        try:
            yield process.pid, address
        finally:
            process.stdin.close()


QUESTION = Question("greedy", "A client that sends very much at once", "", own=measure)


def main() -> None:
    def work(array: np.ndarray) -> int:
        time.sleep(WORK_S)
        return len(array)

    server = zd.rpc.Server.create("zmq", "127.0.0.1:0", threads_max=THREADS)
    server.register("work", work)
    server.register("small", lambda: 1)
    with server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
