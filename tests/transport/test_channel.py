"""The client's channel against a real router: which thread waits, which reads, and the errors that
faults of the connection cause."""

from __future__ import annotations

import gc
import logging
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.transport.helpers import Served, until
from zmqdist import errors
from zmqdist.messages import Call, Refused, Reply
from zmqdist.transport import channel as channels
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.transport.security import client_security
from zmqdist.wire.hello import PROTOCOL, our_hello

Serve = Callable[..., Served]
Open = Callable[..., Channel]

LATE_S = 20.0
"""Longer than anything here takes that goes as it should, on a machine with much to do, too."""


@pytest.fixture
def open_channel() -> Iterator[Open]:
    made: list[Channel] = []

    def make(address: str) -> Channel:
        made.append(Channel(address, client_security(address, "client"), our_hello("client", 7)))
        return made[-1]

    yield make
    for channel in made:
        channel.close()
        until(lambda channel=channel: not channel.snapshot().threads_waiting)
        assert (channel.snapshot().stalls, channel.snapshot().calls) == (0, 0)
        until(lambda channel=channel: not reads(channel))


def reads(channel: Channel) -> bool:
    """Return whether the channel's reader thread exists."""
    return f"zmqdist-reader-{channel.address}" in {thread.name for thread in threading.enumerate()}


def ask(channel: Channel, body: bytes = b"x", within_s: float = LATE_S) -> ClientCall:
    call = ClientCall("m", body, (), time.monotonic() + within_s)
    channel.call_and_wait(call)
    return call


def start(
    channel: Channel, body: bytes = b"x", within_s: float = LATE_S, frames: Any = ()
) -> ClientCall:
    call = ClientCall("m", body, frames, time.monotonic() + within_s)
    channel.submit(call)
    return call


class Held:
    """A server that keeps calls until the test has it reply to them."""

    def __init__(self, served: Served) -> None:
        self.calls: list[tuple[Any, Call, Any]] = []
        self.served = served
        served.answer = lambda *given: self.calls.append(given)  # type: ignore[method-assign]

    def answer(self, number: int) -> None:
        until(lambda: len(self.calls) > number)
        peer, call, frames = self.calls[number]
        self.served.loop.run(
            self.served.router.send, peer, Reply(call.id, 0, "", call.body), frames
        )

    def open(self, open_channel: Open) -> Channel:
        """A connected channel. Call number 0, which shows that it is connected, has got its
        reply.
        """
        channel = open_channel(self.served.address)
        first = start(channel, within_s=LATE_S)
        self.answer(0)
        channel.wait(first)
        assert first.code == 0
        return channel


@pytest.fixture
def long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that ends within LATE_S has not ended with its slice."""
    monkeypatch.setattr(channels, "SLICE_S", 2 * LATE_S)


def test_reply_has_frames_of_call(serve: Serve, open_channel: Open) -> None:
    channel = open_channel(serve().address)
    frames = [b"a" * 10, b"", b"c" * 10_000]
    call = ClientCall("m", b"body", frames, time.monotonic() + LATE_S)
    channel.call_and_wait(call)
    assert (call.code, call.body, [bytes(frame) for frame in call.frames]) == (0, b"body", frames)


def test_later_call_leaves_when_a_thread_waits(serve: Serve, open_channel: Open) -> None:
    """A call that is `later` leaves when a thread of the process waits for the reply of any
    server."""
    held = Held(serve())
    channel, other = held.open(open_channel), open_channel(serve().address)
    assert ask(other).code == 0
    call = ClientCall("m", b"later", (), time.monotonic() + LATE_S)
    call.later = True
    channel.submit(call)
    assert channel.snapshot().calls_waiting == 1
    assert ask(other).code == 0
    held.answer(1)
    channel.wait(call)
    assert call.body == b"later"


def test_frames_of_waiting_call_are_copied(serve: Serve, open_channel: Open) -> None:
    served = serve()
    address = served.address
    served.loop.stop()
    channel = open_channel(address)
    mine = bytearray(b"before")
    call = start(channel, frames=[memoryview(mine)])
    mine[:] = b"after!"
    serve(address=address)
    channel.wait(call)
    assert [bytes(frame) for frame in call.frames] == [b"before"]


@pytest.mark.parametrize(
    ("slice_s", "counted"), [(1.0, 1), (2 * LATE_S, 0)], ids=["whole slice", "shorter"]
)
def test_reply_without_event_counts_as_stall(
    serve: Serve, open_channel: Open, monkeypatch: pytest.MonkeyPatch, slice_s: float, counted: int
) -> None:
    monkeypatch.setattr(channels, "SLICE_S", slice_s)
    held = Held(serve())
    channel = held.open(open_channel)
    call = start(channel)
    connection = (
        channel._connection
    )  # reach: a slice without an announcement cannot be had from outside
    poll = connection.poll

    def deaf(timeout_ms: float) -> list[tuple[int, int]]:
        if timeout_ms:
            held.answer(1)
        poll(timeout_ms)
        return []

    monkeypatch.setattr(connection, "poll", deaf)
    channel.wait(call)
    assert (call.code, channel.stalls) == (0, counted)
    channel.stalls = 0


def test_threads_wait_for_calls_in_any_order(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    calls = [start(channel, b"%d" % number) for number in range(6)]
    ended: list[int] = []
    threads = [
        threading.Thread(target=lambda n=number: (channel.wait(calls[n]), ended.append(n)))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(held.calls) == 6)
    for count, number in enumerate((0, 3, 5, 1, 2, 4), 1):
        held.answer(number)
        until(lambda count=count: len(ended) == count)
        assert ended[-1] == number
    for thread in threads:
        thread.join(LATE_S)
    assert [call.body for call in calls] == [b"%d" % number for number in range(6)]


def test_threads_share_wait_for_one_call(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    call = start(channel)
    threads = [threading.Thread(target=channel.wait, args=(call,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: channel.snapshot().threads_waiting == 4)
    held.answer(0)
    for thread in threads:
        thread.join(LATE_S)
        assert not thread.is_alive()


@pytest.mark.usefixtures("long_slices")
def test_follower_leaves_at_deadline(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    slow = start(channel)
    leader = threading.Thread(target=channel.wait, args=(slow,))
    leader.start()
    until(lambda: channel.snapshot().threads_waiting == 1)
    began = time.monotonic()
    assert ask(channel, within_s=0.05).code == errors.DEADLINE_EXCEEDED
    assert time.monotonic() - began < LATE_S  # the leader did not sleep for a whole slice
    held.answer(0)
    leader.join(LATE_S)
    assert slow.code == 0


@pytest.mark.parametrize(
    "spin_s", [0.0, channels.SPIN_S], ids=["sleeping at once", "looking first"]
)
def test_late_reply_does_not_hide_next_reply(
    serve: Serve, open_channel: Open, monkeypatch: pytest.MonkeyPatch, spin_s: float
) -> None:
    """It arrives while the next call is sent, and sending may consume the edge that announced
    it.
    """
    monkeypatch.setattr(channels, "SPIN_S", spin_s)
    held = Held(serve())
    channel = held.open(open_channel)
    for number in range(150):
        before = start(channel, within_s=0.0)
        assert channel.poll(before)
        answers = threading.Thread(
            target=lambda n=number: (held.answer(2 * n + 1), held.answer(2 * n + 2))
        )
        answers.start()
        assert ask(channel).code == 0
        answers.join(LATE_S)


def test_reply_before_end_of_server_is_read(serve: Serve, open_channel: Open) -> None:
    served = serve()
    channel = open_channel(served.address)
    ask(channel)
    answer, answered = served.answer, threading.Event()
    served.answer = lambda *given: (answer(*given), answered.set())  # type: ignore[method-assign]
    call = start(channel, b"value")
    assert answered.wait(LATE_S)
    served.loop.stop()

    lock, connection = (
        channel._lock,
        channel._connection,
    )  # reach: only the channel knows in which order it looks

    def tended() -> bool:
        with lock:
            connection.maintain(time.monotonic())
        return call.ended

    until(tended)  # the channel hears first of the end of the connection
    assert (call.code, call.body) == (0, b"value")


def test_calls_in_flight_end_with_server(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    call = start(channel)
    until(lambda: held.calls)
    held.served.loop.stop()
    channel.wait(call)
    assert call.code == errors.UNAVAILABLE
    later = start(channel, b"later")
    assert ask(channel, within_s=0.05).code == errors.DEADLINE_EXCEEDED
    served = serve(address=channel.address)
    channel.wait(later)
    assert (later.code, later.body) == (0, b"later")
    assert len(served.shown) == 1


def test_callbacks_are_called_once(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    reported: list[tuple[str, int, str]] = []

    def reporter(word: str) -> Callable[[ClientCall], None]:
        return lambda call: reported.append((word, call.code, threading.current_thread().name))

    call = start(channel)
    channel.add_done_callback(call, lambda call: 1 / 0)
    channel.add_done_callback(call, reporter("before"))
    held.answer(0)
    until(lambda: reported)
    channel.add_done_callback(call, reporter("after"))
    assert reported == [
        ("before", 0, f"zmqdist-reader-{channel.address}"),
        ("after", 0, threading.current_thread().name),
    ]


@pytest.mark.usefixtures("long_slices")
def test_reader_keeps_deadline_of_unwaited_call(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    slow = start(channel)
    leader = threading.Thread(target=channel.wait, args=(slow,))
    leader.start()
    until(lambda: channel.snapshot().threads_waiting == 1)
    ended = threading.Event()
    began = time.monotonic()
    channel.add_done_callback(start(channel, within_s=0.05), lambda call: ended.set())
    assert ended.wait(LATE_S)
    assert time.monotonic() - began < LATE_S  # not only when the leader's slice was over
    held.answer(0)
    leader.join(LATE_S)


def test_reader_ends_when_idle(serve: Serve, open_channel: Open) -> None:
    channel = open_channel(serve().address)
    ended = threading.Event()
    channel.add_done_callback(start(channel), lambda call: ended.set())
    assert ended.wait(LATE_S)
    until(lambda: not reads(channel))
    assert ask(channel).code == 0


def test_dropped_channel_ends_after_its_callbacks(serve: Serve) -> None:
    held = Held(serve())
    channel = Channel(
        held.served.address, client_security(held.served.address, "client"), our_hello("client", 7)
    )
    ended = threading.Event()
    channel.add_done_callback(start(channel), lambda call: ended.set())
    gone = weakref.ref(channel)
    del channel
    gc.collect()
    held.answer(0)
    assert ended.wait(LATE_S)
    until(lambda: gone() is None)


def test_closing_ends_calls_and_wakes_threads(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    calls = [start(channel) for _ in range(3)]
    called = threading.Event()
    channel.add_done_callback(calls[0], lambda call: called.set())
    threads = [threading.Thread(target=channel.wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    until(lambda: channel.snapshot().threads_waiting >= 3)
    channel.close()
    for thread in threads:
        thread.join(LATE_S)
    assert called.wait(LATE_S)
    assert [call.code for call in calls] == [errors.CANCELLED] * 3
    assert start(channel).code == errors.FAILED_PRECONDITION
    channel.close()


def test_cancelled_call_is_cancelled_at_server(serve: Serve, open_channel: Open) -> None:
    from zmqdist.messages import CancelCall

    held = Held(serve())
    cancelled: list[int] = []
    held.served.loop.run(
        held.served.router.on,
        CancelCall,
        lambda peer, message, frames: cancelled.append(message.id),
    )
    channel = held.open(open_channel)
    call = start(channel)
    assert not channel.poll(call)
    assert channel.cancel(call)
    assert not channel.cancel(call)
    assert call.code == errors.CANCELLED
    until(lambda: cancelled == [call.id])


def test_unsent_call_alone_is_given_up(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = held.open(open_channel)
    sent = start(channel)
    assert not channel.cancel(sent, only_unsent=True)
    held.answer(1)
    channel.wait(sent)
    assert sent.code == errors.OK
    assert not channel.cancel(sent, only_unsent=True)
    alone = open_channel("127.0.0.1:1")
    unsent = start(alone)
    assert alone.cancel(unsent, only_unsent=True)
    assert unsent.code == errors.CANCELLED
    assert not alone.cancel(unsent, only_unsent=True)


def test_all_calls_are_cancelled_for_next_owner(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = held.open(open_channel)
    calls = [start(channel) for _ in range(3)]
    assert channel.cancel_all()
    assert [call.code for call in calls] == [errors.CANCELLED] * 3
    channel.close()
    assert not channel.cancel_all()
    assert not open_channel("127.0.0.1:1").cancel_all()


def test_leader_wakes_when_call_is_cancelled(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = held.open(open_channel)
    call = start(channel)
    leader = threading.Thread(target=channel.wait, args=(call,))
    leader.start()
    until(lambda: channel.snapshot().threads_waiting == 1)
    channel.cancel(call)
    leader.join(LATE_S)
    assert channel.stalls == 0  # a wait that ends with a slice is counted


@pytest.mark.usefixtures("long_slices")
@pytest.mark.parametrize("how", ["start", "start with frames", "poll"])
def test_leader_wakes_when_reply_is_read(serve: Serve, open_channel: Open, how: str) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    # which gathers no call, and needs no reader
    call, other = start(channel), start(channel, frames=[b"frame"])
    until(lambda: len(held.calls) == 2)
    connection, wake_fd = (
        channel._connection,
        channel._wake_fd,
    )  # reach: the events that wake the leader
    arrived = connection.poll
    poller = select.poll()
    poller.register(wake_fd, select.POLLIN)
    asleep = threading.Event()

    def hears_of_other_threads_only(timeout_ms: float) -> list[tuple[int, int]]:
        if timeout_ms:
            asleep.set()  # it has already looked for replies, and would have found this one
        return poller.poll(timeout_ms)

    connection.poll = hears_of_other_threads_only
    leader = threading.Thread(target=channel.wait, args=(call,))
    leader.start()
    assert asleep.wait(LATE_S)
    held.answer(0)
    until(lambda: arrived(0))
    began = time.monotonic()
    if how == "poll":
        channel.poll(other)
    else:
        start(channel, frames=[b"frame"] if how == "start with frames" else [])
    leader.join(LATE_S)
    assert time.monotonic() - began < LATE_S  # not only when the leader's slice was over


def test_protocol_mismatch_is_named_on_both_sides(
    serve: Serve, open_channel: Open, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(hello=msgspec.structs.replace(our_hello("server", 1), protocol=(9, 0)))
    channel = open_channel(served.address)
    for _ in range(2):
        call = ask(channel)
        assert call.code == errors.FAILED_PRECONDITION
        assert f"protocol 9.0, this side {PROTOCOL[0]}.{PROTOCOL[1]}" in call.message


def test_full_server_ends_calls_with_its_text(serve: Serve, open_channel: Open) -> None:
    served = serve()
    served.router.peers_max = 0
    call = ask(open_channel(served.address))
    assert call.code == errors.RESOURCE_EXHAUSTED
    assert "connections already" in call.message


def test_invalid_messages_are_counted(serve: Serve, open_channel: Open) -> None:
    served = serve()
    answer = served.answer

    def confuse(peer: Any, call: Call, frames: Any) -> None:
        for header in (b"", b"\xff", b"\x93\x01\x02"):
            served.router._send_raw(peer, header)  # reach: no server has a way to send these
        served.router.send(peer, Refused(3, "just so"))
        served.router.send(peer, Reply(999, 0, "", b""))
        answer(peer, call, frames)

    served.answer = confuse  # type: ignore[method-assign]
    channel = open_channel(served.address)
    assert ask(channel, b"value").body == b"value"
    assert channel.snapshot().strays == 4


def test_long_wait_logs_address_of_server(
    serve: Serve,
    open_channel: Open,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "WAIT_LOG_S", 0.05)
    served = serve()
    served.loop.stop()
    channel = open_channel(served.address)
    call = ClientCall("m", b"")
    with caplog.at_level(logging.WARNING, "zmqdist.transport"):
        channel.submit(call)
        until(
            lambda: (
                len(
                    [
                        r
                        for r in caplog.records
                        if f"wait for a server at {served.address}" in r.message
                    ]
                )
                >= 2
            )
        )
    channel.close()


def test_channel_does_not_cross_fork(child: Callable[..., Any]) -> None:
    program = """
import os, sys, warnings
warnings.simplefilter("ignore")
from tests.transport.test_channel import ask
from tests.transport.helpers import Served
from zmqdist.errors import FailedPreconditionError
from zmqdist.transport.channel import Channel
from zmqdist.transport.security import client_security, server_security
from zmqdist.wire.hello import PROTOCOL, our_hello
served = Served(server_security("127.0.0.1"))
def connect():
    return Channel(served.address, client_security(served.address, "client"), our_hello("client", 7))
channel = connect()
assert ask(channel).code == 0
pid = os.fork()
if pid == 0:
    try:
        ask(channel)
    except FailedPreconditionError as error:
        assert "before a fork" in str(error)
        channel.close()
        assert ask(connect()).code == 0
        os._exit(7)
    os._exit(1)
status = os.waitpid(pid, 0)[1]
assert ask(channel).code == 0
channel.close()
served.loop.stop()
print("child ended with", os.waitstatus_to_exitcode(status))
"""
    assert child(program).communicate(timeout=30)[0] == "child ended with 7\n"
