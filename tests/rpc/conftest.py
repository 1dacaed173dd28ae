"""Fixtures of this folder: secrets of their own, servers here and in child processes, clients that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zmqdist.rpc import Client, ZmqClient, ZmqServer

LATE_MS = 20_000
"""Longer than any test waits for something: what ends in time ended for another reason."""


@pytest.fixture(autouse=True)
def _own_secrets(own_secrets: None) -> None:
    """All tests of this folder."""


@pytest.fixture
def serve() -> Iterator[Callable[..., ZmqServer]]:
    """serve(m=fn, ...): a started server; inline={"m", ...} names the inline ones, a tuple is (fn, signature)."""
    made: list[ZmqServer] = []

    def make(address: str = "127.0.0.1:0", inline: frozenset[str] = frozenset(), **methods: Any) -> ZmqServer:
        server = ZmqServer(address)
        for name, method in methods.items():
            fn, *signatures = method if isinstance(method, tuple) else (method,)
            server.register(name, fn, *signatures, inline=name in inline)
        server.start()
        made.append(server)
        return server

    yield make
    for server in made:
        loop = server._loop
        server.stop(0.5)
        assert loop is None or loop.faults == 0


@pytest.fixture
def connect() -> Iterator[Callable[..., ZmqClient]]:
    """connect(address, ...): a client; its channel has never stalled and holds nothing at the end."""
    made: list[ZmqClient] = []

    def make(address: str, *, listing: bool = True, timeout_in_ms: int = LATE_MS, name: str = "") -> ZmqClient:
        made.append(
            Client.create("zmq", address, name, timeout_in_ms)
            if listing
            else ZmqClient(address, name, False, timeout_in_ms)
        )
        return made[-1]

    yield make
    for client in made:
        client.close()
        assert client._channel.stalls == 0
        assert client._channel.pending == 0
        assert not client._channel._followers
