"""Clients at one server have their turns, and none fills its memory: what does not fit waits at the
client, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rpc.helpers import stranger_to, until
from zmqdist import errors
from zmqdist.limits import CLIENT_PULLED_BYTES_MAX, CLIENT_UNASKED_BYTES_MAX, EAGER_BYTES_MAX
from zmqdist.messages import Call, Replies
from zmqdist.rpc import Server, ZmqClient, ZmqServer
from zmqdist.wire import safe

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]

MIB = 2**20


class Held:
    """A server with one handler thread, whose method `size` waits until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.seen: list[Any] = []
        self.server = Server.create("zmq", "127.0.0.1:0", threads_max=1)
        self.server.register("size", self.size)
        self.server.register("now", lambda: 1, inline=True)
        self.server.start()

    def size(self, array: Any, note: Any = None) -> int:
        assert self.go.wait(60)
        self.seen.append(note)
        return len(array)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.go.set()
        self.server.stop()
        assert self.server.snapshot().faults == 0
        assert self.server.snapshot().bytes_waiting == 0


@pytest.mark.parametrize(
    ("given", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_threads_max_is_a_positive_int(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="threads_max is "):
        Server.create("zmq", "127.0.0.1:0", threads_max=given)


def test_calls_run_up_to_threads_max(connect: Connect) -> None:
    meeting = threading.Barrier(40)
    server = Server.create("zmq", "127.0.0.1:0", threads_max=40)
    server.register("meet", lambda: meeting.wait(30))
    with server:
        client = connect(server.address)
        assert sorted(each.get_value() for each in [client.meet() for _ in range(40)]) == list(
            range(40)
        )
        assert server.snapshot().threads <= server.snapshot().threads_max == 40


def test_clients_take_turns_at_threads(connect: Connect) -> None:
    with Held() as held:
        greedy, modest = connect(held.server.address), connect(held.server.address)
        many = [greedy.size("x", number) for number in range(50)]
        until(lambda: held.server.snapshot().calls == 50)
        one = modest.size("x", "modest")
        until(lambda: held.server.snapshot().calls == 51)
        held.go.set()
        assert [each.get_value() for each in (*many, one)] == [1] * 51
        assert held.seen.index("modest") <= 2
        held.seen.remove("modest")
        assert held.seen == list(range(50))


def test_excess_small_calls_wait_at_their_client(
    connect: Connect,
) -> None:
    with Held() as held:
        greedy, modest = connect(held.server.address), connect(held.server.address)
        piece = np.zeros(256 * 2**10, np.uint8)
        many = [greedy.size(piece) for _ in range(2 * EAGER_BYTES_MAX // piece.nbytes)]
        until(lambda: held.server.snapshot().bytes_waiting > EAGER_BYTES_MAX - 4 * piece.nbytes)
        assert held.server.snapshot().bytes_waiting <= EAGER_BYTES_MAX
        assert greedy.snapshot().calls_waiting > 100
        assert modest.now_blocking() == greedy.snapshot().connected == 1
        held.go.set()
        assert {each.get_value() for each in many} == {len(piece)}


def test_held_call_leaves_after_cancelled_one(connect: Connect) -> None:
    with Held() as held:
        client = connect(held.server.address)
        piece = np.zeros(256 * 2**10, np.uint8)
        first = [
            client.size(piece, timeout_in_ms=60_000) for _ in range(EAGER_BYTES_MAX // piece.nbytes)
        ]
        until(lambda: held.server.snapshot().calls >= len(first) - 1)
        late = client.size("late", "late")
        for each in first:
            each.cancel()
        until(lambda: held.server.snapshot().calls <= 2)
        held.go.set()
        assert late.get_value() == 4


def large(client: ZmqClient, nbytes: int) -> list[Any]:
    """Calls of 8 MiB each, so many that they have more than `nbytes` together."""
    return [
        client.size(np.full(8 * MIB, number % 251, np.uint8), number)
        for number in range(nbytes // (8 * MIB) + 1)
    ]


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> int:
    """Less than a test should have to send."""
    bound = 32 * MIB
    monkeypatch.setattr("zmqdist.rpc.handler_pool.CLIENT_PULLED_BYTES_MAX", bound)
    return bound


def test_large_arrays_that_do_not_fit_wait_at_their_client(
    connect: Connect, route: str, small_bounds: int
) -> None:
    with Held() as held:
        greedy, modest = connect(held.server.address), connect(held.server.address)
        many = large(greedy, 2 * (EAGER_BYTES_MAX + small_bounds))
        until(
            lambda: held.server.snapshot().bytes_waiting > EAGER_BYTES_MAX + small_bounds - 24 * MIB
        )
        until(lambda: held.server.snapshot().calls == len(many))
        assert held.server.snapshot().bytes_waiting <= EAGER_BYTES_MAX + small_bounds
        assert modest.now_blocking() == 1
        held.go.set()
        assert [each.get_value() for each in many] == [8 * MIB] * len(many)
        assert sorted(held.seen) == list(
            range(len(many))
        )  # in the order in which they are complete


def test_held_blocking_call_continues_by_itself(
    connect: Connect, route: str, small_bounds: int
) -> None:
    with Held() as held:
        client = connect(held.server.address)
        many = large(client, EAGER_BYTES_MAX + small_bounds + 24 * MIB)
        with pytest.raises(errors.DeadlineExceededError):
            client.size_blocking(np.zeros(8 * MIB, np.uint8), "late", timeout_in_ms=100)
        timer = threading.Timer(0.05, held.go.set)
        timer.start()
        assert client.size_blocking(np.zeros(8 * MIB, np.uint8)) == 8 * MIB
        assert [each.get_value() for each in many] == [8 * MIB] * len(many)
        assert "late" not in held.seen


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_abandoned_held_calls_leave_nothing(
    connect: Connect, route: str, small_bounds: int, how: str
) -> None:
    with Held() as held:
        client = connect(held.server.address)
        many = large(client, EAGER_BYTES_MAX + small_bounds + 40 * MIB)
        until(lambda: held.server.snapshot().calls == len(many))
        if how == "closed":
            client.close()
        else:
            for each in many:
                assert each.cancel()
        until(lambda: held.server.snapshot().bytes_waiting == 0)
        assert {each.get_error()[0] for each in many} == {errors.CANCELLED}
        until(lambda: held.server.snapshot().calls <= 1)  # the one that runs
        held.go.set()
        assert connect(held.server.address).size_blocking("after") == 5


def test_stop_refuses_calls_not_let_in(connect: Connect, route: str, small_bounds: int) -> None:
    with Held() as held:
        client = connect(held.server.address)
        many = large(client, EAGER_BYTES_MAX + small_bounds + 40 * MIB)
        until(lambda: held.server.snapshot().calls == len(many))
        until(
            lambda: (
                held.server.snapshot().bytes_waiting > small_bounds
                and held.server.snapshot().calls_running
            )
        )
        stopping = threading.Thread(target=held.server.stop)
        stopping.start()
        assert many[-1].get_error() == (
            errors.UNAVAILABLE,
            "the server is stopping; the call was not carried out",
        )
        held.go.set()  # what it had let in is carried out, or refused as well
        stopping.join(60)
        refused = [number for number, each in enumerate(many) if each.get_error()[0] != errors.OK]
        assert {many[number].get_error() for number in refused} == {many[-1].get_error()}
        assert sorted(held.seen) == [number for number in range(len(many)) if number not in refused]
        assert held.seen


@pytest.mark.parametrize("batch", [False, True], ids=["threads", "batches"])
def test_stop_after_grace_refuses_waiting_calls(connect: Connect, batch: bool) -> None:
    go, begun = threading.Event(), threading.Event()
    seen: list[int] = []

    def wait(rows: Any) -> Any:
        begun.set()
        assert go.wait(60)
        seen.append(int(rows[0]))
        return rows

    server = Server.create("zmq", "127.0.0.1:0", threads_max=1)
    options: dict[str, Any] = {"batch": True, "max_batch": 1} if batch else {}
    server.register("wait", wait, **options)
    server.start()
    client = connect(server.address)
    first, *others = (client.wait(np.full(1, number)) for number in range(4))
    assert not first.done()
    assert begun.wait(60)
    until(lambda: server.snapshot().calls == 4)
    server.stop(0.0)
    assert {each.get_error() for each in others} == {
        (errors.UNAVAILABLE, "the server is stopping; the call was not carried out")
    }
    code, message = first.get_error()
    assert code == errors.UNAVAILABLE
    assert "the server may have executed it" in message
    go.set()
    until(lambda: seen == [0])


def test_small_call_passes_large_calls_of_its_client(
    connect: Connect,
) -> None:
    told = threading.Event()
    server = Server.create("zmq", "127.0.0.1:0", threads_max=2)
    server.register("wait", lambda array: told.wait(60))
    server.register("tell", told.set, inline=True)
    with server:
        client = connect(server.address)
        piece = np.zeros(512 * 2**10, np.uint8)
        many = [client.wait(piece) for _ in range(EAGER_BYTES_MAX // piece.nbytes + 8)]
        until(lambda: server.snapshot().bytes_waiting > EAGER_BYTES_MAX // 2)
        assert client.snapshot().calls_waiting
        client.tell_blocking(timeout_in_ms=60_000)
        assert {each.get_value() for each in many} == {True}


def test_batched_method_has_the_same_bounds(
    connect: Connect, route: str, small_bounds: int
) -> None:
    go = threading.Event()

    def double(rows: Any) -> Any:
        assert go.wait(60)
        return rows[:, :1] * 2

    server = Server.create("zmq", "127.0.0.1:0")
    server.register("double", double, batch=True, max_batch=2)
    with server:
        client = connect(server.address)
        bound = EAGER_BYTES_MAX + small_bounds
        many = [
            client.double(np.full((1, 8 * MIB), number, np.uint8))
            for number in range(2 * bound // (8 * MIB))
        ]
        until(lambda: server.snapshot().calls == len(many))
        assert server.snapshot().bytes_waiting <= bound
        go.set()
        assert [int(each.get_value()[0, 0]) for each in many] == [
            2 * number for number in range(len(many))
        ]
        until(lambda: server.snapshot().bytes_waiting == 0)


def test_client_above_its_bound_is_refused(connect: Connect) -> None:
    with Held() as held, stranger_to(held.server.address) as (peer, life):
        body = safe.encode((b"\0" * 1000 * 60,))[0]
        count = CLIENT_UNASKED_BYTES_MAX // len(body) + 20
        for number in range(1, count + 1):
            peer.send(Call(number, "size", life, 0, body))
        message = peer.expect("message", 20.0)[1]
        answer = message.items[0] if isinstance(message, Replies) else message
        assert answer.code == errors.RESOURCE_EXHAUSTED
        assert f"of at most {CLIENT_UNASKED_BYTES_MAX}" in answer.message
        assert held.server.snapshot().bytes_waiting <= CLIENT_UNASKED_BYTES_MAX
        assert connect(held.server.address).now_blocking() == 1


def test_sweep_of_client_is_independent_of_others(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.rpc.service.SWEEP_S", 3600.0)
    given_up = threading.Event()
    monkeypatch.setattr(
        "zmqdist.transport.calls_machine.ServedCall.is_wanted",
        lambda self, now: not given_up.is_set(),
    )
    body = safe.encode((b"\0" * 1000 * 60,))[0]
    count = CLIENT_UNASKED_BYTES_MAX // len(body)
    with (
        Held() as held,
        stranger_to(held.server.address) as one,
        stranger_to(held.server.address) as other,
    ):
        for peer, life in (one, other):
            given_up.clear()
            before = held.server.snapshot().calls
            for number in range(1, count + 1):
                peer.send(Call(number, "size", life, 0, body))
            peer.send(Call(count + 1, "now", life, 0, safe.encode(())[0]))
            assert codes(peer) == {count + 1: errors.OK}
            given_up.set()
            peer.send(Call(count + 2, "size", life, 0, body))
            peer.send(Call(count + 3, "size", life, 0, body))
            peer.send(Call(count + 4, "now", life, 0, safe.encode(())[0]))
            assert codes(peer) == {count + 4: errors.OK}
            kept = held.server.snapshot().calls - before
            assert kept <= 3, "what was given up is not there any more: at most one runs"


def codes(peer: Any) -> dict[int, int]:
    """Of the calls that are answered by the next message."""
    message = peer.expect("message", 20.0)[1]
    return {
        answer.id: answer.code
        for answer in (message.items if isinstance(message, Replies) else [message])
    }


def test_client_bound_exceeds_unasked_window() -> None:
    assert EAGER_BYTES_MAX < CLIENT_UNASKED_BYTES_MAX < CLIENT_PULLED_BYTES_MAX
