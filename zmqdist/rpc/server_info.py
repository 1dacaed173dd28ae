"""The methods that every server has for `zmqdist doctor`: what it reports about itself (kind, version, clock), and an echo."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from zmqdist._version import __version__
from zmqdist.errors import InvalidArgumentError, WireError
from zmqdist.wire.hello import PROTOCOL

SERVER_INFO: Final = "zmqdist.about"
ECHO: Final = "zmqdist.echo"
"""The names of the reserved methods."""

ECHO_BYTES_MAX: Final = 65_536
"""Bytes: more than the packets of any link, and too little to keep a server busy."""


@dataclass(frozen=True)
class ServerInfo:
    """The report of a server about itself.

    Attributes:
      kind: "dispatcher", "worker", "rpc", "server-worker:0".
      version: version of zmqdist.
      protocol, python: (major, minor).
      incarnation: of the server's process.
      time_s: the server's clock when it replied, in seconds since 1970.
    """

    kind: str
    version: str
    protocol: tuple[int, int]
    python: tuple[int, int]
    pid: int
    incarnation: int
    time_s: float


def describe_server(kind: str, incarnation: int) -> list[Any]:
    """Return this process's report as it travels: flat, because `Client.call` returns leaves. New items go to the end."""
    return [kind, __version__, *PROTOCOL, *sys.version_info[:2], os.getpid(), incarnation, time.time()]


def echo(payload: Any) -> bytes:
    """Return the bytes that a client has sent. Raises InvalidArgumentError: `payload` is no bytes, or too long."""
    if not isinstance(payload, bytes) or len(payload) > ECHO_BYTES_MAX:
        raise InvalidArgumentError(f"{ECHO} takes at most {ECHO_BYTES_MAX} bytes")
    return payload


def decode_server_info(reply: Any, peer: str) -> ServerInfo:
    """Decode the report of a server. Raises WireError if `reply` is not one."""
    try:
        kind, version, major, minor, python_major, python_minor, pid, incarnation, time_s = reply[:9]
        return ServerInfo(
            str(kind),
            str(version),
            (int(major), int(minor)),
            (int(python_major), int(python_minor)),
            int(pid),
            int(incarnation),
            float(time_s),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(peer, f"its report about itself cannot be read: {error}") from None
