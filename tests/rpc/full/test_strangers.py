"""Whoever reaches the port may send what they like: nobody else notices, memory stays flat,
descriptors return, all of it is counted.

The server is a process of its own, with a client that calls all the time, small and large, and must
see no error.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.rpc.helpers import until
from zmqdist.limits import CHUNK_BYTES
from zmqdist.messages import (
    Call,
    Calls,
    CancelCall,
    Chunk,
    Credit,
    Ping,
    Replies,
    Reply,
    SharedMemoryAccepted,
)
from zmqdist.rpc import ZmqClient
from zmqdist.transport.endpoint import endpoint, split
from zmqdist.transport.security import client_security
from zmqdist.wire.headers import decode, encode
from zmqdist.wire.hello import decode_hello, encode_hello, our_hello
from zmqdist.wire.safe import encode as encode_value

pytestmark = pytest.mark.timeout(300)  # thousands of connections, on a machine with much to do, too

RAW = 10_000
FUZZED = 6_000
SILENT = 2_000
LAST = 99_999
GROWTH_BYTES_MAX = 24 * 2**20

SERVER = """
import resource, sys
limit, handshake_s = int(sys.argv[1]), float(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from zmqdist.transport import router
router.HANDSHAKE_S = handshake_s
from zmqdist.rpc import ZmqServer
server = ZmqServer("127.0.0.1:0")

def seen():
    now = server.snapshot()
    return {
        "dropped": dict(now.messages_dropped),
        "refused": now.handshakes_refused,
        "strays": now.transfer_faults,
        "repeated": now.calls_repeated,
        "held": now.calls,
        "peers": now.clients,
        "faults": now.faults,
    }

server.register("seen", seen, inline=True)
server.register("echo", lambda value: value)
server.start()
print(server.address, flush=True)
sys.stdin.read()
server.stop(1.0)
"""


class Busy:
    """A server, and a client that calls it all the time. `asked` has what the server counts."""

    def __init__(self, process: subprocess.Popen[str], connect: Callable[..., ZmqClient]) -> None:
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        self.pid = process.pid
        self.client = connect(self.address)
        self.calls = 0
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call, args=(connect(self.address),))
        self._thread.start()
        until(lambda: self.calls > 100 or self.errors)
        self.memory, self.descriptors = self.resident(), self.open()

    def _call(self, client: ZmqClient) -> None:
        small, large = np.arange(100), np.arange(CHUNK_BYTES)
        try:
            while not self._stop.is_set():
                array = small if self.calls % 50 else large
                np.testing.assert_array_equal(client.echo_blocking(array), array)
                self.calls += 1
        except BaseException as error:
            self.errors.append(error)

    def goes_on(self) -> None:
        """More calls are answered, whatever is there now."""
        before = self.calls
        until(lambda: self.calls > before + 50 or self.errors, 20)

    def resident(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    def open(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def seen(self) -> dict[str, Any]:
        return self.client.seen_blocking()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def end(self) -> None:
        """Nothing was noticed, nothing is left."""
        self.goes_on()
        assert until(
            lambda: self.open() <= self.descriptors + 8, 20
        )  # shared memory that its own client uses comes and goes
        self.stop()
        assert not self.errors
        seen = self.seen()
        assert (seen["held"], seen["peers"], seen["faults"]) == (0, 2, 0)
        assert self.resident() - self.memory < GROWTH_BYTES_MAX


@pytest.fixture
def serve_busily(
    child: Callable[..., subprocess.Popen[str]], connect: Callable[..., ZmqClient]
) -> Iterator[Callable[..., Busy]]:
    made: list[Busy] = []

    def serve(limit: int = 0, handshake_s: float = 10.0) -> Busy:
        made.append(Busy(child(SERVER, str(limit), str(handshake_s)), connect))
        return made[-1]

    yield serve
    for busy in made:
        busy.stop()


class Stranger:
    """One that has the token, and speaks ZMTP; what it says is another matter."""

    def __init__(self, context: zmq.Context[Any], address: str, hello: bytes | None = None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 5000)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        client_security(address, "client").apply(self.socket, address)
        self.socket.connect(endpoint(address))
        self.socket.send(
            encode_hello(our_hello("client", 7, "stranger")) if hello is None else hello
        )

    def replies(self) -> list[Reply]:
        """Those in the next message that comes."""
        message = decode(self.socket.recv_multipart()[0], "server")
        return (
            message.items
            if isinstance(message, Replies)
            else [message]
            if isinstance(message, Reply)
            else []
        )


def recorded(incarnation: int) -> list[list[bytes]]:
    """Messages as a client sends them, frames and all."""
    echo = encode_value([(np.int64(3), "text", {"key": (1, 2.5, None)})])[0]
    nothing = encode_value([])[0]
    call = Call(1, "echo", incarnation, 1000, echo)
    return [
        [encode(call)],
        [encode(Call(2, "seen", incarnation, 0, nothing))],
        [encode(Call(3, "zmqdist.methods", incarnation, 0, nothing))],
        [encode(Calls([call, call]))],
        [encode(Call(4, "echo", incarnation, 0, echo, ((CHUNK_BYTES + 1,), (100,))))],
        [encode(Call(5, "echo", incarnation, 0, echo, ((1, 2, 3, 4, 5, 6, 7, 8),)))],
        [encode(Chunk(4, 0, 0)), bytes(CHUNK_BYTES // 64)],
        [encode(Credit(1 << 20))],
        [encode(CancelCall(4))],
        [encode(SharedMemoryAccepted(12345))],
        [encode(Ping())],
    ]


def changed(random: random.Random, message: list[bytes], hello: bytes) -> list[bytes]:
    """The message as somebody sends it who has something in mind, or a broken machine."""
    frames = list(message)
    which = random.randrange(8)
    at = random.randrange(len(frames))
    if which < 4:  # bits are flipped
        damaged = bytearray(frames[at])
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        frames[at] = bytes(damaged)
    elif which == 4:  # it is cut off
        frames[at] = frames[at][: random.randrange(len(frames[at]))]
    elif which == 5:  # a frame comes twice, or many times
        frames[at:at] = [frames[at]] * random.choice([1, 1, 1, 50])
    elif which == 6:  # garbage takes its place
        frames[at] = random.randbytes(random.choice([0, 1, 10, 1000]))
    elif random.random() < 0.2:
        frames = [hello]
    return frames  # else it is as it was: a replay


def test_random_bytes_of_10000_connections_are_harmless(
    serve_busily: Callable[..., Busy],
) -> None:
    busy = serve_busily()
    chance = random.Random(1)
    host, port = split(busy.address)
    for _ in range(RAW):
        with socket.create_connection((host, port)) as stranger:
            data = chance.randbytes(chance.choice([1, 5, 11, 64, 70, 200, 1000]))
            try:
                stranger.sendall(b"\xff" + data if chance.random() < 0.3 else data)
            except OSError:  # it was closed on already
                pass
    until(lambda: busy.seen()["peers"] == 2, 20)
    assert 0 < busy.seen()["refused"] <= RAW, (
        "those that closed before the server did were not refused"
    )
    busy.end()


def test_mangled_messages_are_counted_and_harmless(
    serve_busily: Callable[..., Busy],
) -> None:
    busy = serve_busily()
    chance = random.Random(2)
    hello = encode_hello(our_hello("client", 7, "stranger"))
    with zmq.Context() as context:
        for _ in range(20):
            stranger = Stranger(context, busy.address)
            messages = recorded(decode_hello(stranger.socket.recv(), "server").incarnation)
            for _ in range(FUZZED // 20):
                stranger.socket.send_multipart(changed(chance, chance.choice(messages), hello))
            # of another life: it is answered at once
            stranger.socket.send(encode(Call(LAST, "seen", 1, 0, b"")))
            while not any(reply.id == LAST for reply in stranger.replies()):
                pass
            assert busy.seen()["strays"] > 0, "chunks of no call, and credit for nothing"
            stranger.socket.close()
        for _ in range(50):  # whose first message is not a hello
            stranger = Stranger(
                context, busy.address, changed(chance, [hello], hello)[0][:6] + b"?"
            )
            stranger.socket.send(encode(Ping()))
            stranger.socket.close()
    until(lambda: busy.seen()["peers"] == 2, 20)
    dropped = busy.seen()["dropped"]
    assert {"not a message", "second hello", "refused peer", "before the hello"} <= dropped.keys()
    assert dropped["not a message"] > FUZZED // 20
    assert busy.seen()["repeated"] > 0
    busy.end()


@contextlib.contextmanager
def silent(address: str, count: int) -> Iterator[None]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as open_ones:
        for _ in range(count):
            open_ones.enter_context(socket.create_connection(split(address)))
        yield


def test_silent_connections_are_ended(
    serve_busily: Callable[..., Busy],
) -> None:
    busy = serve_busily(handshake_s=1.0)
    with silent(busy.address, SILENT):
        busy.goes_on()
        assert until(lambda: busy.seen()["refused"] == SILENT, 20), (
            "nobody waits for them any longer than HANDSHAKE_S"
        )
        busy.end()


def test_server_without_descriptors_recovers(
    serve_busily: Callable[..., Busy], connect: Callable[..., ZmqClient]
) -> None:
    limit = 128
    busy = serve_busily(limit, handshake_s=1.0)
    with silent(busy.address, 2 * limit):
        until(lambda: busy.open() >= limit - 1, 20)
        busy.goes_on()
        late = connect(busy.address, timeout_in_ms=30_000)
        assert late.echo_blocking("in") == "in"
        late.close()
        # And attempts of the late one, which the server took out of the queue when that had given
        # them up.
        until(lambda: busy.seen()["refused"] >= 2 * limit and busy.seen()["peers"] == 2, 20)
        busy.end()
