"""Terminals that are closed after their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.running import Terminal

Open = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[Open]:
    """terminal("worker", "--slots", "2"): as `Terminal`."""
    opened: list[Terminal] = []

    def open_one(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield open_one
    for each in reversed(opened):
        each.kill()


@pytest.fixture
def dispatcher(terminal: Open) -> tuple[Terminal, str]:
    """A dispatcher on a free port, and its "host:port"."""
    opened = terminal("dispatcher", "--port", "0")
    return opened, opened.saw("dispatcher at zmq://").partition("zmq://")[2]
