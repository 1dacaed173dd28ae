"""Addresses of this machine: of an interface, towards a peer, and a free port of the range that a firewall lets through.

A host that a server is to bind is written as an address, as a name, or as an interface (`eth1`), whose address is looked up when the
server starts. An interface goes before a host of the same name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zmqdist.errors import InvalidArgumentError, UnavailableError, UnknownError
from zmqdist.port_range import VARIABLE, parse_ports
from zmqdist.random import chance
from zmqdist.transport.address import split

_SIOCGIFADDR: Final = 0x8915
_GLOBAL_SCOPE: Final = "00"


def own_host(peer: str) -> str:
    """Return the address of this machine from which "host:port" is reached. Nothing is sent. Raises UnavailableError: no such host."""
    host, port = split(peer)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        text = f"the dispatcher's address {peer}: the name {host!r} cannot be looked up ({error.strerror})"
        raise UnavailableError(text) from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise UnavailableError(f"no network of this machine leads to {peer} ({error.strerror})") from None
        return str(probe.getsockname()[0])


def bindable(host: str) -> str:
    """Return the address of the interface called `host`, IPv4 first; any other host as it is. Raises UnknownError: it has no address."""
    if host not in (name for _, name in socket.if_nameindex()):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", host.encode()[:15]))
        except OSError:  # it has no IPv4 address
            return _ipv6_of(host)
    return socket.inet_ntoa(reply[20:24])


def _ipv6_of(interface: str) -> str:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in (_GLOBAL_SCOPE, "10"):  # 10: of the loopback
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise UnknownError(f"the interface {interface} has no address: set it up (ip address add), or name another one")


def free_ports() -> Iterator[int]:
    """Yield the ports to try where any free one would do: 0, or all of ZMQDIST_PORTS in turn. Raises InvalidArgumentError: no range."""
    if not (text := os.environ.get(VARIABLE)):
        yield 0
        return
    try:
        ports = parse_ports(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{VARIABLE}: {error}") from None
    # A random one first, so that a server which is started in place of a dead one is rarely taken for it.
    first = chance.randrange(len(ports))
    yield from (*ports[first:], *ports[:first])


def all_taken(host: str) -> UnknownError:
    """Return the error for a range of ports without a free one."""
    ports = os.environ.get(VARIABLE)
    return UnknownError(
        f"could not bind {host}: each port of {VARIABLE}={ports} is in use there; end what has them, or give a wider range"
    )


def bind_free(made: socket.socket, host: str) -> None:
    """Bind a TCP socket to a free port of `host`. Raises OSError; UnknownError: the range of ports is full."""
    for port in free_ports():
        try:
            made.bind((host, port))
            return
        except OSError as error:
            if port == 0 or error.errno != errno.EADDRINUSE:
                raise
    raise all_taken(host)
