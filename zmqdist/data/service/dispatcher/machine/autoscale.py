"""Estimate how many workers would be enough for the readers. The figure is for the operator of a cluster; this module starts no worker.

Theory
    An iteration needs enough workers to make elements as fast as its readers could take them: the sum of the readers' rates, divided by
    the mean rate of a worker, rounded up. The rate of a reader is the rate at which it would take elements if it never waited. A rate
    further than one standard deviation from the mean is replaced by the median, so that one slow start does not ask for a hundred
    workers.
    The figure is the largest of all iterations, and at most FACTOR_MAX times the current number of workers, and MORE_MAX above it.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil
from statistics import fmean, median, pstdev
from typing import Final

from zmqdist.errors import InvalidArgumentError

FACTOR_MAX: Final = 4
MORE_MAX: Final = 500


class AutoScaler:
    """The rates of one iteration's readers and workers, by their numbers."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}
        self._made: dict[int, float] = {}

    def report_worker(self, worker: int, seconds: float) -> None:
        """Note the seconds that a worker needs for an element. Raises InvalidArgumentError if they are not positive."""
        self._made[worker] = _rate("processing_time", seconds)

    def report_reader(self, reader: int, seconds: float) -> None:
        """Note the seconds after which a reader could take another element. Raises InvalidArgumentError if they are not positive."""
        self._taken[reader] = _rate("target_processing_time", seconds)

    def keep(self, workers: Collection[int], readers: Collection[int]) -> None:
        """Forget all workers and readers except these."""
        self._made = {number: rate for number, rate in self._made.items() if number in workers}
        self._taken = {number: rate for number, rate in self._taken.items() if number in readers}

    def optimal(self) -> int | None:
        """Return how many workers would be enough; None until both a worker and a reader have reported."""
        if not self._made or not self._taken:
            return None
        return max(1, ceil(sum(_usual(self._taken.values())) / fmean(_usual(self._made.values()))))


class AutoScalers:
    """The rates of all iterations."""

    def __init__(self) -> None:
        self._scalers: dict[int, AutoScaler] = {}

    def of(self, iteration: int) -> AutoScaler:
        """Return the rates of one iteration; create them for a new one."""
        return self._scalers.setdefault(iteration, AutoScaler())

    @property
    def iterations(self) -> list[int]:
        """The iterations for which a worker or reader has reported."""
        return list(self._scalers)

    def discard(self, iteration: int) -> None:
        """Forget an iteration that has ended; harmless for one without reports."""
        self._scalers.pop(iteration, None)

    def optimal(self, workers: int) -> int | None:
        """Return how many workers would be enough, given the current number; None without reports."""
        found = [each for each in (scaler.optimal() for scaler in self._scalers.values()) if each is not None]
        if not found:
            return None
        return min(max(found), max(1, FACTOR_MAX * workers), workers + MORE_MAX)


def _rate(name: str, seconds: float) -> float:
    if not seconds > 0:
        raise InvalidArgumentError(f"{name} is {seconds}, wants more than 0 s")
    return 1.0 / seconds


def _usual(rates: Collection[float]) -> list[float]:
    mean, spread, middle = fmean(rates), pstdev(rates), median(rates)
    return [middle if abs(rate - mean) > spread else rate for rate in rates]
