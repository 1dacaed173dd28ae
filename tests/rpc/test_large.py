"""Large arrays in calls and answers, by shared memory and by sockets: what the memory rules promise
holds on both routes."""

from __future__ import annotations

import gc
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.rpc.helpers import (
    MIB,
    SERVER,
    address_of,
    change_everything_after_each_call,
    stranger_to,
    until,
)
from zmqdist import errors, freeze
from zmqdist.limits import BULK_CHANNEL_WINDOW_BYTES, CHUNK_BYTES
from zmqdist.messages import Call, Chunk, Credit
from zmqdist.rpc import ZmqClient, ZmqServer
from zmqdist.transport import shm_pool
from zmqdist.transport.channel import ClientConnection
from zmqdist.transport.router import Router
from zmqdist.transport.shm_pool import RETURNED, this_pool
from zmqdist.transport.transfers import BulkChannel, allocate_fresh
from zmqdist.wire import headers, safe
from zmqdist.wire.hello import our_hello

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]
Child = Callable[..., "subprocess.Popen[str]"]


def lends(client: ZmqClient) -> bool:
    return client.snapshot().shared_memory


# -- the rules of memory ---------------------------------------------------------------------------


def test_lane_is_as_configured(remote: ZmqClient, route: str) -> None:
    assert lends(remote) == (route == "shared_memory")


@pytest.mark.parametrize("seed", range(2))
def test_later_writes_stay_in_their_process(remote: ZmqClient, seed: int) -> None:
    change_everything_after_each_call(remote, seed)


def test_arrays_of_handler_are_its_own(remote: ZmqClient) -> None:
    array = np.arange(MIB)
    assert remote.keep_blocking(array) == 1
    answers = [remote.step(np.full(MIB, number)) for number in range(3)]
    got = [answer.get_value() for answer in answers]
    assert remote.spoil_blocking() == [99]
    assert np.array_equal(array, np.arange(MIB))
    # handlers run side by side over one state
    assert all(len(np.unique(one)) <= 3 and one.max() <= 3 for one in got)
    remote.forget_blocking()


@pytest.mark.parametrize("method", ["same", "same_inline"])
def test_result_that_is_the_argument_needs_no_copy(
    serve: Serve, connect: Connect, method: str
) -> None:
    if this_pool() is None:
        pytest.skip("no shared memory on this system")
    kept: list[Any] = []

    def change(array: Any) -> Any:
        array[0] = 7
        return array

    server = serve(
        inline=frozenset({"same_inline"}), same=change, same_inline=change,
        keep=lambda array: (kept.append(array), array)[1], late=lambda: kept.pop(),
    )  # fmt: skip
    client = connect(server.address, timeout_in_ms=30_000)
    array = np.arange(MIB)
    got = [getattr(client, f"{method}_blocking")(array) for _ in range(5)]
    assert all(np.array_equal(one[1:], array[1:]) and one[0] == 7 for one in got)
    assert [memory_of(one).block is None for one in got] == [False] * 5, "the client's own memory"
    assert array[0] == 0
    copied = client.keep_blocking(array)
    kept[0][:] = 9
    assert np.array_equal(copied, array)
    assert (client.late_blocking() == 9).all(), "the memory of another call"


def memory_of(array: Any) -> Any:
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def test_returned_memory_outlives_its_server(child: Child, connect: Connect) -> None:
    if this_pool() is None:
        pytest.skip("no shared memory on this system")
    process = child(SERVER)
    client = connect(address_of(process), timeout_in_ms=30_000)
    got = client.echo_blocking(np.ones(MIB))
    assert memory_of(got).block is not None
    process.kill()
    process.wait()
    pool = this_pool()
    assert pool is not None
    pool.sweep()
    blocks = [pool.copy_in(np.zeros(got.nbytes, np.uint8)) for _ in range(8)]
    assert None not in blocks
    assert got.all(), "its block was not reused"


def test_reply_returns_only_what_its_call_has_lent_and_once() -> None:
    pool = this_pool()
    if pool is None:
        pytest.skip("no shared memory on this system")
    channel = BulkChannel("peer", lambda message, frames: True)
    channel.open_offered_memory(replace(our_hello("server", 1), memory=pool.offer))
    channel.memory_accepted(pool.nonce)
    calls = [Call(number, "m", 1, 0, b"") for number in (1, 2)]
    for call in calls:
        channel.send(call, [pool.copy_in(np.full(MIB, call.id, np.uint8))])  # type: ignore[list-item]
    returned = [(*call.parts[0][:-1], RETURNED) for call in calls]
    with pytest.raises(errors.WireError):
        channel.receive(1, [returned[1]], allocate_fresh, print)
    [array] = channel.receive(1, [returned[0]], allocate_fresh, print) or []
    assert (array == 1).all()
    with pytest.raises(errors.WireError):
        channel.receive(1, [returned[0]], allocate_fresh, print)
    channel.call_ended(2)
    with pytest.raises(errors.WireError):
        channel.receive(2, [returned[1]], allocate_fresh, print)
    channel.call_ended(1)


def test_reply_outlives_client_and_server(route: str, child: Child, connect: Connect) -> None:
    process = child(SERVER)
    client = connect(address_of(process), timeout_in_ms=30_000)
    got = client.ones_blocking(4 * MIB)
    client.close()
    process.kill()
    process.wait()
    got[0] = 5
    assert got.sum() == 4 * MIB + 4


@pytest.mark.parametrize("size", [10, 2 * MIB])
def test_frozen_array_arrives_read_only(remote: ZmqClient, size: int) -> None:
    frozen = freeze(np.arange(size))
    got = remote.echo_blocking(frozen)
    assert np.array_equal(got, frozen)
    assert not got.flags.writeable


# -- out= ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, CHUNK_BYTES, 5 * MIB + 3])
def test_reply_is_received_into_out(remote: ZmqClient, size: int) -> None:
    out = np.zeros(size, np.uint8)
    given = np.arange(size, dtype=np.uint8)
    assert remote.echo_blocking(given, out=out) is out
    assert np.array_equal(out, given)
    assert remote.ones(size, out=out).get_value() is out
    assert out.min() == 1
    assert remote.call("echo", given, out=out).get_value() is out
    assert np.array_equal(out, given)


def test_chunks_go_straight_into_the_array_that_was_given(
    remote: ZmqClient, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "zmqdist.transport.transfers.memory_for", lambda nbytes: made.append(nbytes)
    )
    out = np.zeros(5 * MIB, np.uint8)
    assert remote.ones_blocking(5 * MIB, out=out).all()
    assert made == []


@pytest.mark.parametrize("order", ["C", "F"])
def test_reply_of_either_memory_order_fits(remote: ZmqClient, order: Any) -> None:
    given = np.arange(3 * MIB, dtype=np.float32).reshape(3, MIB)
    out = np.zeros((3, MIB), np.float32, order)
    for array in (given, np.asfortranarray(given)):
        out[:] = 0
        assert remote.echo_blocking(array, out=out) is out
        assert np.array_equal(out, given)


@pytest.mark.parametrize("size", [10, 5 * MIB])
@pytest.mark.parametrize("wrong", ["shape", "dtype", "a list", "nothing"])
def test_unfit_reply_leaves_out_untouched(remote: ZmqClient, size: int, wrong: str) -> None:
    out = np.full(size, 7, np.uint8)
    value: Any = np.ones(size, np.uint8)
    value = {
        "shape": value.reshape(-1, 2),
        "dtype": value.view(np.int8),
        "a list": [value],
        "nothing": None,
    }[wrong]
    with pytest.raises(errors.InvalidArgumentError, match=r"reply is an array of|not one array"):
        remote.echo_blocking(value, out=out)
    assert out.min() == out.max() == 7
    assert remote.echo_blocking(out).nbytes == size


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ([1, 2], "wanted a NumPy array, given a list"),
        (np.zeros(10)[::2], "not contiguous"),
        (np.frombuffer(bytes(10), np.uint8), "read-only"),
        (np.zeros(3, object), "dtype object"),
    ],
)
def test_unusable_out_is_refused_before_call(
    serve: Serve, connect: Connect, out: Any, told: str
) -> None:
    ran: list[int] = []
    client = connect(serve(m=ran.append).address)
    for ask in (client.m, client.m_blocking, lambda value, out: client.call("m", value, out=out)):
        with pytest.raises(errors.InvalidArgumentError, match=told):
            ask(1, out=out)
    with pytest.raises(errors.InvalidArgumentError, match="one of them"):
        client.call("m", 1, output_specs=[], out=np.zeros(3))
    client.m_blocking(2)
    assert ran == [2]


# -- what travels ----------------------------------------------------------------------------------


class Odd(np.ndarray):
    """Has rules of its own."""

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("not like this")


def test_odd_out_harms_no_other_call(
    remote: ZmqClient,
) -> None:
    odd: Any = np.zeros((1, 200_000)).view(Odd)
    fixed = np.zeros(200_000 * 8, np.uint8)
    first = remote.call("ones", (200_000 * 8,), out=odd)
    second = remote.call("ones", (200_000 * 8,), out=fixed)
    fixed.flags.writeable = False
    other: Any = remote
    assert other.small_blocking(5) == 5
    called = threading.Event()
    remote.call("small", (5,)).add_done_callback(lambda _: called.set())
    assert called.wait(20)
    with pytest.raises(errors.InvalidArgumentError):
        first.get_value()
    assert second.get_value() is fixed
    assert fixed.all()


def test_shared_memory_sends_few_bytes(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    if this_pool() is None:
        pytest.skip("no shared memory on this system")
    client = connect(serve(echo=lambda value: value).address, timeout_in_ms=30_000)
    client.echo_blocking(np.zeros(8 * MIB))
    sent: list[int] = []
    put, send_raw = (
        ClientConnection._put,
        Router._send_raw,
    )  # reach: where bytes are handed to ZeroMQ
    monkeypatch.setattr(
        ClientConnection,
        "_put",
        lambda self, *given: sent.append(size_of(given)) or put(self, *given),
    )
    monkeypatch.setattr(
        Router,
        "_send_raw",
        lambda self, peer, *given: sent.append(size_of(given)) or send_raw(self, peer, *given),
    )
    client.echo_blocking(np.zeros(8 * MIB))
    assert len(sent) == 2
    assert sum(sent) < 400


def size_of(given: Any) -> int:
    return len(given[0]) + sum(map(len, given[1])) if len(given) > 1 else len(given[0])


def test_large_call_without_reader_runs(serve: Serve, connect: Connect, route: str) -> None:
    ran = threading.Event()

    def note(array: Any) -> Any:
        assert array.all()
        ran.set()
        return array

    client = connect(serve(note=note).address, timeout_in_ms=30_000)
    client.note(np.ones(16 * MIB, np.uint8))  # the outcome is dropped
    assert ran.wait(30)
    ran.clear()
    early = connect(serve(note=note).address, listing=False, timeout_in_ms=30_000)
    array = np.ones(16 * MIB, np.uint8)
    early.call("note", array)  # before it is known whether there is a server
    array[:] = 0
    assert ran.wait(30)


def test_parts_of_every_size_in_one_value(remote: ZmqClient) -> None:
    given = [
        np.full(size, number, np.uint8)
        for number, size in enumerate((1, 70_000, MIB, 2**16 + 1, 3 * MIB, 0))
    ]
    value = {"arrays": given, "text": "x" * 2 * MIB, "bytes": b"y" * 2 * MIB}
    got = remote.echo_blocking(value)
    assert all(map(np.array_equal, got["arrays"], given))
    assert (got["text"], got["bytes"]) == (value["text"], value["bytes"])


def test_small_calls_pass_while_a_large_array_moves(remote: ZmqClient) -> None:
    """Counted: they are answered before the large one has ended."""
    array = np.zeros(32 * MIB, np.uint8)
    answered = 0
    while not answered:
        large = remote.total(array)
        while not large.done():
            assert remote.small_blocking(answered) == answered
            answered += not large.done()
        assert large.get_value() == 0
        if lends(remote):
            break  # it may be over at once


def test_unread_reply_delays_no_other(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_pool, "_pool", None)
    monkeypatch.setattr(shm_pool, "_tried", True)
    server = serve(ones=lambda n: np.ones(n, np.uint8), small=lambda: 1)
    idle, other = connect(server.address), connect(server.address)
    unread = idle.ones(24 * MIB)
    until(lambda: server.snapshot().bytes_unacknowledged)
    for _ in range(20):
        assert other.small_blocking() == 1
    seen = server.snapshot()
    assert 0 < seen.bytes_unacknowledged <= BULK_CHANNEL_WINDOW_BYTES < seen.bytes_unsent
    assert unread.get_value().all()


# -- ends ------------------------------------------------------------------------------------------


def test_call_past_deadline_is_never_run(remote: ZmqClient, route: str) -> None:
    array = np.zeros(32 * MIB, np.uint8)
    for _ in range(3):
        assert remote.keep(array, timeout_in_ms=2).get_error()[0] in (0, errors.DEADLINE_EXCEEDED)
    remote.forget_blocking()
    assert remote.echo_blocking(np.arange(MIB)).sum() == np.arange(MIB).sum()
    until(lambda: remote.small_blocking(1) == 1 and not remote.snapshot().transfers)


def test_cancelling_stops_what_is_on_the_way_in_either_direction(
    serve: Serve, connect: Connect, route: str
) -> None:
    server = serve(ones=lambda n: np.ones(n, np.uint8), total=lambda array: int(array.sum()))
    client = connect(server.address, timeout_in_ms=30_000)
    for _ in range(3):
        answer, argument = client.ones(16 * MIB), client.total(np.ones(16 * MIB, np.uint8))
        answer.cancel()
        argument.cancel()
        assert client.total_blocking(np.ones(MIB, np.uint8)) == MIB
    until(lambda: client.methods() and server.snapshot().calls == 0)
    until(lambda: client.methods() and server.snapshot().bytes_unsent == 0)


def test_arguments_of_a_call_that_is_refused_stop_at_once(
    serve: Serve, connect: Connect, route: str
) -> None:
    client = connect(serve(m=lambda a: 1).address, timeout_in_ms=30_000)
    with pytest.raises(errors.InvalidArgumentError, match="not registered"):
        client.call("absent", np.ones(24 * MIB, np.uint8)).get_value()
    until(lambda: client.methods() and not client.snapshot().transfers)


@pytest.mark.processes("rpc")
@pytest.mark.killed("rpc")
@pytest.mark.parametrize("who", ["client", "server"])
def test_killed_client_returns_lent_memory(
    child: Child, connect: Connect, route: str, who: str
) -> None:
    if who == "server":
        process = child(SERVER)
        client = connect(address_of(process), timeout_in_ms=30_000)
        assert [client.keep_blocking(np.ones(MIB)) for _ in range(4)] == [1, 2, 3, 4]
        unanswered = client.echo(np.ones(16 * MIB))
        process.kill()
        assert unanswered.get_error()[0] in (0, errors.UNAVAILABLE)
        client.close()
    else:
        server = ZmqServer("127.0.0.1:0")
        server.register("ones", lambda n: np.ones(n, np.uint8))
        server.start()
        process = child(KEEPER, server.address)
        assert address_of(process) == "kept"
        process.kill()
        process.wait()
        until(lambda: not server.snapshot().clients)
        server.stop()
    pool = this_pool()
    if pool is not None:
        gc.collect()
        until(lambda: pool.sweep() >= 0 and pool.lease_count == 0)


KEEPER = """
import sys
from zmqdist.rpc import Client
client = Client.create("zmq", sys.argv[1], "", 30000)
kept = [client.ones_blocking(2**20) for _ in range(4)]
unread = client.ones(2**22)
print("kept", flush=True)
sys.stdin.read()
"""


def test_peer_with_all_segments_is_served_by_socket(
    child: Child,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if this_pool() is None:
        pytest.skip("no shared memory on this system")
    small = shm_pool.ShmPool(48 * MIB)
    monkeypatch.setattr(shm_pool, "_pool", small)
    client = connect(address_of(child(SERVER)), timeout_in_ms=30_000)
    array = np.ones(8 * MIB, np.uint8)
    for number in range(12):
        assert client.keep_blocking(array) == number + 1
    assert 0 < small.lease_count < 12
    assert (
        len([record for record in caplog.records if "no room in shared memory" in record.message])
        == 1
    )
    client.forget_blocking()
    client.close()
    gc.collect()
    until(lambda: small.sweep() >= 0 and small.lease_count == 0)


@pytest.mark.parametrize("fault", ["memfd", "proc"])
def test_memory_that_cannot_be_shared_leaves_the_socket(
    serve: Serve,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    caplog.set_level("INFO", "zmqdist.transport")

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(1, "Operation not permitted")

    if fault == "memfd":
        monkeypatch.setattr(shm_pool, "_pool", None)
        monkeypatch.setattr(shm_pool, "_tried", False)
        monkeypatch.setattr(shm_pool, "make_memfd", refused)
        told = "no shared memory here"
    else:
        monkeypatch.setattr("zmqdist.transport.shm_pool._peers", {})
        monkeypatch.setattr("zmqdist.transport.shm_pool.open_memfd", refused)
        told = "cannot open the shared memory of"
    client = connect(serve(echo=lambda value: value).address, timeout_in_ms=30_000)
    given = np.arange(MIB)
    assert np.array_equal(client.echo_blocking(given), given)
    assert not lends(client)
    lines = [record.message for record in caplog.records if told in record.message]
    assert len(lines) == (1 if fault == "memfd" else 2), lines  # the one of each side


def test_client_without_arena_is_served(
    serve: Serve, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(echo=lambda value: value)
    monkeypatch.setenv("ZMQDIST_ARENA", "off")
    process = child(LONER, server.address)
    assert process.communicate(timeout=30)[0] == "True False\n"


LONER = """
import sys, numpy as np
from zmqdist.rpc import Client
with Client.create("zmq", sys.argv[1], "", 30000) as client:
    given = np.arange(2**20)
    print(np.array_equal(client.echo_blocking(given), given), client.snapshot().shared_memory)
"""


# -- peers that break the rules --------------------------------------------------------------------


@pytest.mark.parametrize("route", ["sockets"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        lambda chunk, data: (chunk.__class__(chunk.id, chunk.part, chunk.offset + 1), data),
        lambda chunk, data: (chunk.__class__(chunk.id, chunk.part + 1, chunk.offset), data),
        lambda chunk, data: (
            chunk.__class__(chunk.id, chunk.part, max(0, chunk.offset - len(data))),
            data,
        ),
        lambda chunk, data: (chunk, bytes(data) + bytes(64 * MIB // 8)),
        lambda chunk, data: (chunk, b""),
    ],
    ids=["a gap", "another part", "doubled", "too long", "empty"],
)
def test_wrong_chunk_of_arguments_fails_call(
    remote: ZmqClient, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    sent: list[int] = []

    def put(self: ClientConnection, message: Any, frames: Any) -> bool:
        if isinstance(message, Chunk):
            sent.append(message.offset)
            if len(sent) == 3:
                message, data = change(message, frames[0])
                frames = (data,)
        return self._put(headers.encode(message), frames)

    monkeypatch.setattr(ClientConnection, "_put_message", put)
    client = ZmqClient(remote.address, timeout_in_ms=30_000)
    error = client.call("keep", np.ones(MIB // 4 * 5, np.float64)).get_error()
    assert error[0] == errors.INVALID_ARGUMENT
    assert "a chunk of" in error[1]
    assert client.call("spoil").get_value() == []
    monkeypatch.undo()
    assert client.call("total", np.ones(MIB)).get_value() == [MIB]
    client.close()


def test_wrong_chunk_of_reply_is_an_error(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_pool, "_pool", None)
    monkeypatch.setattr(shm_pool, "_tried", True)
    send = Router.send

    def wrong(self: Router, peer: Any, message: Any, frames: Any = ()) -> bool:
        if isinstance(message, Chunk) and message.offset:
            frames = (frames[0][:-1],)
        return send(self, peer, message, frames)

    client = connect(serve(ones=lambda n: np.ones(n, np.uint8)).address, timeout_in_ms=30_000)
    monkeypatch.setattr(Router, "send", wrong)
    with pytest.raises(errors.InvalidArgumentError, match=r"a chunk of .* where at most"):
        client.ones_blocking(16 * MIB)
    monkeypatch.setattr(Router, "send", send)
    assert client.ones_blocking(16 * MIB).all()


@pytest.mark.parametrize(
    "parts", [((0,),), ((2**50,),), ((-1,),), ((),), ((1, 2),), ((1, 2, 3, 4, 5, 6, 7, 8),)]
)
def test_parts_that_cannot_be_are_refused(serve: Serve, parts: Any, route: str) -> None:
    server = serve(m=lambda a: 1)
    with stranger_to(server.address) as (stranger, life):
        assert stranger.send(Call(1, "m", life, 0, b"\xc0", parts))
        reply = stranger.expect("message", 20.0)[1]
        assert reply.code in (
            errors.INVALID_ARGUMENT,
            errors.UNAVAILABLE,
            errors.RESOURCE_EXHAUSTED,
        ), reply
        assert server.snapshot().calls == 0


def test_credit_that_was_never_earned_opens_nothing(serve: Serve, connect: Connect) -> None:
    server = serve(m=lambda: 1)
    with stranger_to(server.address) as (stranger, _):
        assert stranger.send(Credit(2**60))
        until(lambda: server.snapshot().transfer_faults == 1)
        assert connect(server.address).m_blocking() == 1
        assert server.snapshot().bytes_unacknowledged == 0


def test_repeated_call_number_harms_no_other(serve: Serve, connect: Connect, route: str) -> None:
    server = serve(inline=frozenset({"ones"}), ones=lambda n: np.ones(n, np.uint8))
    client, other = connect(server.address), connect(server.address)
    call = client.ones(8 * MIB)._call  # reach: the number of a call in flight, which is used again
    line = (
        client._channel._connection
    )  # reach: a connection that shares memory, for a message that no client sends
    for _ in range(3):
        line._put_message(line.table.request(ClientCallTwin(call.id), 0.0), ())  # reach: as above
    assert other.ones_blocking(8 * MIB).all()
    client.close()


class ClientCallTwin:
    """Another call of the same number."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.method = "ones"
        self.body = safe.encode((8 * MIB,))[0]
        self.due = float("inf")
        self.held = False


def test_ctrl_c_in_a_large_call_gives_the_arrays_back(child: Child, route: str) -> None:
    assert child(INTERRUPTED).communicate(timeout=30)[0] == "usable\n"


INTERRUPTED = """
import os, signal, threading, time, numpy as np
from zmqdist.rpc import Client, Server
release = threading.Event()
server = Server.create("zmq", "127.0.0.1:0")
server.register("hold", lambda array: release.wait(30) and array)
server.register("total", lambda array: int(array.sum()))
server.start()
client = Client.create("zmq", server.address, "", 20000)
array, out = np.ones(2**22, np.uint8), np.zeros(2**22, np.uint8)
def interrupt():
    while not server.snapshot().calls:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    client.hold_blocking(array, out=out)
except KeyboardInterrupt:
    array[:] = 2
    release.set()
    assert client.total_blocking(array) == 2**23
    assert not out.any() and client.snapshot().calls == 0
client.close()
server.stop()
print("usable")
"""
