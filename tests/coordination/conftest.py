"""Fixtures of this folder: keepers and clients that are ended, secrets of their own, child
processes that are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.coordination.helpers import Keeper
from zmqdist.coordination.client import CoordinationClient


@pytest.fixture(autouse=True)
def _own_secrets(own_secrets: None) -> None:
    """All tests of this folder."""


@pytest.fixture
def keep() -> Iterator[Callable[..., Keeper]]:
    """keep(tasks, **config): a keeper here; at the end nobody waits there, and nothing has failed
    in its loop."""
    made: list[Keeper] = []

    def make(*args: Any, **kwargs: Any) -> Keeper:
        made.append(Keeper(*args, **kwargs))
        return made[-1]

    yield make
    for keeper in made:
        keeper.stop()
        assert keeper.loop.faults == 0
        assert keeper.left == 0


@pytest.fixture
def join(keep: Callable[..., Keeper]) -> Iterator[Callable[..., CoordinationClient]]:
    """join(keeper or address, "worker:1", ...): a client. Clients are closed before the keepers
    stop."""
    made: list[CoordinationClient] = []

    def make(where: Keeper | str, *args: Any, **kwargs: Any) -> CoordinationClient:
        address = where if isinstance(where, str) else where.address
        made.append(CoordinationClient(address, *args, **kwargs))
        return made[-1]

    yield make
    for client in made:
        client.close()
