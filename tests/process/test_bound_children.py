"""Children that are bound to their zygote: they end with the zygote, with the process that started
it, and when that process is silent."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.helpers import stop
from tests.transport.helpers import until
from tests.zygote import slots_zygote
from zmqdist.process.bound_children import BoundChild, BoundChildren
from zmqdist.process.zygote import SILENT
from zmqdist.process.zygote_client import ZygoteProcess
from zmqdist.transport.loop import Loop

MODULE = "tests.process.child_main"
PATIENCE_S = 20.0
WORDS_MAX = 1000
"""More than a socket holds."""


class Spawned:
    """One child, and this process's end of its only descriptor."""

    def __init__(self, loop: Loop, children: BoundChildren) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(PATIENCE_S)
        self.codes: list[int] = []
        self.child: BoundChild = loop.run(
            children.spawn, MODULE, [theirs.detach()], self.codes.append
        )

    def code(self) -> int:
        until(lambda: self.codes)
        return self.codes[0]

    def pid(self) -> int:
        """Wait until the child has started."""
        until(lambda: self.child.pid)
        return self.child.pid


class Nursery:
    """A loop, a zygote, and its children."""

    def __init__(self) -> None:
        self.loop = Loop("zmqdist-test")
        self.zygote: ZygoteProcess = slots_zygote()
        self.children = BoundChildren(self.loop, self.zygote)
        self.lost: list[int | None] = []
        self.children.on_lost.append(self.lost.append)
        self.loop.on_stop(self.children.close)
        self.loop.start()
        self.spawned: list[Spawned] = []

    def spawn(self) -> Spawned:
        self.spawned.append(Spawned(self.loop, self.children))
        return self.spawned[-1]

    def stop(self) -> None:
        self.loop.stop()
        for each in self.spawned:
            each.ours.close()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.stop()


def ended(pid: int) -> bool:
    """Return whether the process has ended; it may be a zombie that its parent has not reaped
    yet.
    """
    try:
        return ") Z " in Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(("word", "code"), [(b"x", 3), (b"r", 1), (b"", 0)])
def test_child_gets_descriptors_and_reports_exit(nursery: Nursery, word: bytes, code: int) -> None:
    spawned = nursery.spawn()
    spawned.ours.sendall(word)
    spawned.ours.shutdown(socket.SHUT_WR)
    assert spawned.code() == code
    tail = nursery.loop.run(spawned.child.tail)
    assert ("a child's own mistake" in tail) == (word == b"r")


def test_child_leads_session_without_ctrl_c(nursery: Nursery) -> None:
    spawned = nursery.spawn()
    spawned.ours.sendall(b"p")
    numbers = {int(each) for each in spawned.ours.recv(64).split()}
    assert numbers == {spawned.pid()}
    spawned.ours.sendall(b"i")
    assert spawned.ours.recv(1) == b"i"


def test_child_ordered_after_close_leaves_no_descriptor(nursery: Nursery) -> None:
    nursery.loop.run(nursery.children.close)
    spawned = nursery.spawn()
    assert spawned.ours.recv(1) == b""  # its other end is closed
    assert (spawned.child.pid, spawned.codes) == (0, [])


def test_early_kill_is_reported(nursery: Nursery) -> None:
    ours, theirs = socket.socketpair()
    codes: list[int] = []

    def spawn_and_kill() -> None:
        nursery.children.spawn(MODULE, [theirs.detach()], codes.append).kill()

    nursery.loop.run(spawn_and_kill)
    until(lambda: codes)
    assert codes == [-signal.SIGKILL]
    ours.close()


def test_killed_children_all_end_beside_full_socket(nursery: Nursery) -> None:
    """While the zygote does not run, the socket's buffer holds fewer orders than there are; none
    may be dropped."""
    several = [nursery.spawn() for _ in range(40)]
    for each in several:
        each.pid()
    stop(nursery.zygote.pid)

    def fill_and_kill() -> None:
        for _ in range(WORDS_MAX):
            nursery.children.watch(PATIENCE_S)
        for each in several:
            each.child.kill()

    nursery.loop.run(fill_and_kill)
    os.kill(nursery.zygote.pid, signal.SIGCONT)
    assert {each.code() for each in several} == {-signal.SIGKILL}
    again = nursery.spawn()
    again.ours.sendall(b"x")
    assert again.code() == 3


def test_group_of_child_ends_with_child(nursery: Nursery) -> None:
    spawned = nursery.spawn()
    spawned.ours.sendall(b"f")
    assert spawned.ours.recv(1) == b"f"
    (grandchild,) = (
        Path("/proc", str(spawned.pid()), "task", str(spawned.pid()), "children")
        .read_text()
        .split()
    )
    spawned.ours.sendall(b"x")
    assert spawned.code() == 3
    until(lambda: ended(int(grandchild)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_zygote_ignores_group_signals(nursery: Nursery, number: int) -> None:
    before = nursery.spawn()
    before.pid()
    os.kill(nursery.zygote.pid, number)
    after = nursery.spawn()
    for each in (before, after):
        each.ours.sendall(b"x")
        assert each.code() == 3
    assert nursery.zygote.wait(0.0) is None


@pytest.mark.killed("scheduling")
def test_children_end_with_killed_zygote(nursery: Nursery) -> None:
    spawned = nursery.spawn()
    pid = spawned.pid()
    os.kill(nursery.zygote.pid, signal.SIGKILL)
    assert spawned.code() == -signal.SIGKILL
    until(lambda: nursery.lost)
    until(lambda: ended(pid))


def test_silent_starter_loses_children_that_are_not_kept(nursery: Nursery) -> None:
    spawned, kept, shortly_kept = nursery.spawn(), nursery.spawn(), nursery.spawn()
    for each, silence_s in ((kept, PATIENCE_S), (shortly_kept, 0.1)):
        each.pid()
        nursery.loop.run(each.child.keep, silence_s)
    shortly_kept_fd = os.pidfd_open(shortly_kept.pid())
    pidfd = os.pidfd_open(spawned.pid())

    def stand_still() -> None:
        """Be silent, as a stopped process is to the zygote."""
        nursery.children.watch(0.05)
        for fd in (pidfd, shortly_kept_fd):
            assert select.select([fd], [], [], PATIENCE_S)[0]

    nursery.loop.run(stand_still, timeout_s=PATIENCE_S)
    os.close(pidfd)
    os.close(shortly_kept_fd)
    assert spawned.code() == shortly_kept.code() == SILENT
    kept.ours.sendall(b"x")
    assert kept.code() == 3


def test_child_ordered_after_silence_lives(nursery: Nursery) -> None:
    """A resumed process may order children before its next beat."""
    silenced = nursery.spawn()
    pidfd = os.pidfd_open(silenced.pid())

    def stand_still_and_order() -> Spawned:
        nursery.children.watch(2.0)
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        ordered = nursery.spawn()
        ordered.ours.sendall(b"p")
        assert ordered.ours.recv(100), "it was killed, too"
        return ordered

    ordered = nursery.loop.run(stand_still_and_order, timeout_s=2 * PATIENCE_S)
    os.close(pidfd)
    ordered.ours.sendall(b"x")
    assert ordered.code() == 3


def test_children_end_with_owner(nursery: Nursery) -> None:
    several = [nursery.spawn() for _ in range(3)]
    pids = [each.pid() for each in several]
    waiting = nursery.spawn()
    nursery.loop.run(nursery.children.close)
    until(lambda: all(map(ended, pids)))
    assert not any(each.codes for each in (*several, waiting))
