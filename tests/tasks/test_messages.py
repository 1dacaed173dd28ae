"""`Server.send` and `Server.recv` with real servers and processes. Those of TensorFlow's rendezvous
tests that need more than the machine (tests/tasks/test_mailbox_machine.py) have their names here again.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import until
from tests.launch.helpers import stop
from tests.ports import free_addresses
from tests.tasks.helpers import Side, cluster, state_of
from zmqdist.errors import (
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from zmqdist.tasks.server import Server

Made = Callable[..., Server]
Child = Callable[..., "subprocess.Popen[str]"]

SENDER = """
import sys
import numpy as np
from zmqdist.tasks.server import Server
addresses = sys.argv[1].split(",")
with Server({"worker": addresses}, "worker", 1) as server:
    print("up", flush=True)
    for line in sys.stdin:
        word, _, what = line.strip().partition(" ")
        if word == "send":
            print(server.send(what, "worker:0", "tag").get_error()[0], flush=True)
        elif word == "recv":
            print(server.recv("worker:0", what), flush=True)
        else:
            break
"""


def started(child: Child, addresses: list[str]) -> subprocess.Popen[str]:
    """Task worker:1 in a process of its own."""
    process = child(SENDER, ",".join(addresses))
    assert said(process) == "up"
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return said(process)


@pytest.fixture
def pair(made: Made) -> list[Server]:
    return cluster(made, 2)


def waiting(server: Server) -> bool:
    return bool(server.snapshot().mail_waits)


def until_it_waits(server: Server) -> None:
    until(lambda: waiting(server))


def until_it_watches(server: Server) -> None:
    until(lambda: state_of(server, "worker:1") == "up")


def test_send_recv(pair: list[Server]) -> None:
    sent = pair[0].send("hello", "worker:1", "foo")
    assert sent.get_value() is None
    assert pair[1].recv("worker:0", "foo", timeout=20) == "hello"


def test_recv_send(pair: list[Server]) -> None:
    receiving = Side(pair[1].recv, ("worker", 0), "foo")
    until_it_waits(pair[1])
    pair[0].send("hello", ("worker", 1), "foo")
    assert receiving.get() == "hello"


def test_ping_pong(pair: list[Server]) -> None:
    def back() -> None:
        pair[1].send(pair[1].recv("worker:0", "there"), "worker:0", "back")

    answering = Side(back)
    pair[0].send("hello", "worker:1", "there")
    assert pair[0].recv("worker:1", "back", timeout=10) == "hello"
    answering.get()


def test_random_send_recv(pair: list[Server]) -> None:
    order = np.random.default_rng(1).permutation(100)
    sides = [Side(pair[0].recv, "worker:1", f"tag {number}", 30.0) for number in range(16)]
    for number in order:
        pair[1].send(int(number), "worker:0", f"tag {number}")
    assert [side.get() for side in sides] == list(range(16))
    assert [pair[0].recv("worker:1", f"tag {number}", 30.0) for number in range(16, 100)] == list(
        range(16, 100)
    )


def test_multi_sends(pair: list[Server]) -> None:
    for number in range(100):
        pair[0].send(number, "worker:1", "foo")
    assert [pair[1].recv("worker:0", "foo", timeout=10) for _ in range(100)] == list(range(100))


def test_recv_abort(pair: list[Server]) -> None:
    """`stop` is what aborts a mailbox: the waits of the own tasks end with CancelledError, as they
    do when somebody cancels them."""
    receiving = Side(pair[1].recv, "worker:0", "foo")
    until_it_waits(pair[1])
    pair[1].stop(0.5)
    assert isinstance(receiving.wait().error, CancelledError)


def test_abort_then_recv_or_send(pair: list[Server]) -> None:
    pair[1].stop(0.5)
    with pytest.raises((CancelledError, FailedPreconditionError)):
        pair[1].recv("worker:0", "foo")
    with pytest.raises(FailedPreconditionError, match="was stopped"):
        pair[1].send(1, "worker:0", "foo")


def test_order_of_large_and_small_values(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zmqdist.transport.transfers.BulkChannel.shares_memory",
        property(lambda self: False, lambda self, value: None),
        raising=False,
    )
    values: list[Any] = []
    for number in range(12):
        values.append(np.full(400_000, number) if number % 3 == 0 else number)
    for value in values:
        pair[0].send(value, "worker:1", "foo")
    for value in values:
        np.testing.assert_array_equal(pair[1].recv("worker:0", "foo", timeout=20), value)
    assert pair[1].snapshot().mail_items == 0


def test_cancelled_message_delays_no_other(made: Made) -> None:
    addresses = free_addresses(2)
    first = made({"worker": addresses}, "worker", 0)
    lost = first.send("lost", "worker:1", "foo", timeout=0.05)
    kept = first.send("kept", "worker:1", "foo")
    assert not lost.is_ok()
    second = made({"worker": addresses}, "worker", 1)
    assert second.recv("worker:0", "foo", timeout=20) == "kept"
    assert kept.get_value() is None


def test_value_is_a_snapshot(pair: list[Server]) -> None:
    for count in (3, 100_000, 1_000_000):
        array = np.zeros(count)
        pair[0].send([array], "worker:1", "foo")
        pair[0].send({"x": array}, "worker:0", "foo")
        array[:] = 1
        there = pair[1].recv("worker:0", "foo", timeout=10)[0]
        here = pair[0].recv("worker:0", "foo", timeout=10)["x"]
        assert there.sum() == here.sum() == 0
        there[:] = here[:] = 2
        assert (array == 1).all()


def test_message_to_self_needs_no_connection(pair: list[Server]) -> None:
    sent = pair[0].send({"a": (1, "x", None)}, "worker:0", "foo")
    assert sent.done()
    assert sent.is_ok()
    expected: list[Any] = []
    sent.add_done_callback(expected.append)
    assert (expected, sent.cancel(), sent.get_error()) == ([sent], False, (0, ""))
    assert pair[0].recv("worker:0", "foo") == {"a": (1, "x", None)}
    assert not pair[0].snapshot().connections


def test_recv_into_array(
    pair: list[Server],
) -> None:
    pair[0].send(np.arange(6.0).reshape(2, 3), "worker:1", "foo")
    for bad, expected in (
        (np.empty(6), "out. has float64 and .6,"),
        (np.empty((2, 3), int), "out. has int64"),
    ):
        with pytest.raises(InvalidArgumentError, match=expected):
            pair[1].recv("worker:0", "foo", timeout=10, out=bad)
    out = np.empty((2, 3))
    assert pair[1].recv("worker:0", "foo", timeout=10, out=out) is out
    np.testing.assert_array_equal(out, np.arange(6.0).reshape(2, 3))
    pair[0].send("text", "worker:1", "foo")
    with pytest.raises(InvalidArgumentError, match="a str was sent, not one array"):
        pair[1].recv("worker:0", "foo", timeout=10, out=out)
    assert pair[1].recv("worker:0", "foo") == "text"
    frozen = np.empty(1)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="wanted a writable NumPy array"):
        pair[1].recv("worker:0", "foo", out=frozen)


def test_large_array_is_copied_once(pair: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    pair[0].send(0, "worker:1", "warm").get_value()
    copies: list[int] = []
    from zmqdist.transport.shm_pool import ShmPool

    kept = ShmPool.copy_in
    monkeypatch.setattr(
        ShmPool,
        "copy_in",
        lambda pool, view: copies.append(memoryview(view).nbytes) or kept(pool, view),
    )
    monkeypatch.setattr(
        "zmqdist.transport.transfers.memory_for",
        lambda nbytes: pytest.fail("it was received by the socket"),
    )
    pair[0].send(np.ones(2**20), "worker:1", "foo").get_value()
    assert pair[1].recv("worker:0", "foo", timeout=10).nbytes == 2**23
    assert copies == [2**23]


def test_mistakes_fail_at_once(pair: list[Server]) -> None:
    with pytest.raises(
        InvalidArgumentError, match="no task 'worker:7' in this cluster; it has worker:0, worker:1"
    ):
        pair[0].send(1, "worker:7", "foo")
    with pytest.raises(
        InvalidArgumentError, match="a tag is a text of one character or more, without semicolons"
    ):
        pair[0].recv("worker:1", "a;b")
    with pytest.raises(InvalidArgumentError):
        pair[0].send(object(), "worker:1", "foo")
    pair[0].send("after the mistake", "worker:1", "foo")
    assert pair[1].recv("worker:0", "foo", timeout=10) == "after the mistake"


def test_recv_times_out(pair: list[Server]) -> None:
    with pytest.raises(
        DeadlineExceededError, match="no message from worker:0 under 'foo' arrived in time"
    ):
        pair[1].recv("worker:0", "foo", timeout=0.05)


def test_full_mailbox_fails_the_sender(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.tasks.mail.MAIL_ITEMS_MAX", 3)
    pair = cluster(made, 2)
    sent = [pair[0].send(number, "worker:1", "foo") for number in range(5)]
    assert [result.get_error()[0] for result in sent] == [
        0,
        0,
        0,
        RESOURCE_EXHAUSTED,
        RESOURCE_EXHAUSTED,
    ]
    assert "the mailbox of worker:1 is full: 3 messages of 24 bytes" in sent[4].get_error()[1]
    assert [pair[1].recv("worker:0", "foo") for _ in range(3)] == [0, 1, 2]
    pair[0].send("room again", "worker:1", "foo").get_value()
    assert pair[1].recv("worker:0", "foo") == "room again"


def test_recv_waits_for_late_sender(made: Made) -> None:
    addresses = free_addresses(2)
    first = made({"worker": addresses}, "worker", 0)
    receiving = Side(first.recv, "worker:1", "foo")
    sent = first.send("early", "worker:1", "foo")
    until_it_waits(first)
    second = made({"worker": addresses}, "worker", 1)
    assert second.recv("worker:0", "foo", timeout=20) == "early"
    assert sent.get_value() is None
    second.send("late", "worker:0", "foo")
    assert receiving.get() == "late"


@pytest.mark.processes("messages")
@pytest.mark.killed("messages")
def test_killed_sender_ends_recv(made: Made, child: Child) -> None:
    addresses = free_addresses(2)
    server = made({"worker": addresses}, "worker", 0)
    process = started(child, addresses)
    assert tell(process, "send left behind") == "0"
    receiving = Side(server.recv, "worker:1", "never")
    until_it_waits(server)
    until_it_watches(server)
    process.kill()
    error = receiving.wait().error
    assert isinstance(error, UnavailableError)
    assert f"worker:1 at {addresses[1]} has gone" in str(error)
    with pytest.raises(UnavailableError, match=r"worker:1 at .* has gone"):
        server.recv("worker:1", "never", timeout=50)
    assert server.recv("worker:1", "tag") == "left behind"


def test_restarted_sender_is_another_sender(made: Made, child: Child) -> None:
    addresses = free_addresses(2)
    server = made({"worker": addresses}, "worker", 0)
    process = started(child, addresses)
    assert tell(process, "send of the old one") == "0"
    receiving = Side(server.recv, "worker:1", "never")
    until_it_waits(server)
    process.kill()
    process.wait()
    again = started(child, addresses)
    assert tell(again, "send of the new one") == "0"
    assert isinstance(receiving.wait().error, UnavailableError)
    assert server.recv("worker:1", "tag", timeout=20) == "of the new one"
    server.send("to the new one", "worker:1", "back")
    assert tell(again, "recv back") == "to the new one"


def test_stopped_process_is_missed(made: Made, child: Child) -> None:
    addresses = free_addresses(2)
    server = made({"worker": addresses}, "worker", 0)
    process = started(child, addresses)
    assert tell(process, "send first") == "0"
    assert server.recv("worker:1", "tag") == "first"
    receiving = Side(server.recv, "worker:1", "tag")
    until_it_waits(server)
    until_it_watches(server)
    stop(process.pid)
    try:
        assert isinstance(receiving.wait().error, UnavailableError)
        sent = server.send("for later", "worker:1", "back", timeout=30)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert sent.get_error()[0] in (0, UNAVAILABLE)
    assert tell(process, "send it lives") == "0"
    assert server.recv("worker:1", "tag", timeout=30) == "it lives"


def test_threads_and_tags_at_once(pair: list[Server]) -> None:
    def talk(rank: int, tag: str) -> list[int]:
        got = []
        for number in range(50):
            pair[rank].send(number, f"worker:{1 - rank}", tag)
            got.append(pair[rank].recv(f"worker:{1 - rank}", tag, timeout=30))
        return got

    sides = [Side(partial(talk, rank, tag)) for rank in (0, 1) for tag in "abcd"]
    assert all(side.get() == list(range(50)) for side in sides)
    # the last answers are still on their way
    until(lambda: not pair[0].snapshot().mail_unconfirmed)


@pytest.mark.parametrize("timeout", [float("nan"), "3", True])
def test_bad_time_out_is_refused(pair: list[Server], timeout: Any) -> None:
    """NaN would be for ever."""
    with pytest.raises(InvalidArgumentError, match="a time-out is a number of seconds"):
        pair[0].recv("worker:1", "tag", timeout=timeout)
    with pytest.raises(InvalidArgumentError, match="a time-out is a number of seconds"):
        pair[0].send(1, "worker:1", "tag", timeout=timeout)
