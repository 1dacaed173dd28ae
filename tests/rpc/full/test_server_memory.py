"""A server whose handlers sleep, under a client that sends without end; and one whose handlers wait
for themselves."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ROOT
from tests.rpc.helpers import address_of, until
from zmqdist.limits import CLIENT_PULLED_BYTES_MAX, EAGER_BYTES_MAX
from zmqdist.rpc import Client, Server, ZmqClient

Child = Callable[..., "subprocess.Popen[str]"]
Connect = Callable[..., ZmqClient]

MIB = 2**20
PIECE = 16 * MIB
PIECES = 40
THREADS = 2

SERVER = f"""
import sys, threading
from zmqdist.rpc import Server
go = threading.Event()
def first(array):
    go.wait(120)
    return int(array[0])
server = Server.create("zmq", "127.0.0.1:0", threads_max={THREADS})
server.register("first", first)
server.register("calls", lambda: server.snapshot().calls, inline=True)
server.register("bytes", lambda: server.snapshot().bytes_waiting, inline=True)
server.register("go", go.set, inline=True)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""

GREEDY = f"""
import sys, numpy as np
from zmqdist.rpc import Client
client = Client.create("zmq", sys.argv[1])
asked = [client.first(np.full({PIECE}, number, np.uint8)) for number in range({PIECES})]
print("asked", flush=True)
print([each.get_value() for each in asked] == list(range({PIECES})), flush=True)
"""


def resident_bytes(pid: int) -> int:
    """The most that the process ever had in memory."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


@pytest.fixture
def greedy(route: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """greedy(address): a process that sends all its pieces at once."""
    started: list[subprocess.Popen[str]] = []

    def start(address: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", GREEDY, address],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.timeout(180)
def test_endless_sender_fills_only_its_bound(
    route: str, child: Child, connect: Connect, greedy: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = child(SERVER)
    address = address_of(process)
    modest = connect(address, timeout_in_ms=60_000)
    before = resident_bytes(process.pid)
    sender = greedy(address)
    assert sender.stdout is not None
    assert sender.stdout.readline() == "asked\n"
    until(lambda: modest.calls_blocking() == PIECES)
    until(lambda: modest.bytes_blocking() > CLIENT_PULLED_BYTES_MAX - PIECE)
    bound = CLIENT_PULLED_BYTES_MAX + EAGER_BYTES_MAX
    assert modest.bytes_blocking() <= bound
    assert bound < PIECES * PIECE
    modest.go_blocking()
    assert sender.stdout.readline() == "True\n"
    assert resident_bytes(process.pid) - before < bound + (THREADS + 4) * PIECE


@pytest.mark.timeout(120)
def test_handlers_that_block_all_threads_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server.create("zmq", "127.0.0.1:0", threads_max=3)

    def deeper(depth: int) -> int:
        # Longer than two looks at the threads: the first may come while a call before it is not
        # quite over, and then counts anew.
        return 1 + int(client.deeper_blocking(depth - 1, timeout_in_ms=40_000)) if depth else 0

    server.register("deeper", deeper)
    with (
        server,
        Client.create("zmq", server.address, "", 60_000) as client,
        caplog.at_level(logging.WARNING),
    ):
        assert client.deeper_blocking(2) == 2
        stuck = client.deeper(3)
        until(
            lambda: [each for each in caplog.records if "handler threads" in each.message],
            within_s=60,
        )
        assert not stuck.is_ok()
        told = [each.getMessage() for each in caplog.records if "handler threads" in each.message]
    assert len(told) == 1
    assert f"rpc server {server.address}: all 3 handler threads have been busy for 10 s" in told[0]
    assert "Running: deeper (3)." in told[0]
