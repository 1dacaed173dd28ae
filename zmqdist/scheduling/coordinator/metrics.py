"""What coordinators of this process have done, in figures: off until `enable_metrics` is set.

    histogram  function_tracing     pickling a function that was not known, seconds
               closure_execution    a piece of work, from its scheduling to its end, seconds
               remote_value_fetch   bringing a result from the worker's host, or its memory, and unpacking it, seconds
               server_def_update    telling a worker for whom it works, until it does (strategies that invite), seconds
    gauge      queued_closures      pieces of work that have not left the queue
               inflight_closures    pieces of work that have left the queue and not ended
    counter    worker_failures      workers that were lost

The names are those of TensorFlow. Off, a hook costs one look at a module's variable.

Not here: figures of single workers, which are the dispatcher's (`ClusterCoordinator.metrics`).
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

enable_metrics = False
"""Whether anything is recorded: set it before the work whose figures are wanted."""


class Histogram:
    """Counts of values by exponential buckets. Any thread may add.

    Args:
      first: upper bound of the first bucket.
      factor: of each bound to the one before.
      count: of bounds; what is above the last has a bucket, too.

    Attributes:
      bounds: the upper bound of each bucket but the last.
    """

    def __init__(self, first: float, factor: float, count: int) -> None:
        self.bounds = [first * factor**power for power in range(count)]
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
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
        """{"min", "max", "num", "sum", "histogram": {(low, high): count}}; min and max are 0 where there was no value."""
        with self._lock:
            number = sum(self._counts)
            edges = [0.0, *self.bounds, float("inf")]
            return {
                "min": self._min if number else 0.0,
                "max": self._max if number else 0.0,
                "num": number,
                "sum": self._sum,
                "histogram": {
                    edge: count for edge, count in zip(itertools.pairwise(edges), self._counts, strict=True) if count
                },
            }


HISTOGRAMS = {
    "function_tracing": Histogram(0.1, 10, 6),
    "closure_execution": Histogram(0.1, 10, 6),
    "remote_value_fetch": Histogram(0.001, 10, 7),
    "server_def_update": Histogram(1, 10, 5),
}
GAUGES: dict[str, Callable[[], int]] = {}
"""What counts over the coordinators that are open, when somebody asks (runtime.py): nobody keeps these figures up to date."""
_counters = {"worker_failures": 0}
_lock = threading.Lock()


def names() -> list[str]:
    """Of all metrics."""
    return [*HISTOGRAMS, *GAUGES, *_counters]


def get_metric_summary(name: str) -> Any:
    """A histogram's summary (see `Histogram.summary`); of the others the number.

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
    """Set histograms and counters to nothing."""
    for histogram in HISTOGRAMS.values():
        histogram.clear()
    with _lock:
        _counters.update(dict.fromkeys(_counters, 0))


def count(name: str, more: int) -> None:
    """So many more of a counter."""
    if enable_metrics:
        with _lock:
            _counters[name] += more


def record(name: str, seconds: float) -> None:
    """Add to a histogram."""
    if enable_metrics:
        HISTOGRAMS[name].add(seconds)


class Executions:
    """When the pieces of work of one coordinator began, and how long they took. Its owner locks, or has one thread for each method."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}

    def begin(self, work: int) -> None:
        """It was scheduled."""
        if enable_metrics:
            self._began[work] = time.perf_counter()

    def end(self, items: Iterable[tuple[int, int, Any]]) -> None:
        """These have ended: (work, how, with what)."""
        if self._began:
            now = time.perf_counter()
            for work, _, _ in items:
                began = self._began.pop(work, None)
                if began is not None:
                    HISTOGRAMS["closure_execution"].add(now - began)


def monitored_timer(name: str, state_tracker: Callable[[], Any] | None = None) -> AbstractContextManager[None]:
    """Record the seconds that a with-block takes in a histogram; with a `state_tracker` only if what that gives has changed by its end."""
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
