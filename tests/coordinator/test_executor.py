"""zmqdist.Executor is what the standard library calls an Executor."""

from __future__ import annotations

import concurrent.futures as futures
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.coordinator.test_callbacks import refuse_threads
from tests.dispatch.work import begun, exits, go, until, waits, writes, written
from zmqdist import errors


@pytest.mark.processes("executor")
def test_submit_gives_a_future_of_the_standard_library(processes: zd.local_cluster) -> None:
    with zd.Executor(processes) as executor:
        assert isinstance(executor, futures.Executor)
        future = executor.submit(int, "11", base=2)
        assert isinstance(future, futures.Future)
        assert future.result(20) == 3
        assert future.done()
        assert not future.cancelled()
        assert future.exception() is None
        assert executor.submit(os.getpid).result(20) != os.getpid()


def test_arguments_named_like_ours_are_the_functions(threads: zd.local_cluster) -> None:
    with zd.Executor(threads) as executor:
        assert executor.submit(dict, fn=1, args=2, self=3).result(20) == {"fn": 1, "args": 2, "self": 3}


def test_map_is_ordered_takes_several_iterables_and_has_a_time_out(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads) as executor:
        assert list(executor.map(pow, [2, 3, 4], [3, 2, 1], timeout=20)) == [8, 9, 4]
        assert list(executor.map(str, range(50), chunksize=7)) == [str(i) for i in range(50)]
        with pytest.raises(futures.TimeoutError):
            list(executor.map(waits, [tmp_path], timeout=0.05))
        go(tmp_path)


def test_as_completed_and_wait_of_the_standard_library_work(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads) as executor:
        slow = executor.submit(waits, tmp_path)
        quick = executor.submit(int)
        done, missing = futures.wait([slow, quick], 20, return_when=futures.FIRST_COMPLETED)
        assert (done, missing) == ({quick}, {slow})
        go(tmp_path)
        assert list(futures.as_completed([slow, quick], 20)) in ([slow, quick], [quick, slow])


def test_an_error_keeps_its_class_and_touches_no_other(processes: zd.local_cluster) -> None:
    with zd.Executor(processes) as executor:
        many = [executor.submit(int, text) for text in ("1", "x", "2", "y", "3")]
        assert [future.result(20) for future in many if future.exception(20) is None] == [1, 2, 3]
        for future in (many[1], many[3]):
            with pytest.raises(ValueError, match="invalid literal") as caught:
                future.result()
            assert "Traceback" in str(caught.value.__cause__)
        assert executor.submit(int).result(20) == 0


def exits_here() -> None:
    raise SystemExit("while it is unpickled")


class ExitsWhenUnpickled:
    def __reduce__(self) -> Any:
        return exits_here, ()


def test_a_result_that_ends_the_thread_that_unpickles_it_is_an_error_of_its_future_alone(
    threads: zd.local_cluster,
) -> None:
    with zd.Executor(threads) as executor:
        deadly, other = executor.submit(ExitsWhenUnpickled), executor.submit(int)
        assert isinstance(deadly.exception(20), SystemExit)
        assert other.result(20) == 0


def test_a_futures_callback_that_exits_keeps_no_shutdown_waiting(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads) as executor:
        future = executor.submit(waits, tmp_path)
        future.add_done_callback(lambda _: exits_here())
        go(tmp_path)


def test_a_function_that_no_thread_would_settle_is_taken_back(
    threads: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zd.Executor(threads) as executor:
        with monkeypatch.context() as full:
            refuse_threads(full, "zmqdist-callbacks")
            with pytest.raises(RuntimeError, match="can't start new thread"):
                executor.submit(int)
        assert executor.submit(int).result(20) == 0


def test_what_cannot_be_submitted_is_told_at_once(threads: zd.local_cluster) -> None:
    with zd.Executor(threads) as executor:
        with pytest.raises(errors.InvalidArgumentError, match=r"args\[0\], a _thread.lock, cannot be pickled"):
            executor.submit(int, threading.Lock())
        with pytest.raises(TypeError, match="takes a callable"):
            executor.submit(5)  # type: ignore[arg-type]


def test_a_process_that_dies_with_a_function_is_an_error_of_its_future_alone(processes: zd.local_cluster) -> None:
    with zd.Executor(processes) as executor:
        bad = executor.submit(exits)
        good = [executor.submit(int, str(i)) for i in range(20)]
        assert [future.result(20) for future in good] == list(range(20))
        with pytest.raises(errors.WorkerLost, match=r"work\.exits was started 3 times.*exit code 7"):
            bad.result(20)


@pytest.mark.killed("executor")
def test_a_function_whose_process_is_killed_runs_again(processes: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(processes) as executor:
        future = executor.submit(waits, tmp_path)
        (before,) = until(lambda: begun(tmp_path))
        os.kill(before, signal.SIGKILL)
        until(lambda: len(begun(tmp_path)) == 2)
        go(tmp_path)
        assert future.result(20) == "x"


def test_a_queued_future_can_be_cancelled(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads) as executor:
        running = [executor.submit(waits, tmp_path, f"running{i}") for i in range(3)]
        until(lambda: len(begun(tmp_path)) == 3)
        snapshot = threads.dispatcher.snapshot

        def cluster_has() -> int:
            figures = snapshot()
            return figures.queued + sum(row.leases for row in figures.workers)

        queued = executor.submit(waits, tmp_path, "queued")
        until(lambda: cluster_has() == 4)
        called: list[Any] = []
        queued.add_done_callback(called.append)
        assert queued.cancel()
        assert queued.cancelled()
        assert called == [queued]
        with pytest.raises(futures.CancelledError):
            queued.result(20)
        until(lambda: cluster_has() == 3)  # it has heard
        go(tmp_path)
        assert [future.result(20) for future in running] == ["running0", "running1", "running2"]
        assert not running[0].cancel()
    assert not begun(tmp_path, "queued")


def test_a_running_future_that_is_cancelled_is_cut_off(processes: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(processes, cancel_grace_s=0.1) as executor:
        future = executor.submit(writes, tmp_path)
        until(lambda: begun(tmp_path))
        assert future.cancel()
    before = written(tmp_path)  # leaving the with-statement has waited for the end of it
    with zd.Executor(processes) as executor:
        assert list(executor.map(int, range(10))) == list(range(10))
    assert written(tmp_path) == before


def test_leaving_the_with_statement_waits_for_all(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads) as executor:
        submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(5)]
        threading.Timer(0.05, go, (tmp_path,)).start()
    assert [future.result(0) for future in submitted] == ["0", "1", "2", "3", "4"]


def test_shutdown_without_waiting_lets_the_work_go_on(threads: zd.local_cluster, tmp_path: Path) -> None:
    executor = zd.Executor(threads)
    submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(5)]
    executor.shutdown(wait=False)
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(int)
    go(tmp_path)
    assert [future.result(20) for future in submitted] == ["0", "1", "2", "3", "4"]
    executor.shutdown()


def test_shutdown_can_cancel_what_has_not_ended(threads: zd.local_cluster, tmp_path: Path) -> None:
    executor = zd.Executor(threads)
    submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(8)]
    until(lambda: len(begun(tmp_path)) == 3)
    executor.shutdown(cancel_futures=True)
    assert all(future.done() for future in submitted)
    assert all(future.cancelled() for future in submitted[3:])
    assert len(begun(tmp_path)) == 3


def test_futures_end_when_there_is_no_cluster_any_more() -> None:
    with zd.local_cluster(workers=0) as cluster, zd.Executor(cluster, cluster_lost_limit_s=1.0) as executor:
        future = executor.submit(int)
        with pytest.raises(errors.UnavailableError, match="without any worker for 1 s"):
            future.result(20)
