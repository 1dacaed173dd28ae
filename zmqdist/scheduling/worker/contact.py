"""A worker's contact with its dispatcher: when it registers, sends heartbeats, must stop its work, and gives up.

Theory of operation
    While connected the worker sends a Beat at each interval. The dispatcher echoes it, which shows that everything sent before has arrived.
    When the connection ends, work may go on for half a lease, or until three quarters of a lease after the last echoed beat was sent,
    whichever comes first: the dispatcher counts its lease from the last message that it got, and it got that beat after it was sent. The
    time when the echo is read does not count, because the echo may have waited here while the worker was frozen.
    Without contact for the orphan limit the worker ends.
    A refused registration is repeated for a while, because a worker under the same name may have crashed a moment ago. A worker without
    an index of its own does not insist on the one that a dispatcher gave it: another worker may have got it while this one was away.
    A Register names what the worker had when it was sent. What ends before the reply is reported after it, because the dispatcher refuses
    messages from a peer that is not registered. If all work must stop in that time, the worker registers again, without leases; it ignores
    the reply to the first Register, and work that was assigned before the dispatcher had read the second one.
    The dispatcher replies to a Register and a Beat at once, so the time until the reply is the round-trip time.

Not here: what is stopped, and the content of a registration (machine.py).
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
"""The only peer of a worker."""
REGISTER_AGAIN_S = 0.25
"""Seconds before a refused registration is repeated."""
TRIPS_KEPT = 4
"""The round-trip time is the shortest of the last ones: longer ones include waiting at one of the two ends."""
RETRIED_REFUSALS = (errors.ALREADY_EXISTS, errors.FAILED_PRECONDITION)
"""Codes of refusals for which the registration is repeated, because their cause may pass."""


def earliest(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times; None stands for never. Called after each event, and faster than `min`."""
    if one is None or (other is not None and other < one):
        return other
    return one


@dataclass(slots=True)
class Contact:
    """The state of the contact. Times are seconds of the machine's clock; None where nothing is due.

    Attributes:
      orphan_at: when the worker ends for lack of a dispatcher; None while it is registered.
      dispatcher: incarnation of the dispatcher that knows the worker's leases; None for none.
      up: whether the connection is established.
      registered: whether the dispatcher has accepted the registration over this connection. Invariant: only while `up`.
      named: whether the index is the worker's own and not given by a dispatcher.
      index_taken: whether the index was refused because another worker has it.
      serial: number of the latest registration over this connection, from 1. An older dispatcher replies with 0.
      lease_s: the dispatcher's lease; 0 before the first registration.
      beats_sent, beats_echoed: heartbeats over this connection. Invariant: beats_echoed <= beats_sent.
      stop_at: when everything must stop, because contact is lost.
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
    """When the registrations and beats without a reply so far were sent, oldest first."""
    _answered_at: float = -inf
    """When the latest one with a reply was sent: the dispatcher has heard from the worker then or later."""
    _postponed: list[Send] = field(default_factory=list)
    """Messages to send once the registration is accepted."""
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
        """Note that the connection is established. Return whether this dispatcher does not know the worker's leases."""
        self.up = True
        self.serial = 0
        self.beats_sent = self.beats_echoed = 0
        self._unanswered_at.clear()
        is_new = incarnation != self.dispatcher
        self.dispatcher = incarnation
        self._register_at = None
        return is_new

    def note_registration(self, now: float) -> None:
        """Note that a registration is sent, which names all that the worker has now."""
        self.serial += 1
        self._postponed.clear()
        self._unanswered_at.clear()
        self._unanswered_at.append(now)

    def note_beat(self, now: float) -> None:
        """Note that a beat is sent."""
        self.beats_sent += 1
        self._unanswered_at.append(now)

    def echoed(self, now: float) -> None:
        """Note that the dispatcher has echoed a beat."""
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
        """Return a report of ended leases to send now, or postpone it. A new Register replaces it, because that does not name them."""
        if self.registered:
            return [Send(DISPATCHER, message)]
        self._postponed.append(Send(DISPATCHER, message))
        return []

    def accepted(self, beat_s: float, lease_s: float, now: float) -> list[Send]:
        """Note that the registration is accepted. Return the postponed messages, in order."""
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
        """Note a refusal. Return whether the registration will be repeated; `register_due` says when."""
        self.registered = False
        if code in RETRIED_REFUSALS and self._register_at is not None:
            return True  # several messages were in flight, and each is refused
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
        """Return whether everything must stop now (once). The next registration names nothing of it."""
        if self.stop_at is None or now < self.stop_at:
            return False
        self.stop_at = None
        if not self.up:
            self.dispatcher = None
        elif self._register_at is None:
            self._register_at = now  # the registration in flight names the leases that end now
        return True

    def beat_due(self, now: float) -> bool:
        due = self._beat_at is not None and now >= self._beat_at
        if due:
            self._beat_at = now + self._beat_s
        return due
