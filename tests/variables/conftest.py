"""Fixtures of this folder: a ps in this process, its client, and variables there; secrets of their
own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from zmqdist.tasks.server import Server
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref, client_of

SESSION = 1
PROGRAM = 7

Make = Callable[..., Ref]


@pytest.fixture(autouse=True)
def _own_secrets(own_secrets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of this folder; what others of this process have used at a port that is given again
    here is not theirs."""
    monkeypatch.setattr(c, "_credentials", {})
    monkeypatch.setattr(c, "_clients", {})


@pytest.fixture
def ps(caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    """A server of job "ps"; nothing in its loop has failed."""
    with Server({"ps": ["127.0.0.1:0"]}, "ps", 0) as server:
        yield server
    assert "the loop goes on" not in caplog.text  # as a loop logs a callback that has raised


@pytest.fixture
def client(ps: Server) -> Iterator[PsClient]:
    """This process's client of the ps, with a session open."""
    client = client_of(ps.address)
    client.open(PROGRAM, SESSION)
    yield client
    client.close()


@pytest.fixture
def make(ps: Server, client: PsClient) -> Make:
    """make(value, dtype="f4", name="w", session=SESSION): a variable with this value."""
    numbers = itertools.count()

    def make(value: Any, dtype: Any = "f4", name: str = "w", session: int = SESSION) -> Ref:
        array = np.asarray(value, dtype)
        ref = Ref(name, array.shape, array.dtype, ps.task, ps.address, session, next(numbers))
        client.create(ref, array).get_value()
        return ref

    return make
