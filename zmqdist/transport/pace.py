"""How many bytes of large payloads may be on the way through one connection, so that small messages
and heartbeats pass.

Rule: a pace bounds the bytes that were sent and not yet acknowledged. A pace never waits or sends,
  and gets the time as an argument.

Theory of operation
    A heartbeat queues behind all bytes that were sent before it: in the kernel's buffer, and in the
    network router before the slowest link. If the queue is longer than the link carries within the
    heartbeat's time-out, the connection ends, although the link works. A pace measures the queue by
    acknowledgments. It takes the time from the sending of a chunk to its acknowledgment, and
    subtracts the shortest such time. The rest is the time that the chunk and its acknowledgment
    spent in queues, as a heartbeat and its reply would, too.

    The aim of the window is the number of bytes that the link carries in that shortest time plus
    `QUEUE_S`, at the rate that the link has just shown. The window begins small, because the link
    is unknown. Each acknowledgment widens it by `GROWTH` times the acknowledged bytes, up to the
    aim, so that a fast link has its full window after half a megabyte. When the queue has become
    long, the window falls to the aim. It does not fall again because of chunks that were sent
    before it fell. A chunk is a quarter of the window, because a heartbeat cannot interrupt a
    chunk.

    Routes change, so the shortest time is trusted for `TRIP_KEPT_S` only. After that no chunk
    leaves until all chunks are acknowledged. The next chunk has no queue before it, so its time is
    a new measurement of the shortest time. The first chunk after a pause gives such a measurement,
    too.

Promises, checked by tests/transport/test_pace.py against simulated links
    P1  The window stays within [window_min, window_max], a chunk within [chunk_min, chunk_max] and
        the window.
    P2  A chunk leaves only if the window has room for it, or if at most one chunk is on the way.
        Two chunks may always be on the way, because the receiver may acknowledge two at a time.
    P3  On a link of constant rate, from 0.5 Mbit/s on, no message waits longer than the heartbeat's
        time-out, even if two connections share the link.
    P4  A link is busy while there is something to send: it carries at least four fifths of its
        rate, as far as window_max permits.
    P5  On a link that holds the largest window without a queue, the window is at its largest after
        ten round trips.
    P6  An acknowledgment of bytes that were never sent changes nothing.
    P7  When the route has become longer, the pace knows the new shortest time after `TRIP_KEPT_S`
        and two round trips, if chunks leave.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

from zmqdist.limits import (
    BULK_CHANNEL_WINDOW_BYTES,
    BULK_CHANNEL_WINDOW_BYTES_START,
    CHUNK_BYTES,
    CHUNK_BYTES_MIN,
)

QUEUE_S: Final = 0.25
"""Seconds that bytes may spend in queues. It is long enough to keep a link busy, and an eighth of
the heartbeat's time-out."""

LONG_QUEUE_S: Final = 0.5
"""Seconds in queues above which the window narrows. It is only a quarter of the heartbeat's
time-out, because several connections may share a link.
"""

SOJOURN_S_MAX: Final = 1.0
"""Seconds. A chunk that is on the way for longer narrows the window, even if its link is long. It
is half of the heartbeat's time-out."""

GROWTH: Final = 4
"""Bytes by which one acknowledged byte widens the window. With 1 instead of 4, the first mebibyte
takes 1.5 times as long on a fast link. With more than 4, the pace takes too long to recognise a
slow link that lets a burst pass at full speed.
"""

TRIP_KEPT_S: Final = 20.0
"""Seconds for which the shortest trip is trusted. A new measurement costs time: the link is idle
for about one trip before it."""


class _Sent(NamedTuple):
    nbytes: int
    at: float
    alone: bool
    """Whether no chunk was on the way when this chunk was sent, except a chunk that the receiver
    acknowledges together with it."""
    delivered: int
    """Bytes that had been acknowledged when this chunk was sent."""


class Pace:
    """The window of one connection; the module's docstring explains it.

    Attributes:
      window_bytes: bytes that may be on the way at one time. *Invariant*: window_min <=
        window_bytes <= window_max.
      chunk_bytes: size of the largest chunk to send now.
      unacknowledged: bytes that were sent and not acknowledged.
      trip_s: the shortest time from the sending of a chunk to its acknowledgment during the last
        `TRIP_KEPT_S` or so; infinite before the first acknowledgment.
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
        """Make the pace of a new connection.

        Args:
          window_bytes: the first window.
          chunk_min: the smallest chunk, which is also the smallest window.
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

    def fits(self, nbytes: int) -> bool:
        """Return whether a chunk of `nbytes`, at most `chunk_bytes`, may be sent now."""
        # P7: a chunk without a queue before it measures the trip anew
        if self._stale:
            return self._alone()
        # P2: two chunks may always be on the way, because the receiver may acknowledge two together
        return len(self._sent) < 2 or self.unacknowledged + nbytes <= self.window_bytes

    def _alone(self) -> bool:
        """Return whether a chunk that is sent now has no queue before it. An earlier chunk that may
        share its acknowledgment with the new chunk does not count.
        """
        if not self._sent:
            return True
        first = self._sent[0]
        return (
            len(self._sent) == 1
            and first.nbytes == self._chunk_max
            and (first.alone or self._stale)
        )

    def sent(self, nbytes: int, now: float) -> None:
        """Record that a chunk was sent."""
        self.unacknowledged += nbytes
        self._sent.append(_Sent(nbytes, now, self._alone(), self._delivered))

    def acknowledged(self, nbytes: int, now: float) -> bool:
        """Record that the receiver has acknowledged `nbytes` bytes of the oldest chunks. Return
        False, and change nothing, if fewer than `nbytes` bytes are unacknowledged.
        """
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
        if (
            sojourn_s <= self.trip_s + QUEUE_S / 2
            and delivered > self.window_bytes - self.chunk_bytes
        ):
            # The window is used up although there is no queue, so the window itself limits the
            # measured rate: widen it by a chunk.
            aim = max(aim, self.window_bytes + self.chunk_bytes)
        # the queue is short, so that the window may only widen
        if sojourn_s <= min(self.trip_s + LONG_QUEUE_S, SOJOURN_S_MAX):
            if aim > self.window_bytes:
                self._resize(min(aim, self.window_bytes + GROWTH * nbytes))
        # chunks that left before the window fell say nothing about the new window
        elif chunk.at >= self._fell_at:
            self._resize(min(aim, self.window_bytes))
            self._fell_at = now
