"""Fixtures of this folder: servers and sessions that are stopped and closed at the end, secrets of their own, child processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zmqdist.server.server import Server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of these tests, not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("ZMQDIST_KEYS_DIR", "ZMQDIST_TOKEN_FILE", "ZMQDIST_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def made() -> Iterator[Callable[..., Server]]:
    """made(cluster, ...): a Server, which is stopped at the end; nothing in its loop has failed."""
    servers: list[Server] = []

    def make(*args: Any, **kwargs: Any) -> Server:
        servers.append(Server(*args, **kwargs))
        return servers[-1]

    yield make
    for server in servers:
        server.stop(0.5)
        assert server._node.loop.faults == 0


def free_addresses(count: int) -> list[str]:
    """Addresses on loopback that nobody had a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a Python program in another process, which is killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def run(program: str, *args: str) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *args],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()
