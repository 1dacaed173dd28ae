"""The programs of the hosts in test_slow_links.py: python -m tests.campaigns.slow_work ROLE
ARGUMENTS. A client's last line is JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

import numpy as np

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator

MIB = 2**20
BACK_S = 300.0
"""The longest that anything here may take, in seconds; the tests have tighter bounds."""


def serve(address: str) -> None:
    server = zd.rpc.Server.create("zmq", address)
    server.register("echo", lambda array: array)
    server.register("small", lambda number: number)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop()


def echo(address: str, nbytes: str, times: str) -> None:
    """Echo an array several times. Print the seconds of each echo, and figures of the
    connection.
    """
    client = zd.rpc.Client.create("zmq", address, timeout_in_ms=round(1000 * BACK_S))
    array = np.random.default_rng(1).integers(0, 256, int(nbytes), np.uint8)
    took = []
    for _ in range(int(times)):
        begun = time.monotonic()
        back = client.call("echo", [array]).get_value()[0]
        took.append(time.monotonic() - begun)
        assert np.array_equal(back, array)
    _tell(took_s=took, shared_memory=client.snapshot().shared_memory)


def beside(address: str, nbytes: str) -> None:
    """Make small calls during a large one. Print the seconds of the longest, and their number."""
    client = zd.rpc.Client.create("zmq", address, timeout_in_ms=round(1000 * BACK_S))
    large = client.call("echo", [np.zeros(int(nbytes), np.uint8)])
    over = threading.Event()
    large.add_done_callback(lambda _: over.set())
    waits = []
    while not large.done():
        begun = time.monotonic()
        assert client.call("small", [1]).get_value() == [1]
        waits.append(time.monotonic() - begun)
        over.wait(0.1)
    assert large.get_value()[0].nbytes == int(nbytes)
    _tell(longest_s=max(waits), median_s=float(np.median(waits)), count=len(waits))


def doubled(array: Any) -> Any:
    return array * np.uint8(2)


def schedule(address: str, nbytes: str, count: str) -> None:
    """Schedule functions with large arguments and results. Print the seconds of all together."""
    with ClusterCoordinator(address) as coordinator:
        arrays = [
            np.random.default_rng(seed).integers(0, 256, int(nbytes), np.uint8)
            for seed in range(int(count))
        ]
        begun = time.monotonic()
        values = [coordinator.schedule(doubled, (array,)) for array in arrays]
        for array, back in zip(arrays, coordinator.fetch(values), strict=True):
            assert np.array_equal(back, array * np.uint8(2))
        _tell(
            took_s=[time.monotonic() - begun],
            status=coordinator.status() if hasattr(coordinator, "status") else None,
        )


def _tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    {"serve": serve, "echo": echo, "beside": beside, "schedule": schedule}[sys.argv[1]](
        *sys.argv[2:]
    )
