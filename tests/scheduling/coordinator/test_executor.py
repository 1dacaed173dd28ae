"""zmqdist.Executor is what the standard library calls an Executor."""

from __future__ import annotations

import concurrent.futures as futures
import itertools
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import refuse_threads
from tests.scheduling.work import begun, exits, go, until, waits, writes
from zmqdist import errors
from zmqdist.scheduling.coordinator import broken_pool


@pytest.mark.processes("executor")
def test_submit_returns_standard_future(processes: zd.local_cluster) -> None:
    with zd.Executor(processes) as executor:
        assert isinstance(executor, futures.Executor)
        future = executor.submit(int, "11", base=2)
        assert isinstance(future, futures.Future)
        assert future.result(20) == 3
        assert future.done()
        assert not future.cancelled()
        assert future.exception() is None
        assert executor.submit(os.getpid).result(20) != os.getpid()


def test_arguments_named_like_parameters_reach_function(threads: zd.local_cluster) -> None:
    with zd.Executor(threads) as executor:
        assert executor.submit(dict, fn=1, args=2, self=3).result(20) == {
            "fn": 1,
            "args": 2,
            "self": 3,
        }


def test_map_with_buffersize_submits_on_demand(threads: zd.local_cluster) -> None:
    """The items may be endless, and the order is theirs."""
    drawn: list[int] = []

    def endless() -> Iterator[int]:
        for number in itertools.count():
            drawn.append(number)
            yield number

    with zd.Executor(threads) as executor:
        results = executor.map(abs, endless(), buffersize=3)
        assert drawn == [0, 1, 2]
        assert [next(results) for _ in range(10)] == list(range(10))
        assert drawn == list(range(13))
        results.close()  # type: ignore[attr-defined]
        assert list(executor.map(abs, [-1, -2, -3], buffersize=7)) == [1, 2, 3]
        assert list(executor.map(abs, [], buffersize=1)) == []


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({}, {"buffersize": 0}, ValueError, "buffersize must be"),
        ({}, {"buffersize": -1}, ValueError, "buffersize must be"),
        ({}, {"buffersize": 1.0}, TypeError, "buffersize must be"),
        ({}, {"chunksize": 0}, ValueError, "chunksize must be >= 1"),
        ({}, {"chunksize": -1}, ValueError, "chunksize must be >= 1"),
        ({"max_workers": 0}, {}, ValueError, "max_workers must be greater than 0"),
        ({"max_workers": -1}, {}, ValueError, "max_workers must be greater than 0"),
        ({"initializer": 5}, {}, TypeError, "initializer is .*, wants a function or None"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(
    threads: zd.local_cluster, options: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), zd.Executor(threads, **options) as executor:
        executor.map(int, "12", **arguments)


def test_map_has_order_several_iterables_and_time_out(
    threads: zd.local_cluster, tmp_path: Path
) -> None:
    with zd.Executor(threads) as executor:
        assert list(executor.map(pow, [2, 3, 4], [3, 2, 1], timeout=20)) == [8, 9, 4]
        assert list(executor.map(str, range(50), chunksize=7)) == [str(i) for i in range(50)]
        with pytest.raises(futures.TimeoutError):
            list(executor.map(waits, [tmp_path], timeout=0.05))
        go(tmp_path)


def test_standard_library_as_completed_and_wait_work(
    threads: zd.local_cluster, tmp_path: Path
) -> None:
    with zd.Executor(threads) as executor:
        slow = executor.submit(waits, tmp_path)
        quick = executor.submit(int)
        finished, missing = futures.wait([slow, quick], 20, return_when=futures.FIRST_COMPLETED)
        assert (finished, missing) == ({quick}, {slow})
        go(tmp_path)
        assert list(futures.as_completed([slow, quick], 20)) in ([slow, quick], [quick, slow])


def test_error_keeps_its_class_and_affects_one_future(processes: zd.local_cluster) -> None:
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


def test_result_that_exits_at_unpickling_fails_its_future(
    threads: zd.local_cluster,
) -> None:
    with zd.Executor(threads) as executor:
        deadly, plain = executor.submit(ExitsWhenUnpickled), executor.submit(int)
        with pytest.raises(BrokenProcessPool, match="cannot be unpickled here: SystemExit"):
            deadly.result(20)
        assert plain.result(20) == 0


def test_exit_in_callback_does_not_block_shutdown(
    threads: zd.local_cluster, tmp_path: Path
) -> None:
    with zd.Executor(threads) as executor:
        future = executor.submit(waits, tmp_path)
        future.add_done_callback(lambda _: exits_here())
        go(tmp_path)


def test_submit_without_settling_thread_is_undone(
    threads: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zd.Executor(threads) as executor:
        with monkeypatch.context() as full:
            refuse_threads(full, "zmqdist-settling")
            with pytest.raises(RuntimeError, match="can't start new thread"):
                executor.submit(int)
        assert executor.submit(int).result(20) == 0


def test_uncallable_and_unpicklable_are_refused(
    threads: zd.local_cluster,
) -> None:
    with zd.Executor(threads) as executor:
        with pytest.raises(TypeError, match="take a callable"):
            executor.submit(5)  # type: ignore[arg-type]
        unpicklable = executor.submit(int, threading.Lock())
        for cls in (pickle.PicklingError, errors.InvalidArgumentError):
            with pytest.raises(cls, match=r"args\[0\], a _thread.lock, cannot be pickled"):
                unpicklable.result(20)
        with pytest.raises(pickle.PicklingError, match=r"value, a _thread.lock, cannot be pickled"):
            executor.submit(threading.Lock).result(20)


def test_dying_process_fails_its_future_only(
    processes: zd.local_cluster,
) -> None:
    with zd.Executor(processes) as executor:
        bad = executor.submit(exits)
        good = [executor.submit(int, str(i)) for i in range(20)]
        assert [future.result(20) for future in good] == list(range(20))
        for cls in (errors.WorkerLost, BrokenProcessPool, futures.BrokenExecutor):
            with pytest.raises(cls, match=r"work\.exits was started 3 times.*exit code 7"):
                bad.result(20)


@pytest.mark.killed("executor")
def test_killed_function_runs_again(processes: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(processes) as executor:
        future = executor.submit(waits, tmp_path)
        (before,) = until(lambda: begun(tmp_path))
        os.kill(before, signal.SIGKILL)
        until(lambda: len(begun(tmp_path)) == 2)
        go(tmp_path)
        assert future.result(20) == "x"


def test_queued_future_can_be_cancelled(threads: zd.local_cluster, tmp_path: Path) -> None:
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
        until(lambda: called == [queued])
        with pytest.raises(futures.CancelledError):
            queued.result(20)
        until(lambda: cluster_has() == 3)  # it has heard
        go(tmp_path)
        assert [future.result(20) for future in running] == ["running0", "running1", "running2"]
        assert not running[0].cancel()
    assert not begun(tmp_path, "queued")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_running_future_cannot_be_cancelled(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with zd.Executor(request.getfixturevalue(kind)) as executor:
        future = executor.submit(waits, tmp_path)
        until(future.running)
        until(lambda: begun(tmp_path))
        assert not future.cancel()
        assert not future.cancelled()
        go(tmp_path)
        assert future.result(20) == "x"
        assert not future.running()
        assert not future.cancel()


def test_begun_future_cannot_be_cancelled_before_its_report(
    processes: zd.local_cluster, tmp_path: Path
) -> None:
    with zd.Executor(processes) as executor:
        future = executor.submit(waits, tmp_path)
        until(lambda: begun(tmp_path))
        assert not future.cancel()
        assert future.running()
        go(tmp_path)
        assert future.result(20) == "x"


@pytest.mark.parametrize("end", ["kill_workers", "terminate_workers"])
def test_kill_and_terminate_workers_end_all_futures(
    end: str, processes: zd.local_cluster, tmp_path: Path
) -> None:
    executor = zd.Executor(processes, cancel_grace_s=0.1)
    running = [executor.submit(writes, tmp_path, str(i)) for i in range(2)]
    until(lambda: all(future.running() for future in running))
    queued = [executor.submit(writes, tmp_path, f"queued{i}") for i in range(5)]
    getattr(executor, end)()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(int)
    for future in running:
        with pytest.raises(BrokenProcessPool, match="was cut off"):
            future.result(20)
    finished, missing = futures.wait(queued, 20)
    assert not missing
    assert all(future.cancelled() for future in finished)
    until(lambda: not processes.dispatcher.snapshot().coordinators)
    executor.shutdown()
    with zd.Executor(processes) as successor:
        assert list(successor.map(int, range(10))) == list(range(10))
    until(lambda: not list(tmp_path.glob("begun-queued*")))


def test_leaving_with_statement_waits_for_futures(
    threads: zd.local_cluster, tmp_path: Path
) -> None:
    with zd.Executor(threads) as executor:
        submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(5)]
        threading.Timer(0.05, go, (tmp_path,)).start()
    assert [future.result(0) for future in submitted] == ["0", "1", "2", "3", "4"]


def test_shutdown_without_wait_lets_work_go_on(threads: zd.local_cluster, tmp_path: Path) -> None:
    executor = zd.Executor(threads)
    submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(5)]
    executor.shutdown(wait=False)
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(int)
    go(tmp_path)
    assert [future.result(20) for future in submitted] == ["0", "1", "2", "3", "4"]
    executor.shutdown()


def test_shutdown_can_cancel_queued_futures(threads: zd.local_cluster, tmp_path: Path) -> None:
    executor = zd.Executor(threads)
    submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(8)]
    until(lambda: len(begun(tmp_path)) == 3)
    executor.shutdown(wait=False, cancel_futures=True)
    assert [future.cancelled() for future in submitted] == [False] * 3 + [True] * 5
    go(tmp_path)
    executor.shutdown()
    assert [future.result(0) for future in submitted[:3]] == ["0", "1", "2"]
    assert len(begun(tmp_path)) == 3


def test_futures_fail_without_cluster() -> None:
    with (
        zd.local_cluster(workers=0) as cluster,
        zd.Executor(cluster, cluster_lost_limit_s=1.0) as executor,
    ):
        future = executor.submit(int)
        for cls in (errors.UnavailableError, BrokenProcessPool):
            with pytest.raises(cls, match=r"without (any worker|a dispatcher) for 1 s"):
                future.result(20)


def test_callback_may_cancel_other_futures(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads) as executor:
        running = [executor.submit(waits, tmp_path, str(i)) for i in range(3)]
        queued = executor.submit(waits, tmp_path, "queued")
        cancel_event = threading.Event()
        answers: list[bool] = []

        def cancels(_: futures.Future[Any]) -> None:
            answers.append(queued.cancel())
            cancel_event.set()

        until(lambda: len(begun(tmp_path)) == 3)
        running[0].add_done_callback(cancels)
        go(tmp_path)
        assert cancel_event.wait(20)
    assert answers == [queued.cancelled()]


def test_abandoned_map_cancels_its_futures(threads: zd.local_cluster, tmp_path: Path) -> None:
    """Those that have not begun."""
    with zd.Executor(threads) as executor:
        results = executor.map(waits, [tmp_path] * 50, map(str, range(50)), timeout=0.2)
        with pytest.raises(futures.TimeoutError):
            next(results)
        go(tmp_path)
    assert len(begun(tmp_path)) <= 3


def test_max_workers_bounds_running_work(threads: zd.local_cluster, tmp_path: Path) -> None:
    with zd.Executor(threads, max_workers=2) as executor:
        submitted = [executor.submit(waits, tmp_path, str(i)) for i in range(6)]
        until(lambda: len(begun(tmp_path)) == 2)
        assert all(future.cancel() for future in submitted[2:])
        assert len(begun(tmp_path)) == 2
        go(tmp_path)
        assert [future.result(20) for future in submitted[:2]] == ["0", "1"]


INITIALIZED: list[int] = []


def initializes(number: int) -> None:
    INITIALIZED.append(number)


def initialized() -> tuple[int, list[int]]:
    return os.getpid(), INITIALIZED


def test_initializer_is_called_once_in_each_process(
    processes: zd.local_cluster,
) -> None:
    with zd.Executor(processes, initializer=initializes, initargs=(7,)) as executor:
        pairs = list(executor.map(lambda _: initialized(), range(50)))
        assert dict(pairs) == {pid: [7] for pid, _ in pairs}
        assert executor.submit(dict, self=1).result(20) == {"self": 1}
        with pytest.raises(pickle.PicklingError, match=r"args\[0\], a _thread.lock"):
            executor.submit(int, threading.Lock()).result(20)


def refuses() -> None:
    raise ValueError("no licence")


def test_failed_initializer_breaks_executor(threads: zd.local_cluster) -> None:
    executor = zd.Executor(threads, initializer=refuses)
    future = executor.submit(int)
    with pytest.raises(
        BrokenProcessPool, match=r"the initializer .*refuses failed: ValueError: no licence"
    ):
        future.result(20)
    with pytest.raises(BrokenProcessPool, match="no licence"):
        executor.submit(int)
    executor.shutdown()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_base_exception_is_in_its_future(error: BaseException, threads: zd.local_cluster) -> None:
    def raises() -> None:
        raise error

    with zd.Executor(threads) as executor:
        raised = executor.submit(raises).exception(20)
        assert (type(raised), getattr(raised, "args", None)) == (type(error), error.args)
        assert executor.submit(int).result(20) == 0


class FailsWhenUnpickled:
    def __reduce__(self) -> Any:
        return int, ("x",)


def test_argument_unpicklable_at_worker_breaks_its_future(
    threads: zd.local_cluster,
) -> None:
    with zd.Executor(threads) as executor:
        with pytest.raises(
            BrokenProcessPool,
            match="cannot be unpickled by the worker: ValueError: invalid literal",
        ):
            executor.submit(id, FailsWhenUnpickled()).result(20)
        assert isinstance(executor.submit(int, "x").exception(20), ValueError)


def test_closed_local_cluster_fails_futures(tmp_path: Path) -> None:
    cluster = zd.local_cluster(workers=1, processes=False)
    executor = zd.Executor(cluster)
    running, queued = executor.submit(waits, tmp_path), executor.submit(int)
    until(running.running)
    cluster.close()
    for future in (running, queued):
        for cls in (errors.UnavailableError, BrokenProcessPool):
            with pytest.raises(cls, match="the local_cluster of this executor has been closed"):
                future.result(0)
    with pytest.raises(BrokenProcessPool, match="has been closed"):
        executor.submit(int)
    go(tmp_path)
    executor.shutdown()


@pytest.mark.parametrize("name", ["ExecutorWorkerLost", "ExecutorUnavailable", "ExecutorBroken"])
def test_executor_errors_survive_pickling(name: str) -> None:
    cls = getattr(broken_pool, name)
    data = (
        ("f", (("worker:0", 0, -9, ""),)) if name == "ExecutorWorkerLost" else (None, None, "text")
    )
    error = pickle.loads(pickle.dumps(cls(*data)))
    assert type(error) is cls
    assert isinstance(error, RuntimeError)
    assert str(error) == str(cls(*data))


def test_callbacks_may_shut_down_each_others_executor(threads: zd.local_cluster) -> None:
    first, second = zd.Executor(threads), zd.Executor(threads)
    both_run, shutdown_events = threading.Barrier(2), [threading.Event(), threading.Event()]

    def shut_down(executor: zd.Executor, event: threading.Event) -> None:
        both_run.wait(10)
        executor.shutdown()
        event.set()

    first.submit(abs, -1).add_done_callback(lambda _: shut_down(second, shutdown_events[0]))
    second.submit(abs, -2).add_done_callback(lambda _: shut_down(first, shutdown_events[1]))
    assert all(event.wait(10) for event in shutdown_events)
