"""Generator functions: iterators at the client, with credit, an end, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import math
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import Hosted, channel_to, until
from zmqdist import cancelled, errors
from zmqdist.limits import STREAM_BYTES_AHEAD, STREAM_ITEMS_AHEAD, STREAMS_OF_PEER_MAX
from zmqdist.rpc import ZmqClient, ZmqServer, client, payload, service
from zmqdist.specs import TensorSpec
from zmqdist.specs import function as zd_function
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.wire.headers import Items, decode_items, encode_items

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]
Child = Callable[..., "subprocess.Popen[str]"]


class Source:
    """Generator functions whose progress can be watched."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = threading.Event()
        self.threads: set[int] = set()

    def count(self, start: int = 0) -> Iterator[int]:
        try:
            for number in itertools.count(start):
                self.made = number + 1
                self.threads.add(threading.get_ident())
                yield number
        finally:
            self.threads.add(threading.get_ident())
            self.closed.set()

    def upto(self, count: int, fails: bool = False) -> Iterator[int]:
        yield from range(count)
        if fails:
            raise KeyError("at the end")


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server(serve: Serve, source: Source) -> Iterator[ZmqServer]:
    server = serve(count=source.count, upto=source.upto, echo=lambda value: value)
    yield server
    until(lambda: server.snapshot().streams == 0)


def take(stream: Any, got: list[Any]) -> None:
    for item in stream:
        got.append(item)  # one by one: what came before an error counts


# -- what is in one --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 10, 3 * STREAM_ITEMS_AHEAD + 1])
def test_stream_yields_items_in_order(server: ZmqServer, connect: Connect, count: int) -> None:
    client = connect(server.address)
    assert list(client.upto(count)) == list(range(count))
    assert list(client.upto(count=count)) == list(range(count))
    assert list(client.stream("upto", count)) == list(range(count))


def test_generator_error_arrives_after_items(server: ZmqServer, connect: Connect) -> None:
    for count in (0, 3, 2 * STREAM_ITEMS_AHEAD):
        stream, got = connect(server.address).upto(count, fails=True), []
        with pytest.raises(
            errors.UnknownError, match=r"KeyError: 'at the end'\n\nTraceback(.|\n)*in upto\n"
        ):
            take(stream, got)
        assert got == list(range(count))
        assert list(stream) == []  # once


def test_items_are_snapshots_of_any_value(serve: Serve, connect: Connect) -> None:
    given = [
        None,
        {"a": [1, (2.5, "x")]},
        b"bytes",
        np.arange(3),
        "y" * 10,
        [np.zeros(10**5), np.ones(10**6)],
        7,
    ]

    def all_of() -> Iterator[Any]:
        yield from given

    def steps(size: int) -> Iterator[Any]:
        state = np.zeros(size)
        for _ in range(9):
            state += 1
            yield state

    client = connect(serve(all_of=all_of, steps=steps).address, timeout_in_ms=30_000)
    got = list(client.all_of())
    assert [type(item) for item in got] == [type(item) for item in given]
    assert got[:3] == given[:3]
    assert got[5][1].sum() == 10**6
    for size in (2, 10**4, 10**6):
        assert [set(item) for item in map(np.unique, client.steps(size))] == [
            {float(n)} for n in range(1, 10)
        ]


def test_items_fit_the_output_signature_or_the_stream_ends(serve: Serve, connect: Connect) -> None:
    @zd_function(
        input_signature=[TensorSpec((), np.int32)], output_signature=TensorSpec((), np.float32)
    )
    def halves(count: Any) -> Iterator[Any]:
        for number in range(count):
            yield number / 2
        yield "no number"

    client = connect(serve(halves=halves).address)
    assert str(client.methods()["halves"]) == "halves(count: int32[]) -> stream of float32[]"
    got: list[Any] = []
    with pytest.raises(errors.UnknownError, match="halves returned a value that does not fit"):
        take(client.halves(2), got)
    assert [(float(item), item.dtype) for item in got] == [(0.0, np.float32), (0.5, np.float32)]
    with pytest.raises(ValueError, match="expected 1 arguments, given 2"):
        client.halves(1, 2)
    with pytest.raises(errors.InvalidArgumentError, match="expected int32"):
        list(client.halves("text"))


def test_generator_runs_in_one_thread(server: ZmqServer, connect: Connect, source: Source) -> None:
    with connect(server.address).count() as stream:
        assert list(itertools.islice(stream, 2000)) == list(range(2000))
    assert source.closed.wait(30)
    assert len(source.threads) == 1


def test_callable_object_may_be_generator_function(serve: Serve, connect: Connect) -> None:
    class Upto:
        def __call__(self, count: int) -> Iterator[int]:
            yield from range(count)

    client = connect(serve(upto=Upto(), part=functools.partial(Upto().__call__, 2)).address)
    assert str(client.methods()["upto"]) == "upto(count) -> stream"
    assert (list(client.upto(3)), list(client.part())) == ([0, 1, 2], [0, 1])


def test_stream_deadline_may_exceed_timeout_max(
    server: ZmqServer, connect: Connect, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.transport.calls_machine.NEVER_S", math.inf)
    monkeypatch.setattr("zmqdist.rpc.client.NEVER_S", math.inf)
    with connect(server.address).count(timeout_in_ms=1e15) as stream:
        until(lambda: source.made >= STREAM_ITEMS_AHEAD)
        assert list(itertools.islice(stream, 2000)) == list(range(2000))


def test_stream_in_asyncio(server: ZmqServer, connect: Connect, source: Source) -> None:
    client = connect(server.address)

    async def use() -> tuple[list[int], list[int]]:
        whole = [item async for item in client.upto(1500)]
        both = await asyncio.gather(*(some(client.count(start), 100) for start in (0, 50)))
        assert await client.echo(5) == 5
        with pytest.raises(errors.UnknownError, match="at the end"):
            async for _ in client.upto(2, fails=True):
                pass
        return whole, [len(one) for one in both]

    async def some(stream: Any, count: int) -> list[int]:
        got: list[int] = []
        async for item in stream:
            got.append(item)
            if len(got) == count:
                break
        stream.close()
        return got

    assert asyncio.run(use()) == (list(range(1500)), [100, 100])


def test_cancelled_task_closes_its_stream(serve: Serve, connect: Connect) -> None:
    closed = threading.Event()

    def silent() -> Iterator[int]:
        try:
            yield 1
            until(cancelled)
            yield 2
        finally:
            closed.set()

    client = connect(serve(silent=silent).address)

    async def use() -> None:
        stream = client.silent()
        assert await stream.__anext__() == 1
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()

    asyncio.run(use())
    assert closed.wait(30)


def test_short_stream_takes_one_reply(connect: Connect) -> None:
    def three(asked: Any, *args: Any) -> None:
        asked.reply_packed(
            encode_items(Items([payload.pack(n)[0] for n in range(3)], [], (0, ""))), ()
        )

    server = Hosted()
    server.service.register("upto", Source().upto)
    server.service.register_later("zmqdist.open", three)
    with server:
        client = connect(server.address)
        before = client.snapshot().messages_sent
        assert list(client.upto(3)) == [0, 1, 2]
        assert client.snapshot().messages_sent == before + 1


def test_forked_child_leaves_streams_of_parent(child: Child) -> None:
    assert child(FORKED).communicate(timeout=30)[0] == "0 1 2 3 4\n"


FORKED = """
import os
import warnings
from zmqdist.errors import FailedPreconditionError
from zmqdist.rpc import Client, Server
def upto(count):
    yield from range(count)
server = Server.create("zmq", "127.0.0.1:0")
server.register("upto", upto)
server.start()
client = Client.create("zmq", server.address)
stream = client.upto(5)
got = [next(stream)]
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # Python 3.12: such a fork may deadlock
pid = os.fork()
if not pid:
    try:
        next(stream)
    except FailedPreconditionError:  # the items that have arrived are the parent's
        stream.close()
        os._exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
print(*got, *stream, flush=True)
client.close()
server.stop()
"""


# -- credit ----------------------------------------------------------------------------------------


def test_generator_runs_ahead_by_window(
    server: ZmqServer, connect: Connect, source: Source
) -> None:
    client = connect(server.address)
    with client.count() as stream:
        assert next(stream) == 0
        # One answer may be on its way, and a window is made for the next.
        until(lambda: source.made >= STREAM_ITEMS_AHEAD)
        for _ in range(20):
            assert client.echo_blocking(1) == 1
        assert source.made <= 2 * STREAM_ITEMS_AHEAD + 1
        assert list(itertools.islice(stream, 5000)) == list(range(1, 5001))
        assert source.made <= 5001 + 3 * STREAM_ITEMS_AHEAD


def test_large_items_are_bounded_by_their_bytes(serve: Serve, connect: Connect) -> None:
    made: list[int] = []

    def arrays() -> Iterator[Any]:
        for number in range(100):
            made.append(number)
            yield np.full(STREAM_BYTES_AHEAD // 4, number, np.uint8)

    client = connect(serve(arrays=arrays, echo=lambda value: value).address, timeout_in_ms=30_000)
    with client.arrays() as stream:
        assert next(stream).sum() == 0
        until(lambda: len(made) >= 5)
        for _ in range(20):
            client.echo_blocking(1)
        assert len(made) <= 10
        assert [int(item[0]) for item in stream] == list(range(1, 100))


# -- ends ------------------------------------------------------------------------------------------


def test_failed_request_closes_stream_at_server(connect: Connect, source: Source) -> None:
    def full(asked: Any, number: int) -> None:
        raise errors.ResourceExhaustedError(None, None, "no memory for it")

    server = Hosted()
    server.service.register("count", source.count)
    server.service.register_later("zmqdist.next", full)
    with server:
        with pytest.raises(errors.ResourceExhaustedError):
            list(connect(server.address).count())
        assert source.closed.wait(20)


@pytest.mark.parametrize("way", ["break", "close", "with", "drop", "cycle", "unread", "client"])
def test_unfinished_stream_closes_generator(
    server: ZmqServer, connect: Connect, source: Source, way: str
) -> None:
    client = connect(server.address)
    if way == "break":
        for item in client.count():
            if item == 3:
                break
    elif way == "close":
        stream = client.count()
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with client.count() as stream:
            next(stream)
    elif way == "drop":
        next(client.count())
    elif way == "cycle":
        box: list[Any] = [client.count()]
        next(box[0])
        box.append(box)
        del box
        gc.collect()
    elif way == "unread":
        stream = client.count()
        until(lambda: source.made)
        stream.close()
    else:
        stream = client.count()
        next(stream)
        client.close()
        with pytest.raises((errors.CancelledError, errors.FailedPreconditionError)):
            # What was asked; what would be asked next.
            list(stream)
    assert source.closed.wait(30)


def test_stream_is_collected_with_client(server: ZmqServer, source: Source) -> None:
    """The collector calls their finalizers in any order."""
    for _ in range(5):
        client = ZmqClient(server.address, "", True, 5000)
        stream = client.count()
        next(stream)
        box: list[Any] = [client, stream]  # in either order
        box.append(box)
        stream.box = box
        client.box = box
        gone = weakref.ref(client)
        del client, stream, box
        # Again and again: a thread that has just looked at the client may have held it while the
        # first one ran.
        until(lambda gone=gone: gc.collect() >= 0 and gone() is None)
        assert source.closed.wait(30)
        source.closed.clear()


def test_stream_timeout_covers_whole_stream(
    server: ZmqServer, connect: Connect, source: Source
) -> None:
    # Each time is long enough for the server to begin the generator; one that has not begun is not
    # closed.
    client = connect(server.address)
    got: list[int] = []
    with pytest.raises(errors.DeadlineExceededError, match="count"):
        take(client.count(timeout_in_ms=500), got)
    assert got == list(range(len(got)))
    assert source.closed.wait(30)
    source.closed.clear()
    idle = client.count(timeout_in_ms=1000)  # and nobody takes anything
    assert source.closed.wait(30)
    with pytest.raises(errors.DeadlineExceededError, match="count"):
        list(idle)


SERVER = """
import sys, itertools, threading
from zmqdist.rpc import Server
def count():
    yield from itertools.count()
def stuck():
    yield 1
    threading.Event().wait(60)
server = Server.create("zmq", sys.argv[1])
server.register("count", count)
server.register("stuck", stuck)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("back", [False, True], ids=["gone", "back"])
@pytest.mark.parametrize("method", ["count", "stuck"])
def test_server_death_ends_stream(child: Child, connect: Connect, method: str, back: bool) -> None:
    process = child(SERVER, "127.0.0.1:0")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    client = connect(address, timeout_in_ms=0)
    stream = getattr(client, method)()
    assert next(stream) in (0, 1)
    process.kill()
    process.wait()
    if back:
        other = child(SERVER, address)
        assert other.stdout is not None
        assert other.stdout.readline()
        until(lambda: client.call("zmqdist.methods", timeout_in_ms=500).is_ok())
    with pytest.raises(errors.UnavailableError):
        for _ in stream:
            pass


def test_stopping_server_ends_streams(serve: Serve, connect: Connect, source: Source) -> None:
    server = serve(count=source.count)
    client = connect(server.address)
    busy, idle = client.count(), client.count()
    next(busy)
    next(idle)
    server.stop()
    assert source.closed.is_set()
    for stream in (busy, idle):
        with pytest.raises(errors.UnavailableError):
            list(stream)


@pytest.mark.parametrize("way", ["break", "deadline"])
def test_silent_generator_sees_cancellation(serve: Serve, connect: Connect, way: str) -> None:
    begun, told = threading.Event(), threading.Event()

    def deaf() -> Iterator[int]:
        begun.set()
        yield 1
        until(cancelled)
        told.set()

    client = connect(serve(deaf=deaf).address)
    timeout_ms = 300 if way == "deadline" else 0
    while not begun.is_set():  # on a busy host, the deadline may pass before the generator begins
        stream = client.deaf(timeout_in_ms=timeout_ms)
        with contextlib.suppress(errors.DeadlineExceededError):
            next(stream)
        timeout_ms *= 2
    if way == "break":
        stream.close()
    assert told.wait(30)


def test_generator_may_raise_when_closed(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def stubborn() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise ValueError("not like this")

    server = serve(stubborn=stubborn, echo=lambda value: value)
    client = connect(server.address)
    for _ in client.stubborn():
        break
    until(lambda: server.snapshot().streams == 0)
    assert "ValueError: not like this" in caplog.text
    assert client.echo_blocking(1) == 1


# -- what is no stream, and peers that lie ---------------------------------------------------------


def test_method_without_stream_is_refused(serve: Serve, connect: Connect) -> None:
    server = serve(plain=lambda: 1, upto=Source().upto)
    client = connect(server.address)
    assert not hasattr(client, "upto_blocking")
    with pytest.raises(
        errors.InvalidArgumentError, match="plain is not a generator function: call it"
    ):
        list(client.stream("plain"))
    with pytest.raises(
        errors.InvalidArgumentError, match=r"upto is a stream: client\.stream, or client\.upto"
    ):
        client.call("upto", 3).get_value()
    with pytest.raises(errors.InvalidArgumentError, match=r"absent is not registered\."):
        list(client.stream("absent"))
    with pytest.raises(errors.InvalidArgumentError, match="expected 1 to 2 arguments, given 0"):
        list(client.stream("upto"))
    with pytest.raises(errors.InvalidArgumentError, match="set"):
        client.upto({1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'many'"):
        client.upto(many=3)


def test_roles_hold_for_streams_too(connect: Connect) -> None:
    server = Hosted()
    server.service.register("upto", Source().upto, roles=frozenset({"submit"}))
    with server, pytest.raises(errors.PermissionDeniedError, match="role client may not call upto"):
        list(connect(server.address).upto(3))


def test_streams_of_client_are_bounded(server: ZmqServer, connect: Connect) -> None:
    greedy, other = connect(server.address), connect(server.address)
    client = [greedy.count() for _ in range(STREAMS_OF_PEER_MAX)]
    for stream in client:
        next(stream)
    with pytest.raises(
        errors.ResourceExhaustedError, match=f"{STREAMS_OF_PEER_MAX} streams of this client"
    ):
        list(greedy.count())
    assert list(other.upto(3)) == [0, 1, 2]
    for stream in client:
        stream.close()
    until(lambda: server.snapshot().streams == 0)
    assert list(greedy.upto(3)) == [0, 1, 2]


def test_streams_of_server_are_bounded(
    server: ZmqServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STREAMS_MAX", 2)
    client = [connect(server.address).count() for _ in range(2)]
    for stream in client:
        next(stream)
    with pytest.raises(errors.ResourceExhaustedError, match="2 streams run at this server"):
        list(connect(server.address).count())
    for stream in client:
        stream.close()
    until(lambda: server.snapshot().streams == 0)


@pytest.mark.parametrize(("bound", "value"), [("CHUNK_BYTES", 1000), ("FRAMES_MAX", 4)])
def test_reply_with_items_is_bounded(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(service, bound, value)
    seen: list[tuple[int, int]] = []

    def look(body: bytes, frames: int, peer: str) -> Any:
        seen.append((len(body), frames))
        return decode_items(body, frames, peer)

    monkeypatch.setattr(client, "decode_items", look)

    def items() -> Iterator[Any]:
        yield from [b"x" * 400, [np.zeros(10**4), np.ones(10**4)]] * 20

    got = list(connect(serve(items=items).address).items())
    assert len(got) == 40
    if bound == "FRAMES_MAX":
        assert max(frames for _, frames in seen) <= value
    else:
        assert max(size for size, _ in seen) <= value + 400


LIES: list[tuple[str, Any, int]] = [
    ("zmqdist.open", (), errors.INVALID_ARGUMENT),
    ("zmqdist.open", (1, 2), errors.INVALID_ARGUMENT),
    ("zmqdist.open", ("one", "count", ()), errors.INVALID_ARGUMENT),
    ("zmqdist.open", (1, 5, ()), errors.INVALID_ARGUMENT),
    ("zmqdist.open", (1, "count", 5), errors.INVALID_ARGUMENT),
    ("zmqdist.open", (1, "count", {"start": 1}), errors.INVALID_ARGUMENT),
    ("zmqdist.open", (1, "count", {"": (), 5: 1}), errors.INVALID_ARGUMENT),
    ("zmqdist.open", (1, "zmqdist.open", ()), errors.INVALID_ARGUMENT),
    ("zmqdist.next", (2**70,), errors.UNAVAILABLE),
    ("zmqdist.next", ([],), errors.UNAVAILABLE),
    ("zmqdist.next", (True,), errors.UNAVAILABLE),
    ("zmqdist.close", ({"a": 1},), errors.OK),
    ("zmqdist.close", (-1,), errors.OK),
    ("zmqdist.close", (1, 2, 3), errors.INVALID_ARGUMENT),
]


def test_wrong_stream_calls_cost_only_their_peer(
    server: ZmqServer, connect: Connect, source: Source
) -> None:
    stream = connect(server.address).count()
    assert next(stream) == 0
    number = stream._number  # reach: what only the stream's own messages say
    with channel_to(server.address) as liar:
        for method, args, code in LIES:
            assert raw(liar, method, args).get_error()[0] == code, (method, args)
        assert raw(liar, "zmqdist.next", (number,)).get_error()[0] == errors.UNAVAILABLE
        assert raw(liar, "zmqdist.close", (number,)).is_ok()
        assert raw(liar, "zmqdist.open", (7, "count", ())).is_ok()
        assert raw(liar, "zmqdist.open", (7, "count", ())).get_error()[0] == errors.INVALID_ARGUMENT
        assert list(itertools.islice(stream, 1000)) == list(range(1, 1001))
        stream.close()


def test_second_request_for_items_is_refused(serve: Serve) -> None:
    release = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        assert release.wait(30)
        yield 2

    with channel_to(serve(slow=slow).address) as channel:
        assert raw(channel, "zmqdist.open", (7, "slow", ())).is_ok()
        first, second = raw(channel, "zmqdist.next", (7,)), raw(channel, "zmqdist.next", (7,))
        assert second.get_error()[0] == errors.INVALID_ARGUMENT
        release.set()
        assert first.is_ok()


def raw(channel: Channel, method: str, args: Any) -> Any:
    """A call of which the value is not looked at: `call` would flatten its arguments."""
    from zmqdist.rpc.client import StatusOrResult

    call = ClientCall(method, payload.pack(tuple(args))[0])
    channel.submit(call)
    return StatusOrResult(channel, call, lambda call, address: None)


@pytest.mark.parametrize(
    ("items", "frames"),
    [
        (b"\xc1", 0),
        (b"", 0),
        (payload.pack([1, 2])[0], 0),
        (encode_items(Items([b""], [1])), 0),
        (encode_items(Items([b""], [2])), 1),
        (encode_items(Items([b"", b""], [1])), 1),
        (encode_items(Items([b"", b""], [2, -1])), 1),
        (encode_items(Items([b""])), 1),
    ],
)
def test_wrong_items_are_a_wire_error(items: bytes, frames: int) -> None:
    with pytest.raises(errors.WireError):
        decode_items(items, frames, "server")


def test_invalid_item_ends_stream_with_wire_error(connect: Connect) -> None:
    server = Hosted()
    items = encode_items(Items([payload.pack(1)[0], b"\xc1"], [], (0, "")))
    server.service.register_later(
        "zmqdist.open", lambda asked, *args: asked.reply_packed(items, ())
    )
    with server:
        stream = connect(server.address).stream("m")
        assert next(stream) == 1
        with pytest.raises(errors.WireError):
            next(stream)


def test_decoding_error_is_no_end_of_stream(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any) -> Items:
        raise MemoryError("no memory for items")

    def numbers() -> Iterator[int]:
        yield from range(3)

    client = connect(serve(count=numbers).address)
    monkeypatch.setattr("zmqdist.rpc.client.decode_items", decode)
    with pytest.raises(MemoryError, match="no memory for items"):
        list(client.stream("count"))


def test_stream_read_by_other_thread_is_refused(serve: Serve, connect: Connect) -> None:
    goes_on = threading.Event()

    def slow() -> Iterator[int]:
        goes_on.wait(30)
        yield 1

    client = connect(serve(slow=slow).address)
    with client.stream("slow") as stream:
        reader = threading.Thread(target=next, args=(stream,))
        reader.start()
        until(lambda: client.snapshot().threads_waiting)
        with pytest.raises(
            errors.FailedPreconditionError,
            match="another thread or task reads this stream of 'slow'",
        ):
            next(stream)
        goes_on.set()
        reader.join()
