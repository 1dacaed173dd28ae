"""Arguments and captured things are as they were at `schedule`; results are private; what is stable
is pickled and shipped once."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import functions_sent, record_sent, run_in_threads
from tests.scheduling.work import go, until, waits
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig

MIB = 2**20
# its workers keep connections to those from which they fetched
pytestmark = pytest.mark.shares_cluster
SIZES = pytest.mark.parametrize(
    "size", [10, 100_000, MIB], ids=["in the message", "in a frame", "8 MiB"]
)


@pytest.fixture
def coordinator(in_slots: ClusterCoordinator) -> ClusterCoordinator:
    return in_slots


def slow_sum(folder: Path, array: Any) -> float:
    """Looks at its array only when the test says so."""
    waits(folder)
    return float(array.sum())


@SIZES
def test_argument_is_as_at_schedule(
    coordinator: ClusterCoordinator, tmp_path: Path, size: int
) -> None:
    array = np.ones(size)
    values = []
    for number in range(3):
        array[:] = number
        values.append(coordinator.schedule(slow_sum, (tmp_path, array)))
    array[:] = 99
    go(tmp_path)
    assert coordinator.fetch(values) == [0.0, size, 2.0 * size]


@SIZES
def test_captured_array_is_as_at_schedule(
    coordinator: ClusterCoordinator, tmp_path: Path, size: int
) -> None:
    array = np.ones(size)

    def total() -> float:
        return slow_sum(tmp_path, array)

    values = []
    for number in range(3):
        array[:] = number
        values.append(coordinator.schedule(total))
    array[:] = 99
    go(tmp_path)
    assert coordinator.fetch(values) == [0.0, size, 2.0 * size]


def test_rebound_captured_name_counts(coordinator: ClusterCoordinator) -> None:
    factor = 1

    def times(number: int) -> int:
        return factor * number

    values = []
    for factor in (2, 3, 2):  # noqa: B007  `times` captures it
        values.append(coordinator.schedule(times, (10,)))
    assert coordinator.fetch(values) == [20, 30, 20]


def test_argument_changes_stay_in_their_run(
    coordinator: ClusterCoordinator,
) -> None:
    """What a function does to its arguments, and to what it captured, stays with it: each has its
    own copy."""
    array = np.zeros(3)

    def adds(argument: Any) -> tuple[float, float]:
        argument += 1
        return float(argument[0]), float(array[0])

    assert (
        coordinator.fetch([coordinator.schedule(adds, (array,)) for _ in range(3)])
        == [(1.0, 0.0)] * 3
    )
    assert array[0] == 0


@SIZES
def test_results_are_private_and_writable(coordinator: ClusterCoordinator, size: int) -> None:
    shared = np.ones(size)

    def gives() -> Any:
        return shared, shared

    for _ in range(2):
        first, second = coordinator.schedule(gives).get(20)
        first += 1
        assert first.sum() == 2 * size
        assert shared.sum() == size
        assert second.sum() in (size, 2 * size)  # the same array twice may come as one


_results: list[Any] = []


def keeps_its_result() -> Any:
    _results.append(np.ones(MIB))
    return _results[-1]


def test_result_does_not_change_with_object_of_function(
    in_threads: ClusterCoordinator,
) -> None:
    """In a thread of this process nothing but a copy keeps the two apart."""
    value = in_threads.schedule(keeps_its_result)
    value.exception(20)
    _results.pop()[:] = 99
    assert value.get().max() == 1


def test_large_arguments_and_results_arrive_whole(coordinator: ClusterCoordinator) -> None:
    array = np.arange(8 * MIB // 8)
    assert coordinator.schedule(np.sum, (array,)).get(30) == array.sum()
    result = coordinator.schedule(np.arange, (64 * MIB // 8,)).get(30)
    assert result.nbytes == 64 * MIB
    assert result[:: MIB // 8].tolist() == list(range(0, 64 * MIB // 8, MIB // 8))


def test_large_results_of_many_functions_arrive(in_processes: ClusterCoordinator) -> None:
    values = in_processes.map(lambda number: np.full(MIB, number), range(12))
    in_processes.join(30)
    assert [set(np.unique(value.get())) for value in values] == [{number} for number in range(12)]


def test_function_with_unchanged_capture_is_sent_once(
    in_processes: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = record_sent(monkeypatch)
    weights = np.ones(3)

    def scaled(number: int) -> float:
        return float(weights.sum()) * number

    assert in_processes.fetch(in_processes.map(scaled, range(20))) == [3.0 * i for i in range(20)]
    assert functions_sent(sent) == [1]
    weights += 1
    assert in_processes.schedule(scaled, (1,)).get(20) == 6.0
    assert functions_sent(sent) == [1, 1]


def test_capture_changes_stay_in_their_run(
    coordinator: ClusterCoordinator,
) -> None:
    marks: list[int] = []
    first = coordinator.schedule(list)

    def appends() -> int:
        marks.append(1)
        return len(marks)

    def appends_to_the_result() -> int:
        first.append(1)  # type: ignore[attr-defined]  # it is the list there
        return len(first)  # type: ignore[arg-type]

    for fn in (appends, appends_to_the_result):
        assert coordinator.fetch([coordinator.schedule(fn) for _ in range(9)]) == [1] * 9


def test_module_reload_is_logged_once(
    in_threads: ClusterCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "often_edited.py").write_text("def one():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    edited = importlib.import_module("often_edited")
    monkeypatch.setitem(sys.modules, "often_edited", edited)
    assert in_threads.schedule(edited.one).get(20) == 1
    importlib.reload(edited)
    for _ in range(2):
        assert in_threads.schedule(edited.one).get(20) == 1
    messages = [
        record.getMessage() for record in caplog.records if "was reloaded" in record.message
    ]
    assert len(messages) == 1
    assert "module often_edited was reloaded in this program" in messages[0]


def test_large_arguments_are_freed_after_their_work(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    big = np.ones(MIB)
    values = [
        in_processes.schedule(lambda array: slow_sum(tmp_path, array) + big.sum(), (big,))
        for _ in range(4)
    ]
    assert in_processes.snapshot().held.parts > 0
    go(tmp_path)
    in_processes.join(30)
    assert in_processes.fetch(values) == [2.0 * MIB] * 4
    assert in_processes.snapshot().held.parts == 0


def test_large_results_are_freed_at_worker_on_arrival() -> None:
    with (
        zd.DispatchServer() as dispatcher,
        zd.WorkerServer(WorkerConfig(dispatcher.address)) as worker,
        ClusterCoordinator(dispatcher) as coordinator,
    ):
        for value in coordinator.map(lambda number: np.full(MIB, number), range(4)):
            assert len(value.get(20)) == MIB
        coordinator.join(20)
        until(lambda: worker.snapshot().held.parts == 0)
        until(lambda: dispatcher.snapshot().coordinators[0].held == 0)


def test_values_of_several_coordinators_do_not_mix(threads: zd.local_cluster) -> None:
    results: dict[int, Any] = {}

    def use(number: int) -> None:
        with ClusterCoordinator(threads) as coordinator:
            results[number] = coordinator.fetch(coordinator.map(lambda i: number * i, range(100)))

    run_in_threads(*(functools.partial(use, number) for number in range(4)))
    assert results == {number: [number * i for i in range(100)] for number in range(4)}
