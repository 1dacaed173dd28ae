"""`imap`: results in order, computed a bounded number ahead of the program."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(60)


class Counted:
    """An iterable without an end, which counts what was read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.read += 1
            yield number


def test_endless_input_is_read_a_bounded_number_ahead(coordinator: ClusterCoordinator) -> None:
    numbers = Counted()
    with coordinator.imap(pow, numbers, itertools.repeat(2), ahead=5) as results:
        assert numbers.read == 0
        for number in range(100):
            assert next(results) == number**2
            assert numbers.read <= number + 5
    coordinator.join(20)


def test_results_come_in_order_of_inputs(in_slots: ClusterCoordinator) -> None:
    results = in_slots.imap(divmod, range(300), itertools.repeat(7), ahead=50)
    assert list(results) == [divmod(number, 7) for number in range(300)]
    assert list(results) == []


def test_error_is_raised_at_its_place(coordinator: ClusterCoordinator) -> None:
    results = coordinator.options(name="read").imap(int, ["1", "x", "3"])
    assert next(results) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        next(results)
    assert list(results) == [3]


def test_item_that_cannot_be_pickled_fails_at_its_place(coordinator: ClusterCoordinator) -> None:
    items: list[Any] = [[1], [(number for number in ())], [2], [2, 3]]
    results = coordinator.imap(len, items)
    assert next(results) == 1
    with pytest.raises(errors.InvalidArgumentError, match="generator"):
        next(results)
    assert list(results) == [1, 2]


def test_error_of_input_comes_after_results(coordinator: ClusterCoordinator) -> None:
    def items() -> Iterator[int]:
        yield -1
        yield -2
        raise OSError("the source has ended")

    results = coordinator.imap(abs, items())
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(OSError, match="the source has ended"):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize("end", ["close", "drop"])
def test_end_of_iteration_cancels_what_was_not_taken(
    in_threads: ClusterCoordinator, tmp_path: Path, end: str
) -> None:
    results = in_threads.imap(
        waits, itertools.chain([tmp_path / "first"], itertools.repeat(tmp_path)), ahead=8
    )
    (tmp_path / "first").mkdir()
    go(tmp_path / "first")
    assert next(results) == "x"
    until(lambda: begun(tmp_path))
    if end == "close":
        results.close()
        assert list(results) == []
    del results
    gc.collect()
    in_threads.join(20)
    assert (tmp_path / "cancelled-x").exists()
    assert in_threads.snapshot().records == 0


@pytest.mark.parametrize(
    ("ahead", "error", "message"),
    [(0, ValueError, "ahead is 0, wants 1 or more"), (1.5, TypeError, r"ahead is 1\.5, wants a")],
)
def test_bad_bound_is_refused(
    coordinator: ClusterCoordinator, ahead: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        coordinator.imap(abs, [1], ahead=ahead)


def test_parts_of_results_are_refused(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(ValueError, match="no use for the option num_returns"):
        coordinator.options(num_returns=2).imap(divmod, [7], [2])
    with pytest.raises(TypeError, match="at least one iterable"):
        coordinator.imap(abs)
