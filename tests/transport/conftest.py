"""Fixtures of this folder: servers and clients over real sockets (wired.py), child processes,
private secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transport.helpers import Dialled, Served
from zmqdist.transport.security import (
    ClientSecurity,
    ServerSecurity,
    client_security,
    server_security,
)


@pytest.fixture(autouse=True)
def _own_secrets(own_secrets: None) -> None:
    """Applies to all tests of this folder."""


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(
        security: ServerSecurity | None = None, address: str = "127.0.0.1:0", **options: Any
    ) -> Served:
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
