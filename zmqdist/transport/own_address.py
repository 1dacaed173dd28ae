"""Addresses of this host: the address of an interface, the address from which packets to a peer
leave, and the ports that a firewall permits.

A user names the host that a server binds by an address, by a name, or by an interface (`eth1`). The
address of an interface is looked up when the server starts. If an interface and a host have the
same name, zmqdist uses the interface.
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

from zmqdist.addresses import is_name, is_wildcard, one_spelling
from zmqdist.errors import InvalidArgumentError, UnavailableError, UnknownError
from zmqdist.port_range import VARIABLE, parse_ports
from zmqdist.random import chance
from zmqdist.transport.endpoint import split

_SIOCGIFADDR: Final = 0x8915
_GLOBAL_SCOPE: Final = "00"


def own_host(peer: str) -> str:
    """Return the address of this host from which packets to "host:port" leave. Sends nothing.

    Raises:
      UnavailableError: the name cannot be looked up, or no network leads to the address.
    """
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
    ports = os.environ.get(VARIABLE)
    return UnknownError(
        f"could not bind {host}: each port of {VARIABLE}={ports} is in use there; end processes "
        f"that use them, or give a wider range"
    )


def bind_free(made: socket.socket, host: str) -> None:
    """Bind a TCP socket to a free port of `host`.

    Raises:
      UnknownError: each port of ZMQDIST_PORTS is in use.
      OSError: the kernel refuses for another reason.
    """
    for port in free_ports():
        try:
            made.bind((host, port))
            return
        except OSError as error:
            if port == 0 or error.errno != errno.EADDRINUSE:
                raise
    raise all_taken(host)
