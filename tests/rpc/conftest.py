"""Fixtures of this folder: secrets of their own, servers here and in child processes, clients that are closed at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zmqdist.rpc import Client, ZmqClient, ZmqServer

ROOT = Path(__file__).resolve().parents[2]

LATE_MS = 20_000
"""Longer than any test waits for something: what ends in time ended for another reason."""


@pytest.fixture(autouse=True)
def _own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of these tests, not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ZMQDIST_KEYS_DIR", raising=False)
    monkeypatch.delenv("ZMQDIST_TOKEN_FILE", raising=False)


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


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a Python program in another process, which is killed at the end."""
    made: list[subprocess.Popen[str]] = []

    def run(program: str, *args: str) -> subprocess.Popen[str]:
        made.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *args],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.communicate()
