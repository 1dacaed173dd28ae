"""Fixtures of this folder: servers and clients over real sockets (wired.py), child processes, secrets of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.net.wired import Dialled, Served
from zmqdist.net.security import ClientSecurity, ServerSecurity, client_security, server_security

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of these tests, not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ZMQDIST_KEYS_DIR", raising=False)
    monkeypatch.delenv("ZMQDIST_TOKEN_FILE", raising=False)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(security: ServerSecurity | None = None, address: str = "127.0.0.1:0", **options: Any) -> Served:
        made.append(Served(security or server_security("127.0.0.1"), address, **options))
        return made[-1]

    yield make
    for served in made:
        served.loop.stop()
        assert served.loop.faults == 0


@pytest.fixture
def dial() -> Iterator[Callable[..., Dialled]]:
    made: list[Dialled] = []

    def make(address: str, security: ClientSecurity | None = None, **options: Any) -> Dialled:
        made.append(Dialled(address, security or client_security(address, "client"), **options))
        return made[-1]

    yield make
    for dialled in made:
        dialled.loop.stop()
        assert dialled.loop.faults == 0


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a Python program in another process, which is killed at the end."""
    made: list[subprocess.Popen[str]] = []

    def run(program: str, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *args]
        made.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.communicate()
