"""Addresses as servers and clients use them: the host and port of a socket, ZeroMQ's
`tcp://host:port`, an address with a public key.

`localhost` means 127.0.0.1 for client and server, because two hosts files could disagree about it.
`zmqdist/addresses.py` parses the text that users write. No function of this module looks up a name.
"""

from __future__ import annotations

from typing import Final

from zmqdist.addresses import join_address, split_address
from zmqdist.errors import InvalidArgumentError

_KEY: Final = "#"

BOUND_PORT: Final = "%port%"
"""Placeholder in an address that a worker advertises: the port that its server has bound
(`WorkerConfig.worker_address`)."""

DTS_PORT: Final = "%dts_port%"
"""Placeholder in an address that a worker advertises: the port at which it serves elements
(`WorkerConfig.data_transfer_address`)."""


def split(address: str) -> tuple[str, int]:
    """Return the host that a socket binds or connects to, without brackets, and the port (0 to
    65535).

    Raises:
      InvalidArgumentError: `address` is not `host:port`, or has no host.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise InvalidArgumentError(f"{address!r} is not an address: {error}") from None
    if not host:
        raise InvalidArgumentError(f"{address!r} is not an address: no host before the colon")
    return ("127.0.0.1" if host == "localhost" else "0.0.0.0" if host == "*" else host), port


def strip_scheme(address: str) -> str:
    """Return an address without a leading `zmq://`. Raises TypeError if `address` is not a str."""
    if not isinstance(address, str):
        raise TypeError(f"an address is a str, as '127.0.0.1:5050', not {type(address).__name__}")
    return address.removeprefix("zmq://")


def endpoint(address: str) -> str:
    """Return `tcp://host:port` for ZeroMQ. Raises the errors of `split`."""
    return f"tcp://{join_address(*split(address))}"


def with_key(address: str, key: bytes) -> str:
    """Return one text with an address and the public key of the socket that listens at it, or the
    address alone if `key` is empty."""
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
        raise InvalidArgumentError(
            f"the text after the address {address} is not a public key"
        ) from None
