"""Addresses in two forms: `host:port`, as users write them, and `tcp://host:port`, as ZeroMQ takes them.

IPv6 hosts are written in brackets: `[::1]:5050`. `localhost` means 127.0.0.1 for client and server, because the file /etc/hosts of one host
could name another address than that of the next host. No function of this module looks up a name.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from zmqdist.errors import InvalidArgumentError

_KEY: Final = "#"

DTS_PORT: Final = "%dts_port%"
"""Placeholder in an address that a worker advertises: the port by which it serves elements (`WorkerConfig.data_transfer_address`)."""


def split(address: str) -> tuple[str, int]:
    """Return the host without brackets, and the port (0 to 65535).

    Raises:
      InvalidArgumentError: `address` is not `host:port`.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    decimal = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not decimal or int(port) > 65535 or (":" in host and not bracketed):
        raise InvalidArgumentError(f"{address!r} is not an address: wanted host:port, as 127.0.0.1:5050 or [::1]:5050")
    return ("127.0.0.1" if host == "localhost" else "0.0.0.0" if host == "*" else host), int(port)


def strip_scheme(address: str) -> str:
    """Return an address without a leading `zmq://`. Raises TypeError if `address` is not a str."""
    if not isinstance(address, str):
        raise TypeError(f"an address is a str, as '127.0.0.1:5050', not {type(address).__name__}")
    return address.removeprefix("zmq://")


def join(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint(address: str) -> str:
    """Return `tcp://host:port` for ZeroMQ. Raises as `split`."""
    return f"tcp://{join(*split(address))}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address that only this host can reach.

    A name other than localhost is not looked up, and counts as an address that other hosts can reach.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether a server that binds the host listens on all interfaces."""
    return host in ("*", "0.0.0.0", "::")


def is_name(host: str) -> bool:
    """Return whether the host is a name, which has to be looked up, and not an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_ipv6(host: str) -> bool:
    """Return whether `host` is a literal IPv6 address, for which a socket needs IPv6 switched on."""
    return ":" in host


def with_key(address: str, key: bytes) -> str:
    """Return one text with an address and the public key of the socket that listens at it, or the address alone if `key` is empty."""
    return f"{address}{_KEY}{key.hex()}" if key else address


def split_key(text: str) -> tuple[str, bytes]:
    """Return the address and the key that `with_key` joined.

    Raises:
      InvalidArgumentError: the text after the address is not a key.
    """
    address, _, key = text.partition(_KEY)
    try:
        return address, bytes.fromhex(key)
    except ValueError:
        raise InvalidArgumentError(f"the text after the address {address} is not a public key") from None
