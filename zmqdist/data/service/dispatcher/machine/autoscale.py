"""Estimate how many workers would be enough for the readers. The estimate is for the people who run
a cluster. zmqdist itself starts no worker because of the estimate.

Theory
    An iteration needs enough workers to make elements as fast as its readers could take them: the
    sum of the readers' rates, divided by the mean rate of a worker, rounded up. The rate of a
    reader is the rate at which it would take elements if it never waited. The median replaces every
    rate that differs from the mean by more than one standard deviation. Otherwise a single worker
    that starts slowly could raise the estimate to a hundred workers.
    The estimate for the service is the largest estimate of all iterations. It is at most FACTOR_MAX
    times the current number of workers, and at most MORE_MAX above that number.
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
    """The rates at which the readers of one iteration take elements, and at which its workers make
    elements."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}
        self._made: dict[int, float] = {}

    def report_worker(self, worker: int, seconds: float) -> None:
        """Record how many seconds a worker needs for an element. Raises InvalidArgumentError if
        `seconds` is not positive."""
        self._made[worker] = _rate("processing_time", seconds)

    def report_reader(self, reader: int, seconds: float) -> None:
        """Record how many seconds a reader's program needs for an element. Raises
        InvalidArgumentError if `seconds` is not positive."""
        self._taken[reader] = _rate("target_processing_time", seconds)

    def keep(self, workers: Collection[int], readers: Collection[int]) -> None:
        """Keep only the rates of the workers and readers with these numbers, because the others
        have ended."""
        self._made = {number: rate for number, rate in self._made.items() if number in workers}
        self._taken = {number: rate for number, rate in self._taken.items() if number in readers}

    def optimal(self) -> int | None:
        """Return how many workers would be enough for the iteration, or None until both a worker
        and a reader have reported."""
        if not self._made or not self._taken:
            return None
        return max(1, ceil(sum(_usual(self._taken.values())) / fmean(_usual(self._made.values()))))


def bounded(estimates: Collection[int], workers: int) -> int | None:
    """Return how many workers would be enough for all iterations, from the estimate of each; None
    without estimates. `workers` is their current number, which bounds the result.
    """
    if not estimates:
        return None
    return min(max(estimates), max(1, FACTOR_MAX * workers), workers + MORE_MAX)


def _rate(name: str, seconds: float) -> float:
    if not seconds > 0:
        raise InvalidArgumentError(f"{name} is {seconds}, wants more than 0 s")
    return 1.0 / seconds


def _usual(rates: Collection[float]) -> list[float]:
    mean, spread, middle = fmean(rates), pstdev(rates), median(rates)
    return [middle if abs(rate - mean) > spread else rate for rate in rates]
