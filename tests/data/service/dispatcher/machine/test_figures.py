"""The figure that says how many workers would be enough."""

from __future__ import annotations

import pytest

from zmqdist.data.service.dispatcher.machine.figures import AutoScaler, bounded
from zmqdist.errors import InvalidArgumentError


def scaler(workers: list[float], readers: list[float]) -> AutoScaler:
    made = AutoScaler()
    for number, seconds in enumerate(workers):
        made.report_worker(number, seconds)
    for number, seconds in enumerate(readers):
        made.report_reader(number, seconds)
    return made


@pytest.mark.parametrize(
    ("workers", "readers", "optimal"),
    [
        ([], [], None),
        ([0.1], [], None),
        ([], [0.1], None),
        ([0.2], [0.025], 8),
        ([0.2], [0.025, 0.05], 12),
        ([0.2, 0.15], [0.025], 7),
        ([0.1], [1.0], 1),
        # a worker whose time is far from the others counts as the median worker
        ([0.08] * 4 + [0.5], [0.01], 8),
        ([0.2], [0.03] * 4 + [0.3], 34),
    ],
)
def test_optimum_covers_rate_of_readers(
    workers: list[float], readers: list[float], optimal: int | None
) -> None:
    assert scaler(workers, readers).optimal() == optimal


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_impossible_times_are_refused(seconds: float) -> None:
    made = AutoScaler()
    with pytest.raises(InvalidArgumentError, match="processing_time is"):
        made.report_worker(1, seconds)
    with pytest.raises(InvalidArgumentError, match="target_processing_time is"):
        made.report_reader(1, seconds)
    assert made.optimal() is None


def test_optimum_ignores_lost_worker_and_reader() -> None:
    made = scaler([0.2, 0.2], [0.05, 0.05])
    assert made.optimal() == 8
    made.keep({0}, {1})
    assert made.optimal() == 4


@pytest.mark.parametrize(("workers", "bound"), [(0, 1), (1, 4), (10, 40), (200, 700), (1000, 1500)])
def test_optimum_is_bounded_by_number_of_workers(workers: int, bound: int) -> None:
    assert bounded([], workers) is None
    assert bounded([10**6], workers) == bound


def test_optimum_is_that_of_largest_iteration() -> None:
    assert bounded([2, 10], 100) == 10
