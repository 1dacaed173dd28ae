"""Whom a coordinator misses, a dispatcher or a worker, and the line in the log that says so as long as something waits for it.

One line for all that wait, in whatever way: `join`, `get`, `as_completed`, an Executor's future, or a program that has not asked yet.
"""

from __future__ import annotations

import logging

from zmqdist import limits
from zmqdist.scheduling.coordinator.closures import Closures
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.coordinator")


class UnreachableLog:
    """What the machine says of it, for people. `watch` is the loop's; `whom` may be asked by any thread."""

    def __init__(self, loop: Loop, machine: Closures, dealer: DealerConnection) -> None:
        self._loop = loop
        self._machine = machine
        self._dealer = dealer
        self._since: float | None = None

    @property
    def description(self) -> str | None:
        """Who is missing, and why; None when the cluster is there."""
        address = self._dealer.address
        if not self._machine.enlisted:
            return f"the dispatcher at {address}: {self._dealer.trouble or 'no answer'}"
        return None if self._machine.workers else f"a worker to register with the dispatcher at {address}"

    def watch(self) -> None:
        """After each event: see to it that there is a line every WAIT_LOG_S while unfinished work misses the cluster."""
        since = self._machine.alone_since
        if since != self._since:
            self._since = since
            self._loop.set_timer(self, None if since is None else since + limits.WAIT_LOG_S, self._warn)

    def _warn(self) -> None:
        if self._since is None:
            return
        now = self._loop.now()
        self._loop.set_timer(self, now + limits.WAIT_LOG_S, self._warn)
        count = self._machine.unfinished
        functions = f"{count} scheduled function{'' if count == 1 else 's'}"
        log.warning(
            "%s: waiting for %s (%.0f s so far)", functions, self.description or "the cluster", now - self._since
        )
