"""What can be scheduled, what cannot and how that is reported; map and close."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import begun, counts, starts, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue


class Counter:
    """An object whose method is scheduled."""

    def __init__(self, start: int) -> None:
        self.start = start

    def plus(self, more: int) -> int:
        return self.start + more

    def __call__(self, more: int) -> int:
        return self.plus(more)


CALLABLES: list[tuple[Any, Any, Any, Any]] = [
    (int, ("3",), None, 3),
    (int, ["3"], {"base": 4}, 3),
    (dict, None, {"a": 1}, {"a": 1}),
    (lambda: 3, None, None, 3),
    (functools.partial(int, base=2), ("11",), None, 3),
    (Counter(1).plus, (2,), None, 3),
    (Counter(1), (2,), {}, 3),
    (np.add, (1, 2), None, np.int64(3)),
    (zd.function(abs), (-3,), None, 3),
]


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "result"),
    CALLABLES,
    ids=[repr(row[0]).split(" at 0x")[0][:40] for row in CALLABLES],
)
def test_callables_can_be_scheduled(
    in_processes: ClusterCoordinator, fn: Any, args: Any, kwargs: Any, result: Any
) -> None:
    assert in_processes.schedule(fn, args, kwargs).fetch(20) == result


def test_arguments_may_be_an_iterator(in_processes: ClusterCoordinator) -> None:
    assert in_processes.schedule(sum, iter([[1, 2]])).fetch(20) == 3


_order: list[int] = []


def note(number: int) -> None:
    _order.append(number)


def test_functions_begin_in_schedule_order() -> None:
    """One thread of this process, so that it sees our list."""
    _order.clear()
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        coordinator.map(note, range(50))
        coordinator.join(20)
        assert _order == list(range(50))


# -- what cannot be --------------------------------------------------------------------------------

LOCK = threading.Lock()


class Holder:
    def __init__(self) -> None:
        self.socket = LOCK

    def method(self) -> None: ...


def captures_a_lock() -> Any:
    lock = LOCK
    return lambda: lock


INVALID = errors.InvalidArgumentError
BAD: list[tuple[Any, Any, Any, type[Exception], str]] = [
    (5, None, None, TypeError, r"schedule\(\) and submit\(\) take a callable, not int"),
    (None, None, None, TypeError, "take a callable, not NoneType"),
    (int, 5, None, TypeError, r"args is 5, wants a tuple or a list: args=\(5,\)"),
    (int, "5", None, TypeError, r"args is '5', wants a tuple or a list"),
    (int, None, 5, TypeError, "not iterable"),
    (int, (LOCK,), None, INVALID, r"args\[0\], a _thread\.lock, cannot be pickled"),
    (int, ([{"a": LOCK}],), None, INVALID, r"args\[0\]\[0\]\['a'\], a _thread\.lock"),
    (int, None, {"x": LOCK}, INVALID, r"kwargs\['x'\], a _thread\.lock"),
    (captures_a_lock(), None, None, INVALID, "<lambda>, which captures 'lock', a _thread.lock"),
    (functools.partial(int, LOCK), None, None, INVALID, r"int\.args\[0\], a _thread\.lock"),
    (Holder().method, None, None, INVALID, r"method\.__self__\.socket, a _thread\.lock"),
    (int, (np.array([1, LOCK], object),), None, INVALID, r"args\[0\]\[1\], a _thread\.lock"),
]


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "kind", "message"), BAD, ids=[row[4] for row in BAD]
)
def test_unschedulable_call_is_refused_and_changes_nothing(
    in_threads: ClusterCoordinator,
    fn: Any,
    args: Any,
    kwargs: Any,
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        in_threads.schedule(fn, args, kwargs)
    assert in_threads.done()
    in_threads.join(0)
    assert in_threads.schedule(int).get(20) == 0


def test_coordinator_cannot_be_captured(in_threads: ClusterCoordinator) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match="a ClusterCoordinator stays in its process"
    ):
        in_threads.schedule(lambda: in_threads.schedule(int))


def test_module_missing_at_workers_is_named(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    (tmp_path / "only_with_us.py").write_text("def fn(): return 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import only_with_us  # type: ignore[import-not-found]

        value = in_processes.schedule(only_with_us.fn)
    message = (
        "module 'only_with_us' is not importable in process .* put it on the workers' PYTHONPATH"
    )
    with pytest.raises(errors.FailedPreconditionError, match=message):
        value.get(20)
    with pytest.raises(errors.FailedPreconditionError):
        in_processes.join()


# -- close and fork --------------------------------------------------------------------------------


def test_close_cancels_unfinished_work(processes: zd.local_cluster, tmp_path: Path) -> None:
    coordinator = ClusterCoordinator(processes)
    finished = coordinator.schedule(int)
    coordinator.join(20)
    values = [coordinator.schedule(writes, (tmp_path, str(i))) for i in range(5)]
    until(lambda: len(begun(tmp_path)) == 2)
    coordinator.close()
    coordinator.close()
    assert finished.get() == 0
    for value in values:
        with pytest.raises(errors.CancelledError):
            value.get(0)
    with ClusterCoordinator(processes) as successor:
        assert successor.fetch(successor.map(int, range(4))) == [0, 1, 2, 3]
        pids = begun(tmp_path)
        assert len(pids) == 2
        # each worker cuts off its own
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
        before = written(tmp_path)
        successor.fetch(successor.map(counts_once(tmp_path), range(4)))
        assert written(tmp_path) == before


def counts_once(folder: Path) -> Any:
    return lambda name: counts(folder, str(name), 0.02)


def test_close_ends_get_and_join(threads: zd.local_cluster, tmp_path: Path) -> None:
    coordinator = ClusterCoordinator(threads)
    value = coordinator.schedule(waits, (tmp_path,))
    outcomes: list[Any] = []

    def wait(call: Any) -> None:
        try:
            call()
        except Exception as error:
            outcomes.append(type(error))
        else:
            outcomes.append(None)

    waiters = [
        threading.Thread(target=wait, args=(call,)) for call in (value.get, coordinator.join)
    ]
    for waiter in waiters:
        waiter.start()
    until(lambda: begun(tmp_path) and coordinator.snapshot().waiting_for_end)
    coordinator.close()
    for waiter in waiters:
        waiter.join(20)
    assert sorted(map(str, outcomes)) == ["<class 'zmqdist.errors.CancelledError'>", "None"]


def test_closed_coordinator_refuses_calls(threads: zd.local_cluster) -> None:
    with ClusterCoordinator(threads) as coordinator:
        value = coordinator.schedule(int)
        urgent = coordinator.options(priority=1)
        coordinator.join(20)
    for use in (
        lambda: coordinator.schedule(int),
        lambda: coordinator.submit(int),
        lambda: urgent.submit(int),
        lambda: coordinator.map(abs, [1]),
        coordinator.join,
        coordinator.done,
    ):
        with pytest.raises(
            errors.FailedPreconditionError, match="this ClusterCoordinator has been closed"
        ):
            use()
    assert value.get() == 0
    assert coordinator.fetch([value, "x"]) == [0, "x"]
    assert not value.cancel()


def test_dropped_value_does_not_stop_its_function(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    for name in "abc":
        in_threads.schedule(counts, (tmp_path, name))
    in_threads.join(20)
    assert [starts(tmp_path, name) for name in "abc"] == [1, 1, 1]
    assert isinstance(in_threads.schedule(int), RemoteValue)


def test_unbounded_queue_is_warned_about(
    threads: zd.local_cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterCoordinator(threads, queue_max=0) as coordinator:
        assert "queue_max is 0" in caplog.text
        assert sum(coordinator.fetch(coordinator.map(int, ["1"] * 3000))) == 3000
        coordinator.join(20)
    with pytest.raises(ValueError, match="queue_max is -1"):
        ClusterCoordinator(threads, queue_max=-1)


def test_refused_coordinator_raises_at_its_next_calls(
    threads: zd.local_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqdist.scheduling.dispatcher.machine.COORDINATORS_MAX", 0)
    with ClusterCoordinator(threads) as coordinator:
        for request in (coordinator.workers, lambda: coordinator.create_per_worker_resource(int)):
            with pytest.raises(errors.ResourceExhaustedError, match="has 0 coordinators"):
                request()


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


@pytest.mark.parametrize(
    ("call", "message", "frame"),
    [
        (
            lambda c: c.schedule(int, ([{"x": LOCK}],)),
            r"args[0][0]['x'], a _thread.lock, cannot be pickled: TypeError: ",
            "",
        ),
        (lambda c: c.schedule(int, None, {"x": Refuses()}), "kwargs['x'], a ", "in __reduce__"),
        (
            lambda c: c.schedule(lambda: LOCK),
            "which captures 'LOCK', a _thread.lock, cannot be pickled",
            "",
        ),
        (
            lambda c: c.map(lambda _: LOCK, [1]),
            "which captures 'LOCK', a _thread.lock, cannot be pickled",
            "",
        ),
        (
            lambda c: c.schedule(threading.Lock).get(20),
            "value, a _thread.lock, cannot be pickled",
            "",
        ),
        (lambda c: c.schedule(Refuses).get(20), "value, a ", ""),
    ],
)
def test_pickling_error_shows_no_frames_of_pickler(
    in_threads: ClusterCoordinator, call: Any, message: str, frame: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        call(in_threads)
    text = "".join(traceback.format_exception(caught.value))
    assert message in str(caught.value)
    assert frame in text
    assert "pickle.py" not in text
    assert "trusted.py" not in text
    with contextlib.suppress(errors.InvalidArgumentError):
        in_threads.join()


def test_array_of_values_needs_numbers(
    coordinator: ClusterCoordinator,
) -> None:
    for numbers in ([1, 2**60], [0.5, 2.0], [1j, 2.0 + 0j]):
        values: Any = coordinator.map(lambda number: number, numbers)
        assert np.array(values).tolist() == numbers
    for items in ([False, True], ["a", "b"]):
        values = coordinator.map(lambda item: item, items)
        with pytest.raises(TypeError, match="no number or array"):
            np.array(values)
