"""What several tests of this folder need: a service whose reserved methods a test may replace, peers
that send any message, servers in other processes, and random arrays."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.transport.helpers import Dialled
from zmqdist.limits import CHUNK_BYTES, HANDLER_THREADS_MAX
from zmqdist.rpc import StatusOrResult, ZmqClient, payload
from zmqdist.rpc.client import as_returned
from zmqdist.rpc.service import RpcService
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import client_security, server_security
from zmqdist.wire.hello import our_hello


class Hosted:
    """An RpcService on a router of its own. What is registered before `start` is served."""

    def __init__(self, threads_max: int = HANDLER_THREADS_MAX) -> None:
        self.service = RpcService("hosted", threads_max)
        self.address = ""

    def start(self) -> Hosted:
        self._loop = Loop("zmqdist-hosted")
        router = Router(self._loop, server_security("127.0.0.1"), our_hello("server", 77, "hosted"))
        self.address = router.bind("127.0.0.1:0")
        self.service.attach(router, self._loop, 77)
        self._loop.start()
        return self

    def stop(self) -> None:
        self.service.stop(0.5)
        self._loop.stop()
        assert self.service.snapshot().faults == 0

    def __enter__(self) -> Hosted:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


@contextmanager
def channel_to(address: str) -> Iterator[Channel]:
    """A connection whose calls nothing has checked."""
    channel = Channel(address, client_security(address, "client"), our_hello("client", 78))
    yield channel
    channel.close()


def unchecked(channel: Channel, method: str, given: Any) -> StatusOrResult:
    """A call with this body, whatever the method takes."""
    call = ClientCall(method, payload.pack(given)[0])
    channel.submit(call)
    return StatusOrResult(channel, call, as_returned)


@contextmanager
def stranger_to(address: str) -> Iterator[tuple[Dialled, int]]:
    """A peer that sends messages of its own making, and the incarnation of the server."""
    dialled = Dialled(address, client_security(address, "client"))
    try:
        yield dialled, dialled.expect("up", 20.0)[1].incarnation
    finally:
        dialled.loop.stop()


def until(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """The first true value of `condition`; fails when there was none for `within_s`."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        pause.wait(0.002)
    return value


MIB = 2**20

SERVER = """
import sys, numpy as np
from zmqdist.rpc import Server
kept = []
state = np.zeros(2**20, np.int64)
def keep(array):
    kept.append(array)
    return len(kept)
def step(array):  # changes its argument and its own array right before and after it has answered
    array += 1
    state[:] = array[:len(state)]
    return state
def spoil():
    for array in kept:
        array[:] = 99
    state[:] = 99
    return [int(array[0]) for array in kept]
server = Server.create("zmq", "127.0.0.1:0")
for name, fn in {"echo": lambda value: value, "keep": keep, "step": step, "spoil": spoil, "forget": kept.clear,
                 "total": lambda array: int(array.sum()), "ones": lambda n: np.ones(n, np.uint8)}.items():
    server.register(name, fn)
server.register("small", lambda value: value, inline=True)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def change_everything_after_each_call(remote: ZmqClient, seed: int) -> None:
    """Arrays of any dtype, shape and order are changed right after each call; the handlers do the
    same with theirs."""
    rng = random.Random(seed)
    pending: list[tuple[Any, Any]] = []
    for _ in range(8):
        array = some_array(rng)
        given = {"one": array, "two": [array[: len(array) // 2], 7]}
        wanted = {"one": array.copy("K"), "two": [array[: len(array) // 2].copy(), 7]}
        if rng.random() < 0.5:
            pending.append((remote.echo(given), wanted))
        else:
            check(remote.echo_blocking(given), wanted)
        spoil(array)
    for outcome, wanted in pending:
        got = outcome.get_value()
        check(got, wanted)
        spoil(got["one"])  # private and writable
        check(got["two"], wanted["two"])


def some_array(rng: random.Random) -> np.ndarray[Any, Any]:
    dtype = np.dtype(
        rng.choice(["u1", "<f4", ">i8", "c16", "S5", "<M8[s]", [("a", "<i4"), ("b", "<f8", (3,))]])
    )
    count = rng.choice([1000, CHUNK_BYTES, 3 * MIB, 9 * MIB]) // dtype.itemsize // 6 * 6
    raw = np.random.default_rng(rng.randrange(2**32)).integers(
        0, 100, count * dtype.itemsize, np.uint8
    )
    array = raw.view(dtype).reshape(rng.choice([(count,), (count // 2, 2), (count // 6, 2, 3)]))
    return (
        np.asfortranarray(array)
        if rng.random() < 0.3
        else array[::2]
        if rng.random() < 0.2
        else array
    )


def spoil(array: np.ndarray[Any, Any]) -> None:
    assert array.flags.writeable
    array[...] = np.zeros((), array.dtype)


def check(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            check(got[key], wanted[key])
    elif isinstance(wanted, list):
        for one, other in zip(got, wanted, strict=True):
            check(one, other)
    elif isinstance(wanted, np.ndarray):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes()
    else:
        assert got == wanted
