"""Who answers at an address, and what its clock says: a question that every server answers, for `zmqdist doctor`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from zmqdist._version import __version__
from zmqdist.errors import WireError
from zmqdist.wire.hello import PROTOCOL

ABOUT: Final = "zmqdist.about"
"""The reserved method."""


@dataclass(frozen=True)
class About:
    """What a server says of itself.

    Attributes:
      kind: "dispatcher", "worker", "rpc", "server-worker:0".
      version: of zmqdist there.
      protocol, python: (major, minor).
      incarnation: of this life of it.
      time_s: its clock, in seconds since 1970, when it answered.
    """

    kind: str
    version: str
    protocol: tuple[int, int]
    python: tuple[int, int]
    pid: int
    incarnation: int
    time_s: float


def about_us(kind: str, incarnation: int) -> list[Any]:
    """As it travels: flat, because `Client.call` gives leaves. New items go to the end."""
    return [kind, __version__, *PROTOCOL, *sys.version_info[:2], os.getpid(), incarnation, time.time()]


def heard(reply: Any, peer: str) -> About:
    """What a server told. Raises WireError: that is something else."""
    try:
        kind, version, major, minor, python_major, python_minor, pid, incarnation, time_s = reply[:9]
        return About(
            str(kind),
            str(version),
            (int(major), int(minor)),
            (int(python_major), int(python_minor)),
            int(pid),
            int(incarnation),
            float(time_s),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(peer, f"what should say who it is does not: {error}") from None
