"""Notices that functions may wait for ever: all slots are busy, and work that functions have
scheduled waits for a slot; no I/O.

A function that schedules functions and waits for them keeps its slot meanwhile. If such functions
fill all slots, none of their work can begin. The dispatcher cannot know whether a function waits,
but a function that has scheduled work usually does.
"""

from __future__ import annotations

from collections.abc import Collection

from zmqdist.events import Send
from zmqdist.messages import Stalled
from zmqdist.scheduling.dispatcher.records import RUNNING, CoordinatorSession, WorkerLoad

STALLED_S = 5.0
"""Seconds without progress after which the dispatcher reports a stall."""


class StallWatch:
    """The watch over nested sessions, which are sessions of coordinators that scheduled functions
    have made.

    Attributes:
      sessions: the open nested sessions, in the order of their registrations.
    """

    def __init__(self) -> None:
        self.sessions: dict[CoordinatorSession, None] = {}
        self._reported = False
        self._moved_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """The time at which `report` must be called; None while there is nothing to watch."""
        return None if self._reported or not self.sessions else self._moved_at

    def moved(self, now: float) -> None:
        """Note that work has begun or ended, or that a nested session has submitted work."""
        self._moved_at = now + STALLED_S

    def closed(self, session: CoordinatorSession) -> None:
        self.sessions.pop(session, None)
        self._reported = self._reported and bool(self.sessions)

    def report(self, loads: Collection[WorkerLoad], now: float) -> list[Send]:
        """Return the report to one nested session if there is a stall. It is returned once until
        all nested sessions have been closed."""
        due = self.deadline
        if due is None or now < due:
            return []
        self.moved(now)
        running = sum(lease.state in RUNNING for load in loads for lease in load.leases.values())
        slots = sum(load.member.slots for load in loads)
        waiting = {
            session: sum(part.queued + part.outstanding for part in session.with_detached)
            for session in self.sessions
        }
        for load in loads:
            for lease in load.leases.values():
                for session in waiting:
                    waiting[session] -= (
                        lease.state in RUNNING and lease.session in session.with_detached
                    )
        receiver = next((session for session, count in waiting.items() if count), None)
        if receiver is None or running < slots:
            return []
        self._reported = True
        return [Send(receiver.peer, Stalled(sum(waiting.values()), slots))]
