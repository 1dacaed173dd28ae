"""Messages between the two ends of a connection that are in one process, such as a program and the
dispatcher of its `local_cluster`. They do not pass through ZeroMQ, which takes three hand-overs
between threads for each message.

The connection itself is made, authenticated and watched as any other. After the hellos, the
connecting side looks for the server among those of this process, by the port that it has connected
to and by the incarnation in the server's hello; so there is no shortcut past a proxy.
From then on both sides pass encoded messages to the other's loop (`Loop.call_now`: this thread
takes the other loop's turn if that loop sleeps). A server sends a peer nothing but its hello before
the peer's first message, so no message overtakes another.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

from zmqdist.errors import FailedPreconditionError
from zmqdist.transport.loop import Loop
from zmqdist.wire.hello import Hello

Deliver: TypeAlias = "Callable[[bytes, list[memoryview]], object]"


class ShortcutServer(Protocol):
    """A Router, as this module needs it."""

    def shortcut_from(self, hello: Hello, address: Any, back: Shortcut) -> Shortcut: ...


_servers: Final[WeakValueDictionary[tuple[int, int, int], ShortcutServer]] = WeakValueDictionary()
"""The servers of this process, by pid (a forked child has none), port and incarnation."""


def register(server: ShortcutServer, port: int, incarnation: int) -> None:
    """Let connections of this process to a server's port use shortcuts."""
    _servers[os.getpid(), port, incarnation] = server


def find(port: int, incarnation: int) -> ShortcutServer | None:
    """Return the server of this process that listens at the port; None if it is elsewhere."""
    return _servers.get((os.getpid(), port, incarnation))


class Shortcut:
    """One direction of a shortcut.

    Args:
      loop: the receiver's loop, which calls `deliver` with each message. The receiver may keep the
        frames and write to them.
    """

    __slots__ = ("_deliver", "_loop", "_messages")

    def __init__(self, loop: Loop, deliver: Deliver) -> None:
        self._loop = loop
        self._deliver: Deliver | None = deliver
        self._messages: deque[tuple[bytes, list[memoryview]]] = deque()

    def send(self, header: bytes, frames: Sequence[Any]) -> bool:
        """Pass a message to the receiver. Return False if its loop has ended."""
        self._messages.append((header, [memoryview(bytearray(frame)) for frame in frames]))
        try:
            self._loop.call_now(self.drain)
        except FailedPreconditionError:
            return False
        return True

    def drain(self) -> None:
        """Deliver the messages that have been passed. Call it in the receiver's loop."""
        for _ in range(len(self._messages)):
            message = self._messages.popleft()
            if self._deliver is not None:
                self._deliver(*message)

    def close(self) -> None:
        """Drop all further messages. Call it in the receiver's loop."""
        self._deliver = None
