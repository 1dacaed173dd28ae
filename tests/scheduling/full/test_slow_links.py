"""A peer whose bytes arrive counts as alive, whatever these bytes are: each case fills a link of 1
Mbit/s for longer than the time-out of heartbeats, and keeps its first connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.slow_link import MBIT, SlowLink
from zmqdist import nest
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data.experimental.service import (
    DispatcherConfig,
    DispatchServer,
    WorkerConfig,
    WorkerServer,
)
from zmqdist.limits import HEARTBEAT_TIMEOUT_S

BYTES = round(1.6 * HEARTBEAT_TIMEOUT_S * MBIT)
"""What crosses the link in each test."""
TIMEOUT_MS = 40_000


@pytest.fixture
def dispatcher() -> Iterator[str]:
    with DispatchServer(DispatcherConfig()) as server:
        yield server.target.removeprefix("zmq://")


@pytest.fixture(autouse=True)
def _sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no bytes bypass the link."""
    for user in ("channel", "router", "transfers", "shm_pool"):
        monkeypatch.setattr(f"zmqdist.transport.{user}.this_pool", lambda: None)


def size(data: bytes) -> int:
    return len(data)


def text(nbytes: int) -> bytes:
    return bytes(nbytes)


def amount(value: Any) -> int:
    """Return the length of all parts of a value together, where a number counts as one."""
    return sum(1 if isinstance(leaf, int) else len(leaf) for leaf in nest.flatten(value))


def check(link: SlowLink) -> None:
    assert link.connections == 1, "the first connection has lasted"
    assert link.carried >= BYTES


@pytest.mark.parametrize("slow", ["worker", "program"])
@pytest.mark.parametrize("way", ["arguments", "results"])
def test_functions_with_a_kilobyte_over_slow_link(dispatcher: str, slow: str, way: str) -> None:
    with SlowLink(dispatcher) as link:
        at = {"worker": dispatcher, "program": dispatcher, slow: link.address}
        with (
            WorkerServer(WorkerConfig(at["worker"])),
            ClusterCoordinator(at["program"]) as coordinator,
        ):
            if way == "arguments":
                values = [coordinator.schedule(size, (bytes(1000),)) for _ in range(BYTES // 1000)]
                assert set(coordinator.fetch(values)) == {1000}
            else:
                values = [coordinator.schedule(text, (1000,)) for _ in range(BYTES // 1000)]
                assert set(coordinator.fetch(values)) == {bytes(1000)}
        check(link)


def test_stopping_server_sends_its_replies_first() -> None:
    with contextlib.ExitStack() as ends:
        server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        ends.callback(server.stop)
        begun = threading.Semaphore(0)
        server.register("text", lambda: (begun.release(), bytes(1000))[1])
        server.start()
        link = ends.enter_context(SlowLink(server.address))
        client = ends.enter_context(
            zd.rpc.Client.create("zmq", link.address, timeout_in_ms=TIMEOUT_MS)
        )
        calls = [client.call("text") for _ in range(BYTES // 1000)]
        assert all(begun.acquire(timeout=TIMEOUT_MS / 1000) for _ in calls)
        server.stop(TIMEOUT_MS / 1000)
        assert {call.get_value()[0] for call in calls} == {bytes(1000)}
        check(link)


COUNT = BYTES // 5
PART = 1000
CALLS = {
    "a list of numbers": list(range(100_000, 100_000 + COUNT)),
    "a bytes object": bytes(BYTES),
    "many texts": ["x" * 60_000] * (BYTES // 60_000 + 1),
    "an array": np.zeros(BYTES, np.uint8),
    "arrays of less than a chunk": [np.zeros(100_000, np.uint8)] * (BYTES // 100_000 + 1),
}


@pytest.mark.parametrize("value", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("way", ["argument", "reply", "many at once"])
def test_calls_over_slow_link(value: Any, way: str) -> None:
    with contextlib.ExitStack() as ends:
        server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        ends.callback(server.stop)
        server.register("amount", lambda *leaves: amount(leaves))
        server.register("give", lambda: value)
        server.start()
        link = ends.enter_context(SlowLink(server.address))
        client = ends.enter_context(
            zd.rpc.Client.create("zmq", link.address, timeout_in_ms=TIMEOUT_MS)
        )
        if way == "argument":
            assert client.call("amount", [value]).get_value() == [amount(value)]
        elif way == "reply":
            assert amount(client.call("give").get_value()) == amount(value)
        else:
            parts = [value[at : at + PART] for at in range(0, len(value), PART)]
            calls = [client.call("amount", [part]) for part in parts]
            assert sum(call.get_value()[0] for call in calls) == amount(value)
        check(link)
