"""`Retries`: waits before retries, and errors after which a function runs again."""

from __future__ import annotations

import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.test_options import times
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)


def calls(folder: Path) -> int:
    return len(list(folder.glob("call-*")))


# -- the policy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry", "draw", "delay_s"),
    [(1, 0.5, 1.0), (2, 0.5, 2.0), (3, 0.5, 4.0), (4, 0.5, 5.0), (2, 0.0, 1.6), (2, 1.0, 2.4)],
)
def test_wait_doubles_to_its_bound_with_jitter(retry: int, draw: float, delay_s: float) -> None:
    assert zd.Retries(9, 1.0, 5.0, 0.2).delay_s(retry, draw) == pytest.approx(delay_s)


def test_wait_of_any_retry_is_a_number() -> None:
    assert zd.Retries(10**9, 1.0, 60.0).delay_s(10**9, 0.5) == 60.0
    assert zd.Retries(1, Decimal("0.5")).delay_s(1, 0.5) == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("retry_if", "expected"),
    [
        (None, True),
        (OSError, True),
        (ValueError, False),
        ((ValueError, OSError), True),
        (lambda error: "again" in str(error), True),
        (lambda error: False, False),
    ],
)
def test_errors_are_accepted_by_class_or_function(retry_if: Any, expected: bool) -> None:
    assert zd.Retries(1, retry_if=retry_if).accepts(TimeoutError("again")) is expected


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"times": -1}, ValueError, "times is -1, wants 0 or more"),
        ({"times": 1.5}, TypeError, r"times is 1\.5, wants a whole number"),
        ({"times": 1, "backoff_s": -1}, ValueError, "backoff_s is -1, wants 0 s or more"),
        ({"times": 1, "backoff_max_s": "1"}, ValueError, "backoff_max_s is '1', wants 0 s"),
        ({"times": 1, "jitter": 2}, ValueError, "jitter is 2, wants 0 to 1"),
        ({"times": 1, "retry_if": 5}, TypeError, "retry_if is 5, wants classes, or a function"),
        ({"times": 1, "retry_if": (5,)}, TypeError, r"retry_if is \(5,\), wants classes of exc"),
    ],
)
def test_bad_policy_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        zd.Retries(**fields)


# -- in a cluster -----------------------------------------------------------------------------------


def test_function_runs_again_after_the_wait(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    policy = zd.Retries(3, backoff_s=0.05, jitter=0)
    began = time.monotonic()
    assert coordinator.options(retries=policy).submit(times, tmp_path, 3).result(20) == 3
    assert time.monotonic() - began >= 0.15
    coordinator.join(20)
    assert coordinator.snapshot().records == 0


def test_last_error_ends_the_retries(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    policy = zd.Retries(2, backoff_s=0.01)
    value = coordinator.schedule(times, (tmp_path, 9), retries=policy)
    with pytest.raises(ValueError, match="call 3"):
        value.result(20)


@pytest.mark.parametrize("refuse", [OSError, lambda error: False, lambda error: 1 / 0])
def test_refused_error_is_the_last(
    coordinator: ClusterCoordinator, tmp_path: Path, refuse: Any
) -> None:
    policy = zd.Retries(5, backoff_s=0, retry_if=refuse)
    value = coordinator.options(retries=policy).submit(times, tmp_path, 9)
    with pytest.raises(ValueError, match="call 1"):
        value.result(20)
    assert calls(tmp_path) == 1


def test_waiting_retry_if_holds_up_nothing_else(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    asked, go = threading.Event(), threading.Event()

    def decide(error: Exception) -> bool:
        asked.set()
        assert go.wait(20)
        return str(error) == "call 1"

    value = coordinator.options(retries=zd.Retries(3, 0, retry_if=decide)).submit(
        times, tmp_path, 2
    )
    assert asked.wait(20)
    seen: list[Any] = []
    coordinator.submit(abs, -1).add_done_callback(lambda other: seen.append(value.result(20)))
    assert coordinator.submit(abs, -2).result(20) == 2
    assert not value.done()
    go.set()
    assert value.result(20) == 2
    until(lambda: seen == [2], "a callback may wait for the value")


def test_cancel_ends_the_wait(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    value = coordinator.options(retries=zd.Retries(3, 60.0)).submit(times, tmp_path, 9)
    until(lambda: calls(tmp_path) and coordinator.snapshot().waiting_for_inputs)
    assert value.cancel()
    assert isinstance(value.exception(20), errors.CancelledError)


def test_time_out_ends_the_wait(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    options = coordinator.options(retries=zd.Retries(3, 60.0), timeout=0.2)
    assert isinstance(
        options.submit(times, tmp_path, 9).exception(20), errors.DeadlineExceededError
    )


def test_end_of_the_round_ends_the_wait(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    value = coordinator.options(retries=zd.Retries(3, 60.0)).submit(times, tmp_path, 9)
    until(lambda: calls(tmp_path))
    coordinator.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        coordinator.join(20)
    assert isinstance(value.exception(20), errors.CancelledError)


def test_thousand_waits_take_no_slot(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    patient = in_threads.options(retries=zd.Retries(1, 60.0, retry_if=ValueError))
    values = patient.map(int, ["x"] * 1000)
    until(lambda: in_threads.snapshot().waiting_for_inputs == 1000)
    assert in_threads.submit(abs, -1).result(20) == 1
    assert in_threads.cancel_all() == 1000
    assert all(isinstance(value.exception(20), errors.CancelledError) for value in values)
