"""How much of what is large may be on the way by one connection, so that small messages and heartbeats pass: what the link carries tells.

Rule: a pace bounds what has been sent and not yet acknowledged; it never waits and never sends, and is told the time.

Theory of operation
    A heartbeat stands behind what was sent before it: in the kernel's buffer, and in the router before the slowest link. Whoever sends
    more than the link carries in the heartbeat's time-out ends its own connection, though everything moves. What is acknowledged tells
    how long that queue is: the time from the sending of a chunk to its acknowledgment, less the shortest such time, is spent in queues,
    in either direction, just as a heartbeat and its answer would be.

    The window aims at what the link carries in that shortest time and `QUEUE_S` more, at the rate at which it has just carried. It begins
    small, because nobody knows the link, and each acknowledgment widens it by `GROWTH` times what it acknowledges, up to the aim: a fast
    link has its full window after half a megabyte. When the queue has become long it falls to the aim, once for all that was sent
    before. Chunks are a quarter of the window: a chunk is what cannot be interrupted for a heartbeat. Between two processes of one host
    no link is slow, and the window begins with its largest.

    Routes change, so the shortest time is believed for `TRIP_KEPT_S`. After that nothing more leaves until all on the way is
    acknowledged, and the next chunk, which waits behind nothing, tells it anew; so does the first chunk after a pause.

Promises, checked by tests/machines/test_pace.py against simulated links
    P1  the window stays within [window_min, window_max], a chunk within [chunk_min, chunk_max] and the window
    P2  no chunk leaves that the window has no room for, but one with no more than one on the way: the other side may wait for a second
    P3  on a link of constant rate, from 0.5 Mbit/s on, nothing waits longer than the heartbeat's time-out; also two at once
    P4  a link is busy while there is something to send: at least four fifths of its rate arrives, as far as window_max lets it
    P5  on a link that holds the largest window without a queue, the window is at its largest after ten round trips
    P6  what was acknowledged and never sent changes nothing
    P7  the shortest trip of a route that has become longer is known after `TRIP_KEPT_S` and two trips, if chunks leave
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

from zmqdist.limits import BULK_CHANNEL_WINDOW_BYTES, BULK_CHANNEL_WINDOW_BYTES_START, CHUNK_BYTES, CHUNK_BYTES_MIN

QUEUE_S: Final = 0.25
"""What may wait in queues: enough to keep a link busy, an eighth of the heartbeat's time-out."""

LONG_QUEUE_S: Final = 0.5
"""A longer wait narrows the window. The time-out of heartbeats is four times that, and several connections share a link."""

SOJOURN_S_MAX: Final = 1.0
"""A chunk on its way for longer narrows the window though its link is far away: half of the heartbeat's time-out."""

GROWTH: Final = 4
"""Bytes by which one acknowledged byte widens the window. With 1 the first mebibyte of a connection takes half as long again on a fast
link; with more, a slow link that lets a burst pass at full speed looks fast for too long."""

TRIP_KEPT_S: Final = 20.0
"""How long the shortest trip is believed. To learn it anew costs a link one trip without work."""


class _Sent(NamedTuple):
    nbytes: int
    at: float
    alone: bool
    """Nothing was on the way before, but for one that the other side acknowledges together with this one."""
    delivered: int
    """What was acknowledged until then."""


class Pace:
    """See the module's docstring.

    Attributes:
      window_bytes: so much may be on the way.
      chunk_bytes: the largest chunk to send now.
      unacknowledged: bytes that were sent and not acknowledged.
      trip_s: the shortest time from a chunk's sending to its acknowledgment in about `TRIP_KEPT_S`; infinite before the first.
    """

    __slots__ = (
        "_chunk_max",
        "_chunk_min",
        "_delivered",
        "_fell_at",
        "_sent",
        "_stale",
        "_trip_at",
        "_window_max",
        "_window_min",
        "chunk_bytes",
        "trip_s",
        "unacknowledged",
        "window_bytes",
    )

    def __init__(
        self,
        window_max: int = BULK_CHANNEL_WINDOW_BYTES,
        chunk_max: int = CHUNK_BYTES,
        *,
        window_bytes: int = BULK_CHANNEL_WINDOW_BYTES_START,
        chunk_min: int = CHUNK_BYTES_MIN,
    ) -> None:
        """Args:
        window_bytes: to begin with.
        chunk_min: the smallest window, too.
        """
        assert chunk_min <= chunk_max <= window_max
        self._window_max = window_max
        self._window_min = self._chunk_min = chunk_min
        self._chunk_max = chunk_max
        self._sent: deque[_Sent] = deque()
        self._delivered = 0
        self._fell_at = -inf
        self._trip_at = -inf
        self._stale = False
        self.unacknowledged = 0
        self.trip_s = inf
        self._resize(window_bytes)

    def _resize(self, window_bytes: int) -> None:
        self.window_bytes = max(self._window_min, min(self._window_max, window_bytes))
        self.chunk_bytes = max(self._chunk_min, min(self._chunk_max, self.window_bytes // 4))

    def widen(self) -> None:
        """The link is known to be fast."""
        self._resize(self._window_max)

    def fits(self, nbytes: int) -> bool:
        """Whether a chunk of so many bytes, at most `chunk_bytes`, may leave now."""
        if self._stale:
            return self._alone()
        return len(self._sent) < 2 or self.unacknowledged + nbytes <= self.window_bytes

    def _alone(self) -> bool:
        """Whether a chunk that leaves now waits behind nothing. Of two of the largest chunks there may be one acknowledgment."""
        if not self._sent:
            return True
        first = self._sent[0]
        return len(self._sent) == 1 and first.nbytes == self._chunk_max and (first.alone or self._stale)

    def sent(self, nbytes: int, now: float) -> None:
        """A chunk leaves."""
        self.unacknowledged += nbytes
        self._sent.append(_Sent(nbytes, now, self._alone(), self._delivered))

    def acknowledged(self, nbytes: int, now: float) -> bool:
        """The other side has taken so many bytes, of the oldest chunks; False: more than were sent."""
        if not 0 <= nbytes <= self.unacknowledged:
            return False
        self.unacknowledged -= nbytes
        self._delivered += nbytes
        last, left = None, nbytes
        while left > 0:
            oldest = self._sent.popleft()
            if oldest.nbytes > left:
                self._sent.appendleft(oldest._replace(nbytes=oldest.nbytes - left))
                break
            last, left = oldest, left - oldest.nbytes
        if last is not None:
            self._adjust(last, nbytes, now)
        return True

    def _adjust(self, chunk: _Sent, nbytes: int, now: float) -> None:
        sojourn_s = max(now - chunk.at, 1e-6)
        stale = now - self._trip_at > TRIP_KEPT_S
        if sojourn_s <= self.trip_s or (stale and chunk.alone):
            self.trip_s, self._trip_at, stale = sojourn_s, now, False
        self._stale = stale
        delivered = self._delivered - chunk.delivered
        aim = int(delivered / sojourn_s * (self.trip_s + QUEUE_S))
        if sojourn_s <= self.trip_s + QUEUE_S / 2 and delivered > self.window_bytes - self.chunk_bytes:
            # There is no queue, and no room: whole chunks may not reach the aim.
            aim = max(aim, self.window_bytes + self.chunk_bytes)
        if sojourn_s <= min(self.trip_s + LONG_QUEUE_S, SOJOURN_S_MAX):
            if aim > self.window_bytes:
                self._resize(min(aim, self.window_bytes + GROWTH * nbytes))
        elif chunk.at >= self._fell_at:
            self._resize(min(aim, self.window_bytes))
            self._fell_at = now
