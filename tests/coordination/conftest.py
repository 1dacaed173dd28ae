"""Fixtures of this folder: keepers and clients that are ended, secrets of their own, child processes that are killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordination.kept import ROOT, Keeper
from zmqdist.coordination.client import CoordinationClient


@pytest.fixture(autouse=True)
def _own_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of these tests, not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ZMQDIST_KEYS_DIR", raising=False)
    monkeypatch.delenv("ZMQDIST_TOKEN_FILE", raising=False)


@pytest.fixture
def keep() -> Iterator[Callable[..., Keeper]]:
    """keep(tasks, **config): a keeper here; at the end nobody waits there, and nothing has failed in its loop."""
    made: list[Keeper] = []

    def make(*args: Any, **kwargs: Any) -> Keeper:
        made.append(Keeper(*args, **kwargs))
        return made[-1]

    yield make
    for keeper in made:
        keeper.stop()
        assert keeper.loop.faults == 0
        assert keeper.waiting == 0


@pytest.fixture
def join(keep: Callable[..., Keeper]) -> Iterator[Callable[..., CoordinationClient]]:
    """join(keeper or address, "worker:1", ...): a client. Clients are closed before the keepers stop."""
    made: list[CoordinationClient] = []

    def make(where: Keeper | str, *args: Any, **kwargs: Any) -> CoordinationClient:
        address = where if isinstance(where, str) else where.address
        made.append(CoordinationClient(address, *args, **kwargs))
        return made[-1]

    yield make
    for client in made:
        client.close()


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
