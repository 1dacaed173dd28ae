"""`wait`, `as_completed` with values that are added, and `cancel_all`."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits, writes
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(90)


# -- wait -----------------------------------------------------------------------------------------


def test_wait_returns_both_lists_in_order(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    slow, quick = in_threads.submit(waits, tmp_path), in_threads.submit(int)
    assert in_threads.wait([slow, quick, slow], count=1, timeout=20) == ([quick], [slow])
    assert in_threads.wait({slow: "its number"}, timeout=0.01) == ([], [slow])
    go(tmp_path)
    assert in_threads.wait((slow, quick), timeout=20) == ([slow, quick], [])
    assert in_threads.wait([]) == ([], [])


def test_error_counts_as_end(in_threads: ClusterCoordinator) -> None:
    broken = in_threads.submit(int, "x")
    assert in_threads.wait([broken]) == ([broken], [])
    assert isinstance(broken.exception(), ValueError)


def test_count_above_number_of_values_waits_for_all(in_threads: ClusterCoordinator) -> None:
    left = in_threads.map(abs, range(10))
    rounds = 0
    while left:
        finished, left = in_threads.wait(left, count=4, timeout=20)
        assert len(finished) >= 4 or not left
        rounds += 1
    assert 1 <= rounds <= 3


def test_count_of_zero_does_not_wait(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    slow = in_threads.submit(waits, tmp_path)
    assert in_threads.wait([slow], count=0) == ([], [slow])
    go(tmp_path)


def test_thousand_waits_leave_no_waiter(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    slow = in_threads.map(waits, [tmp_path] * 20)
    gc.collect()
    before = sum(type(waiter) is threading.Semaphore for waiter in gc.get_objects())
    for _ in range(1000):
        finished, left = in_threads.wait(slow, count=1, timeout=0)
        assert (finished, left) == ([], slow)
    gc.collect()
    assert sum(type(waiter) is threading.Semaphore for waiter in gc.get_objects()) <= before
    go(tmp_path)


def test_close_ends_wait(threads: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(threads) as coordinator:
        slow = coordinator.submit(waits, tmp_path)
        results: list[Any] = []
        waiter = threading.Thread(target=lambda: results.append(coordinator.wait([slow])))
        waiter.start()
        until(lambda: begun(tmp_path))
        coordinator.close()
        waiter.join(20)
        assert results == [([slow], [])]
        assert slow.cancelled()
        assert list(coordinator.as_completed([slow])) == [slow]
        with pytest.raises(errors.FailedPreconditionError, match="has been closed"):
            coordinator.cancel_all()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"values": [5]},
            TypeError,
            "wait wants RemoteValues, which submit and schedule return, not 5",
        ),
        (
            {"values": 5},
            TypeError,
            "wait wants RemoteValues, which submit and schedule return, not 5",
        ),
        ({"values": [], "count": "1"}, TypeError, "count is '1', wants a whole number"),
        ({"values": [], "count": 1.0}, TypeError, r"count is 1\.0, wants a whole number"),
        (
            {"values": [], "count": -1},
            ValueError,
            "count is -1, wants 0 or more, or None for all values",
        ),
        (
            {"values": [], "timeout": "soon"},
            ValueError,
            "a time-out is a number of seconds, or None, not 'soon'",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_of_wait(
    in_threads: ClusterCoordinator, arguments: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        in_threads.wait(**arguments)


# -- as_completed ---------------------------------------------------------------------------------


def test_loop_over_as_completed_may_add_values(in_threads: ClusterCoordinator) -> None:
    search = in_threads.as_completed([in_threads.submit(int, "1")], timeout=60)
    results = []
    for value in search:
        results.append(value.result())
        if value.result() < 512:
            search.add(in_threads.submit(lambda before: before * 2, value))
    assert results == [2**power for power in range(10)]
    assert len(search) == 0


def test_search_may_end_early(in_threads: ClusterCoordinator) -> None:
    candidates = iter(range(10**6))
    search = in_threads.as_completed(
        in_threads.map(abs, [next(candidates) for _ in range(8)]), timeout=60
    )
    best = 0
    for value in search:
        best = max(best, value.result())
        if best < 1000:
            search.add(in_threads.submit(abs, next(candidates)))
    assert 1000 <= best < 1008
    in_threads.join(20)


def test_added_values_are_yielded_once(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    slow, quick = in_threads.submit(waits, tmp_path), in_threads.submit(int)
    order = in_threads.as_completed([slow, quick, slow], timeout=20)
    assert next(order) is quick
    order.add_all([slow, slow])
    assert len(order) == 1
    go(tmp_path)
    assert list(order) == [slow]
    order.add(slow)
    assert list(order) == [slow]
    assert next(order, None) is None
    assert list(in_threads.as_completed([])) == []


def test_values_may_come_from_another_thread(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    order = in_threads.as_completed([in_threads.submit(waits, tmp_path)], timeout=30)
    results: list[Any] = []
    taker = threading.Thread(target=lambda: results.extend(value.result() for value in order))
    taker.start()
    order.add_all(in_threads.map(abs, range(100)))
    until(lambda: len(results) == 100)
    go(tmp_path)
    taker.join(30)
    assert sorted(results[:-1]) == list(range(100))
    assert results[-1] == "x"


@pytest.mark.parametrize("values", [[5], 5, None, "ab", [[]]], ids=str)
def test_added_non_value_is_refused(in_threads: ClusterCoordinator, values: Any) -> None:
    order = in_threads.as_completed([])
    refused = "as_completed wants RemoteValues, which submit and schedule return, not"
    with pytest.raises(TypeError, match=refused):
        order.add_all([in_threads.submit(int), values])
    with pytest.raises(TypeError, match=refused):
        in_threads.as_completed(values)
    assert len(order) == 0


def test_iterator_is_usable_after_time_out(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    slow, quick = in_threads.submit(waits, tmp_path), in_threads.submit(int)
    until(quick.done)
    order = in_threads.as_completed([slow, quick], timeout=0.05)
    assert next(order) is quick
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"1 of 2 values have not ended after 0\.05 s"):
            next(order)
    go(tmp_path)
    until(slow.done)
    assert next(order) is slow


# -- cancel_all -----------------------------------------------------------------------------------


def test_cancel_all_ends_unfinished_work(in_processes: ClusterCoordinator, tmp_path: Path) -> None:
    running = in_processes.map(writes, [tmp_path] * 2, ["a", "b"])
    until(lambda: len(begun(tmp_path)) == 2)
    waiting = in_processes.map(waits, [tmp_path] * 1000)
    after = in_processes.submit(len, waiting[-1])
    late = in_processes.options(timeout=60.0).submit(waits, tmp_path)
    assert in_processes.cancel_all() == 1004
    in_processes.join(30)
    assert all(value.cancelled() for value in (*running, *waiting, late))
    assert after.exception() is not None
    assert len(begun(tmp_path)) == 2, "what waited has never begun"
    assert in_processes.cancel_all() == 0
    assert in_processes.submit(abs, -3).result(20) == 3


def test_cancel_all_leaves_resources(in_threads: ClusterCoordinator) -> None:
    resource = in_threads.create_per_worker_resource(list)
    assert in_threads.cancel_all() == 0
    assert resource.fetch(20) == [[], [], []]


def test_cancel_all_counts_dropped_values(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    in_threads.submit(waits, tmp_path)
    until(lambda: begun(tmp_path))
    assert in_threads.cancel_all() == 1
    in_threads.join(20)
    assert (tmp_path / "cancelled-x").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("gather", r"gather\(\) takes 2 positional arguments but 3 were given"),
        ("wait", r"wait\(\) takes 2 positional arguments but 3 were given"),
        ("as_completed", "as_completed wants a list of RemoteValues, not one"),
    ],
)
def test_second_value_is_not_taken_as_time_out(
    in_threads: ClusterCoordinator, call: str, message: str
) -> None:
    first, second = in_threads.map(abs, [-1, -2])
    with pytest.raises(TypeError, match=message):
        getattr(in_threads, call)(first, second)


def test_threads_share_one_as_completed(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    values = [*in_threads.map(abs, range(20)), in_threads.submit(waits, tmp_path)]
    search = in_threads.as_completed(values, timeout=60)
    yielded: list[Any] = []
    takers = [threading.Thread(target=lambda: yielded.extend(search)) for _ in range(3)]
    for taker in takers:
        taker.start()
    until(lambda: len(search) == 1)
    go(tmp_path)
    for taker in takers:
        taker.join(30)
    assert len(yielded) == len(values)
    assert set(yielded) == set(values)
