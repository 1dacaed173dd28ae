"""Whose fault it is: what a task waits for when its own server stops ends with CancelledError,
which names that stop and nobody else.

The stop ends connections, watches and the task's part in what others do together, and each of those
has an error of its own, which reads as if another task had gone. So each kind of wait is ended here
many times, at once and after it has come to rest.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import until
from tests.ports import free_addresses
from tests.tasks.helpers import LARGE, Side, Silent, cluster, state_of, together
from zmqdist.errors import (
    UNAVAILABLE,
    CancelledError,
    FailedPreconditionError,
    OpError,
    UnavailableError,
)
from zmqdist.rpc.service import RpcService
from zmqdist.tasks.server import Server
from zmqdist.tasks.session import Session

Made = Callable[..., Server]

TIMES = 6
"""How often each wait is ended; each time the stop meets it somewhere else."""


def in_group(count: int) -> Callable[[Server], bool]:
    return lambda leader: any(len(row.arrived) == count for row in leader.snapshot().groups)


def keeper_waits(server: Server) -> bool:
    keeper = server.snapshot().keeper
    return keeper is not None and bool(keeper.barriers or keeper.key_waits)


# what waits: (name, rank of the task whose server stops, what it does, when it has come to rest at
# (own server, the leader))
WAITS: list[tuple[str, int, Callable[[Server], Any], Callable[[Server, Server], bool]]] = [
    (
        "recv",
        1,
        lambda one: one.recv("worker:0", "tag"),
        lambda one, _: one.snapshot().mail_waits == 1,
    ),
    (
        "recv of itself",
        1,
        lambda one: one.recv("worker:1", "tag"),
        lambda one, _: one.snapshot().mail_waits == 1,
    ),
    (
        "recv, not seen",
        0,
        lambda one: one.recv("worker:2", "tag"),
        lambda one, _: one.snapshot().mail_waits == 1,
    ),
    ("announced by the leader", 0, lambda one: one.all_reduce(1), lambda one, _: in_group(1)(one)),
    (
        "announced to the leader",
        1,
        lambda one: one.all_reduce(1),
        lambda _, leader: in_group(1)(leader),
    ),
    (
        "a leader not seen",
        1,
        lambda one: one.all_reduce(1, group=["worker:2", "worker:1"]),
        lambda one, _: True,
    ),
    ("barrier of the leader", 0, lambda one: one.barrier("b"), lambda one, _: keeper_waits(one)),
    ("barrier of another", 1, lambda one: one.barrier("b"), lambda _, leader: keeper_waits(leader)),
    ("key of the leader", 0, lambda one: one.kv.get("k"), lambda one, _: keeper_waits(one)),
    ("key of another", 1, lambda one: one.kv.get("k"), lambda _, leader: keeper_waits(leader)),
    (
        "all tasks",
        1,
        lambda one: one.coordination.wait_for_all(),
        lambda one, _: one.coordination.snapshot().requests == 1,
    ),
]


@pytest.mark.parametrize(("name", "rank", "wait", "at_rest"), WAITS, ids=[row[0] for row in WAITS])
def test_own_stop_ends_waits(
    made: Made,
    name: str,
    rank: int,
    wait: Callable[[Server], Any],
    at_rest: Callable[[Server, Server], bool],
) -> None:
    for number in range(TIMES):
        servers = cluster(made, 3)[:2]
        for server in servers if number % 2 else ():
            # else connections, watches and registrations are made meanwhile
            server.coordination.register(30)
        side = Side(wait, servers[rank])
        if number % 3 < 2:
            until(lambda: at_rest(servers[rank], servers[0]))  # noqa: B023
        servers[rank].stop(0.1)
        error = side.wait().error
        text = f"{name}, time {number}: {error!r}"
        begun = isinstance(error, FailedPreconditionError) and number % 3 == 2  # the stop was first
        assert isinstance(error, CancelledError) or begun, text
        assert f"the server of worker:{rank} was stopped" in str(error), text
        servers[1 - rank].stop(0.0)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "member"])
def test_own_stop_ends_an_exchange(
    made: Made, monkeypatch: pytest.MonkeyPatch, kind: str, rank: int
) -> None:
    """The other one is silent, so the stopped one waits for its pieces; of a broadcast the root is
    silent."""
    for number in range(TIMES):
        with monkeypatch.context() as patch:
            pair = cluster(made, 2)
            silent = Silent(patch, kind, 1 - rank)
            how = {"root": 1 - rank} if kind == "broadcast" else {}
            sides = [
                Side(lambda one=one, how=how: getattr(one, kind)(np.ones(LARGE), **how))
                for one in pair
            ]
            assert silent.begun.wait(30)
            if number % 2:
                until(lambda: state_of(pair[rank], f"worker:{1 - rank}") == "up")  # noqa: B023
            pair[rank].stop(0.1)
            error = sides[rank].wait().error
            assert isinstance(error, CancelledError), f"time {number}: {error!r}"
            assert f"the server of worker:{rank} was stopped" in str(error)
            until(lambda: state_of(pair[1 - rank], f"worker:{rank}") == "gone")  # noqa: B023
            silent.go.set()
            other = sides[1 - rank].wait().error
            assert isinstance(other, UnavailableError), f"time {number}: {other!r}"
            assert f"worker:{rank}" in str(other)
            pair[1 - rank].stop(0.0)


def test_last_member_fails_by_own_stop(made: Made) -> None:
    """Its announcement may already be agreed: then it has its result."""
    for _ in range(TIMES):
        pair = cluster(made, 2)
        # they have seen each other
        assert together(pair, lambda server, rank: server.all_reduce(1)) == [2, 2]
        sides = [Side(server.all_reduce, np.ones(LARGE)) for server in pair]
        pair[1].stop(0.1)
        own, other = (side.wait().error for side in reversed(sides))
        assert own is None or isinstance(own, (CancelledError, FailedPreconditionError)), repr(own)
        assert own is None or "the server of worker:1 was stopped" in str(own)
        if other is not None:
            assert isinstance(other, UnavailableError), repr(other)
            assert "worker:1" in str(other)
        else:
            assert own is None or isinstance(own, CancelledError)
        pair[0].stop(0.0)


def test_own_stop_reports_no_other_task(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zmqdist.tasks"):
        for _ in range(TIMES):
            pair = cluster(made, 2)
            sides = [Side(pair[rank].recv, f"worker:{1 - rank}", "tag") for rank in (0, 1)]
            # A receive from a task that has not been seen yet would go on waiting for it.
            until(
                lambda: (
                    [state_of(pair[rank], f"worker:{1 - rank}") for rank in (0, 1)] == ["up", "up"]  # noqa: B023
                )
            )
            pair[1].stop(0.1)
            assert isinstance(sides[1].wait().error, CancelledError)
            error = sides[0].wait().error
            assert isinstance(error, UnavailableError)
            assert "worker:1" in str(error)
            assert state_of(pair[1], "worker:0") == "up"
            pair[0].stop(0.0)
    assert "worker:1" in caplog.text
    assert not [record for record in caplog.messages if record.startswith("worker:0")]


def test_stop_is_a_loss_for_other_tasks(made: Made) -> None:
    """The other way round: nobody else is told that its own part was cancelled."""
    for _ in range(TIMES):
        pair = cluster(made, 2)
        sent: list[OpError] = []

        def send(one: Server = pair[1], sent: list[OpError] = sent) -> None:
            while not sent:
                try:
                    one.send(1, "worker:0", "tag", timeout=5.0).get_value()
                except OpError as refused:
                    sent.append(refused)

        waiting = Side(pair[1].all_reduce, 1)
        sending = Side(send)
        until(lambda: in_group(1)(pair[0]))  # noqa: B023
        pair[0].stop(0.05)
        error = waiting.wait().error
        assert isinstance(error, UnavailableError), repr(error)
        assert "worker:0" in str(error)
        late = Side(pair[1].all_reduce, 1, "sum", None, 0.2).wait().error
        assert not isinstance(late, CancelledError), repr(late)
        sending.wait()
        assert not isinstance(sent[0], CancelledError), repr(sent[0])
        pair[1].stop(0.0)


# -- questions of the server itself ----------------------------------------------------------------


@pytest.fixture
def mute() -> Iterator[str]:
    """An address where something greets as ZeroMQ does, and never says more: questions to it
    wait.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def greet() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                taken.append(peer)
                peer.sendall(
                    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
                )

        thread = threading.Thread(target=greet)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for peer in taken:
            peer.close()


def test_check_alive_fails_at_own_stop(made: Made, mute: str) -> None:
    server = made({"worker": [*free_addresses(1), mute]}, "worker", 0)
    asking = Side(server.check_alive, "worker:1")
    until(lambda: server.snapshot().connections)
    server.stop(0.0)
    error = asking.wait().error
    assert isinstance(error, CancelledError)
    assert str(error) == "the server of worker:0 was stopped"


def test_reset_names_the_stopped_task(made: Made, mute: str) -> None:
    server = made({"worker": free_addresses(1), "ps": [mute]}, "worker", 0)
    resetting = Side(Session.reset, server.target)
    until(lambda: server.snapshot().connections)
    server.stop(0.1)
    error = resetting.wait().error
    assert isinstance(error, UnavailableError)
    assert "ps:0" not in str(error)


def test_unsent_message_is_cancelled_at_stop(made: Made, mute: str) -> None:
    server = made({"worker": [*free_addresses(1), mute]}, "worker", 0)
    sent = server.send(1, "worker:1", "tag")
    assert server.snapshot().mail_unconfirmed == 1
    server.stop(0.0)
    with pytest.raises(CancelledError, match="was closed"):
        sent.get_value()
    # its callback runs after those who wait were woken
    until(lambda: server.snapshot().mail_unconfirmed == 0)


def test_stopped_mailbox_refuses_messages(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is still open while the stop waits for a function that runs. The sender has not
    heard of the stop yet."""
    monkeypatch.setattr(RpcService, "say_goodbye", lambda *text: None)
    pair = cluster(made, 2)
    pair[0].send(1, "worker:1", "tag").get_value()
    begun, go = threading.Event(), threading.Event()
    HELD.append((begun, go))
    with Session(pair[1]) as session:
        running = Side(session.run, hold)
        assert begun.wait(20)
        stopping = Side(pair[1].stop, 20.0)
        until(lambda: pair[1].snapshot().mail_items == 0)  # aborted
        refused = pair[0].send(2, "worker:1", "tag", timeout=20.0).get_error()
        go.set()
        running.wait()
        stopping.wait()
    HELD.clear()
    assert refused == (UNAVAILABLE, "the server of worker:1 was stopped")


HELD: list[tuple[threading.Event, threading.Event]] = []
"""For `hold`, which a session runs in this process; this module is imported by its name."""


def hold() -> None:
    begun, go = HELD[0]
    begun.set()
    go.wait(30)
