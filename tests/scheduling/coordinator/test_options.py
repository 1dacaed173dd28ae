"""`retries`, `timeout` and `lineage` of `schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import (
    call_count,
    logged_array,
    replace_worker,
    run_in_threads,
)
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)


def times(folder: Path, well_at: int, payload: Any = None) -> int:
    """Fails until it has been called so often."""
    calls = len(list(folder.glob("call-*"))) + 1
    (folder / f"call-{calls}").touch()
    if calls < well_at:
        raise ValueError(f"call {calls}")
    return calls


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"", b"x" * 2**18], ids=["small", "large"])
def test_function_that_raises_is_retried(
    coordinator: ClusterCoordinator, tmp_path: Path, payload: bytes
) -> None:
    assert coordinator.schedule(times, (tmp_path, 3, payload), retries=2).fetch(20) == 3
    coordinator.join(20)
    until(lambda: coordinator.snapshot().held.parts == 0)


def test_last_error_is_raised_without_retries_left(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    value = coordinator.schedule(times, (tmp_path, 9), retries=2)
    with pytest.raises(ValueError, match="call 3"):
        value.fetch(20)
    with pytest.raises(ValueError, match="call 3"):
        coordinator.join(20)


def test_dependent_waits_for_end_of_retries(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    first = in_threads.schedule(times, (tmp_path, 3), retries=2)
    assert in_threads.schedule(int, (first,)).fetch(20) == 3


def test_large_function_is_there_for_its_retries(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    weight = b"x" * 2**18
    assert coordinator.schedule(lambda: times(tmp_path, 3, weight), retries=2).fetch(20) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"retries": -1}, ValueError, "retries is -1, wants 0 or more"),
        ({"retries": 2.5}, TypeError, r"retries is 2\.5, wants a whole number"),
        ({"retries": True}, TypeError, "retries is True, wants a whole number"),
        ({"timeout": 0}, ValueError, "timeout is 0, wants more than 0 s"),
        ({"timeout": -1.5}, ValueError, r"timeout is -1\.5, wants more than 0 s"),
        (
            {"timeout": float("nan")},
            ValueError,
            "a time-out is a number of seconds, or None, not nan",
        ),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(
    in_threads: ClusterCoordinator, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        in_threads.schedule(int, **options)


# -- time-outs -------------------------------------------------------------------------------------


def test_waiting_work_times_out_without_other_events(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    first = in_threads.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    second = in_threads.schedule(len, (first,), timeout=0.2)
    assert isinstance(second.exception(20), errors.DeadlineExceededError)
    go(tmp_path)
    assert first.fetch(20) == "x"


def test_waiting_work_that_times_out_fails_its_dependents(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    first = in_threads.schedule(waits, (tmp_path,))
    second = in_threads.schedule(len, (first,), timeout=3.0)  # time to schedule the third
    third = in_threads.schedule(abs, (second,))
    with pytest.raises(errors.ClosureInputError) as caught:
        third.fetch(20)
    assert isinstance(caught.value.original_exception, errors.DeadlineExceededError)
    go(tmp_path)
    assert first.fetch(20) == "x"
    with pytest.raises(errors.DeadlineExceededError):
        in_threads.join(20)


def test_timed_out_queued_work_never_begins(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        coordinator.schedule(waits, (tmp_path, "first"))
        until(lambda: begun(tmp_path))
        late = coordinator.schedule(waits, (tmp_path, "late"), timeout=0.05)
        with pytest.raises(errors.DeadlineExceededError):
            late.fetch(20)
        snapshot = cluster.dispatcher.snapshot
        # it is taken back
        until(lambda: snapshot().queued + sum(row.leases for row in snapshot().workers) == 1)
        go(tmp_path)
        with pytest.raises(errors.DeadlineExceededError):
            coordinator.join(20)
        assert not begun(tmp_path, "late")


def test_work_that_ends_in_time_leaves_no_record(coordinator: ClusterCoordinator) -> None:
    assert coordinator.schedule(abs, (-2,), timeout=60).fetch(20) == 2
    coordinator.join(20)
    assert coordinator.snapshot().records == 0


# -- lineage ---------------------------------------------------------------------------------------


def test_lost_value_is_recomputed_once_for_several_threads(
    fragile: ClusterCoordinator, single: zd.local_cluster, tmp_path: Path
) -> None:
    value = fragile.schedule(logged_array, (tmp_path, "value"), lineage=True)
    assert value.exception(20) is None
    replace_worker(single)
    results: list[int] = []
    run_in_threads(*[lambda: results.append(int(value.get(40)[0]))] * 4)
    assert results == [1] * 4
    assert call_count(tmp_path, "value") == 2


def test_lineage_is_freed_with_its_value(
    in_threads: ClusterCoordinator, threads: zd.local_cluster
) -> None:
    def held_parts() -> int:
        return sum(worker.snapshot().held.parts for worker in threads.servers)

    value = in_threads.schedule(np.zeros, (2**17,), lineage=True)
    large = in_threads.schedule(np.add, (value, np.ones(2**17)), lineage=True)
    assert large.exception(20) is None
    del value
    assert held_parts() == 2
    assert in_threads.snapshot().records == 2
    del large
    until(lambda: in_threads.snapshot().records == held_parts() == 0)
    assert in_threads.snapshot().held.parts == 0
