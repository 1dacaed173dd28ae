"""How many work items a worker may have, counting those that are on their way to or from it.

Rule: a window only computes a bound for its owner; it never waits and never sends.

`WorkWindow` aims at the work that keeps a worker busy for `HORIZON_S` and one round trip. This
amount of work lasts until the next batch arrives. More would leave no work for a worker that joins.
The window starts small, because the duration of a function is not known, and then follows the rate
at which the worker ends work items. The rate counts only the time in which the worker had work. The
worker itself measures that time, because by the dispatcher's clock a distant worker that got little
work would seem slow.

Promises, checked by tests/scheduling/dispatcher/test_credit.py and by the simulation
    P1  the limit stays within [2 x slots, per_slot_max x slots]
    P2  if a work item takes longer than `HORIZON_S` and one round trip, each slot gets at most two
        items: one item runs, one item waits
    P3  a worker whose window is always full is busy all the time, even with a long round trip,
        unless a bound of P1 limits the window
"""

from __future__ import annotations

from zmqdist.limits import WORKER_WINDOW_MAX

HORIZON_S = 0.05
"""Seconds of work that a worker should have, in addition to a round trip."""
SAMPLE_S = 0.005
"""Seconds. A rate is measured over at least this much busy time, because single messages would
change a rate over less time too much."""
TRIP_S_MAX = 1.0
"""A round trip above this does not widen the window, because it shows that the dispatcher or the
worker reads its messages late."""


class WorkWindow:
    """The bound on the number of unfinished work items that one worker may have.

    Attributes:
      limit: the bound.
      rate: work items that the worker ends in a second while it has work; 0 while unknown.
      trip_s: the round-trip time to the worker.
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
        """When the worker last ended an item, or got an item after having no work; None while it
        has no work."""

    def note_handed_out(self, now: float) -> None:
        """Record that work was handed out to the worker."""
        if self._since is None:
            self._since = now

    def note_returned(
        self, count: int, busy_s: float, trip_s: float, now: float, *, idle: bool
    ) -> None:
        """Record that `count` items have ended, and adapt the limit.

        Args:
          busy_s: the time for which the worker had work since its last report.
          trip_s: the round-trip time, as the worker measures it.
          idle: whether the worker has no item left.
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
        # Adopt a lower rate at once, but only half of an increase. A rate that is too high takes
        # work from other workers, whereas a rate that is too low costs only a message.
        self.rate = sample if sample < self.rate else (self.rate + sample) / 2
        self.limit = max(
            self._floor, min(self._ceiling, int(self.rate * (HORIZON_S + self.trip_s)))
        )
        self._count = 0
        self._busy_s = 0.0

    @property
    def _is_sample(self) -> bool:
        """Whether enough busy time has passed since the last sample to compute a rate.

        With a long round trip a wrong rate costs more, so the rate is measured over more time, or
        over a whole window of work items.
        """
        if self.trip_s <= SAMPLE_S:
            return self._busy_s >= SAMPLE_S
        return self._busy_s >= max(SAMPLE_S, self.trip_s / 4) or self._count >= self.limit

    def remaining_s(self, held: int) -> float:
        """Return for how many seconds `held` items will probably keep the worker busy; infinite
        while the worker's rate is unknown."""
        return held / self.rate if self.rate > 0 else float("inf")

    def overdue_at(self, held: int) -> float:
        """Return the time at which all `held` items should have ended. If no item has ended by
        then, the worker runs a slow function."""
        return (
            float("inf")
            if self._since is None
            else self._since + self.trip_s + self.remaining_s(held)
        )
