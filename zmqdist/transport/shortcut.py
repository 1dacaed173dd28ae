"""Messages between the two ends of a connection that are in one process, such as a program and the
dispatcher of its `local_cluster`, or in processes of one user on one host. They do not pass through
ZeroMQ, which takes three hand-overs between threads for each message.

The connection itself is made, authenticated and watched as any other. After the hellos, the
connecting side looks for the server among those of this process and this host, by the port that it
has connected to and by the incarnation in the server's hello; so there is no shortcut past a proxy.
A server sends a peer nothing but its hello before the peer's first message, so no message overtakes
another.

Within a process both sides then pass encoded messages to the other's loop (`Loop.call_now`: this
thread takes the other loop's turn if that loop sleeps).

Between processes they use a Unix socket (`LoopPipe`), whose abstract name has the server's port and
incarnation. The kernel tells both sides that the other is of the same user. The connecting side
sends its hello again and the local address of its connection, by which the server finds the
connection; until the server has replied, the connecting side waits. If the server closes the socket
instead, ZeroMQ is used. Servers with keys (CURVE) have no such socket, and only Linux has one.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

from zmqdist import platforms
from zmqdist.errors import FailedPreconditionError
from zmqdist.limits import FRAMES_MAX, PAYLOAD_BYTES_MAX
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import BACKLOG
from zmqdist.transport.pipe import Parts
from zmqdist.wire.hello import Hello

if platforms.IS_LINUX:
    import resource

Deliver: TypeAlias = "Callable[[bytes, list[memoryview] | None], object]"


class ShortcutServer(Protocol):
    """A Router, as this module needs it."""

    def shortcut_from(self, hello: Hello, address: Any, back: Shortcut) -> Shortcut: ...


STRANGER_BYTES_MAX: Final = 64 * 1024
"""Bytes of a message by a pipe whose connection is not known yet."""

_PEER: Final = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""

_servers: Final[WeakValueDictionary[tuple[int, int, int], ShortcutServer]] = WeakValueDictionary()
"""The servers of this process, by pid (a forked child has none), port and incarnation."""


def register(server: ShortcutServer, port: int, incarnation: int) -> None:
    """Let connections of this process to a server's port use shortcuts."""
    _servers[os.getpid(), port, incarnation] = server


def find(port: int, incarnation: int) -> ShortcutServer | None:
    """Return the server of this process that listens at the port; None if it is elsewhere."""
    return _servers.get((os.getpid(), port, incarnation))


def listen_on_host(port: int, incarnation: int) -> socket.socket | None:
    """Return a socket to which other processes of this host connect for a shortcut to a server;
    None if there can be none."""
    return _open(socket.socket.bind, port, incarnation)


def connect_on_host(port: int, incarnation: int) -> socket.socket | None:
    """Return a socket to the server of this user and host that listens at the port; None if there is
    none."""
    end = _open(socket.socket.connect, port, incarnation)
    return end if end is not None and is_own_user(end) else None


def _open(join: Callable[..., None], port: int, incarnation: int) -> socket.socket | None:
    if not platforms.IS_LINUX:
        return None
    end = None
    try:
        end = socket.socket(socket.AF_UNIX)
        end.setblocking(False)
        join(end, f"\0zmqdist-1/{port}/{incarnation}")
        if join is socket.socket.bind:
            end.listen(BACKLOG)
    except OSError:
        if end is not None:
            end.close()
        return None
    return end


def leaves_room(end: socket.socket) -> bool:
    """Whether this process has used less than half of its descriptors. If not, close this end."""
    if end.fileno() < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        return True
    end.close()
    return False


def is_own_user(end: socket.socket) -> bool:
    """Whether the process at the other end is of this user. If not, close this end."""
    _, uid, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid == os.geteuid():
        return True
    end.close()
    return False


def received(parts: Parts) -> list[memoryview] | None:
    """Return the frames of a message that has come by a pipe; None if they are too large."""
    if not isinstance(parts, list) or len(parts) > FRAMES_MAX:
        return None
    frames = [memoryview(part) for part in parts]
    return frames if sum(map(len, frames)) <= PAYLOAD_BYTES_MAX else None


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
