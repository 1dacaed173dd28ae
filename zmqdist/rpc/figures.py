"""The figures of the methods of the RPC servers of this process: calls, errors, durations.

A server's loop counts, and any thread may read: a number may be a moment older than another one.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import nlargest

from zmqdist.limits import BUCKET_BOUNDS_S, BUCKETS, METHODS_SHOWN_MAX
from zmqdist.messages import MethodFacts


class MethodFigures:
    """The calls of one method that have ended."""

    __slots__ = ("_buckets", "count", "failed", "max_s", "sum_s")

    def __init__(self) -> None:
        self.count = self.failed = 0
        self.sum_s = self.max_s = 0.0
        self._buckets: list[int] | None = None

    def add(self, took_s: float, code: int) -> None:
        """Count a call. `code` is that of its error, 0 without one."""
        self.count += 1
        self.sum_s += took_s
        if took_s > self.max_s:
            self.max_s = took_s
        if code:
            self.failed += 1
        if self._buckets is None:  # most methods are never called
            self._buckets = [0] * BUCKETS
        self._buckets[bisect_left(BUCKET_BOUNDS_S, took_s)] += 1

    def facts(self, method: str, in_flight: int) -> MethodFacts:
        buckets = [(at, count) for at, count in enumerate(self._buckets or ()) if count]
        return MethodFacts(
            method, self.count, self.failed, in_flight, self.sum_s, self.max_s, buckets
        )


def most_called(methods: list[MethodFacts]) -> list[MethodFacts]:
    """Return those methods that have been called, at most METHODS_SHOWN_MAX."""
    called = [facts for facts in methods if facts.count or facts.in_flight]
    return nlargest(METHODS_SHOWN_MAX, called, key=lambda facts: facts.count)
