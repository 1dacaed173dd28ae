"""What a server reports about itself (kind, version, clock): a method that every server has, for `zmqdist doctor`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from zmqdist._version import __version__
from zmqdist.errors import WireError
from zmqdist.wire.hello import PROTOCOL

SERVER_INFO: Final = "zmqdist.about"
"""The name of the reserved method."""


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
