"""TCP sockets outside of ZeroMQ: those that listen before a router serves them, the end of a connection, the numbers of host names."""

from __future__ import annotations

import contextlib
import errno
import os
import socket as sockets
from typing import Final

import zmq

from zmqdist.errors import UnknownError
from zmqdist.transport.address import is_ipv6, join

BACKLOG: Final = 1024
"""Connections that the kernel keeps for us until they are accepted: a cluster starts all at once."""


def listen(host: str) -> sockets.socket:
    """A TCP socket at a free port, for `Router.bind_fd` here or in a child. Connections wait in it until somebody serves them.

    Raises:
      UnknownError: not an address of this machine.
    """
    number = look_up(host)
    made = sockets.socket(sockets.AF_INET6 if is_ipv6(number) else sockets.AF_INET, sockets.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.bind((number, 0))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise UnknownError(f"could not bind {join(host, 0)}: {error.strerror}") from None
    return made


def look_up(host: str) -> str:
    """The number of a host name, IPv4 first; what cannot be looked up is left to ZeroMQ, which knows interface names."""
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError:
        return host
    numbers = sorted((str(entry[4][0]) for entry in found), key=is_ipv6)
    return numbers[0]


def shut_down(fd: int) -> None:
    """End the connection of a descriptor that is ZeroMQ's, which notices it as if the other side had ended it."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as own:
        own.shutdown(sockets.SHUT_RDWR)


def why_not_bound(error: zmq.ZMQError) -> str:
    """Say why an address could not be bound, and what to do."""
    if error.errno == zmq.EADDRINUSE:
        return "the port is in use; stop what listens there, or take port 0 for a free one"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine does not have that address"
    return str(error.strerror).lower()
