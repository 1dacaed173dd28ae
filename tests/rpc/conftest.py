"""Fixtures of this folder: secrets of their own, servers here and in child processes, clients that
are closed at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.rpc.helpers import SERVER, address_of, until
from zmqdist.rpc import Client, ZmqClient, ZmqServer
from zmqdist.transport import shm_pool
from zmqdist.transport.shm_pool import this_pool

LATE_MS = 20_000
"""Longer than any test waits for something: what ends in time ended for another reason."""


@pytest.fixture(autouse=True)
def _own_secrets(own_secrets: None) -> None:
    """All tests of this folder."""


@pytest.fixture
def serve() -> Iterator[Callable[..., ZmqServer]]:
    """serve(m=fn, ...): a started server; inline={"m", ...} names the inline ones, a tuple is (fn,
    signature)."""
    made: list[ZmqServer] = []

    def make(
        address: str = "127.0.0.1:0", inline: frozenset[str] = frozenset(), **methods: Any
    ) -> ZmqServer:
        server = ZmqServer(address)
        for name, method in methods.items():
            fn, *signatures = method if isinstance(method, tuple) else (method,)
            server.register(name, fn, *signatures, inline=name in inline)
        server.start()
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop(0.5)
        assert server.snapshot().faults == 0


@pytest.fixture
def connect() -> Iterator[Callable[..., ZmqClient]]:
    """connect(address, ...): a client; it has never stalled and holds nothing at the end."""
    made: list[ZmqClient] = []

    def make(
        address: str, *, listing: bool = True, timeout_in_ms: int = LATE_MS, name: str = ""
    ) -> ZmqClient:
        made.append(
            Client.create("zmq", address, name, timeout_in_ms)
            if listing
            else ZmqClient(address, name, False, timeout_in_ms)
        )
        return made[-1]

    yield make
    for client in made:
        client.close()
        until(lambda client=client: not client.snapshot().threads_waiting)  # type: ignore[misc]
        assert (client.snapshot().stalls, client.snapshot().calls) == (0, 0)


@pytest.fixture(params=["shared_memory", "sockets"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways; what is started in the test goes this one."""
    if request.param == "sockets":
        monkeypatch.setenv("ZMQDIST_ARENA", "off")
        monkeypatch.setattr(shm_pool, "_pool", None)
        monkeypatch.setattr(shm_pool, "_tried", True)
    elif this_pool() is None:
        pytest.skip("no shared memory on this system")
    return str(request.param)


@pytest.fixture(scope="module")
def large_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The address of SERVER for each route, and the folder of its token as "state". One process a
    route serves the module."""
    state = str(tmp_path_factory.mktemp("large-servers"))
    there: dict[str, str] = {"state": state}
    processes = []
    for name, bound in (("shared_memory", ""), ("sockets", "off")):
        own = {"XDG_STATE_HOME": state, **({"ZMQDIST_ARENA": bound} if bound else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        there[name] = address_of(process)
    yield there
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def remote(
    route: str,
    large_servers: dict[str, str],
    connect: Callable[..., ZmqClient],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ZmqClient]:
    """A client of SERVER in another process, which keeps nothing of the tests before."""
    monkeypatch.setenv("XDG_STATE_HOME", large_servers["state"])
    client = connect(large_servers[route], timeout_in_ms=30_000)
    client.forget_blocking()
    yield client
    client.forget_blocking()
