"""Virtual time: nothing waits, and a run is the same each time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

AT_ONCE_MAX = 10_000
"""Events at one moment of virtual time; more is a loop that would never end."""


class SimClock:
    """Functions to call, by time; of equal times the one that came first.

    Attributes:
      now: virtual seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = itertools.count()
        self._at_once = 0

    def after(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Call `fn` in `delay_s` seconds; 0 is after everything that is due now."""
        self.at(self.now + delay_s, fn)

    def at(self, time_s: float, fn: Callable[[], object]) -> None:
        """Call `fn` at exactly this time, so that what has equal times keeps its order; at once, in its turn, when that has passed."""
        heapq.heappush(self._heap, (max(self.now, time_s), next(self._serial), fn))

    def next_poll(self, since_s: float, step_s: float) -> float:
        """When one looks next that looks each `step_s` since a time: an event at that time does for all the looks that see nothing."""
        at_s = since_s + step_s
        while at_s <= self.now:
            at_s += step_s
        return at_s

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `until_s`, or until `stop` says so after an event."""
        while self._heap and self._heap[0][0] <= until_s:
            at, _, fn = heapq.heappop(self._heap)
            self._at_once = self._at_once + 1 if at == self.now else 0
            assert self._at_once < AT_ONCE_MAX, "a machine asks to be called again and again at the same time"
            self.now = at
            fn()
            if stop():
                return
        self.now = max(self.now, until_s)
