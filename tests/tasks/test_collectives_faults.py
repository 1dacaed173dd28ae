"""Collectives whose members stop, die or fail: who is named, who is told, and that the group works
again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import until
from tests.ports import free_addresses
from tests.tasks.helpers import (
    LARGE,
    Side,
    Silent,
    cluster,
    errors,
    state_of,
    together,
    until_announced,
    works,
)
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.errors import UNAVAILABLE, CancelledError, DeadlineExceededError, UnavailableError
from zmqdist.tasks.liveness import Watches
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.server import Server
from zmqdist.transport.credentials import Credentials

Made = Callable[..., Server]
Child = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pair(made: Made) -> list[Server]:
    return cluster(made, 2)


def assert_down(error: BaseException | None) -> None:
    assert isinstance(error, UnavailableError)
    assert "peer down" in str(error)


def test_abort_communication(pair: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a ring, whose pieces one member does not send."""
    with monkeypatch.context() as patch:
        silent = Silent(patch, "all_reduce", 1)
        sides = [Side(server.all_reduce, np.ones(LARGE)) for server in pair]
        assert silent.begun.wait(20)
        pair[0].group().abort(UNAVAILABLE, "peer down")
        for side in sides[:1], sides:
            for each in side:
                assert_down(each.wait().error)
            silent.go.set()
    pair[1].group().reset()
    works(pair)


def test_execution_after_timeout(pair: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """All have come, and one sends nothing: the text is another one. It reaches the one that hangs
    as well."""
    held = Silent(monkeypatch, "all_reduce", 1)
    silent = Side(pair[1].all_reduce, np.ones(LARGE))
    error = Side(pair[0].all_reduce, np.ones(LARGE), "sum", None, 0.2).wait().error
    assert isinstance(error, DeadlineExceededError)
    assert "no piece came from worker:1 within 0.2 s, during the execution" in str(error)
    held.go.set()
    late = silent.wait().error
    assert isinstance(late, DeadlineExceededError)
    assert str(late).startswith("worker:0: no piece came from worker:1")
    monkeypatch.undo()
    works(pair)


def test_own_stop_ends_collective(pair: list[Server]) -> None:
    waiting = Side(pair[0].all_reduce, 1)
    until_announced(pair[0])
    pair[0].stop(0.5)
    assert isinstance(waiting.wait().error, CancelledError)


def test_stop_of_leader_ends_collective(pair: list[Server]) -> None:
    waiting = Side(pair[1].all_reduce, 1)
    until_announced(pair[0])
    pair[0].stop(0.5)
    error = waiting.wait().error
    assert isinstance(error, UnavailableError)
    assert "worker:0" in str(error)


def test_leader_that_stops_after_its_reply(pair: list[Server]) -> None:
    def fn(server: Server, rank: int) -> Any:
        got = server.all_reduce(1)
        server.stop(1.0)
        return got

    assert together(pair, fn) == [2, 2]


def test_sender_ignores_restart_of_receiver(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have come, then the receiver goes; what is sent after that has no connection to end
    with.
    """
    silent = Silent(monkeypatch, "broadcast", 0)
    root = Side(pair[0].broadcast, np.ones(LARGE))
    other = Side(pair[1].broadcast)
    assert silent.begun.wait(20)
    pair[1].stop(0.1)
    assert isinstance(other.wait().error, CancelledError)
    until(lambda: state_of(pair[0], "worker:1") == "gone")
    silent.go.set()
    error = root.wait().error
    assert isinstance(error, UnavailableError)
    assert "worker:1" in str(error)


def test_members_meet_after_different_failures(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends an operation that fails at the other, and waits in the next one."""
    works(pair)
    with monkeypatch.context() as patch:
        full = Silent(patch, "broadcast", 1, MemoryError("no room"))
        receiver = Side(pair[1].broadcast)
        np.testing.assert_array_equal(Side(pair[0].broadcast, np.ones(LARGE)).get(), np.ones(LARGE))
        full.go.set()
        assert isinstance(receiver.wait().error, MemoryError)
    assert isinstance(
        Side(pair[0].all_reduce, 1, "sum", None, 0.05).wait().error, DeadlineExceededError
    )
    works(pair)


def test_message_of_new_incarnation_counts(made: Made) -> None:
    """The leader has heard of the next life of a member; the watch of another member may be
    behind.
    """
    addresses, other = free_addresses(2), ("worker", 0)
    node = Node(ClusterSpec({"worker": addresses}), ("worker", 1), addresses[1], Credentials())
    watches = Watches(node)
    node.serve()
    try:
        first = made({"worker": addresses}, "worker", 0)
        watches.watch(other)
        until(lambda: watches.rows()["worker:0"].state == "up")
        first.stop(0.0)
        until(lambda: watches.rows()["worker:0"].state == "gone")
        # its last words, which were read late
        watches.heard_from(other, first.snapshot().incarnation)
        assert f"worker:0 at {addresses[0]} has gone" in watches.gone_message(other)
        watches.heard_from(other, 5)
        assert watches.gone_message(other) == ""
        assert (
            watches.rows()["worker:0"].state == "unseen"
        )  # until the watch is there the end of its connection to us counts
    finally:
        node.close(0.0)


@pytest.mark.parametrize("first_hand", [True, False])
def test_early_end_of_member_is_final(made: Made, first_hand: bool) -> None:
    """It has announced, and all members are told of the agreement when it has gone: its own life
    does not bring it back."""
    addresses, other = free_addresses(2), ("worker", 1)
    node = Node(ClusterSpec({"worker": addresses}), ("worker", 0), addresses[0], Credentials())
    watches, peers = Watches(node), []
    node.service.register_later("speak", lambda call: peers.append(call.peer), roles=TASKS)
    node.serve()
    try:
        member = Node(ClusterSpec({"worker": addresses}), other, addresses[1], Credentials())
        member.service.register_later(
            "zmqdist.watch", lambda call, life: None, roles=TASKS
        )  # it goes before it answers
        member.serve()
        try:
            watches.watch(other)
            until(lambda: node.is_connected(other))
            member.start(("worker", 0), "speak")
            until(lambda: bool(peers))
            if first_hand:
                watches.heard_from(other, member.incarnation, peers[0])
        finally:
            member.close(0.0)
        until(lambda: watches.rows()["worker:1"].state == "gone")
        watches.heard_from(other, member.incarnation)
        assert bool(watches.gone_message(other)) is first_hand, (
            "without a word of its own the leader, who had one, tells its end"
        )
        watches.heard_from(other, member.incarnation + 1)
        assert watches.gone_message(other) == ""
    finally:
        node.close(0.0)


def test_memory_error_reaches_other_members(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as full:
        full.setattr("zmqdist.tasks.ring_schedules.gather", none)
        got = errors(pair, lambda server, rank: server.gather(np.ones(LARGE), timeout=10.0))
    assert all("no room" in str(error) for error in got)
    works(pair)


# -- processes that die ----------------------------------------------------------------------------

MEMBER = """
import sys
import numpy as np
from zmqdist.tasks import ring_schedules
from zmqdist.tasks.server import Server
addresses, rank = sys.argv[1].split(","), int(sys.argv[2])
def silent(*args):
    print("silent", flush=True)
    sys.stdin.readline()
with Server({"worker": addresses}, "worker", rank) as server:
    print("up", flush=True)
    for line in sys.stdin:
        value = np.ones(int(line))
        if rank == 2 and len(value) > 1000:  # dies in the middle: it has come, and sends nothing
            ring_schedules.all_reduce = silent
        try:
            print(server.all_reduce(value).sum(), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
"""


class Processes:
    """Ranks 1 and 2 in processes of their own, rank 0 here. They are started side by side."""

    def __init__(self, made: Made, child: Child) -> None:
        self.addresses = free_addresses(3)
        self.child = child
        self.server = made({"worker": self.addresses}, "worker", 0)
        self.ranks = {rank: self.start(rank) for rank in (1, 2)}
        for process in self.ranks.values():
            assert self.said(process) == "up"

    def start(self, rank: int) -> subprocess.Popen[str]:
        return self.child(MEMBER, ",".join(self.addresses), str(rank))

    def said(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def call(self, *ranks: int, count: int = 1) -> None:
        for rank in ranks:
            pipe = self.ranks[rank].stdin
            assert pipe is not None
            pipe.write(f"{count}\n")
            pipe.flush()

    def all(self) -> None:
        self.call(1, 2)
        assert float(self.server.all_reduce(np.ones(1)).sum()) == 3.0
        assert [self.said(self.ranks[rank]) for rank in (1, 2)] == ["3.0", "3.0"]


@pytest.mark.processes("collectives")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_absent_killed_member_is_named(made: Made, child: Child, sign: int) -> None:
    processes = Processes(made, child)
    processes.all()
    mine = Side(processes.server.all_reduce, np.ones(1))
    processes.call(1)
    until_announced(processes.server, 2)
    os.kill(processes.ranks[2].pid, sign)
    error = mine.wait().error
    assert isinstance(error, UnavailableError)
    assert f"worker:2 at {processes.addresses[2]} has gone" in str(error)
    assert f"worker:2 at {processes.addresses[2]} has gone" in processes.said(processes.ranks[1])


@pytest.mark.killed("collectives")
def test_killed_member_is_named_and_replaced(made: Made, child: Child) -> None:
    processes = Processes(made, child)
    processes.all()
    mine = Side(processes.server.all_reduce, np.ones(LARGE))
    processes.call(1, 2, count=LARGE)
    assert processes.said(processes.ranks[2]) == "silent"
    processes.ranks[2].kill()
    processes.ranks[2].wait()
    error = mine.wait().error
    assert isinstance(error, UnavailableError)
    assert "worker:2" in str(error)
    assert processes.said(processes.ranks[1]).startswith("UnavailableError")
    processes.ranks[2] = processes.start(2)
    assert processes.said(processes.ranks[2]) == "up"
    until(lambda: state_of(processes.server, "worker:2") == "up")
    processes.all()
    processes.all()


def test_killed_leader_is_named(made: Made, child: Child) -> None:
    addresses = free_addresses(3)
    leader = child(MEMBER, ",".join(addresses), "0")
    assert leader.stdout is not None
    assert leader.stdout.readline().strip() == "up"
    server = made({"worker": addresses}, "worker", 1)
    waiting = Side(server.all_reduce, 1)
    until(lambda: server.snapshot().collective_calls == 1 and state_of(server, "worker:0") == "up")
    leader.kill()
    error = waiting.wait().error
    assert isinstance(error, UnavailableError)
    assert "with leader worker:0" in str(error)
    until(lambda: state_of(server, "worker:0") == "gone")
    # who comes after that does not wait for its next life either
    error = Side(server.all_reduce, 1).wait().error
    assert isinstance(error, UnavailableError)
    assert f"worker:0 at {addresses[0]} has gone" in str(error)
