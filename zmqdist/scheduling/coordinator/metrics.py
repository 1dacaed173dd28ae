"""Figures about the work of all coordinators in this process, which are recorded while
`enable_metrics` is set.

    histogram  function_tracing     seconds to pickle a function that the cluster did not know
               closure_execution    seconds from the scheduling of a work item to its end
               remote_value_fetch   seconds to unpickle a result, and to fetch it first if its worker keeps it
               server_def_update    seconds until an invited worker has accepted the program (only with strategies that invite workers)
    gauge      queued_closures      work items that wait in the queue, or for their inputs
               inflight_closures    work items that workers have
    counter    worker_failures      workers that were lost; each coordinator counts them

TensorFlow's metrics have the same names. A read of a gauge asks the dispatcher, even while
`enable_metrics` is not set. While it is not set, a call of `record` or `count` only checks this
variable.

Not here: figures of single workers, which the dispatcher counts. `ClusterCoordinator.metrics`
returns all figures.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from zmqdist import clock as time

enable_metrics = False
"""Whether figures are recorded. Set it before the work that is to be measured."""


class Histogram:
    """Counts of values in exponential buckets. Any thread may add values.

    Args:
      first: upper bound of the first bucket.
      factor: ratio of each bound to the bound before it.
      count: number of bounds. One more bucket counts the values above the last bound.

    Attributes:
      bounds: the upper bounds of all buckets except the last bucket.
    """

    def __init__(self, first: float, factor: float, count: int) -> None:
        self.bounds = [first * factor**power for power in range(count)]
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            self._counts = [0] * (len(self.bounds) + 1)
            self._min, self._max, self._sum = float("inf"), float("-inf"), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect.bisect_right(self.bounds, value)] += 1
            self._min, self._max = min(self._min, value), max(self._max, value)
            self._sum += value

    def summary(self) -> dict[str, Any]:
        """Return a dict {"min", "max", "num", "sum", "histogram": {(low, high): count}}. Without
        values, min and max are 0."""
        with self._lock:
            number = sum(self._counts)
            edges = [0.0, *self.bounds, float("inf")]
            return {
                "min": self._min if number else 0.0,
                "max": self._max if number else 0.0,
                "num": number,
                "sum": self._sum,
                "histogram": {
                    edge: count
                    for edge, count in zip(itertools.pairwise(edges), self._counts, strict=True)
                    if count
                },
            }


HISTOGRAMS = {
    "function_tracing": Histogram(0.1, 10, 6),
    "closure_execution": Histogram(0.1, 10, 6),
    "remote_value_fetch": Histogram(0.001, 10, 7),
    "server_def_update": Histogram(1, 10, 5),
}
GAUGES: dict[str, Callable[[], int]] = {}
"""Functions that compute a gauge from the open coordinators (coordinator_snapshot.py) on each read,
so that no other code has to update the gauge."""
_counters = {"worker_failures": 0}
_lock = threading.Lock()


def names() -> list[str]:
    """Return the names of all metrics."""
    return [*HISTOGRAMS, *GAUGES, *_counters]


def get_metric_summary(name: str) -> Any:
    """Return the summary of a histogram (`Histogram.summary`), or the number of a gauge or counter.

    Raises:
      ValueError: there is no metric of this name.
    """
    if name in HISTOGRAMS:
        return HISTOGRAMS[name].summary()
    if name in GAUGES:
        return GAUGES[name]()
    if name in _counters:
        return _counters[name]
    raise ValueError(f"no metric {name!r}; there are {', '.join(names())}")


def reset() -> None:
    """Clear all histograms and counters."""
    for histogram in HISTOGRAMS.values():
        histogram.clear()
    with _lock:
        _counters.update(dict.fromkeys(_counters, 0))


def count(name: str, more: int) -> None:
    """Add `more` to a counter, if figures are recorded."""
    if enable_metrics:
        with _lock:
            _counters[name] += more


def record(name: str, seconds: float) -> None:
    """Add a duration to a histogram, if figures are recorded."""
    if enable_metrics:
        HISTOGRAMS[name].add(seconds)


def monitored_timer(
    name: str, state_tracker: Callable[[], Any] | None = None
) -> AbstractContextManager[None]:
    """Return a context manager that records the seconds of its block in a histogram.

    With a `state_tracker`, it records only if `state_tracker()` returns different values before and
    after the block.
    """
    return _timed(name, state_tracker) if enable_metrics else _OFF


_OFF: AbstractContextManager[None] = nullcontext()


@contextmanager
def _timed(name: str, state_tracker: Callable[[], Any] | None) -> Iterator[None]:
    before = state_tracker() if state_tracker is not None else None
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    if state_tracker is None or state_tracker() != before:
        HISTOGRAMS[name].add(seconds)
