"""TCP outside of ZeroMQ: a socket that listens before a router serves it, the end of one
connection, and the address of a host name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket as sockets
import sys
from typing import Any, Final

import zmq

from zmqdist.addresses import is_ipv6, join_address
from zmqdist.errors import UnknownError
from zmqdist.limits import UNSENT_BYTES_MAX
from zmqdist.transport import forks
from zmqdist.transport.own_address import bind_free, bindable

BACKLOG: Final = 1024
"""Number of connections that the kernel holds until the server accepts them. All processes of a
cluster may connect at the same time."""

TCP_NOTSENT_LOWAT: Final = 25
"""The number of this option in Linux; Python has no name for it before 3.12."""

SIOCOUTQNSD: Final = 0x894B
"""The number of this request in Linux; Python has no name for it."""


def listen(host: str, any_port: bool = False) -> sockets.socket:
    """Return a TCP socket that listens at a free port, for `Router.bind_fd` in this process or in a
    child process.

    Until a process serves the socket, the kernel holds the connections to it.

    Args:
      any_port: whether the port may be outside of ZMQDIST_PORTS.

    Raises:
      UnknownError: `host` is not an address of this host, or each port of ZMQDIST_PORTS is in use.
    """
    number = look_up(bindable(host))
    made = sockets.socket(
        sockets.AF_INET6 if is_ipv6(number) else sockets.AF_INET, sockets.SOCK_STREAM
    )
    try:
        made.setblocking(False)
        if any_port:
            made.bind((number, 0))
        else:
            bind_free(made, number)
        made.listen(BACKLOG)
        forks.reserved.add(made)
    except BaseException as error:
        made.close()
        if isinstance(error, OSError):
            raise UnknownError(
                f"could not bind {join_address(host, 0)}: {error.strerror}"
            ) from None
        raise
    return made


def look_up(host: str) -> str:
    """Return the IP address of a host name, an IPv4 address if the name has one.

    A name that the system cannot look up is returned as it is, because it may be the name of an
    interface, which ZeroMQ knows.
    """
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError:
        return host
    numbers = sorted((str(entry[4][0]) for entry in found), key=is_ipv6)
    return numbers[0]


def shut_down(fd: int) -> None:
    """Shut down the connection of a descriptor that ZeroMQ owns. ZeroMQ then acts as if the other
    side had ended the connection."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as own:
        own.shutdown(sockets.SHUT_RDWR)


def limit_unsent(fd: int) -> Any:
    """Keep the bytes that wait in the kernel below UNSENT_BYTES_MAX, so that heartbeats do not wait
    behind megabytes on a slow link.

    Return the local address of this connection; None if it has just ended.
    """
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as own:
        own.setsockopt(sockets.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        return own.getsockname()
    return None


def unsent_bytes(fd: int) -> int:
    """Return the bytes of a connection that wait in the kernel; 0 if it has just ended. What the
    kernel has sent it delivers even when this process has ended.
    """
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(fd, SIOCOUTQNSD, bytes(4)), sys.byteorder)
    return 0


def bind_problem(error: zmq.ZMQError) -> str:
    """Return the part of an error text that says why ZeroMQ could not bind an address, and what the
    user can do."""
    if error.errno == zmq.EADDRINUSE:
        return (
            "the port is in use; stop the process that listens there, or take port 0 for a free one"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this host does not have that address"
    return str(error.strerror).lower()
