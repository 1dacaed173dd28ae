"""The log line that says that a coordinator's unfinished work waits for a dispatcher or a worker.

The coordinator logs one line for all its waiting threads, whether they wait in `join`, `get`,
`as_completed` or for an Executor's Future. It logs the line even if no thread waits.
"""

from __future__ import annotations

import logging

from zmqdist import limits
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.coordinator")


class UnreachableLog:
    """Logs and describes what a cluster lacks: a dispatcher or workers. The loop calls `watch`. Any
    thread may read `description`."""

    def __init__(self, loop: Loop, machine: CoordinatorMachine, dealer: DealerConnection) -> None:
        self._loop = loop
        self._machine = machine
        self._dealer = dealer
        self.since: float | None = None

    @property
    def description(self) -> str | None:
        """What the cluster lacks, and why; None if the cluster has a dispatcher and a worker."""
        address = self._dealer.address
        if not self._machine.registered:
            return f"the dispatcher at {address}: {self._dealer.trouble or 'no answer'}"
        return (
            None
            if self._machine.workers
            else f"a worker to register with the dispatcher at {address}"
        )

    def watch(self) -> None:
        """Start or stop the timer that writes a log line every WAIT_LOG_S while unfinished work
        lacks a dispatcher or a worker. Call this when the machine's `without_cluster_since` is no
        longer `since`."""
        since = self.since = self._machine.without_cluster_since
        self._loop.set_timer(self, None if since is None else since + limits.WAIT_LOG_S, self._warn)

    def _warn(self) -> None:
        if self.since is None:
            return
        now = self._loop.now()
        self._loop.set_timer(self, now + limits.WAIT_LOG_S, self._warn)
        count = self._machine.unfinished
        functions = f"{count} scheduled function{'' if count == 1 else 's'}"
        log.warning(
            "%s: waiting for %s (%.0f s so far)",
            functions,
            self.description or "the cluster",
            now - self.since,
        )
