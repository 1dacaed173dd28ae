"""Decides which workers a program invites, and when. The machine does no I/O and reads no clock.
The recruiter's thread passes it the time.

Theory of operation
    The program wants workers, each by an index and an address. An invitation is one call to the
    server at the worker's address. The call waits until the server appears, and its reply says
    whether the worker has agreed to work for this program's dispatcher. The dispatcher reports
    which workers are present. A worker works for the program once it has accepted an invitation and
    is present. The machine invites every other wanted worker at once, and again AGAIN_S after an
    invitation has ended. It also invites a worker that is present but has not accepted, because an
    earlier program with the same dispatcher address may have invited that worker.
    An invitation has no time limit. While the server does not appear, the client of the invitation
    tries to connect again and again, with back-off.

Promises, checked by tests/sim/simulations/recruitment.py
    R1  Each wanted worker has at most one invitation in flight. A worker that is no longer wanted
        has no invitation in flight.
    R2  A wanted worker that does not work for the program has an invitation in flight, or gets an
        invitation within AGAIN_S.
    R3  A worker that works for the program is not invited.
    R4  The reply to an invitation that was dropped has no effect.
    R5  `refusal` returns a worker only if waiting cannot change the worker's error. If the worker
        works for another program, `refusal` returns the worker only after INVITE_PATIENCE_S,
        because the other program may have crashed a moment ago.

Not here: the calls and the thread (worker_recruiter.py).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import inf
from typing import Final, TypeAlias

from zmqdist import errors
from zmqdist.limits import INVITE_PATIENCE_S

AGAIN_S: Final = 0.25
"""Pause before the next invitation of a worker that has not joined, in seconds."""

PASSING: Final = (errors.UNAVAILABLE, errors.ABORTED, errors.CANCELLED, errors.DEADLINE_EXCEEDED)
"""Errors after which another invitation may succeed. ALREADY_EXISTS counts as such an error for the
first INVITE_PATIENCE_S."""


@dataclass(frozen=True, slots=True)
class InviteWorker:
    """Send an invitation. `invitation` is its number, which the recruiter passes to
    `invitation_ended` when the invitation has ended."""

    invitation: int
    index: int
    address: str


@dataclass(frozen=True, slots=True)
class DropInvitation:
    """Close the connection of an invitation, because the reply to the invitation does not matter
    any more."""

    invitation: int


@dataclass(frozen=True, slots=True)
class LogFailure:
    """Log that the invitations of a worker began to fail with this error. `passes` is True if the
    error may go away by itself."""

    index: int
    address: str
    message: str
    passes: bool


@dataclass(frozen=True, slots=True)
class RecordAcceptance:
    """Record how long a worker took to accept its invitation."""

    took_s: float


RecruitmentEffect: TypeAlias = InviteWorker | DropInvitation | LogFailure | RecordAcceptance


@dataclass(eq=False)
class _Wanted:
    """One wanted worker.

    Attributes:
      invitation: the number of the invitation in flight, or 0 if no invitation is in flight.
      invited_at: the time at which the last invitation was sent.
      retry_at: no invitation is sent before this time.
      code, message: how the last invitation ended. The code is OK after a success.
      failing_since: when the invitations began to end with `code`.
      accepted: whether the worker has accepted the last invitation. It may register with the
        dispatcher a little later.
    """

    address: str
    invitation: int = 0
    invited_at: float = 0.0
    retry_at: float = -inf
    code: int = errors.OK
    message: str = ""
    failing_since: float = 0.0
    accepted: bool = False


class Recruitment:
    """The wanted workers of one program. The docstring of the module has the rules. Each method
    that returns effects is one event."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Wanted] = {}
        self._present: Set[int] = frozenset()
        self._invitations: dict[int, int] = {}
        """The index of each invitation in flight, by number."""
        self._last = 0

    @property
    def addresses(self) -> dict[int, str]:
        """The address of each wanted worker, by index, sorted."""
        return {index: task.address for index, task in sorted(self._tasks.items())}

    @property
    def missing(self) -> list[int]:
        """The indices of the wanted workers that do not work for the program yet, sorted."""
        return [
            index for index, task in sorted(self._tasks.items()) if not self._works(index, task)
        ]

    @property
    def deadline(self) -> float:
        """The time at which the caller should call `ticked`, on the clock of `now`. It is `inf` if
        there is nothing to do before the next event.
        """
        return min(
            (
                self._tasks[index].retry_at
                for index in self.missing
                if not self._tasks[index].invitation
            ),
            default=inf,
        )

    def refusal(self, now: float) -> tuple[int, str, int, str] | None:
        """Return (index, address, code, message) of a worker that fails with an error that waiting
        cannot change, as promise R5 says. Return None if there is no such worker."""
        for index in self.missing:
            task = self._tasks[index]
            # R5: the other program may have crashed a moment ago, and then its dispatcher goes soon
            patient = (
                task.code == errors.ALREADY_EXISTS and now - task.failing_since < INVITE_PATIENCE_S
            )
            if task.code not in (errors.OK, *PASSING) and not patient:
                return index, task.address, task.code, task.message
        return None

    def want(self, index: int, address: str, now: float) -> list[RecruitmentEffect]:
        """Want the server at `address` as the worker of this index, in place of any server that was
        wanted for this index before."""
        # R1: the invitation of an earlier address of this index must not be answered any more
        effects = self.drop(index)
        self._tasks[index] = _Wanted(address)
        return effects + self.ticked(now)

    def drop(self, index: int) -> list[RecruitmentEffect]:
        """Stop wanting the worker of this index, and drop its invitation if one is in flight."""
        task = self._tasks.pop(index, None)
        if task is None or not task.invitation:
            return []
        del self._invitations[task.invitation]
        return [DropInvitation(task.invitation)]

    def members_changed(self, present: Set[int], now: float) -> list[RecruitmentEffect]:
        """Record the workers that are registered with the dispatcher now."""
        self._present = present
        return self.ticked(now)

    def invitation_ended(
        self, invitation: int, code: int, message: str, now: float
    ) -> list[RecruitmentEffect]:
        """Record that an invitation was accepted (`code` OK) or has failed. An invitation may fail
        before it is sent."""
        index = self._invitations.pop(invitation, None)
        if index is None:  # promise R4: ignore the reply to a dropped invitation
            return []
        task = self._tasks[index]
        task.invitation = 0
        task.retry_at = now + AGAIN_S
        effects: list[RecruitmentEffect] = [DropInvitation(invitation)]
        if code == errors.OK:
            task.accepted = True
            effects.append(RecordAcceptance(now - task.invited_at))
        elif task.code != code:  # log a repeated error only once
            task.failing_since = now
            effects.append(LogFailure(index, task.address, message, code in PASSING))
        task.code, task.message = code, message
        return effects

    def ticked(self, now: float) -> list[RecruitmentEffect]:
        """Invite each wanted worker whose `retry_at` has passed."""
        effects: list[RecruitmentEffect] = []
        for index in self.missing:
            task = self._tasks[index]
            # R1 and R2: one invitation at a time, and a pause after each
            if task.invitation or task.retry_at > now:
                continue
            self._last += 1
            # An acceptance counts for one invitation only: a worker that has gone since must accept
            # anew.
            task.invitation, task.invited_at, task.accepted = self._last, now, False
            self._invitations[task.invitation] = index
            effects.append(InviteWorker(task.invitation, index, task.address))
        return effects

    def _works(self, index: int, task: _Wanted) -> bool:
        return task.accepted and index in self._present
