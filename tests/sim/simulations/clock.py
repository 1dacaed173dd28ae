"""The clock of a simulation. Time is virtual, so that a simulation waits for nothing and two runs
with the same seed are equal."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

AT_ONCE_MAX = 10_000
"""The most events at one moment of virtual time. More events mean that a machine sets a deadline
for this moment again and again."""


class SimClock:
    """Calls functions in the order of their times. Functions with equal times are called in the
    order in which they were added.

    Attributes:
      now: the virtual seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = itertools.count()
        self._at_once = 0

    def after(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Call `fn` in `delay_s` seconds. If `delay_s` is 0, call it after all functions that are
        due now."""
        self.at(self.now + delay_s, fn)

    def at(self, time_s: float, fn: Callable[[], object]) -> None:
        """Call `fn` at exactly this time. If the time has passed, call `fn` after all functions
        that are due now."""
        heapq.heappush(self._heap, (max(self.now, time_s), next(self._serial), fn))

    def next_poll(self, since_s: float, step_s: float) -> float:
        """Return the time of the next poll of a thread that polls every `step_s` seconds from
        `since_s` on. The simulation leaves out the polls up to now, because they would have seen no
        change.
        """
        at_s = since_s + step_s
        while at_s <= self.now:
            at_s += step_s
        return at_s

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `until_s`, or until `stop` returns True after an event."""
        while self._heap and self._heap[0][0] <= until_s:
            at, _, fn = heapq.heappop(self._heap)
            self._at_once = self._at_once + 1 if at == self.now else 0
            assert self._at_once < AT_ONCE_MAX, (
                "a machine sets a deadline for the current time again and again"
            )
            self.now = at
            fn()
            if stop():
                return
        self.now = max(self.now, until_s)


@contextmanager
def seed_named(seed: int, trace: Sequence[str]) -> Iterator[None]:
    """Add the seed, and the end of the trace, to the text of an error in the with-statement."""
    try:
        yield
    except BaseException as error:
        error.args = (
            f"{error}\nseed {seed}: replay with `pytest tests/sim --seed {seed}`\n"
            + "\n".join(trace[-40:]),
        )
        raise
