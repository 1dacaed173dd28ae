"""How much work may be on the way to a worker and back.

Rule: a window bounds what has been given and not yet come back; it never waits and never sends.

`WorkWindow` bounds the pieces of work that a worker holds or that travel to it and back. It aims at `horizon_s` of work at the
worker, and at what the worker does in a round trip besides: enough that the worker does not fall idle while the next batch travels,
little enough that a newcomer finds something to take over. It starts small, because nobody knows how long a function takes, and
follows the rate at which the worker works. That rate counts the time in which the worker had work, which the worker itself reports:
seen from here, a worker that was given little and is far away looks slow.

Promises, checked by tests/machines/test_credit.py and by the simulation
    P1  the limit stays within [2 x slots, per_slot_max x slots]
    P2  work that takes longer than the horizon and the round trip is given out at most two for a slot: one runs, one waits
    P3  a worker that always has work in its window is busy all the time, however long the round trip is, as far as P1 lets it
"""

from __future__ import annotations

from zmqdist.limits import WORKER_WINDOW_MAX

HORIZON_S = 0.05
SAMPLE_S = 0.005
"""A rate is taken over at least this long: single messages say nothing."""
TRIP_S_MAX = 1.0
"""A longer round trip is a dispatcher or a worker that does not come to its messages, and gets no more of them."""


class WorkWindow:
    """Pieces of work that one worker may hold unfinished.

    Attributes:
      limit: so many.
      rate: pieces a second of work that the worker does; 0 while it is not known.
      trip_s: the round trip to it.
    """

    __slots__ = ("_busy_s", "_ceiling", "_count", "_floor", "_since", "limit", "rate", "trip_s")

    def __init__(self, slots: int, per_slot_max: int = WORKER_WINDOW_MAX) -> None:
        self._floor = 2 * slots
        self._ceiling = per_slot_max * slots
        self.limit = self._floor
        self.rate = 0.0
        self.trip_s = 0.0
        self._count = 0
        self._busy_s = 0.0
        self._since: float | None = None
        """When it last gave something back, or was given something after it had nothing; None while it has nothing."""

    def note_handed_out(self, now: float) -> None:
        """Work was given."""
        if self._since is None:
            self._since = now

    def note_returned(self, count: int, busy_s: float, trip_s: float, now: float, *, idle: bool) -> None:
        """`count` pieces came back.

        Args:
          busy_s: so long the worker had work since it last gave something back.
          trip_s: the round trip, as the worker sees it.
          idle: the worker has nothing left.
        """
        if not count:
            return
        self._count += count
        self._busy_s += busy_s
        self.trip_s = min(trip_s, TRIP_S_MAX)
        self._since = None if idle else now
        if not self._is_sample:
            return
        sample = self._count / max(self._busy_s, 1e-6)
        # Down at once, up by half: a rate that was too high makes others wait, one that is too low costs a message.
        self.rate = sample if sample < self.rate else (self.rate + sample) / 2
        self.limit = max(self._floor, min(self._ceiling, int(self.rate * (HORIZON_S + self.trip_s))))
        self._count = 0
        self._busy_s = 0.0

    @property
    def _is_sample(self) -> bool:
        """Over a long way each wrong turn costs a round trip: a rate is taken over more time there, but for a window that is small."""
        if self.trip_s <= SAMPLE_S:
            return self._busy_s >= SAMPLE_S
        return self._busy_s >= max(SAMPLE_S, self.trip_s / 4) or self._count >= self.limit

    def remaining_s(self, held: int) -> float:
        """How long the worker will probably be busy with what it holds; infinite while its rate is unknown."""
        return held / self.rate if self.rate > 0 else float("inf")

    def overdue_at(self, held: int) -> float:
        """When all that it holds should have come back; if nothing has until then, it is at something slow."""
        return float("inf") if self._since is None else self._since + self.trip_s + self.remaining_s(held)


class BusyTime:
    """How long a worker has had work since its last report: what the other end's `WorkWindow` counts."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None

    def note_arrival(self, now: float, held: int) -> None:
        """Work has come to a worker that holds `held` pieces."""
        if not held:
            self._since = now

    def take_us(self, now: float, held: int) -> int:
        """The microseconds for a report that leaves the worker with `held` pieces."""
        busy_s = 0.0 if self._since is None else now - self._since
        self._since = now if held else None
        return int(busy_s * 1e6)
