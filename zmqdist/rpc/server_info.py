"""Two methods that every server has, for `zmqdist doctor`: a report about the server (kind,
version, clock), and an echo."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Final

from zmqdist import clock as time
from zmqdist._version import __version__
from zmqdist.errors import InvalidArgumentError, WireError
from zmqdist.wire.hello import PROTOCOL

SERVER_INFO: Final = "zmqdist.about"
ECHO: Final = "zmqdist.echo"
"""SERVER_INFO and ECHO are the reserved names of the two methods."""

ECHO_BYTES_MAX: Final = 65_536
"""Bytes. A payload of this size fills several packets of any link, but does not keep a server
busy.
"""


@dataclass(frozen=True)
class ServerInfo:
    """The report of a server about itself.

    Attributes:
      kind: the kind of server, such as "dispatcher", "worker", "rpc" or "server-worker:0".
      version: version of zmqdist.
      protocol, python: versions as (major, minor).
      incarnation: incarnation of the server's process.
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
    """Return the report of this process about itself as a flat list. The order is part of the
    protocol, so a new item is added at the end.
    """
    return [
        kind,
        __version__,
        *PROTOCOL,
        *sys.version_info[:2],
        os.getpid(),
        incarnation,
        time.time(),
    ]


def echo(payload: Any) -> bytes:
    """Return the bytes that a client has sent. Raises InvalidArgumentError if `payload` is not
    bytes, or too long."""
    if not isinstance(payload, bytes) or len(payload) > ECHO_BYTES_MAX:
        raise InvalidArgumentError(f"{ECHO} takes bytes, at most {ECHO_BYTES_MAX}")
    return payload


def decode_server_info(reply: Any, peer: str) -> ServerInfo:
    """Return the report that a server's reply contains. Raises WireError if `reply` is not a
    report."""
    try:
        kind, version, major, minor, python_major, python_minor, pid, incarnation, time_s = reply[
            :9
        ]
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
