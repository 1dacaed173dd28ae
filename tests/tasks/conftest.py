"""Fixtures of this folder: servers and sessions that are stopped and closed at the end, secrets of
their own, child processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zmqdist.tasks.server import Server


@pytest.fixture(autouse=True)
def _own_secrets(own_secrets: None) -> None:
    """All tests of this folder."""


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
        assert server.snapshot().faults == 0
