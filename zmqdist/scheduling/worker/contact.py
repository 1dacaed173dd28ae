"""A worker's contact with its dispatcher: when it registers, beats, stops its work and gives up.

Theory of operation
    Contact is the connection. While it stands the worker beats; a Beat comes back, which says that everything before it has arrived.
    When it goes, work may go on for half a lease, or until three quarters of a lease after the last beat that came back was sent,
    whichever is sooner: the dispatcher counts its lease from when it heard the worker last, which it had not before that beat. When the
    answer is read says nothing: it may have lain here while the worker was frozen. Without any contact for the orphan limit the worker
    ends. A refused registration is repeated for a while: a worker under the same name may have died a moment ago. A worker that named no
    index does not insist on the one that a dispatcher gave it: while it was away, or at another dispatcher, that may have become another's.
    What ends while a registration is on its way is told when that is answered: it names what was there when it was sent, and a dispatcher
    refuses whatever comes before one. When everything has to stop in that time, another registration follows, which names nothing; the
    answer to the first one counts for nothing, nor does the work that the dispatcher assigns before it has read the second.
    A registration and each beat are answered at once, so the time until then is the round trip to the dispatcher.

Not here: what is stopped, and what a registration says (worker.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.events import Send
from zmqdist.limits import LEASE_S
from zmqdist.messages import Message

DISPATCHER: Final = "dispatcher"
"""The one peer of a worker."""
REGISTER_AGAIN_S = 0.25
TRIPS_KEPT = 4
"""The round trip is the shortest of the last ones: what lies above it was waiting, at one of the two ends."""
RETRIED_REFUSALS = (errors.ALREADY_EXISTS, errors.FAILED_PRECONDITION)
"""Refusals that may pass."""


def earliest(one: float | None, other: float | None) -> float | None:
    """Of two times, None for never; it is asked after each event."""
    if one is None or (other is not None and other < one):
        return other
    return one


@dataclass(slots=True)
class Contact:
    """Times are seconds of the machine's clock; None where nothing is due.

    Attributes:
      dispatcher: incarnation of the one that knows what this worker has; None when nobody does.
      up, registered: the connection stands; the dispatcher has taken us.
      serial: of the latest registration on this connection; the first is 1. An older dispatcher answers with 0.
      lease_s: as the dispatcher told; 0 before.
      named: the index is the worker's own, not one that a dispatcher gave it.
      index_taken: the index was refused, because another worker has it.
    """

    orphan_limit_s: float
    orphan_at: float | None
    dispatcher: int | None = None
    up: bool = False
    registered: bool = False
    named: bool = True
    index_taken: bool = False
    serial: int = 0
    lease_s: float = 0.0
    beats_sent: int = 0
    beats_echoed: int = 0
    stop_at: float | None = None
    _beat_s: float = 1.0
    _beat_at: float | None = None
    _register_at: float | None = None
    _refusals: int = 0
    _unanswered_at: deque[float] = field(default_factory=deque)
    """When the registration or the beats were sent whose answers have not come yet, oldest first."""
    _answered_at: float = -inf
    """When the latest one was sent that was answered: the dispatcher has heard the worker then, or later."""
    _postponed: list[Send] = field(default_factory=list)
    """What is to be said once the registration is answered."""
    _trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=TRIPS_KEPT))

    @property
    def deadline(self) -> float | None:
        first = earliest(self._beat_at, self.orphan_at)
        return earliest(earliest(first, self.stop_at), self._register_at)

    @property
    def trip_s(self) -> float:
        """The round trip to the dispatcher; 0 while it is not known."""
        return min(self._trips_s, default=0.0)

    def connected(self, incarnation: int) -> bool:
        """The connection stands. True when this dispatcher knows nothing of what the worker has."""
        self.up = True
        self.serial = 0
        self.beats_sent = self.beats_echoed = 0
        self._unanswered_at.clear()
        is_new = incarnation != self.dispatcher
        self.dispatcher = incarnation
        self._register_at = None
        return is_new

    def note_registration(self, now: float) -> None:
        """A registration is sent, which names all that the worker has now."""
        self.serial += 1
        self._postponed.clear()
        self._unanswered_at.clear()
        self._unanswered_at.append(now)

    def note_beat(self, now: float) -> None:
        """A beat is sent."""
        self.beats_sent += 1
        self._unanswered_at.append(now)

    def echoed(self, now: float) -> None:
        """A beat has come back."""
        self.beats_echoed += 1
        self._note_reply(now)

    def _note_reply(self, now: float) -> None:
        if self._unanswered_at:
            self._answered_at = self._unanswered_at.popleft()
            self._trips_s.append(now - self._answered_at)

    def disconnected(self, now: float) -> None:
        self.up = self.registered = False
        self._beat_at = self._register_at = None
        self.orphan_at = now + self.orphan_limit_s
        self.stop_at = min(now + self.lease_s / 2, max(now, self._answered_at + 0.75 * self.lease_s))

    def report(self, message: Message) -> list[Send]:
        """Say that leases have ended: now, or once we are welcomed. The next registration, which does not name them, says as much."""
        if self.registered:
            return [Send(DISPATCHER, message)]
        self._postponed.append(Send(DISPATCHER, message))
        return []

    def accepted(self, beat_s: float, lease_s: float, now: float) -> list[Send]:
        """The dispatcher has taken the worker. Returns what is to be said now, in order."""
        self._beat_s, self.lease_s = beat_s, lease_s
        self._note_reply(now)
        self.registered = True
        self._register_at = None
        self.index_taken = False
        self._refusals = 0
        self.orphan_at = self.stop_at = None
        self._beat_at = now + beat_s
        postponed, self._postponed = self._postponed, []
        return postponed

    def refused(self, code: int, now: float) -> bool:
        """True when the registration is to be repeated, which `register_due` will say."""
        self.registered = False
        if code in RETRIED_REFUSALS and self._register_at is not None:
            return True  # several messages were on their way, and each is refused
        self._refusals += 1
        patience_s = 1.0 + (self.lease_s or LEASE_S)
        if code not in RETRIED_REFUSALS or self._refusals * REGISTER_AGAIN_S >= patience_s:
            return False
        self.index_taken = code == errors.ALREADY_EXISTS and not self.named
        self._register_at = now + REGISTER_AGAIN_S
        return True

    def orphaned(self, now: float) -> bool:
        return self.orphan_at is not None and now >= self.orphan_at

    def register_due(self, now: float) -> bool:
        due = self._register_at is not None and now >= self._register_at
        if due:
            self._register_at = None
        return due

    def must_stop(self, now: float) -> bool:
        """Everything has to stop now. The dispatcher that is registered with next is not to know anything of it."""
        if self.stop_at is None or now < self.stop_at:
            return False
        self.stop_at = None
        if not self.up:
            self.dispatcher = None
        elif self._register_at is None:
            self._register_at = now  # the registration that is on its way names what ends now
        return True

    def beat_due(self, now: float) -> bool:
        due = self._beat_at is not None and now >= self._beat_at
        if due:
            self._beat_at = now + self._beat_s
        return due
