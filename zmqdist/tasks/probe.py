"""Which tasks are there: quickly, because most questions about a cluster must not wait for those that are not.

A task that listens greets whoever connects, before any handshake (transport/greeting.py). One whose port is closed is known at once; one
whose host does not answer after the probe's patience, all of them at the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Final

from zmqdist.errors import InvalidArgumentError
from zmqdist.transport.greeting import GreetingProbe

_LOOK_S: Final = 0.001
"""A greeting on one host takes about so long; there is nothing to wait on for a hundred probes at once."""


def listening(addresses: Mapping[tuple[str, int], str]) -> set[tuple[str, int]]:
    """Those tasks at whose "host:port" something speaks ZeroMQ."""
    probes: dict[tuple[str, int], GreetingProbe] = {}
    for task, address in addresses.items():
        with contextlib.suppress(InvalidArgumentError):  # no address: a cluster may have such, and nobody listens there
            probes[task] = GreetingProbe(address, time.monotonic())
    found = set()
    while probes:
        for task, probe in tuple(probes.items()):
            if probe.step(time.monotonic()):
                del probes[task]
                if probe.mechanism:
                    found.add(task)
        if probes:
            time.sleep(_LOOK_S)
    return found
