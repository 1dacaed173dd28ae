"""Router and dealer, connected over real sockets: messages, hellos, and lost peers."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

import zmqdist as zd
from tests.launch.helpers import stop
from tests.transport.helpers import Dialled, Served, until
from zmqdist.background import wait_finished
from zmqdist.errors import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    FailedPreconditionError,
    InvalidArgumentError,
    ProtocolMismatchError,
    ResourceExhaustedError,
    UnknownError,
)
from zmqdist.limits import FRAMES_MAX, HEADER_PIECE_BYTES, PAYLOAD_BYTES_MAX
from zmqdist.messages import Beat, Call, Goodbye, Message, Ping, Refused, Reply
from zmqdist.transport import dealer
from zmqdist.transport import router as router_module
from zmqdist.transport import shortcut as shortcut_module
from zmqdist.transport.dealer import configure
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop
from zmqdist.transport.pipe import BYTES, BlockingPipe
from zmqdist.transport.port_probe import PortProbe
from zmqdist.transport.router import REFUSALS_MAX, Peer, Router
from zmqdist.transport.security import client_security, server_security
from zmqdist.wire.headers import decode, encode, split_header
from zmqdist.wire.hello import (
    MAGIC,
    PROTOCOL,
    Hello,
    decode_hello,
    encode_hello,
    is_hello,
    our_hello,
)

Serve = Callable[..., Served]
Dial = Callable[..., Dialled]
Child = Callable[..., "subprocess.Popen[str]"]

Connect = Callable[..., "Raw"]

PREFIX = MAGIC + bytes(PROTOCOL)
HELLO = encode_hello(our_hello("client", 3, "raw"))

FIELDS = msgspec.msgpack.decode(HELLO[len(PREFIX) :])
WRONG_FIELDS = [
    [*FIELDS[:at], value, *FIELDS[at + 1 :]]
    for at, values in enumerate(
        [
            (5, None, b"\xff", []),
            (0, -1, "1", 1.5, None, []),
            (5, None, b"\xff"),
            (5, None),
            (5, [3], [3, "x"], None),
            (5, [5], "x"),
            (5, [2], ["2", 0]),
            (5, [1, 2], ["a", 1, 2]),
            ("x", None, 1.5),
            (5, None),
        ]
    )
    for value in values
]
"""Hellos with one field of a wrong type, shape or value."""

DIALLING = """
import sys
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import client_security
from zmqdist.wire.hello import our_hello
loop = Loop("zmqdist-child")
ignore = lambda *args: None
dealer = DealerConnection(loop, sys.argv[1], client_security(sys.argv[1], "worker"), our_hello("worker", 5, "worker:0"),
                on_up=lambda hello: loop.set_timer("beating", loop.now() + 0.5, lambda: print("beating", flush=True)),
                on_message=ignore, on_down=ignore, on_refused=ignore)
dealer.connect()
loop.start()
sys.stdin.read()
"""

SERVING = """
import sys
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import server_security
from zmqdist.wire.hello import our_hello
loop = Loop("zmqdist-child")
router = Router(loop, server_security("127.0.0.1"), our_hello("server", int(sys.argv[1]), "child"))
address = router.bind(sys.argv[2])
loop.start()
print(address, flush=True)
sys.stdin.read()
"""


class Raw:
    """A bare DEALER that can send any frames."""

    def __init__(
        self,
        served: Served,
        *,
        insecure: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        configure(self.socket)
        client_security(served.address, "client", insecure=insecure).apply(
            self.socket, served.address
        )
        self.socket.connect(f"tcp://{served.address}")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> bytes:
        assert self.socket.poll(3000), "no reply"
        return self.socket.recv()

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(served: Served, **options: Any) -> Raw:
        made.append(Raw(served, **options))
        return made[-1]

    yield make
    for raw in made:
        raw.close()


@pytest.fixture
def raw(serve: Serve, connect: Connect) -> Raw:
    return connect(serve())


# -- messages --------------------------------------------------------------------------------------


def test_message_arrives_with_frames(serve: Serve, dial: Dial) -> None:
    dialled = dial(serve().address)
    hello = dialled.expect("up")[1]
    assert (hello.kind, hello.name, hello.incarnation) == ("server", "served", 1)
    big = bytes(range(256)) * 4096
    assert dialled.send(Call(1, "echo", 0, 0, b"body"), [b"", b"small", big])
    _, reply, frames = dialled.expect("message")
    assert reply == Reply(1, 0, "client", b"body")
    assert [bytes(frame) for frame in frames] == [b"", b"small", big]
    assert not frames[2].readonly, "the receiver owns its frames and may write to them"


def test_messages_keep_order(serve: Serve, dial: Dial) -> None:
    dialled = dial(serve().address)
    dialled.expect("up")
    dialled.loop.run(
        lambda: [dialled.dealer.send(Call(number, "echo", 0, 0, b"")) for number in range(2000)]
    )
    assert [dialled.expect("message")[1].id for _ in range(2000)] == list(range(2000))


@pytest.mark.parametrize("role", ["client", "observe", "submit", "worker", "admin"])
def test_role_comes_from_handshake(serve: Serve, dial: Dial, role: str) -> None:
    served = serve()
    dialled = dial(served.address, client_security(served.address, role))
    dialled.expect("up")
    assert dialled.ask(1).message == role


def test_role_limits_messages_except_admin(serve: Serve, dial: Dial) -> None:
    served = serve()
    served.router.on(
        Beat,
        lambda peer, message, frames: served.router.send(peer, Goodbye("ok")),
        frozenset({"worker"}),
    )
    for role, expected in {"client": Refused, "worker": Goodbye, "admin": Goodbye}.items():
        dialled = dial(served.address, client_security(served.address, role))
        dialled.expect("up")
        dialled.send(Beat())
        answer = dialled.expect("message")[1]
        assert type(answer) is expected
        if expected is Refused:
            assert answer == Refused(
                PERMISSION_DENIED, "role client may not send Beat (allowed: admin, worker)"
            )


def test_unserved_messages_get_bounded_replies(serve: Serve, dial: Dial) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    for _ in range(REFUSALS_MAX + 10):
        dialled.send(Beat())
    for _ in range(REFUSALS_MAX):
        assert dialled.expect("message")[1] == Refused(UNIMPLEMENTED, "Beat is not served here")
    assert dialled.ask(1).id == 1
    assert served.router.dropped == {"not served here": REFUSALS_MAX + 10}


def test_ping_gets_no_reply(serve: Serve, dial: Dial) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    dialled.send(Ping())
    assert dialled.ask(1).id == 1
    assert served.router.dropped == {}


# -- hellos ----------------------------------------------------------------------------------------


def test_peer_without_hello_is_refused_once(raw: Raw) -> None:
    raw.send(encode(Call(1, "echo", 0, 0, b"")))
    raw.send(HELLO)
    raw.send(encode(Call(2, "echo", 0, 0, b"")))
    answer = decode(raw.receive(), "server")
    assert answer == Refused(
        FAILED_PRECONDITION, "the first message of a connection must be a hello"
    )
    assert not raw.socket.poll(50)


def test_major_version_mismatch_is_named_on_both_sides(
    raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    nine = b"ZMQD" + bytes((9, 0)) + msgspec.msgpack.encode(["from the future", {"unknown": 1}])
    raw.send(nine)
    raw.send(encode(Call(2, "echo", 0, 0, b"")))
    assert decode_hello(raw.receive(), "server").protocol == PROTOCOL
    assert not raw.socket.poll(50)
    assert f"speaks zmqdist protocol 9.0, this side {PROTOCOL[0]}.{PROTOCOL[1]}" in caplog.text


def test_server_of_other_version_is_refused(dial: Dial, serve: Serve) -> None:
    served = serve(hello=msgspec.structs.replace(our_hello("server", 1, "served"), protocol=(9, 1)))
    error = dial(served.address).expect("refused")[1]
    assert isinstance(error, ProtocolMismatchError)
    assert (error.ours, error.theirs) == (PROTOCOL, (9, 1))


@pytest.mark.parametrize(
    "damage", [{"name": 5}, {"name": "x" * 5000}, {"incarnation": 0}], ids=["type", "length", "0"]
)
def test_unreadable_hello_of_server_is_reported(
    dial: Dial, serve: Serve, damage: dict[str, Any]
) -> None:
    served = serve(hello=msgspec.structs.replace(our_hello("server", 1, "served"), **damage))
    assert isinstance(dial(served.address).expect("refused")[1], InvalidArgumentError)
    with pytest.raises(InvalidArgumentError, match=r"damaged hello|hello of \d+ bytes"):
        zd.rpc.Client.create("zmq", served.address, timeout_in_ms=20_000)


def test_second_hello_is_dropped(raw: Raw) -> None:
    raw.send(HELLO)
    assert decode_hello(raw.receive(), "server").name == "served"
    raw.send(HELLO)
    raw.send(encode(Call(1, "echo", 0, 0, b"")))
    assert decode(raw.receive(), "server") == Reply(1, 0, "client", b"")


@pytest.mark.parametrize(
    "frames",
    [
        [b"ZMQD"],
        [PREFIX],
        [PREFIX + b"\x91" * 200],
        [PREFIX + msgspec.msgpack.encode(["client", "not a number"])],
        [PREFIX + msgspec.msgpack.encode({"kind": "client"})],
        [HELLO + bytes(5000)],
        *([PREFIX + msgspec.msgpack.encode(fields)] for fields in WRONG_FIELDS),
    ],
)
def test_damaged_hello_is_refused(
    serve: Serve, dial: Dial, connect: Connect, frames: list[bytes]
) -> None:
    served = serve()
    other = dial(served.address)
    other.expect("up")
    raw = connect(served)
    raw.send(*frames)
    raw.send(encode(Call(1, "echo", 0, 0, b"")))
    answer = decode(raw.receive(), "server")
    assert isinstance(answer, Refused)
    assert answer.code == INVALID_ARGUMENT
    assert re.match(
        "damaged hello: |hello of [0-9]+ bytes, at most 4096|its first message is not",
        answer.message,
    )
    until(lambda: served.router.dropped == {"not a message": 1, "refused peer": 1})
    raw.close()
    assert other.ask(1).id == 1
    assert len(served.shown) == 1


@pytest.mark.parametrize(
    "frames", [[b""] * FRAMES_MAX, [bytes(PAYLOAD_BYTES_MAX // 2 + 1)] * 2], ids=["frames", "bytes"]
)
def test_oversized_message_frees_its_memory(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, frames: list[bytes]
) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(router_module, "TRIM_DELAY_S", 0.0)
    monkeypatch.setattr(router_module, "trim_heap", given_back.set)
    served = serve()
    raw = connect(served)
    raw.send(HELLO)
    raw.send(encode(Call(1, "echo", 0, 0, b"")), *frames)
    raw.send(encode(Call(2, "echo", 0, 0, b"")), *frames[1:])
    raw.receive()
    text = "a message has too many frames or bytes"
    assert decode(raw.receive(), "server") == Refused(RESOURCE_EXHAUSTED, text)
    answer = decode(raw.receive(), "server")
    assert isinstance(answer, Reply)
    assert answer.id == 2
    assert served.router.dropped == {"too many frames or bytes": 1}
    assert given_back.wait(20)
    raw.close()


def test_invalid_messages_are_logged_once(
    serve: Serve, caplog: pytest.LogCaptureFixture, connect: Connect
) -> None:
    served = serve()
    raw = connect(served)
    raw.send(HELLO)
    for header in (
        b"",
        b"\xff" * 50,
        b"\x92\x01",
        b"secret secret",
        msgspec.msgpack.encode([999, "secret"]),
    ):
        raw.send(header)
    raw.send(encode(Call(1, "echo", 0, 0, b"")), *[b""] * FRAMES_MAX)
    raw.send(encode(Call(2, "echo", 0, 0, b"")), *[b""] * (FRAMES_MAX - 1))
    raw.receive()
    refusals = [decode(raw.receive(), "server") for _ in range(6)]
    assert [refusal.code for refusal in refusals] == [INVALID_ARGUMENT] * 5 + [RESOURCE_EXHAUSTED]
    assert "secret" not in str(refusals)
    answer = decode(raw.receive(), "server")
    assert isinstance(answer, Reply)
    assert answer.id == 2
    assert served.router.dropped == {"not a message": 5, "too many frames or bytes": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "secret" not in caplog.text
    raw.close()


def test_name_of_peer_cannot_forge_log_lines(serve: Serve, connect: Connect) -> None:
    served = serve()
    raw = connect(served)
    raw.send(encode_hello(Hello("client", 4, "nice\nERROR " + "x" * 1000)))
    raw.receive()
    until(lambda: served.shown)
    assert served.shown[0].name == ("nice?ERROR " + "x" * 1000)[:100]
    raw.close()


def test_connections_beyond_bound_are_refused(serve: Serve, dial: Dial) -> None:
    served = serve()
    served.router.peers_max = 1
    first = dial(served.address)
    first.expect("up")
    error = dial(served.address).expect("refused")[1]
    assert isinstance(error, ResourceExhaustedError)
    assert error.error_code == RESOURCE_EXHAUSTED
    assert first.ask(1).id == 1


def test_messages_before_hello_are_dropped(serve: Serve, dial: Dial) -> None:
    served = serve()
    early = encode(Reply(1, 0, "", b""))  # in place of the hello
    served.router._hello = early  # reach: no server has a way to send this
    dialled = dial(served.address)
    until(lambda: dialled.dealer.dropped == {"before the hello": 1})
    assert not dialled.dealer.up
    assert not dialled.send(Beat()), "a send over a lost connection must return that it failed"


# -- lost peers ------------------------------------------------------------------------------------


def test_peer_end_is_reported_once(serve: Serve, dial: Dial) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    dialled.loop.stop()
    until(lambda: served.gone)
    assert served.gone == served.shown
    assert served.gone[0].gone
    assert not served.loop.run(served.router.send, served.gone[0], Beat())
    assert served.loop.run(lambda: served.router.peers) == []
    assert len(served.gone) == 1


def test_killed_process_is_noticed(serve: Serve, child: Child) -> None:
    served = serve()
    process = child(DIALLING, served.address)
    until(lambda: served.shown)
    assert served.shown[0].name == "worker:0"
    process.send_signal(signal.SIGKILL)
    until(lambda: served.gone)


def test_stopped_process_is_noticed_by_heartbeat(serve: Serve, dial: Dial, child: Child) -> None:
    served = serve()
    client, server = child(DIALLING, served.address), child(SERVING, "9", "127.0.0.1:0")
    assert server.stdout is not None
    dialled = dial(server.stdout.readline().strip())
    dialled.expect("up")
    assert client.stdout is not None
    # the server knows how long to wait since the first heartbeat
    assert client.stdout.readline() == "beating\n"
    stop(client.pid)
    stop(server.pid)
    until(lambda: served.gone)
    dialled.expect("down")
    assert not dialled.dealer.up


def test_hello_repeats_after_restart_of_server(dial: Dial, child: Child) -> None:
    first = child(SERVING, "11", "127.0.0.1:0")
    assert first.stdout is not None
    address = first.stdout.readline().strip()
    dialled = dial(address)
    assert dialled.expect("up")[1].incarnation == 11
    first.send_signal(signal.SIGKILL)
    dialled.expect("down")
    assert not dialled.send(Beat())
    child(SERVING, "12", address)
    assert dialled.expect("up")[1].incarnation == 12


def test_messages_of_dead_server_are_read_first(serve: Serve, dial: Dial) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    until(lambda: served.shown)
    entered, hold = threading.Event(), threading.Event()
    dialled.loop.call_soon(lambda: (entered.set(), hold.wait(30)))
    assert entered.wait(30)  # from now on the client is late
    served.loop.run(
        lambda: [served.router.send(served.shown[0], Reply(n, 0, "", b"")) for n in range(3000)]
    )
    served.loop.stop()
    hold.set()
    assert [dialled.expect("message")[1].id for _ in range(3000)] == list(range(3000))
    dialled.expect("down")


class Held:
    """Keep a loop from running until `release`, and call a function before any other event of the
    loop."""

    def __init__(self, loop: Loop, then: Callable[[], object] = lambda: None) -> None:
        entered, self._hold = threading.Event(), threading.Event()
        loop.call_soon(lambda: (entered.set(), self._hold.wait(30), then()))
        assert entered.wait(30)

    def release(self) -> None:
        self._hold.set()


def test_descriptor_reuse_blames_right_peer(serve: Serve, connect: Connect) -> None:
    # no handler: handshakes go on while the loop is held
    served = serve(server_security("127.0.0.1", insecure=True))
    # Which number the server's end gets is a race with the client's end, which lives in this
    # process too.
    assert any(one_dies_and_another_comes(served, connect) for _ in range(60)), (
        "no descriptor number was ever used again"
    )


def one_dies_and_another_comes(served: Served, connect: Connect) -> bool:
    """Connect a new peer while the server is late; return whether it got the descriptor number of
    the dead one."""
    served.shown.clear()
    served.gone.clear()
    first = connect(served, insecure=True)
    first.send(encode_hello(Hello("client", 1, "first")))
    first.receive()
    open_fds = len(os.listdir("/proc/self/fd"))
    held = Held(served.loop)
    first.socket.close(linger=0)
    # the socket's own, and both ends of the connection
    until(lambda: len(os.listdir("/proc/self/fd")) == open_fds - 3)
    second = connect(served, insecure=True, context=first.context)
    second.send(encode_hello(Hello("client", 1, "second")))
    until(lambda: len(os.listdir("/proc/self/fd")) == open_fds)
    held.release()
    decode_hello(second.receive(), "server")
    until(lambda: served.gone)
    assert [peer.name for peer in served.gone] == ["first"]
    assert [peer.name for peer in served.loop.run(lambda: served.router.peers)] == ["second"]
    second.close()
    until(lambda: len(served.gone) == 2)
    return served.shown[0].fd == served.shown[1].fd


@pytest.mark.parametrize(
    ("answered", "pings"),
    [(False, 0), (True, 0), (True, 6)],
    ids=[
        "unreachable at once",
        "unreachable a moment later",
        "reachable until long after its end was reported",
    ],
)
def test_peer_dead_before_hello_does_not_stay(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, answered: bool, pings: int
) -> None:
    served = serve(server_security("127.0.0.1", insecure=True))
    router = served.router
    send, read_monitor = (
        router._send_raw,
        router._read_monitor,
    )  # reach: the order of two sockets' events is ZeroMQ's
    # the worst order: the monitor's event comes before the hello
    held = Held(served.loop, read_monitor)
    answers: list[Peer] = []
    pinged: list[Peer] = []

    def answer(peer: Peer, header: bytes, frames: Any = ()) -> bool:
        if not is_hello(header):
            pinged.append(peer)
            return len(pinged) <= pings or send(peer, header, frames)
        answers.append(peer)
        return answered or send(peer, header, frames)

    monkeypatch.setattr(router, "_send_raw", answer)
    open_fds = len(os.listdir("/proc/self/fd"))
    first = connect(served, insecure=True)
    first.send(encode_hello(Hello("client", 1, "first")))
    first.socket.close(linger=1000)
    first.close()
    until(lambda: len(os.listdir("/proc/self/fd")) == open_fds)
    held.release()
    until(lambda: len(answers) == 1)
    until(lambda: served.loop.run(lambda: router.peers) == [] and len(served.gone) == answered)
    assert [peer.name for peer in served.shown] == ["first"] * answered


def test_ends_behind_one_descriptor_are_noticed(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(server_security("127.0.0.1", insecure=True))
    monkeypatch.setattr("zmqdist.transport.router.decode_event", lambda frame: (0, 7))
    monkeypatch.setattr("zmqdist.transport.router.fd_of", lambda frame: 7)
    staying, *leaving = [connect(served, insecure=True) for _ in range(4)]
    for one in (leaving[0], staying, *leaving[1:]):
        one.send(HELLO)
        one.receive()
    for one in leaving:
        one.close()
    until(lambda: len(served.gone) == 3)
    assert len(served.loop.run(lambda: served.router.peers)) == 1
    staying.send(encode(Call(5, "echo", 0, 0, b"")))
    while not isinstance(answer := decode(staying.receive(), "server"), Reply):
        assert answer == Ping()
    assert answer.id == 5
    staying.close()
    until(lambda: len(served.gone) == 4)


def test_stopping_server_sends_no_hello(serve: Serve, connect: Connect) -> None:
    served = serve()
    served.router.stopping = True
    raw = connect(served)
    raw.send(HELLO)
    until(lambda: served.router.received == 1)
    assert not raw.socket.poll(0)
    assert served.shown == []


def test_sends_keep_wake_up_for_input(serve: Serve, connect: Connect) -> None:
    served = serve()
    raw = connect(served)
    raw.send(HELLO)
    raw.receive()
    peer = until(lambda: served.shown and served.shown[0])
    done = threading.Event()

    def push() -> None:
        while not done.is_set():
            served.loop.run(served.router.send, peer, Beat())

    pusher = threading.Thread(target=push)
    pusher.start()
    try:
        for number in range(1500):
            raw.send(encode(Call(number, "echo", 0, 0, b"")))
            while not isinstance(answer := decode(raw.receive(), "server"), Reply):
                pass
            assert answer.id == number
    finally:
        done.set()
        pusher.join()


def test_many_peers_that_end_are_reported(serve: Serve, dial: Dial, connect: Connect) -> None:
    served = serve()
    staying = dial(served.address, name="staying")
    staying.expect("up")
    for _ in range(4):
        crowd = [connect(served) for _ in range(15)]
        for one in crowd:
            one.send(HELLO)
        for one in crowd:
            one.receive()
        for one in crowd:
            one.close()
    until(lambda: len(served.gone) == 60)
    assert [peer.name for peer in served.loop.run(lambda: served.router.peers)] == ["staying"]
    assert staying.ask(1).id == 1


# -- strangers -------------------------------------------------------------------------------------


def test_garbage_connections_disturb_nobody(serve: Serve, dial: Dial) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    host, port = served.address.split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    garbage = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 200,
        bytes(64),
        greeting,
        greeting + b"\x04\x05HELLO",
        b"",
        os.urandom(300),
    ]
    open_fds = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
            stranger.sendall(garbage[number % len(garbage)])
            if number % 3 == 0:  # a reset instead of a close
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if number % 10 == 0:
            assert dialled.ask(number).id == number
    assert dialled.ask(1000).id == 1000
    assert served.router.refused_handshakes > 0
    assert len(served.shown) == 1
    until(lambda: len(os.listdir("/proc/self/fd")) <= open_fds)


@pytest.mark.parametrize(
    "sent", [b"", b"\xff" + bytes(8) + b"\x7f\x03"], ids=["nothing", "part of a greeting"]
)
def test_closed_handshake_counts_as_no_refusal(serve: Serve, sent: bytes) -> None:
    served = serve()
    for number in range(20):  # as readiness probes do
        with socket.create_connection(split(served.address), timeout=5.0) as probe:
            probe.sendall(sent)
            if number % 2:
                probe.recv(1)
    assert served.router.refused_handshakes == 0
    with socket.create_connection(split(served.address), timeout=5.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        until(lambda: served.router.refused_handshakes == 1)


def test_unread_monitor_does_not_block_zeromq(serve: Serve) -> None:
    served = serve(server_security("127.0.0.1", insecure=True))
    held = Held(served.loop)
    host, port = served.address.split(":")
    for _ in range(2500):  # more than twice ZeroMQ's default queue
        with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
            stranger.sendall(bytes(64))
    probe = PortProbe(served.address, time.monotonic())
    until(lambda: probe.step(time.monotonic()))
    assert probe.mechanism == "NULL"
    held.release()


# -- addresses -------------------------------------------------------------------------------------


def test_port_in_use_is_reported(serve: Serve) -> None:
    served = serve()
    with pytest.raises(UnknownError, match=f"could not bind {served.address}: the port is in use"):
        serve(address=served.address)


def test_port_of_dropped_server_is_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{taken.getsockname()[1]}"

    def wait(within_s: float) -> bool:
        taken.close()  # as the thread does that ends a dropped server, just before the wait begins
        return wait_finished(within_s)

    monkeypatch.setattr(router_module, "wait_finished", wait)
    assert serve(address=address).address == address


@pytest.mark.parametrize(
    ("address", "error", "expected"),
    [
        ("127.0.0.1", InvalidArgumentError, "no port; write host:port"),
        ("127.0.0.1:http", InvalidArgumentError, "'http' is not a port number"),
        ("127.0.0.1:65536", InvalidArgumentError, "port 65536 is above 65535"),
        ("::1:5050", InvalidArgumentError, "an IPv6 host needs brackets"),
        (":5050", InvalidArgumentError, "no host before the colon"),
        (
            "127.1:0",
            InvalidArgumentError,
            "'127.1' is not an IP address: write four decimal numbers",
        ),
        ("[::ffff:0.0.0.0]:0", FailedPreconditionError, "zmqdist keygen"),
        ("0.0.0.0:0", FailedPreconditionError, "zmqdist keygen"),
        ("*:0", FailedPreconditionError, "zmqdist keygen"),
        ("[::]:0", FailedPreconditionError, "zmqdist keygen"),
        ("192.0.2.1:0", FailedPreconditionError, "zmqdist keygen"),
    ],
)
def test_unservable_address_is_refused(
    serve: Serve, address: str, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        serve(address=address)


def test_address_of_other_host_is_reported(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UnknownError, match=r"could not bind 192\.0\.2\.1:0: this host does not have that address"
    ):
        serve(server_security("192.0.2.1", insecure=True), "192.0.2.1:0")


@pytest.mark.parametrize(
    "address",
    [
        "[::1]:0",
        "localhost:0",
        "LOCALHOST:0",
        "localhost.:0",
        "[0:0:0:0:0:0:0:1]:0",
        "[::ffff:127.0.0.1]:0",
        "[::1%lo]:0",
    ],
)
def test_names_of_loopback_work_on_both_ends(serve: Serve, dial: Dial, address: str) -> None:
    if "[" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    served = serve(address=address)
    dialled = dial(served.address)
    dialled.expect("up")
    assert dialled.ask(1).id == 1


def test_bound_socket_is_served(dial: Dial) -> None:
    given = socket.create_server(("127.0.0.1", 0))
    loop = Loop("zmqdist-given")
    router = Router(loop, server_security("127.0.0.1"), our_hello("server", 1))
    address = router.bind_fd(given.detach())
    loop.start()
    dial(address).expect("up")
    loop.stop()


def test_loop_has_one_secured_server() -> None:
    loop = Loop("zmqdist-twice")
    security = server_security("127.0.0.1")
    Router(loop, security, our_hello("server", 1))
    with pytest.raises(FailedPreconditionError, match="give each server a loop of its own"):
        Router(loop, security, our_hello("server", 1))
    loop.stop()


def test_handler_error_loses_one_message(
    serve: Serve, dial: Dial, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()

    def broken(peer: Any, message: Message, frames: Any) -> None:
        raise ValueError("broken on purpose")

    served.router.on(Beat, broken)
    dialled = dial(served.address)
    dialled.expect("up")
    dialled.send(Beat())
    assert dialled.ask(1).id == 1
    assert served.loop.faults == 1
    assert "broken on purpose" in caplog.text
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    served.loop.faults = 0


def test_message_without_memory_ends_connection(
    serve: Serve, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for the answer to this message gets an error."""
    served = serve()
    failing = [MemoryError("no room"), MemoryError("no room")]

    def broken(peer: Any, message: Message, frames: Any) -> None:
        if failing:
            raise failing.pop()

    served.router.on(Beat, broken)
    dialled = dial(served.address)
    for _ in range(2):
        dialled.expect("up")
        dialled.send(Beat())
        dialled.expect("down")
    dialled.expect("up")
    assert dialled.ask(1).id == 1
    assert served.loop.faults == 2
    served.loop.faults = 0


def test_client_without_memory_reconnects(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")

    def decode(*_: Any) -> Message:
        raise MemoryError("no room")

    with monkeypatch.context() as failing:
        failing.setattr(dealer, "decode", decode)
        dialled.send(Call(1, "echo", 1, 0, b""))
        dialled.expect("down")
    dialled.expect("up")
    assert dialled.ask(2).id == 2
    assert dialled.loop.faults == 1
    dialled.loop.faults = 0


def test_client_reconnects_to_silent_server(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router on the way that has forgotten the connection reports nothing, and heartbeats begin
    only after the handshake."""
    monkeypatch.setattr(dealer, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(20.0)
        dialled = dial("{}:{}".format(*silent.getsockname()))
        with silent.accept()[0], silent.accept()[0]:
            until(lambda: "did not finish the handshake in time" in dialled.dealer.trouble)


@pytest.mark.parametrize("body", [bytes(HEADER_PIECE_BYTES), bytes(10**6)], ids=len)
def test_header_frames_let_heartbeats_pass(
    serve: Serve, connect: Connect, dial: Dial, body: bytes
) -> None:
    served = serve()
    dialled = dial(served.address)
    dialled.expect("up")
    assert dialled.send(Call(2, "echo", 0, 0, body), [b"payload"])
    _, reply, frames = dialled.expect("message")
    assert (reply.body, list(map(bytes, frames))) == (body, [b"payload"])
    raw = connect(served)
    raw.send(HELLO)
    raw.receive()
    first, rest = split_header(encode(Call(1, "echo", 0, 0, body)), [])
    raw.send(first, *rest)
    assert raw.socket.poll(20_000)
    assert max(map(len, raw.socket.recv_multipart())) <= HEADER_PIECE_BYTES + 3
    raw.close()


@pytest.mark.parametrize("count", [0, 2, 0xFFFF])
def test_incomplete_header_is_no_message(serve: Serve, connect: Connect, count: int) -> None:
    served = serve()
    raw = connect(served)
    raw.send(HELLO)
    raw.send(b"\xc1" + count.to_bytes(2, "big"), b"\x92\x01")
    raw.send(encode(Call(1, "echo", 0, 0, b"")))
    until(lambda: served.router.dropped == {"not a message": 1})
    raw.close()


@pytest.fixture(params=["process", "host"])
def shortcut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut within this process, or the one between processes of this host."""
    if request.param == "host":
        monkeypatch.setattr(dealer, "find", lambda *_: None)


@pytest.mark.usefixtures("shortcut")
def test_shortcut_passes_messages_in_order(serve: Serve, dial: Dial) -> None:
    """Two equal connections of this process get each their own replies, past the sockets, and may
    write to the frames."""
    served = serve()
    pair = [dial(served.address), dial(served.address)]
    for one in pair:
        one.expect("up")
    payload = [b"frame", bytearray(b"other"), b""]
    for number in range(200):
        for at, one in enumerate(pair):
            one.send(Call(2 * number + at + 1, "echo", 0, 0, b"b"), payload)
    for at, one in enumerate(pair):
        for number in range(200):
            _, reply, frames = one.expect("message")
            assert reply.id == 2 * number + at + 1
            assert [bytes(frame) for frame in frames] == [b"frame", b"other", b""]
            frames[0][:] = b"wrote"
    assert payload == [b"frame", b"other", b""]
    assert all(peer.shortcut is not None for peer in served.router.peers)


@pytest.mark.usefixtures("shortcut")
def test_shortcut_ends_with_connection(serve: Serve, dial: Dial) -> None:
    """Messages of a connection that has ended do not reach the next one."""
    served = serve()
    one = dial(served.address)
    one.expect("up")
    one.ask(1)
    (peer,) = served.loop.run(lambda: served.router.peers)
    router_module.shut_down(peer.fd)
    one.expect("down")
    until(lambda: served.gone == [peer])
    assert peer.shortcut is None
    one.expect("up")
    one.ask(2)


@pytest.mark.parametrize("linger_s", [0.0, 5.0])
def test_last_messages_of_host_arrive(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch, linger_s: float
) -> None:
    """A server that is late reads all that the peer's socket has taken before it forgets the peer;
    with a linger time a peer that ends waits until its socket has taken all."""
    monkeypatch.setattr(dealer, "find", lambda *_: None)
    served = serve()
    one = dial(served.address)
    one.expect("up")
    one.ask(1)
    seen: list[int] = []
    at_end: list[int] = []
    served.router.on(Call, lambda peer, call, frames: seen.append(call.id))
    served.router.on_gone.append(lambda peer: at_end.append(len(seen)))
    held, free = threading.Event(), threading.Event()
    served.loop.call_soon(lambda: (held.set(), free.wait(20)))
    assert held.wait(20)
    count = 20 if linger_s else 2
    for number in range(count):
        assert one.send(Call(number, "echo", 0, 0, b""), [bytes(50_000)])
    timer = threading.Timer(0.1, free.set)
    timer.start()
    one.loop.run(one.dealer.close, linger_s)
    free.set()
    until(lambda: at_end)
    assert (seen, at_end) == (list(range(count)), [count])
    timer.join()


@pytest.mark.parametrize(
    "fault", ["other user", "no listener", "other connection", "no room", "silence"]
)
def test_connection_without_shortcut_uses_zeromq(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(dealer, "find", lambda *_: None)
    ends = socket.socketpair()
    if fault == "other user":
        other = SimpleNamespace(geteuid=lambda: os.geteuid() + 1, getpid=os.getpid)
        monkeypatch.setattr(shortcut_module, "os", other)
    elif fault == "no listener":
        monkeypatch.setattr(router_module, "listen_on_host", lambda *_: None)
    elif fault == "no room":
        few = SimpleNamespace(getrlimit=lambda _: (2, 2), RLIMIT_NOFILE=0)
        monkeypatch.setattr(shortcut_module, "resource", few)
    elif fault == "silence":
        monkeypatch.setattr(dealer, "connect_on_host", lambda *_: ends[0])
        monkeypatch.setattr(dealer, "HANDSHAKE_S", 0.2)
    else:
        monkeypatch.setattr(router_module, "remote_address", lambda *_: None)
    served = serve()
    one = dial(served.address)
    one.expect("up")
    one.ask(1)
    assert [peer.shortcut for peer in served.router.peers] == [None]
    for end in ends:
        end.close()


def claim(served: Served, peer: Peer) -> BlockingPipe[bytes]:
    """Return a pipe to the server whose first message claims this peer's connection."""
    end = shortcut_module.connect_on_host(split(served.address)[1], 1)
    assert end is not None
    pipe = BlockingPipe(end.detach(), BYTES)
    address = str(router_module.remote_address(peer.fd)).encode()
    assert peer.hello is not None
    pipe.send(encode_hello(peer.hello), [address])
    return pipe


def test_connection_with_shortcut_cannot_be_claimed(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer, "find", lambda *_: None)
    served = serve()
    one = dial(served.address)
    one.expect("up")
    one.ask(1)
    pipe = claim(served, served.loop.run(lambda: served.router.peers)[0])
    with contextlib.closing(pipe), pytest.raises(EOFError):
        pipe.receive()
    one.ask(2)


def test_end_of_shortcut_ends_its_connection(serve: Serve, connect: Connect) -> None:
    """What the server has sent by the shortcut may be lost, so the peer has to connect again."""
    served = serve()
    raw = connect(served)
    raw.send(HELLO)
    raw.receive()
    (peer,) = served.loop.run(lambda: served.router.peers)
    with contextlib.closing(claim(served, peer)) as pipe:
        assert is_hello(pipe.receive()[0])
    until(lambda: served.gone == [peer])


def test_unbound_port_has_no_shortcut(serve: Serve) -> None:
    served = serve()
    port = split(served.address)[1]
    end = shortcut_module.connect_on_host(port, 1)
    assert end is not None
    end.close()
    served.router.unbind(served.address)
    assert shortcut_module.connect_on_host(port, 1) is None


def test_proxy_prevents_shortcut(serve: Serve, dial: Dial) -> None:
    """A connection through another port uses its socket."""
    served = serve()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = dial(f"127.0.0.1:{listener.getsockname()[1]}")
        inner = listener.accept()[0]
    with inner, socket.create_connection(("127.0.0.1", split(served.address)[1])) as outer:
        threads = [
            threading.Thread(target=pass_on, args=ends) for ends in ((inner, outer), (outer, inner))
        ]
        for thread in threads:
            thread.start()
        one.expect("up")
        one.ask(1)
        assert [peer.shortcut for peer in served.router.peers] == [None]
        one.loop.stop()
        for thread in threads:
            thread.join(20)


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(65_536):
        sink.sendall(data)
    with contextlib.suppress(OSError):  # the other direction has ended first
        sink.shutdown(socket.SHUT_WR)
