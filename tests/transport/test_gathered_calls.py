"""Calls without a waiting thread: they are sent, and with which other calls."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from tests.transport.helpers import Served, until
from tests.transport.test_channel import Held, Open, Serve, ask, open_channel, reads, start
from zmqdist import errors
from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX
from zmqdist.messages import Call, Calls
from zmqdist.transport import channel as channels
from zmqdist.transport.channel import Channel

__all__ = ["open_channel"]  # a fixture


@pytest.fixture
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the reader thread send no call."""
    monkeypatch.setattr(channels, "GATHER_S", 60.0)


def messages_to(served: Served) -> list[list[bytes]]:
    """Return a list that gets the bodies of the calls of each message from now on."""
    arrived: list[list[bytes]] = []

    def one(peer: Any, call: Call, frames: Any) -> None:
        arrived.append([call.body])
        served.answer(peer, call, frames)

    def several(peer: Any, calls: Calls, frames: Any) -> None:
        arrived.append([call.body for call in calls.items])
        for call in calls.items:
            served.answer(peer, call, [])

    served.loop.run(served.router.on, Call, one)
    served.loop.run(served.router.on, Calls, several)
    return arrived


def one_in_flight(channel: Channel, held: Held) -> Any:
    """Start a call that the server keeps."""
    call = start(channel, b"first")
    until(lambda: len(held.calls) == 1)
    return call


def sees_the_end(channel: Channel, call: Any) -> bool:
    """Look at the connection, and return whether its end has ended this call."""
    lock, look = (
        channel._lock,
        channel._check_connection,
    )  # reach: a use from outside would send what has gathered
    with lock:
        look(time.monotonic())
    return bool(call.ended)


def test_unwaited_call_leaves_beside_call_in_flight(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    one_in_flight(channel, held)
    for number in range(2, 5):  # again and again, because the reader goes off duty in between
        start(channel, b"%d" % number)
        until(lambda number=number: len(held.calls) == number)
        until(
            lambda: not channel._gathering
        )  # reach: when its reader is off duty nothing outside shows
    assert channel.snapshot().stalls == 0


def test_unwaited_call_leaves_beside_slow_calls(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    slow = one_in_flight(channel, held)
    leader = threading.Thread(target=channel.wait, args=(slow,))
    leader.start()
    until(lambda: channel.snapshot().threads_waiting == 1)
    start(channel)
    until(lambda: len(held.calls) == 2)
    held.answer(0)
    leader.join(30)


def test_unwaited_call_leaves_while_reader_waits(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    channel.add_done_callback(one_in_flight(channel, held), lambda call: None)
    until(lambda: reads(channel))
    start(channel)
    until(lambda: len(held.calls) == 2)


@pytest.mark.usefixtures("no_naps")
@pytest.mark.parametrize(
    ("body_bytes", "full_count"),
    [(1, BATCH_ITEMS_MAX), (BATCH_BYTES_MAX // 4, 4)],
    ids=["by count", "by bytes"],
)
def test_full_message_leaves(
    serve: Serve, open_channel: Open, body_bytes: int, full_count: int
) -> None:
    held = Held(serve())
    arrived = messages_to(held.served)
    channel = open_channel(held.served.address)
    one_in_flight(channel, held)
    for _ in range(full_count + 1):
        start(channel, bytes(body_bytes))
    until(lambda: len(arrived) == 2)
    assert [len(bodies) for bodies in arrived] == [1, full_count]
    assert channel.snapshot().calls_waiting == 1


@pytest.mark.usefixtures("no_naps")
def test_call_with_frames_leaves_after_gathered_calls(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    arrived = messages_to(held.served)
    channel = open_channel(held.served.address)
    one_in_flight(channel, held)
    start(channel, b"2")
    start(channel, b"3")
    start(channel, b"framed", frames=[b"frame"])
    until(lambda: len(arrived) == 3)
    assert arrived == [[b"first"], [b"2", b"3"], [b"framed"]]


@pytest.mark.usefixtures("no_naps")
def test_gathered_calls_leave_with_reply(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    first, other = one_in_flight(channel, held), start(channel, b"other", frames=[b"frame"])
    until(lambda: len(held.calls) == 2)
    leader = threading.Thread(target=channel.wait, args=(other,))
    leader.start()
    until(lambda: channel.snapshot().threads_waiting == 1)
    start(channel, b"gathered")
    assert channel.snapshot().calls_waiting == 1
    held.answer(0)
    until(lambda: len(held.calls) == 3)
    assert first.ended
    held.answer(1)
    leader.join(30)


@pytest.mark.usefixtures("no_naps")
@pytest.mark.parametrize("how", ["wait", "poll", "add_done_callback", "ask another", "close"])
def test_gathered_calls_leave_when_thread_waits(serve: Serve, open_channel: Open, how: str) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    one_in_flight(channel, held)
    gathered = [start(channel, within_s=0.5), start(channel, within_s=0.5)]
    assert channel.snapshot().calls_waiting == 2
    if how == "wait":
        channel.wait(gathered[0])
    elif how == "poll":
        assert not channel.poll(gathered[0])
    elif how == "add_done_callback":
        channel.add_done_callback(gathered[0], lambda call: None)
    elif how == "ask another":
        ask(channel, within_s=0.01)
    else:
        channel.close()
    until(lambda: len(held.calls) >= 3)


@pytest.mark.usefixtures("no_naps")
def test_gathered_calls_wait_when_connection_ends(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    first = one_in_flight(channel, held)
    gathered = [start(channel, b"%d" % number) for number in range(3)]
    held.served.loop.stop()
    assert channel.snapshot().calls_waiting == 3

    until(lambda: sees_the_end(channel, first))
    assert first.code == errors.UNAVAILABLE
    assert not any(call.ended for call in gathered)
    again = serve(address=channel.address)
    arrived = messages_to(again)
    for call in gathered:
        channel.wait(call)
    assert [(call.code, call.body) for call in gathered] == [(0, b"0"), (0, b"1"), (0, b"2")]
    assert [body for bodies in arrived for body in bodies] == [b"0", b"1", b"2"]


@pytest.mark.usefixtures("no_naps")
def test_reader_does_not_poll_without_server(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    channel = open_channel(held.served.address)
    first = one_in_flight(channel, held)
    gathered = start(channel, b"later")
    held.served.loop.stop()
    until(lambda: sees_the_end(channel, first))
    start(channel)  # the channel finds no server, and wakes the reader
    until(
        lambda: not channel._gathering
    )  # reach: when its reader is off duty nothing outside shows
    assert not gathered.ended
    serve(address=channel.address)
    channel.wait(gathered)
    assert (gathered.code, gathered.body) == (0, b"later")


@pytest.mark.usefixtures("no_naps")
def test_cancelled_gathered_call_is_never_sent(serve: Serve, open_channel: Open) -> None:
    held = Held(serve())
    arrived = messages_to(held.served)
    channel = open_channel(held.served.address)
    one_in_flight(channel, held)
    cancelled, late = start(channel, b"cancelled"), start(channel, b"late", within_s=0.01)
    assert channel.cancel(cancelled)
    lock, connection = (
        channel._lock,
        channel._connection,
    )  # reach: a use from outside would send what has gathered
    with lock:
        connection.expire(time.monotonic() + 1)
    assert (cancelled.code, late.code) == (errors.CANCELLED, errors.DEADLINE_EXCEEDED)
    start(channel, b"framed", frames=[b"frame"])
    until(lambda: len(arrived) == 2)
    assert arrived == [[b"first"], [b"framed"]]


def test_channels_of_threads_send_at_once(serve: Serve, open_channel: Open) -> None:
    """Each thread that waits sends what the channels of all others have gathered."""
    served = serve()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures: list[Exception] = []

    def work(channel: Channel) -> None:
        try:
            for _ in range(60):
                for call in [start(channel) for _ in range(4)]:
                    channel.wait(call)
                    assert call.code == errors.OK, call.message
        except Exception as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(open_channel(served.address),)) for _ in range(12)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not failures
