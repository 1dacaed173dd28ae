"""Terminals that are closed after their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.helpers import Terminal

Open = Callable[..., Terminal]


def start_worker(terminal: Open, address: str, *options: str) -> Terminal:
    opened = terminal("worker", "--dispatcher", address, *options)
    opened.saw(f" of {address}: ")
    return opened


@pytest.fixture
def terminal() -> Iterator[Open]:
    """terminal("worker", "--slots", "2"): as `Terminal`."""
    opened: list[Terminal] = []

    def open_one(*arguments: str, **options: Any) -> Terminal:
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield open_one
    for item in reversed(opened):
        item.kill()


@pytest.fixture(scope="module")
def dispatcher_here() -> Iterator[str]:
    """The "host:port" of a dispatcher in a thread of this process, for commands that only ask
    it.
    """
    with zd.DispatchServer() as server:
        yield server.address


@pytest.fixture
def dispatcher(terminal: Open) -> tuple[Terminal, str]:
    """A dispatcher on a free port, and its "host:port"."""
    opened = terminal("dispatcher", "--port", "0")
    return opened, opened.saw("dispatcher at zmq://").partition("zmq://")[2]
