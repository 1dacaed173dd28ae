"""The log lines that say that a coordinator's unfinished work waits for a dispatcher or a worker,
and that its actors wait for a place.

The coordinator logs one line for all its waiting threads, whether they wait in `join`, `get`,
`as_completed` or for an Executor's Future. It logs the line even if no thread waits.
"""

from __future__ import annotations

import logging

from zmqdist import limits
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.scheduling.shared.actors import ActorState
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
        self._actors_due: float | None = None

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

    def watch_actors(self) -> None:
        """Write a log line every WAIT_LOG_S from now on while actors have no process, and the
        dispatcher has said why. Call this when the state of an actor has changed."""
        if self._actors_due is None:
            self._actors_due = self._loop.now() + limits.WAIT_LOG_S
            self._loop.set_timer(self.watch_actors, self._actors_due, self._warn_of_actors)

    def _warn_of_actors(self) -> None:
        self._actors_due = None
        waiting = [
            actor
            for actor in self._machine.actors.actors.values()
            if actor.state in (ActorState.PENDING, ActorState.AWAY) and actor.reason
        ]
        if waiting:
            first = waiting[0]
            others = f" and {len(waiting) - 1} other actors wait" if waiting[1:] else " waits"
            log.warning("the actor %s%s: %s", first.cls, others, first.reason)
            self.watch_actors()
