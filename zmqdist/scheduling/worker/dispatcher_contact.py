"""A worker's contact with its dispatcher: when the worker registers, sends heartbeats, must stop
its work, and gives up.

Theory of operation
    While connected the worker sends a Beat at each interval. The dispatcher echoes each Beat. The
    echo shows that the dispatcher has received all messages that the worker sent before the Beat.
    When the connection ends, work may go on for half of `lease_s`, but not longer than three
    quarters of `lease_s` after the worker sent the last echoed Beat. This is safe because the
    dispatcher counts a lease from the last message that it received, and it received this Beat
    later than the worker sent it. The time when the worker reads the echo does not count, because
    the echo may have waited in the worker's socket while the worker was frozen.
    A worker ends when it has had no contact for the orphan limit.
    The worker repeats a refused registration for a while, because the dispatcher may not know yet
    that an earlier worker of this name has crashed. A worker that was configured without an index
    accepts a new index from the dispatcher, because another worker may have got the old index while
    this worker was away.
    A Register names the leases that the worker had when it sent the Register. Leases that end
    before the reply are reported after the reply, because the dispatcher refuses messages from a
    peer that is not registered. If the worker has to stop all work while it still waits for the
    reply, it sends a second Register, without leases. The worker then ignores the reply to the
    first Register, and all work that the dispatcher has assigned before the reply to the second.
    The dispatcher replies to a Register and a Beat at once, so the time until the reply is the
    round-trip time.

Not here: which work is stopped, and the content of a registration (machine.py).
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
"""The dispatcher, which is the only peer of a worker's machine."""
REGISTER_AGAIN_S = 0.25
"""Seconds before a refused registration is repeated."""
TRIPS_KEPT = 4
"""`Contact.trip_s` is the shortest of this many last round trips, because longer round trips
include time in which a message waited."""
RETRIED_REFUSALS = (errors.ALREADY_EXISTS, errors.FAILED_PRECONDITION)
"""The codes of refusals after which the worker registers again, because the cause of the refusal
may pass."""


def earliest(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times, where None means never. Does not use the slower `min`,
    because it is called after each event."""
    if one is None or (other is not None and other < one):
        return other
    return one


@dataclass(slots=True)
class Contact:
    """The state of a worker's contact with its dispatcher. Times are seconds by the machine's
    clock; None means never.

    Attributes:
      orphan_at: when the worker ends if it has no dispatcher by then; None while the worker is
        registered.
      dispatcher: the incarnation of the dispatcher that knows the worker's leases; None if no
        dispatcher knows them.
      up: whether the connection is established.
      registered: whether the dispatcher has accepted the registration over this connection.
        Invariant: only while `up`.
      named: whether the worker was configured with its index; False if a dispatcher chose the
        index.
      index_taken: whether the dispatcher refused the index because another worker has it.
      serial: the number of the latest registration over this connection, counted from 1. A
        dispatcher of an older version replies with 0.
      lease_s: the dispatcher's lease; 0 before the first registration.
      beats_sent, beats_echoed: the number of heartbeats over this connection. Invariant:
        beats_echoed <= beats_sent.
      stop_at: when all work must stop if the contact is still lost.
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
    """The times at which the worker sent the registrations and beats that have no reply yet, oldest
    first."""
    _answered_at: float = -inf
    """When the worker sent the latest registration or beat that has a reply. The dispatcher
    received it then or later."""
    _postponed: list[Send] = field(default_factory=list)
    """The messages to send once the dispatcher has accepted the registration."""
    _trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=TRIPS_KEPT))

    @property
    def deadline(self) -> float | None:
        first = earliest(self._beat_at, self.orphan_at)
        return earliest(earliest(first, self.stop_at), self._register_at)

    @property
    def trip_s(self) -> float:
        """The round-trip time to the dispatcher; 0 while unknown."""
        return min(self._trips_s, default=0.0)

    def connected(self, incarnation: int) -> bool:
        """Record that the connection is established. Return whether the dispatcher is a new
        incarnation, which does not know the leases."""
        self.up = True
        self.serial = 0
        self.beats_sent = self.beats_echoed = 0
        self._unanswered_at.clear()
        is_new = incarnation != self.dispatcher
        self.dispatcher = incarnation
        self._register_at = None
        return is_new

    def note_registration(self, now: float) -> None:
        """Record that a Register is sent. Drop the postponed reports of ended leases: the Register
        does not name these leases, so the dispatcher ends them without a report."""
        self.serial += 1
        self._postponed.clear()
        self._unanswered_at.clear()
        self._unanswered_at.append(now)

    def note_beat(self, now: float) -> None:
        """Record that a beat is sent."""
        self.beats_sent += 1
        self._unanswered_at.append(now)

    def echoed(self, now: float) -> None:
        """Record that the dispatcher has echoed a beat."""
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
        self.stop_at = min(
            now + self.lease_s / 2, max(now, self._answered_at + 0.75 * self.lease_s)
        )

    def report(self, message: Message) -> list[Send]:
        """If the worker is registered, return the Send of this report of ended leases. Otherwise
        postpone the report, and return []."""
        if self.registered:
            return [Send(DISPATCHER, message)]
        self._postponed.append(Send(DISPATCHER, message))
        return []

    def accepted(self, beat_s: float, lease_s: float, now: float) -> list[Send]:
        """Record that the dispatcher has accepted the registration. Return the reports postponed
        since the Register, in order."""
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
        """Record a refusal by the dispatcher. Return whether the worker will register again. If so,
        `register_due` says when."""
        self.registered = False
        if code in RETRIED_REFUSALS and self._register_at is not None:
            # A registration is already planned. The dispatcher refuses each message that was on its
            # way, but these refusals count as one.
            return True
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
        """Return whether all work must stop now, because the contact was lost for too long.

        Return True at most once after each loss of contact. The caller must then stop the work, and
        the worker registers anew.
        """
        if self.stop_at is None or now < self.stop_at:
            return False
        self.stop_at = None
        if not self.up:
            self.dispatcher = None
        elif self._register_at is None:
            # Register again, because the Register that was sent lists leases which the caller ends
            # now.
            self._register_at = now
        return True

    def beat_due(self, now: float) -> bool:
        due = self._beat_at is not None and now >= self._beat_at
        if due:
            self._beat_at = now + self._beat_s
        return due
