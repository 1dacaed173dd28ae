"""What Linux offers and macOS or Windows does not: what takes its place there, and the error of what
needs Linux.

Clients (RPC, variables, coordinators, Executors) and RPC servers run on all three
(docs/platforms.md). On Linux the names here are the functions of Python themselves, so that they
cost nothing more.

A thread that polls is woken by a write to a *wake descriptor*: an eventfd, elsewhere one end of a
socket pair, because Windows polls sockets only.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zmqdist.errors import UnimplementedError

if TYPE_CHECKING:  # Linux does not use it here, and it would make each command start later
    from socket import socket

IS_LINUX: Final = sys.platform == "linux"
IS_WINDOWS: Final = sys.platform == "win32"

register_at_fork: Final[Callable[..., None]] = getattr(
    os, "register_at_fork", lambda **_hooks: None
)


def open_flags(*names: str) -> int:
    """Return those of these flags of `os.open` that the system has, and Windows' O_BINARY."""
    return sum(getattr(os, name, 0) for name in (*names, "O_BINARY"))


def check_linux(subject: str, instead: str) -> None:
    """Raise UnimplementedError on another system than Linux.

    Args:
      subject, instead: what needs Linux, and what to do in place of it.
    """
    if not IS_LINUX:
        raise UnimplementedError(f"{subject} needs Linux, and this is {sys.platform}: {instead}")


def refusing(name: str) -> Callable[..., Any]:
    """Return what a name of zmqdist is on another system than Linux: a function that raises
    UnimplementedError."""

    def refuse(*_: object, **__: object) -> None:
        check_linux(name, "use a cluster on Linux hosts by its address")

    return refuse


class SelectorPoll:
    """The methods of `select.epoll` on a system without it; with `per_second` 1000, those of
    `select.poll`."""

    def __init__(self, per_second: int = 1) -> None:
        from selectors import DefaultSelector

        self._selector = DefaultSelector()
        self._per_second = per_second
        self.register, self.modify = self._selector.register, self._selector.modify
        self.unregister, self.close = self._selector.unregister, self._selector.close

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        ready = self._selector.select(timeout / self._per_second)
        return [(key.fd, events) for key, events in ready]


_pairs: Final[dict[int, tuple[socket, socket]]] = {}
"""The ends to read and to write, by the number of the wake descriptor."""


def _open_pair() -> int:
    from socket import socketpair

    reader, writer = socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    _pairs[reader.fileno()] = reader, writer
    return reader.fileno()


def _write_pair(fd: int, _count: int) -> None:
    with contextlib.suppress(BlockingIOError):  # it is full, so that the poll returns anyway
        _pairs[fd][1].send(b"\0")


def _read_pair(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while len(_pairs[fd][0].recv(4096)) == 4096:
            pass


def _close_pair(fd: int) -> None:
    for end in _pairs.pop(fd):
        end.close()


new_epoll: Callable[[], select.epoll]
new_poll: Callable[[], select.poll] = getattr(
    select,
    "poll",
    partial(SelectorPoll, 1000),  # type: ignore[arg-type]
)
open_wake_fd: Callable[[], int]
write_wake_fd: Callable[[int, int], object]
read_wake_fd: Callable[[int], object]
close_wake_fd: Callable[[int], object]
if IS_LINUX:
    new_epoll = select.epoll
    open_wake_fd = partial(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    write_wake_fd, read_wake_fd, close_wake_fd = os.eventfd_write, os.eventfd_read, os.close
    POLL_READ, POLL_WRITE = select.EPOLLIN, select.EPOLLOUT
    POLL_BROKEN = select.EPOLLHUP | select.EPOLLERR
else:
    new_epoll = SelectorPoll  # type: ignore[assignment]
    open_wake_fd, write_wake_fd = _open_pair, _write_pair
    read_wake_fd, close_wake_fd = _read_pair, _close_pair
    POLL_READ, POLL_WRITE, POLL_BROKEN = 1, 2, 0  # the numbers of `selectors`
