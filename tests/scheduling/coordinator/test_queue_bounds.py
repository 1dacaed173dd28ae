"""A coordinator that schedules faster than its cluster works is bounded in bytes: `schedule`
blocks, and goes on when work has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import in_thread
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue
from zmqdist.scheduling.coordinator.queue_bounds import SMALL_BYTES_MAX, QueueBounds
from zmqdist.scheduling.coordinator.work import Extra
from zmqdist.transport.memory_limits import usable_bytes

MIB = 2**20
BOUND = 3 * MIB


@pytest.fixture
def bounded(threads: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(
        threads, queue_bytes_max=BOUND, cancel_grace_s=0.2, cluster_lost_limit_s=30.0
    ) as coordinator:
        yield coordinator


def array_of(number: int, size: int = MIB) -> np.ndarray[Any, Any]:
    return np.full(size, number, np.uint8)


def fails(_: Any) -> None:
    raise ValueError("Some error.")


def length(argument: Any) -> int:
    return len(argument)


def waits_with(argument: Any, folder: Path) -> str:
    return waits(folder, str(int(argument[0])))


def is_full(coordinator: ClusterCoordinator) -> bool:
    return coordinator.snapshot().waiting_for_room == 1


def small_bytes(number: int) -> bytes:
    """They travel in the message: below 64 KiB."""
    return bytes([number]) * 60_000


@pytest.mark.parametrize(
    ("make", "size"), [(array_of, MIB), (small_bytes, 60_000)], ids=["large", "small"]
)
def test_schedule_blocks_at_bound_until_work_ends(
    bounded: ClusterCoordinator, tmp_path: Path, make: Callable[[int], Any], size: int
) -> None:
    values: list[RemoteValue] = []
    count = 2 * BOUND // size

    def schedule_all() -> None:
        for number in range(count):
            values.append(bounded.schedule(waits_with, (make(number % 256), tmp_path)))

    thread, outcomes = in_thread(schedule_all)
    until(lambda: is_full(bounded))
    full = bounded.snapshot()
    assert BOUND - 1.1 * size < full.queue_bytes <= BOUND
    assert full.scheduled == len(values) <= BOUND // size
    go(tmp_path)
    thread.join(30)
    assert outcomes == [None]
    assert bounded.fetch(values) == [str(number % 256) for number in range(count)]
    bounded.join(20)
    assert bounded.snapshot().queue_bytes == 0


def test_queue_bytes_stay_within_bound(processes: zd.local_cluster) -> None:
    snapshots = []
    with ClusterCoordinator(processes, queue_bytes_max=BOUND) as coordinator:

        def schedule(number: int) -> RemoteValue:
            value = coordinator.schedule(length, (array_of(number),))
            snapshots.append(coordinator.snapshot())
            return value

        values = [schedule(number) for number in range(40)]
        assert [value.get(20) for value in values] == [MIB] * 40
    assert max(snapshot.queue_bytes for snapshot in snapshots) <= BOUND
    assert max(snapshot.held.bytes for snapshot in snapshots) <= BOUND + 2 * MIB, (
        "one more is copied before it is known to fit"
    )


def test_work_above_bound_is_scheduled_alone(bounded: ClusterCoordinator, tmp_path: Path) -> None:
    first = bounded.schedule(waits_with, (array_of(0), tmp_path))
    thread, outcomes = in_thread(lambda: bounded.schedule(length, (array_of(1, 2 * BOUND),)))
    until(lambda: is_full(bounded))
    go(tmp_path)
    thread.join(20)
    assert first.get(20) == "0"
    assert outcomes[0].get(20) == 2 * BOUND
    assert bounded.schedule(length, (array_of(1, 2 * BOUND),)).get(20) == 2 * BOUND


@pytest.mark.parametrize("how", ["argument", "captured", "map"])
def test_shared_parts_count_once(bounded: ClusterCoordinator, tmp_path: Path, how: str) -> None:
    shared = array_of(0, 2 * MIB)
    if how == "map":
        values = bounded.map(lambda number: waits_with(shared, tmp_path), range(20))
    elif how == "captured":
        values = [bounded.schedule(lambda: waits_with(shared, tmp_path)) for _ in range(20)]
    else:
        values = [bounded.schedule(waits_with, (shared, tmp_path)) for _ in range(20)]
    assert 2 * MIB <= bounded.snapshot().queue_bytes < 2 * MIB + 100_000
    go(tmp_path)
    assert bounded.fetch(values) == ["0"] * 20


@pytest.mark.parametrize(
    "options", [{"retries": 1}, {"timeout": 60}, {"keep": True}, {"lineage": True}, {"worker": 0}]
)
def test_work_with_options_counts(
    bounded: ClusterCoordinator, tmp_path: Path, options: dict[str, Any]
) -> None:
    value = bounded.schedule(waits_with, (array_of(0, 2 * MIB), tmp_path), **options)
    assert bounded.snapshot().queue_bytes >= 2 * MIB
    thread, outcomes = in_thread(lambda: bounded.schedule(length, (array_of(1, 2 * MIB),)))
    until(lambda: is_full(bounded))
    go(tmp_path)
    thread.join(20)
    assert value.get(20) == "0"
    assert outcomes[0].get(20) == 2 * MIB
    until(lambda: bounded.snapshot().queue_bytes == 0)


def test_lineage_does_not_count(bounded: ClusterCoordinator) -> None:
    """Arguments that stay for a recomputation do not fill the queue."""
    values = [
        bounded.schedule(length, (array_of(number, 2 * MIB),), lineage=True) for number in range(6)
    ]
    assert [value.get(20) for value in values] == [2 * MIB] * 6
    assert bounded.snapshot().held.bytes >= 12 * MIB


def test_work_waiting_for_inputs_counts(bounded: ClusterCoordinator, tmp_path: Path) -> None:
    first = bounded.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    second = bounded.schedule(lambda name, argument: name, (first, array_of(0, 2 * MIB)))
    thread, outcomes = in_thread(
        lambda: bounded.schedule(lambda name, argument: name, (first, array_of(1, 2 * MIB)))
    )
    until(lambda: is_full(bounded))
    go(tmp_path)
    thread.join(20)
    assert [second.get(20), outcomes[0].get(20)] == ["x", "x"]


def test_schedule_raises_error_instead_of_waiting_for_room(
    bounded: ClusterCoordinator, tmp_path: Path
) -> None:
    stuck = bounded.schedule(waits_with, (array_of(0, 2 * MIB), tmp_path))
    until(lambda: begun(tmp_path))
    thread, outcomes = in_thread(lambda: bounded.schedule(length, (array_of(1, 2 * MIB),)))
    until(lambda: is_full(bounded))
    assert stuck.cancel()
    thread.join(20)
    assert outcomes[0].get(20) == 2 * MIB
    bad = bounded.schedule(fails, (0,))
    until(bad.done)
    with pytest.raises(ValueError, match="Some error"):
        bounded.schedule(length, (array_of(1),))
    assert bounded.snapshot().queue_bytes == 0


def test_close_ends_wait_for_room(threads: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(threads, queue_bytes_max=BOUND, cancel_grace_s=0.2) as coordinator:
        coordinator.schedule(waits_with, (array_of(0, 2 * MIB), tmp_path))
        until(lambda: begun(tmp_path))
        thread, outcomes = in_thread(lambda: coordinator.schedule(length, (array_of(1, 2 * MIB),)))
        until(lambda: is_full(coordinator))
    thread.join(20)
    assert isinstance(outcomes[0], errors.FailedPreconditionError)
    assert coordinator.snapshot().queue_bytes == 0


def test_idle_workers_at_bound_are_warned_about_once(
    bounded: ClusterCoordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(bounded.workers()) == 3
    bounded.schedule(waits_with, (array_of(0, 2 * MIB), tmp_path))
    until(lambda: begun(tmp_path))
    thread, _ = in_thread(
        lambda: [bounded.schedule(length, (array_of(n, 2 * MIB),)).get(20) for n in range(3)]
    )
    until(lambda: is_full(bounded))
    go(tmp_path)
    thread.join(20)
    messages = [
        record.getMessage()
        for record in caplog.records
        if "workers are idle" in record.getMessage()
    ]
    assert len(messages) == 1
    assert "queue_bytes_max is 3145728" in messages[0]


def test_bound_of_zero_warns_and_never_blocks(
    threads: zd.local_cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterCoordinator(threads, queue_bytes_max=0, cancel_grace_s=0.2) as coordinator:
        assert "queue_bytes_max is 0" in caplog.text
        values = [
            coordinator.schedule(waits_with, (array_of(number), tmp_path)) for number in range(8)
        ]
        go(tmp_path)
        assert coordinator.fetch(values) == [str(number) for number in range(8)]


def test_negative_bound_is_refused(threads: zd.local_cluster) -> None:
    with pytest.raises(
        ValueError, match="queue_bytes_max is -1, wants 1 or more bytes, or 0 for no bound"
    ):
        ClusterCoordinator(threads, queue_bytes_max=-1)


def test_default_bound_is_quarter_of_memory(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    """A program that is not told of it does not notice: a hundred megabytes ahead of the workers
    are nothing."""
    assert usable_bytes() // 4 > 128 * MIB
    values = [
        in_threads.schedule(waits_with, (array_of(number, 4 * MIB), tmp_path))
        for number in range(25)
    ]
    assert in_threads.snapshot().queue_bytes > 100 * MIB
    go(tmp_path)
    assert in_threads.fetch(values) == [str(number) for number in range(25)]


def test_executor_is_bounded(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads, queue_bytes_max=BOUND) as executor:
        submitted: list[Any] = []

        def submit_all() -> None:
            for number in range(6):
                submitted.append(executor.submit(waits_with, array_of(number), tmp_path))

        thread, outcomes = in_thread(submit_all)
        until(
            lambda: len(begun(tmp_path)) == len(submitted) == 2,
            "the third does not fit beside what travels with each",
        )
        go(tmp_path)
        thread.join(20)
        assert outcomes == [None]
        assert [future.result(20) for future in submitted] == [str(number) for number in range(6)]


# -- the count alone -------------------------------------------------------------------------------


SIZES = {1: 100, 2: 50}


@pytest.mark.parametrize(
    ("bytes_max", "before", "nbytes", "parts", "fits"),
    [
        (1000, [], 5000, [], True),
        (1000, [(900, [])], 100, [], True),
        (1000, [(900, [])], SMALL_BYTES_MAX, [], True),
        (1000, [(700, [])], 301, [], False),
        (1000, [(700, [])], 300, [], True),
        (1000, [(700, [1])], 100, [1, 1], True),
        (1000, [(700, [1])], 100, [1, 2], True),
        (1000, [(700, [1])], 151, [1, 2], False),
        (1000, [(1000, [])], 0, [1], False),
        (0, [(10**9, [])], 10**9, [1], True),
    ],
)
def test_bounds_admit_what_fits(
    bytes_max: int, before: list[tuple[int, list[int]]], nbytes: int, parts: list[int], fits: bool
) -> None:
    count = QueueBounds(10, bytes_max, SIZES.__getitem__)
    for size, of_work in before:
        count.begin(Extra(), size, of_work)
    assert count.fits(nbytes, parts) is fits


def test_count_is_that_of_unfinished_work() -> None:
    count = QueueBounds(10, 1000, SIZES.__getitem__)
    first, second, small = Extra(), Extra(), Extra()
    count.begin(first, 300, [1])
    count.begin(second, 400, [1, 2])
    count.begin(small, SMALL_BYTES_MAX, [])
    assert count.counted_bytes == 300 + 400 + 150
    count.end(first)
    count.end(small)
    count.end(first)
    assert count.counted_bytes == 400 + 150
    count.end(second)
    assert count.counted_bytes == 0
