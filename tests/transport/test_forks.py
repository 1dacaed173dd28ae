"""A forked child keeps nothing of its parent's servers and connections: their ports become free,
and their peers see the parent's end."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import pytest

import zmqdist as zd
from tests.transport.helpers import until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data.service import WorkerConfig
from zmqdist.rpc import Client, Server
from zmqdist.transport.own_address import listen


@contextlib.contextmanager
def child(do: Callable[[], bytes] = bytes) -> Iterator[bytes]:
    """Fork a child that stays until the end of the `with` statement. Give what `do` returns
    there.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        with contextlib.suppress(BaseException):
            theirs.send(do() + b".")
            theirs.recv(1)
        os._exit(0)
    theirs.close()
    ours.settimeout(20)
    try:
        yield ours.recv(1000)[:-1]
    finally:
        ours.close()
        os.waitpid(pid, 0)


def inet_sockets() -> list[int]:
    """Return the descriptors of this process that are TCP sockets."""
    fds = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                fds.append(fd)
    return fds


@pytest.fixture
def cluster() -> Iterator[None]:
    """A server, clients, a dispatcher, a worker and a coordinator, all connected."""
    with contextlib.ExitStack() as ends:
        server = Server.create("zmq", "127.0.0.1:0")
        ends.callback(server.stop)
        server.register("length", lambda *leaves: len(leaves))
        server.start()
        client = ends.enter_context(Client.create("zmq", server.address))
        assert client.call("length", [1]).get_value() == [1]
        dispatcher = ends.enter_context(zd.DispatchServer())
        ends.enter_context(zd.WorkerServer(WorkerConfig(dispatcher.address)))
        coordinator = ends.enter_context(ClusterCoordinator(dispatcher))
        assert coordinator.schedule(len, ("three",)).get(20) == 5
        ends.enter_context(listen("127.0.0.1"))
        yield


def test_child_has_no_socket_of_parent(cluster: None) -> None:
    assert inet_sockets()
    with child(lambda: repr(inet_sockets()).encode()) as left:
        assert left == b"[]"


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_sockets_of_program_stay_in_child(cluster: None, timeout_s: float | None) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as own,
    ):
        socket.setdefaulttimeout(timeout_s)
        try:
            with child(
                lambda: repr((os.get_blocking(own.fileno()), sorted(inet_sockets()))).encode()
            ) as left:
                assert left == repr((True, sorted([listening.fileno(), own.fileno()]))).encode()
        finally:
            socket.setdefaulttimeout(None)


def serve(address: str) -> Server:
    server = Server.create("zmq", address)
    server.start()
    return server


def test_port_is_free_while_child_lives() -> None:
    server = serve("127.0.0.1:0")
    with child():
        server.stop()
        port = int(server.address.rpartition(":")[2])

        def is_free() -> bool:
            with socket.socket() as other, contextlib.suppress(OSError):
                other.bind(("127.0.0.1", port))
                return True
            return False

        until(is_free)


def test_reserved_port_is_free_while_child_lives() -> None:
    with listen("127.0.0.1") as reserved:
        name = reserved.getsockname()
    with listen("127.0.0.1") as reserved, child():
        name = reserved.getsockname()
        reserved.close()
        with socket.socket() as other:
            other.bind(name)


def test_parent_continues_after_fork(cluster: None) -> None:
    server = serve("127.0.0.1:0")
    with Client.create("zmq", server.address) as client:
        with child():
            assert client.methods() is not None
        assert client.methods() is not None
    server.stop()
