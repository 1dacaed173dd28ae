"""How many workers would be enough: a figure for whoever starts them; nobody is started here.

Theory
    An iteration needs as many workers as make elements as fast as its readers could take them: the sum of the readers' rates over the
    mean rate of a worker, rounded up. A reader's rate is what it would take if it never waited. Rates further than one standard deviation
    from their mean are taken for the median, so that one slow start does not order a hundred machines.
    The figure is the largest of all iterations, and at most FACTOR_MAX times the present number and MORE_MAX above it.
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
    """One iteration: its readers and its workers, by whatever number they have."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}
        self._made: dict[int, float] = {}

    def report_worker(self, worker: int, seconds: float) -> None:
        """It takes so long for an element. Raises InvalidArgumentError: 0 or less."""
        self._made[worker] = _rate("processing_time", seconds)

    def report_reader(self, reader: int, seconds: float) -> None:
        """It could take an element each so many seconds. Raises InvalidArgumentError: 0 or less."""
        self._taken[reader] = _rate("target_processing_time", seconds)

    def keep(self, workers: Collection[int], readers: Collection[int]) -> None:
        """Forget all others."""
        self._made = {number: rate for number, rate in self._made.items() if number in workers}
        self._taken = {number: rate for number, rate in self._taken.items() if number in readers}

    def optimal(self) -> int | None:
        """Workers that would be enough; None without reports of both sides."""
        if not self._made or not self._taken:
            return None
        return max(1, ceil(sum(_usual(self._taken.values())) / fmean(_usual(self._made.values()))))


class AutoScalers:
    """All iterations."""

    def __init__(self) -> None:
        self._scalers: dict[int, AutoScaler] = {}

    def of(self, iteration: int) -> AutoScaler:
        """That of one iteration, made when it is new."""
        return self._scalers.setdefault(iteration, AutoScaler())

    @property
    def iterations(self) -> list[int]:
        """Those that somebody has reported of."""
        return list(self._scalers)

    def discard(self, iteration: int) -> None:
        """It has ended, reported or not."""
        self._scalers.pop(iteration, None)

    def optimal(self, workers: int) -> int | None:
        """The figure, with so many workers at present; None without reports."""
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
