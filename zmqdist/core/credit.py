"""How much may be on the way: windows for work and for bytes.

Rule: a window bounds what has been given and not yet come back; it never waits and never sends.

`WorkWindow` bounds the pieces of work that a worker holds. It aims at `horizon_s` of work: enough that the worker does not
fall idle while the next batch travels, little enough that a newcomer finds something to take over. It starts small, because
nobody knows how long a function takes, and follows the rate at which results come back.

Promises, checked by tests/core/test_credit.py and by the simulation
    P1  the limit stays within [2 x slots, per_slot_max x slots]
    P2  work that takes longer than the horizon is given out at most two for a slot: one runs, one waits
    P3  a ByteWindow never allows more than its size on the way, but for a single chunk, which always may
"""

from __future__ import annotations

from zmqdist.limits import WORKER_WINDOW_MAX

HORIZON_S = 0.05
SAMPLE_S = 0.005
"""A rate is taken over at least this long: single messages say nothing."""


class WorkWindow:
    """Pieces of work that one worker may hold unfinished."""

    __slots__ = ("_busy_s", "_ceiling", "_count", "_floor", "_since", "limit", "rate")

    def __init__(self, slots: int, per_slot_max: int = WORKER_WINDOW_MAX) -> None:
        self._floor = 2 * slots
        self._ceiling = per_slot_max * slots
        self.limit = self._floor
        self.rate = 0.0
        self._count = 0
        self._busy_s = 0.0
        self._since: float | None = None
        """Since when the worker has had something; None while it has nothing."""

    def given(self, now: float) -> None:
        """Work was given."""
        if self._since is None:
            self._since = now

    def done(self, count: int, now: float, *, idle: bool) -> None:
        """`count` pieces came back; `idle`: the worker has nothing left.

        Only the time counts in which it had something: one that is given little, and so is idle in between, is not slow.
        """
        if not count:
            return
        self._count += count
        self._busy_s += now - (now if self._since is None else self._since)
        self._since = None if idle else now
        if self._busy_s < SAMPLE_S:
            return
        sample = self._count / self._busy_s
        # Down at once, up by half: a rate that was too high makes others wait, one that is too low costs a message.
        self.rate = sample if sample < self.rate else (self.rate + sample) / 2
        self.limit = max(self._floor, min(self._ceiling, int(self.rate * HORIZON_S)))
        self._count = 0
        self._busy_s = 0.0

    def remaining_s(self, held: int) -> float:
        """How long the worker will probably be busy with what it holds; infinite while its rate is unknown."""
        return held / self.rate if self.rate > 0 else float("inf")

    def overdue_at(self, held: int) -> float:
        """When all that it holds should have come back; if nothing has until then, it is at something slow."""
        return float("inf") if self._since is None else self._since + self.remaining_s(held)


class ByteWindow:
    """Bytes of bulk chunks that may be asked for and not yet here."""

    __slots__ = ("_on_the_way", "_size")

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._on_the_way = 0

    def take(self, count_bytes: int) -> bool:
        """Whether a chunk of so many bytes may be asked for now; then it counts. With nothing on the way always."""
        if self._on_the_way and self._on_the_way + count_bytes > self._size:
            return False
        self._on_the_way += count_bytes
        return True

    def arrived(self, count_bytes: int) -> None:
        self._on_the_way -= count_bytes
        assert self._on_the_way >= 0, "more arrived than was asked for"
