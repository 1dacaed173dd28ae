"""The part of the dispatcher's machine that ties work which a function has scheduled to the run of
this function. No I/O.

Theory of operation
    The coordinator of a scheduled function names the lease of this function, its *parent*, when it
    registers. Its session is a *child* of the lease. When the lease ends in any way (an outcome, a
    crash, a lost worker, a cancel), the child is *fenced*: its waiting work is dropped, its running
    work is aborted, and it may submit nothing more. The end of the lease is held back, and not
    reported to the parent's coordinator, until no work of the child can be executing. The leases
    of the child hold back their ends for their own children, so the whole tree has ended.
    Nothing waits for a message of the child. A child whose connection ends while its parent runs
    may register again.

Promises, which continue those of machine.py, checked by
tests/scheduling/dispatcher/test_machine.py and tests/sim
    P21 the end of a lease is reported, and its work queued again, only when no descendant of the
        lease can be executing
    P22 a fenced session gets no more work queued, and none of its work begins
    P23 a session with a parent registers only while the lease of the parent exists and was not
        cancelled

    P24 work with resources that no worker could run because functions above it keep them fails at
        once

Not here: the leases and their ends (machine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zmqdist.events import Send
from zmqdist.scheduling.dispatcher.records import CoordinatorSession, Lease, WorkerLoad
from zmqdist.scheduling.dispatcher.resources import Ledger
from zmqdist.scheduling.shared.quantities import Quantities, amounts_text

FENCED = (
    "the function that has scheduled this work has ended or was cancelled: wait for the results "
    "inside the function"
)
"""The text of the Refused to the coordinator of a fenced session."""


def kept_above(request: Quantities) -> str:
    """Return the error text for work that waits for itself."""
    return (
        f"it needs {amounts_text(request)}, which only the functions that have scheduled it have: "
        f"they keep their resources while they wait, so it would wait for ever"
    )


@dataclass(slots=True)
class HeldEnd:
    """The end of a lease that is held back. `apply` applies it, and returns the messages to send."""

    lease: Lease
    apply: Callable[[], list[Send]]


class Nesting:
    """The children of leases; the module's docstring has the rules.

    Attributes:
      children: the sessions of each parent, by lease. A lease without children has no entry.
      held: the ends that are held back, oldest first.
    """

    def __init__(self) -> None:
        self.children: dict[Lease, list[CoordinatorSession]] = {}
        self.held: list[HeldEnd] = []

    def adopt(self, session: CoordinatorSession, parent: Lease, number: int) -> None:
        """Make a new session the child of a lease with this number."""
        session.depth = parent.session.depth + 1
        session.above = (*parent.session.above, number)
        self.children.setdefault(parent, []).append(session)

    @staticmethod
    def waits_for_itself(
        session: CoordinatorSession, request: Quantities, worker: str, loads: Iterable[WorkerLoad]
    ) -> bool:
        """Return whether a worker has enough for a request of a child, but none beside what the
        functions above it keep until they end (P24)."""
        is_enough = False
        for load in loads:
            ledger = Ledger(load.member.resources)
            if worker not in ("", load.name) or not ledger.fits(request):
                continue
            is_enough = True
            for number in session.above:
                if (grant := load.grants.get(number)) is not None:
                    ledger.change(grant, -1)
            if ledger.fits(request):
                return False
        return is_enough

    def is_quiet(self, lease: Lease, now: float) -> bool:
        """Return whether no work of a lease's children can be executing."""
        return all(
            part.is_quiet(now)
            for session in self.children.get(lease, ())
            for part in session.with_detached
        )

    def unfenced(self, lease: Lease) -> list[CoordinatorSession]:
        """Return the children of a lease that are not fenced yet, and note that they are."""
        sessions = [s for s in self.children.get(lease, ()) if not s.fenced]
        for session in sessions:
            for part in session.with_detached:
                part.fenced = True
        return sessions

    def take_quiet(self, now: float) -> list[HeldEnd]:
        """Return the held ends that may be applied, and forget them and their children. Forget
        closed children that are quiet as well."""
        ready = [end for end in self.held if self.is_quiet(end.lease, now)]
        for end in ready:
            self.held.remove(end)
            self.children.pop(end.lease, None)
        for lease, sessions in list(self.children.items()):
            sessions[:] = [s for s in sessions if not (s.closed and _is_quiet(s, now))]
            if not sessions:
                del self.children[lease]
        return ready

    @property
    def deadline(self) -> float | None:
        """The time from which on a held end may be applied, if no event occurs before."""
        times = [
            max(part.unsettled_until for s in sessions for part in s.with_detached)
            for end in self.held
            if (sessions := self.children.get(end.lease))
            and not any(part.outstanding for s in sessions for part in s.with_detached)
        ]
        return min(times, default=None)


def _is_quiet(session: CoordinatorSession, now: float) -> bool:
    return all(part.is_quiet(now) for part in session.with_detached)
