"""Several slots and workers: which functions run at the same time, which slot gets which work, and
which work is taken back."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import zmqdist as zd
from tests.scheduling.work import begun, counts, go, starts, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.children import Child
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.scheduling.worker.slots import within_descriptors


@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
def test_four_slots_run_four_functions(
    start_worker: Callable[..., Child], tmp_path: Path, processes: bool
) -> None:
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        start_worker(dispatcher.address, slots=4, processes=processes)
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(6)]
        until(lambda: len(begun(tmp_path)) == 4)
        assert len(set(begun(tmp_path))) == (4 if processes else 1)
        (row,) = until(lambda: [row for row in dispatcher.snapshot().workers if row.running == 4])
        assert row.slots == 4
        go(tmp_path)
        assert coordinator.fetch(values) == [str(i) for i in range(6)]


def test_work_is_spread_over_slots(cluster: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(cluster) as coordinator:
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(4)]
        until(lambda: len(set(begun(tmp_path))) == 4)
        # it is reported a little later
        until(lambda: [row.running for row in cluster.dispatcher.snapshot().workers] == [2, 2])
        go(tmp_path)
        coordinator.fetch(values)


def test_quick_work_passes_slow_work(cluster: zd.local_cluster, tmp_path: Path) -> None:
    """All four slots get batches of quick work first, so that other functions wait behind a slow
    one."""
    with ClusterCoordinator(cluster) as coordinator:
        coordinator.fetch(coordinator.map(int, range(2000)))
        values = []
        for i in range(400):
            values.append(
                coordinator.schedule(waits, (tmp_path, str(i))) if i in (50, 200) else None
            )
            values.append(coordinator.schedule(counts, (tmp_path, str(i))))
        slow = [value for value in values[::2] if value is not None]
        quick = values[1::2]
        # while the slow functions are still running
        assert coordinator.fetch(quick) == [str(i) for i in range(400)]
        assert not any(value.done() for value in slow)
        go(tmp_path)
        coordinator.join(20)
        assert [starts(tmp_path, str(i)) for i in range(400)] == [1] * 400


def test_late_worker_takes_over_waiting_work(
    start_worker: Callable[..., Child], tmp_path: Path
) -> None:
    with (
        zd.DispatchServer() as dispatcher,
        ClusterCoordinator(dispatcher) as coordinator,
        zd.WorkerServer(WorkerConfig(dispatcher.address)),
    ):
        values = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(2)]
        until(lambda: begun(tmp_path))
        until(lambda: dispatcher.snapshot().queued == 0)  # the first worker has the second one
        start_worker(dispatcher.address)
        until(lambda: len(begun(tmp_path)) == 2)
        go(tmp_path)
        assert coordinator.fetch(values) == ["0", "1"]


def test_killed_slot_affects_no_other(cluster: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(cluster, cancel_grace_s=0.1) as coordinator:
        others = [coordinator.schedule(waits, (tmp_path, str(i))) for i in range(3)]
        bad = coordinator.schedule(writes, (tmp_path, "bad"))
        until(lambda: len(begun(tmp_path)) == 4)
        pids = {row.pid for row in cluster.dispatcher.snapshot().workers}
        assert bad.cancel()
        with pytest.raises(errors.CancelledError):
            bad.get(20)
        before = written(tmp_path)
        go(tmp_path)
        assert coordinator.fetch(others) == ["0", "1", "2"]
        coordinator.join(20)
        assert len(begun(tmp_path)) == 4
        assert written(tmp_path) == before
        assert {row.pid for row in cluster.dispatcher.snapshot().workers} == pids


def test_work_behind_killed_function_runs_elsewhere(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1) as cluster,
        ClusterCoordinator(cluster, cancel_grace_s=0.1) as coordinator,
    ):
        coordinator.fetch(coordinator.map(int, range(500)))  # so that the slot gets batches
        bad = coordinator.schedule(writes, (tmp_path,))
        behind = [coordinator.schedule(counts, (tmp_path, str(i))) for i in range(50)]
        until(lambda: begun(tmp_path))
        bad.cancel()
        assert coordinator.fetch(behind) == [str(i) for i in range(50)]
        assert isinstance(bad.exception(0), errors.CancelledError)
        coordinator.join(20)
        assert [starts(tmp_path, str(i)) for i in range(50)] == [1] * 50


def test_coordinators_are_served_in_turn(cluster: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(cluster) as greedy, ClusterCoordinator(cluster) as modest:
        many = [greedy.schedule(counts, (tmp_path, f"many{i}", 0.02)) for i in range(1000)]
        few = [modest.schedule(counts, (tmp_path, f"few{i}")) for i in range(4)]
        modest.fetch(few)
        assert not all(value.done() for value in many)
        for value in many:
            value.cancel()
        greedy.join(20)


def test_round_ends_without_touching_other_coordinator(
    cluster: zd.local_cluster, tmp_path: Path
) -> None:
    with (
        ClusterCoordinator(cluster) as one,
        ClusterCoordinator(cluster, cancel_grace_s=0.1) as other,
    ):
        kept = one.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        other.schedule(writes, (tmp_path,))
        other.schedule(int, ("x",))
        with pytest.raises(ValueError, match="invalid literal"):
            other.join(20)
        assert not kept.done()
        go(tmp_path)
        assert kept.get(20) == "x"
        assert len(begun(tmp_path)) <= 2


def test_output_of_functions_reaches_worker_output(
    start_worker: Callable[..., Child],
) -> None:
    import sys

    lines: list[str] = []
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        start_worker(dispatcher.address, on_line=lines.append)

        def speaks() -> None:
            print("to standard output")
            print("to standard error", file=sys.stderr)

        coordinator.schedule(speaks).get(20)
        until(lambda: {"to standard output", "to standard error"} <= set(lines))


def test_failing_reader_of_lines_blocks_no_writer(
    start_worker: Callable[..., Child],
) -> None:
    """A pipe has room for 64 KiB: a process that writes more waits for a reader."""
    lines = 0

    def refuses(line: str) -> None:
        nonlocal lines
        lines += 1
        raise SystemExit("the terminal is closed")

    def speaks() -> int:
        for _ in range(4000):
            print("x" * 100)
        return 1

    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        start_worker(dispatcher.address, on_line=refuses)
        assert coordinator.schedule(speaks).get(20) == 1
        until(lambda: lines >= 4000)


def test_slot_death_is_logged(start_worker: Callable[..., Child]) -> None:
    def killed() -> None:
        import signal

        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    lines: list[str] = []
    with zd.DispatchServer() as dispatcher, ClusterCoordinator(dispatcher) as coordinator:
        start_worker(dispatcher.address, on_line=lines.append)
        with pytest.raises(errors.WorkerLost):
            coordinator.schedule(killed).get(20)
        said = "the process of slot 0 died while it ran a function: killed by SIGKILL"
        until(lambda: sum(said in line for line in lines) == 3)


def test_function_sees_cancellation_in_its_threads(
    cluster: zd.local_cluster, tmp_path: Path
) -> None:
    def starts_a_thread() -> None:
        thread = threading.Thread(target=waits, args=(tmp_path,))
        thread.start()
        thread.join()

    with ClusterCoordinator(cluster, cancel_grace_s=30.0) as coordinator:
        value = coordinator.schedule(starts_a_thread)
        until(lambda: begun(tmp_path))
        value.cancel()
        assert isinstance(value.exception(20), errors.CancelledError)
        assert (tmp_path / "cancelled-x").exists()


def test_slot_process_keeps_state_of_modules(cluster: zd.local_cluster) -> None:
    """A slot process continues after a function, so that imports and caches are there for the next
    one."""
    with ClusterCoordinator(cluster) as coordinator:
        pids = [
            set(coordinator.fetch(coordinator.map(lambda _: os.getpid(), range(20))))
            for _ in range(3)
        ]
        assert len(set.union(*pids)) <= 4


def test_few_descriptors_bound_actors_and_extra_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([(resource.RLIM_INFINITY, 0), (1024, 0), (256, 0), (64, 0)])
    monkeypatch.setattr("resource.getrlimit", lambda which: next(limits))
    assert within_descriptors(8, 10_000, 4096) == (10_000, 4096)
    assert within_descriptors(8, 64, 64) == (64, 64)
    assert within_descriptors(8, 64, 64) == (10, 10)
    assert within_descriptors(8, 64, 64) == (0, 0)
