"""Addresses as people write them, `host:port`, and as ZeroMQ wants them, `tcp://host:port`.

IPv6 hosts stand in brackets: `[::1]:5050`. `localhost` means 127.0.0.1, on both ends, whatever the hosts file prefers.
No names are looked up here.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from zmqdist.errors import InvalidArgumentError

_KEY: Final = "#"

DTS_PORT: Final = "%dts_port%"
"""In an address that a worker advertises: the port of its elements (`WorkerConfig.data_transfer_address`)."""


def split(address: str) -> tuple[str, int]:
    """Host without brackets, and port (0 to 65535).

    Raises:
      InvalidArgumentError: not `host:port`.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    decimal = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not decimal or int(port) > 65535 or (":" in host and not bracketed):
        raise InvalidArgumentError(f"{address!r} is not an address: wanted host:port, as 127.0.0.1:5050 or [::1]:5050")
    return ("127.0.0.1" if host == "localhost" else "0.0.0.0" if host == "*" else host), int(port)


def plain(address: str) -> str:
    """An address without the `zmq://` that may stand before it. Raises TypeError: not a text."""
    if not isinstance(address, str):
        raise TypeError(f"an address is a str, as '127.0.0.1:5050', not {type(address).__name__}")
    return address.removeprefix("zmq://")


def join(host: str, port: int) -> str:
    """`host:port`, with brackets where they are needed."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoint(address: str) -> str:
    """`tcp://host:port`, as ZeroMQ wants it."""
    return f"tcp://{join(*split(address))}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host: by its number, a name other than localhost proves nothing."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether a server that binds the host listens on all interfaces."""
    return host in ("*", "0.0.0.0", "::")


def is_name(host: str) -> bool:
    """Whether the host has to be looked up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_ipv6(host: str) -> bool:
    """Whether the socket needs IPv6: a literal IPv6 address."""
    return ":" in host


def with_key(address: str, key: bytes) -> str:
    """An address together with the public key of what listens there, as one text; without a key the address itself."""
    return f"{address}{_KEY}{key.hex()}" if key else address


def split_key(text: str) -> tuple[str, bytes]:
    """What `with_key` was given.

    Raises:
      InvalidArgumentError: what stands for the key is none.
    """
    address, _, key = text.partition(_KEY)
    try:
        return address, bytes.fromhex(key)
    except ValueError:
        raise InvalidArgumentError(f"{address} comes with something that is no public key") from None
