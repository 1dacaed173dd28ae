"""What a forked child closes: the TCP sockets of its parent, which would otherwise outlive the
parent's servers and connections.

A child of `os.fork` has a copy of each descriptor. A copy of a listening socket keeps the port in
use after the parent has stopped its server, and a copy of a connection hides the parent's death
from its peers. ZeroMQ's thread does not run in the child, so the child only closes the descriptors:
ZeroMQ's objects stay as they are, and pyzmq does not touch the objects of another process.

ZeroMQ may close a descriptor at any time, and the system reuses the number at once. So a descriptor
counts as ours by the address of its socket: the port of one of our servers, or the address that a
connection of ours got when it was made.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
from collections import Counter
from typing import Any, Final
from weakref import WeakSet

reserved: Final[WeakSet[sockets.socket]] = WeakSet()
"""Sockets that listen for a server that does not serve them yet."""
ports: Final[Counter[int]] = Counter()
"""The number of servers of this process at each port."""
connections: Final[dict[int, Any]] = {}
"""The local address of each connection that this process has made, by the descriptor."""


def _in_child() -> None:
    for listening in reserved:
        listening.close()
    default_s = sockets.getdefaulttimeout()
    # another value would change the mode of sockets that the parent uses
    sockets.setdefaulttimeout(None)
    for fd in map(int, os.listdir("/proc/self/fd")) if ports or connections else ():
        with contextlib.suppress(OSError):
            if _is_ours(fd):
                os.close(fd)
    sockets.setdefaulttimeout(default_s)
    ports.clear()
    connections.clear()


def _is_ours(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with sockets.socket(fileno=os.dup(fd)) as own:
        name = own.getsockname()
        inet = own.family in (sockets.AF_INET, sockets.AF_INET6)
        return inet and (ports[name[1]] > 0 or connections.get(fd) == name)


os.register_at_fork(after_in_child=_in_child)
