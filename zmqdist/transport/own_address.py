"""Addresses of this host: the address of an interface, the address from which packets to a peer
leave, and the ports that a firewall permits.

A user names the host that a server binds by an address, by a name, or by an interface (`eth1`). The
address of an interface is looked up when the server starts. If an interface and a host have the
same name, zmqdist uses the interface.

Also here: a socket that listens before a router serves it, the end of one TCP connection, the
address of a host name, and what a forked child closes: the TCP sockets of its parent, which would
otherwise outlive the parent's servers and connections.

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
import errno
import os
import socket
import stat
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import zmq

from zmqdist.addresses import (
    VARIABLE,
    is_ipv6,
    is_name,
    is_wildcard,
    join_address,
    one_spelling,
    parse_ports,
)
from zmqdist.errors import InvalidArgumentError, UnavailableError, UnknownError
from zmqdist.limits import UNSENT_BYTES_MAX
from zmqdist.platforms import IS_LINUX, IS_WINDOWS, check_linux, register_at_fork
from zmqdist.random import chance
from zmqdist.transport.endpoint import split

_SIOCGIFADDR: Final = 0x8915
_GLOBAL_SCOPE: Final = "00"

reserved_sockets: Final[WeakSet[socket.socket]] = WeakSet()
"""Sockets that listen for a server that does not serve them yet."""
our_ports: Final[Counter[int]] = Counter()
"""The number of servers of this process at each port."""
our_connections: Final[dict[int, Any]] = {}
"""The local address of each connection that this process has made, by the descriptor."""


def own_host(peer: str) -> str:
    """Return the address of this host from which packets to "host:port" leave. Sends nothing.

    Raises:
      UnavailableError: the name cannot be looked up, or no network leads to the address.
    """
    host, port = split(peer)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise UnavailableError(
            f"the dispatcher's address {peer}: the name {host!r} cannot be looked up "
            f"({error.strerror})"
        ) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise UnavailableError(
                f"no network of this host leads to {peer} ({error.strerror})"
            ) from None
        return str(probe.getsockname()[0])


def bindable(host: str) -> str:
    """Return the address of the interface called `host`, an IPv4 address if it has one. Return the
    one spelling of `host` if it is an address or the name of a host.

    Raises:
      InvalidArgumentError: `host` looks like an IP address and is not one.
      UnknownError: the interface has no address, or `host` is neither an interface nor a name that
        can be looked up.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    try:
        host = one_spelling(host)
    except ValueError as error:
        raise InvalidArgumentError(f"no host to bind: {error}") from None
    if host not in interfaces:
        if is_name(host) and not is_wildcard(host):
            try:
                socket.getaddrinfo(host, None)
            except OSError:
                raise UnknownError(
                    f"this host has no interface {host}, and no host of that name is known: its "
                    f"interfaces are {', '.join(interfaces)}"
                ) from None
        return host
    check_linux(
        f"the address of the interface {host}", "name the address that the server is to bind"
    )
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", host.encode()[:15]))
        except OSError:  # the interface has no IPv4 address
            return _ipv6_of(host)
    return socket.inet_ntoa(reply[20:24])


def _ipv6_of(interface: str) -> str:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in (_GLOBAL_SCOPE, "10"):
            # 10 is the scope of the loopback address
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise UnknownError(
        f"the interface {interface} has no address: set it up (ip address add), or name another one"
    )


def ports_are_limited() -> bool:
    """Return whether ZMQDIST_PORTS limits the ports of servers."""
    return bool(os.environ.get(VARIABLE))


def free_ports() -> Iterator[int]:
    """Yield the ports to try for a server that may take any port: the ports of ZMQDIST_PORTS,
    beginning at a random one, or 0 if the variable is not set.

    Raises:
      InvalidArgumentError: ZMQDIST_PORTS is not a range of ports.
    """
    if not ports_are_limited():
        yield 0
        return
    try:
        ports = parse_ports(os.environ[VARIABLE])
    except ValueError as error:
        raise InvalidArgumentError(f"{VARIABLE}: {error}") from None
    # The first port is random, so that the clients of a dead server rarely find a new server on its
    # port.
    first = chance.randrange(len(ports))
    yield from (*ports[first:], *ports[:first])


def all_taken(host: str) -> UnknownError:
    """Return the error for a host on which each port of ZMQDIST_PORTS is in use."""
    return UnknownError(
        f"could not bind {host}: each port of {VARIABLE}={os.environ.get(VARIABLE)} is in use there; end processes "
        f"that use them, or give a wider range"
    )


def bind_free(listener: socket.socket, host: str) -> None:
    """Bind a TCP socket to a free port of `host`.

    Raises:
      UnknownError: each port of ZMQDIST_PORTS is in use.
      OSError: the kernel refuses for another reason.
    """
    for port in free_ports():
        try:
            listener.bind((host, port))
            return
        except OSError as error:
            if port == 0 or error.errno != errno.EADDRINUSE:
                raise
    raise all_taken(host)


BACKLOG: Final = 1024
"""Number of connections that the kernel holds until the server accepts them. All processes of a
cluster may connect at the same time."""

TCP_NOTSENT_LOWAT: Final = 25
"""The number of this option in Linux; Python has no name for it before 3.12."""

SIOCOUTQNSD: Final = 0x894B
"""The number of this request in Linux; Python has no name for it."""


def listen(host: str, any_port: bool = False) -> socket.socket:
    """Return a TCP socket that listens at a free port, for `Router.bind_fd` in this process or in a
    child process.

    Until a process serves the socket, the kernel holds the connections to it.

    Args:
      any_port: whether the port may be outside of ZMQDIST_PORTS.

    Raises:
      UnknownError: `host` is not an address of this host, or each port of ZMQDIST_PORTS is in use.
    """
    number = look_up(bindable(host))
    listener = socket.socket(
        socket.AF_INET6 if is_ipv6(number) else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listener.setblocking(False)
        if any_port:
            listener.bind((number, 0))
        else:
            bind_free(listener, number)
        listener.listen(BACKLOG)
        reserved_sockets.add(listener)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise UnknownError(
                f"could not bind {join_address(host, 0)}: {error.strerror}"
            ) from None
        raise
    return listener


def look_up(host: str) -> str:
    """Return the IP address of a host name, an IPv4 address if the name has one.

    A name that the system cannot look up is returned as it is, because it may be the name of an
    interface, which ZeroMQ knows.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return host
    return min((str(entry[4][0]) for entry in entries), key=is_ipv6)


@contextlib.contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Give a socket of a descriptor that ZeroMQ owns, and leave the descriptor open."""
    own = socket.socket(fileno=fd if IS_WINDOWS else os.dup(fd))
    try:
        yield own
    finally:
        own.detach() if IS_WINDOWS else own.close()


def shut_down(fd: int) -> None:
    """Shut down the connection of a descriptor that ZeroMQ owns. ZeroMQ then acts as if the other
    side had ended the connection."""
    with contextlib.suppress(OSError), _socket_of(fd) as own:
        own.shutdown(socket.SHUT_RDWR)


def limit_unsent(fd: int) -> Any:
    """Keep the bytes that wait in the kernel below UNSENT_BYTES_MAX, so that heartbeats do not wait
    behind megabytes on a slow link.

    Return the local address of this connection; None if it has just ended.
    """
    with contextlib.suppress(OSError), _socket_of(fd) as own:
        if IS_LINUX:
            own.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        return own.getsockname()
    return None


def remote_address(fd: int) -> Any:
    """Return the remote address of a connection; None if it has just ended."""
    with contextlib.suppress(OSError), _socket_of(fd) as own:
        return own.getpeername()
    return None


def unsent_bytes(fd: int) -> int:
    """Return the bytes of a connection that wait in the kernel; 0 if it has just ended. What the
    kernel has sent it delivers even when this process has ended. Only Linux tells: elsewhere 0.
    """
    if not IS_LINUX:
        return 0
    import fcntl

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


def _in_child() -> None:
    for listener in reserved_sockets:
        listener.close()
    default_s = socket.getdefaulttimeout()
    # another value would change the mode of sockets that the parent uses
    socket.setdefaulttimeout(None)
    folder = "/proc/self/fd" if IS_LINUX else "/dev/fd"
    for fd in map(int, os.listdir(folder)) if our_ports or our_connections else ():
        with contextlib.suppress(OSError):
            if _is_ours(fd):
                os.close(fd)
    socket.setdefaulttimeout(default_s)
    our_ports.clear()
    our_connections.clear()


def _is_ours(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with _socket_of(fd) as own:
        name = own.getsockname()
        inet = own.family in (socket.AF_INET, socket.AF_INET6)
        return inet and (our_ports[name[1]] > 0 or our_connections.get(fd) == name)


register_at_fork(after_in_child=_in_child)
