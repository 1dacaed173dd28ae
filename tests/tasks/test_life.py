"""start, stop, join, drop: contract S2."""

from __future__ import annotations

import gc
import socket
import subprocess
import threading
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from tests.coordination.helpers import until
from tests.ports import free_addresses
from tests.tasks.helpers import Side
from zmqdist.errors import (
    INVALID_ARGUMENT,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from zmqdist.rpc import ZmqClient, internal_client
from zmqdist.tasks.server import Server
from zmqdist.tasks.session import Session

Made = Callable[..., Server]


def is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True


def test_start_again_and_start_after_stop(made: Made) -> None:
    server = made({"local": ["localhost:0"]})
    server.start()
    server.stop()
    server.stop()
    with pytest.raises(FailedPreconditionError, match="stopped"):
        server.start()


def test_join_before_start_forbids_start(made: Made) -> None:
    server = made({"local": ["localhost:0"]}, start=False)
    assert server.join()
    with pytest.raises(FailedPreconditionError, match="stopped"):
        server.start()
    assert is_free(server.address)


def test_join_waits_for_stop_or_time_out(made: Made) -> None:
    server = made({"local": ["localhost:0"]})
    assert not server.join(0.01)
    joined: list[bool] = []
    waiting = threading.Thread(target=lambda: joined.append(server.join()))
    waiting.start()
    server.stop()
    waiting.join(30)
    assert joined == [True]


def test_port_is_free_after_stop() -> None:
    (address,) = free_addresses(1)
    for _ in range(20):
        with Server({"local": [address]}, start=False) as server:
            assert server.address == address
            assert not is_free(address)
        assert is_free(address)


@pytest.mark.parametrize("grace", ["1", -1, float("nan"), True])
def test_bad_grace_is_refused(made: Made, grace: Any) -> None:
    server = made({"local": ["localhost:0"]})
    with Session(server) as session:
        for stop in (server.stop, lambda given: session.stop_task(grace=given), session.shutdown):
            with pytest.raises(InvalidArgumentError, match="grace is a number of seconds"):
                stop(grace)
        assert session.run(int) == 0
        security = server.credentials.client(server.address, "submit")
        with ZmqClient(server.address, security=security) as client:  # another one than ours
            code, text = internal_client.start(client, "server.stop", "1").get_error()
        assert (code, "grace is a number of seconds" in text) == (INVALID_ARGUMENT, True)
        assert session.run(int) == 0
    server.stop(inf)
    assert is_free(server.address)


def test_dropped_server_stops() -> None:
    for start in (True, False):
        server = Server.create_local_server(start=start)
        address = server.address
        assert not is_free(address)
        del server
        gc.collect()
        until(lambda: is_free(address))  # noqa: B023


def test_server_in_reference_cycle_stops() -> None:
    for start in (False, True, False):
        server: Any = Server.create_local_server(start=start)
        server.itself = server
        address = server.address
        del server
        gc.collect()
        until(lambda: is_free(address))  # noqa: B023


def test_port_of_dropped_server_is_free() -> None:
    (address,) = free_addresses(1)
    for _ in range(10):
        server = Server({"local": [address]})
        assert server.address == address
        del server
    until(lambda: is_free(address))


def test_running_call_gets_the_grace(made: Made) -> None:
    for grace in (20.0, 0.0):
        server = made({"local": ["localhost:0"]})
        HELD[:] = entered, leave = threading.Event(), threading.Event()
        with Session(server) as session:
            running = Side(session.run, held)
            assert entered.wait(20)
            stopping = Side(server.stop, grace)
            if grace:
                leave.set()
                assert running.get() == 7
            else:
                error = running.wait().error
                assert isinstance(error, UnavailableError)
                assert "held on local:0" in str(error)
            stopping.wait()
        leave.set()


HELD: list[threading.Event] = []
"""For `held`, which a session runs in this process; this module is imported by its name."""


def held() -> int:
    entered, leave = HELD
    entered.set()
    leave.wait(30)
    return 7


def test_servers_of_a_cluster_in_one_process(made: Made) -> None:
    """A hundred and one: contract S2.8."""
    addresses = free_addresses(101)
    cluster = {"worker": addresses[:1], "ps": addresses[1:]}
    servers = [made(cluster, "ps", index) for index in range(100)]
    worker = made(cluster, "worker", 0)
    assert len({server.target for server in servers} | {worker.target}) == 101


def test_missing_descriptors_are_an_error(
    child: Callable[..., subprocess.Popen[str]],
) -> None:
    program = """
import resource
import zmqdist
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
servers = []
try:
    while True:
        servers.append(zmqdist.Server.create_local_server())
except zmqdist.errors.ResourceExhaustedError as error:
    print(error)
with zmqdist.Session(servers[-1]) as session:
    print(session.run(len, "abc"))
for server in servers:
    server.stop()
"""
    lines = child(program).communicate(timeout=30)[0].splitlines()
    assert "of 128: raise `ulimit -n`" in lines[0]
    assert lines[1:] == ["3"]
