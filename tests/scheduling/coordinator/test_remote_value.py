"""RemoteValue: what `schedule` returns, in all the ways in which it can be asked and can end."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import functools
import gc
import itertools
import logging
import sys
import threading
import traceback
import types
from collections import namedtuple
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits, writes, written
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator, RemoteValue

both_clusters = pytest.mark.parametrize("coordinator", ["threads", "processes"], indirect=True)

Pair = namedtuple("Pair", "left right")

VALUES: list[Any] = [
    None,
    True,
    3,
    2**70,
    1.5,
    1j,
    "text",
    b"bytes",
    [1, (2, [3])],
    (2, (3, 4), [5], {"v": 1}),
    {"a": [None], 1: {2}},
    np.float32(1.5),
    np.bool_(True),
    Pair(1, [2]),
]


@pytest.fixture
def coordinator(in_slots: ClusterCoordinator) -> ClusterCoordinator:
    return in_slots


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_result_keeps_type_and_value(in_processes: ClusterCoordinator, value: Any) -> None:
    result = in_processes.schedule(lambda: value).fetch(20)
    assert type(result) is type(value)
    assert result == value


@pytest.mark.parametrize(
    "array", [np.array(7), np.zeros((0, 3)), np.arange(6).reshape(2, 3).T, np.array(["ab", "c"])]
)
def test_arrays_keep_dtype_and_shape_and_are_writable(
    in_processes: ClusterCoordinator, array: Any
) -> None:
    result = in_processes.schedule(lambda: array).fetch(20)
    assert (type(result), result.dtype, result.shape) == (np.ndarray, array.dtype, array.shape)
    assert np.array_equal(result, array)
    assert result.flags.writeable


def test_object_array_keeps_its_objects(in_processes: ClusterCoordinator) -> None:
    result = in_processes.schedule(lambda: np.array([{"a": 1}, None, [2]], dtype=object)).fetch(20)
    assert result.dtype == object
    assert list(result) == [{"a": 1}, None, [2]]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    result: Any
    next: Any = None


@attrs.frozen
class Job:
    result: Any


class Plain:
    def __init__(self, results: Any) -> None:
        self.results = results


class Slotted:
    __slots__ = ("results",)

    def __init__(self, results: Any) -> None:
        self.results = results


HOLDERS: list[tuple[Any, Any]] = [
    (lambda v: {"a": v}.values(), [3]),
    (lambda v: {"a": v}.items(), [("a", 3)]),
    (lambda v: collections.UserDict(a=v).values(), [3]),
    (lambda v: {v}, {3}),
    (lambda v: frozenset([v]), frozenset([3])),
    (lambda v: collections.deque([v]), collections.deque([3])),
    (lambda v: (item for item in [v]), [3]),
    (lambda v: {"late": map(list, [[v]])}, {"late": [[3]]}),
    (lambda v: zip("a", [v], strict=True), [("a", 3)]),
    (lambda v: itertools.chain([v]), [3]),
    (lambda v: {Colour.RED: v, 1: 1, "b": 2}, {Colour.RED: 3, 1: 1, "b": 2}),
    (lambda v: {v: 1}, {3: 1}),
    (lambda v: collections.defaultdict(list, a=v), {"a": 3}),
    (lambda v: Run(v, [Run({"x": v})]), Run(3, [Run({"x": 3})])),
    (lambda v: Job(Pair(v, 1)), Job(Pair(3, 1))),
    (lambda v: np.array([v, None], object), [3, None]),
    (lambda v: zd.coordinator.PerWorkerValues([v]), [3]),
    (
        lambda v: {"a": [v, None], "b": (v, "text"), "c": 4},
        {"a": [3, None], "b": (3, "text"), "c": 4},
    ),
    (lambda v: "text", "text"),
]


@pytest.mark.parametrize("number", range(len(HOLDERS)))
def test_fetch_replaces_remote_values_in_structures(
    in_threads: ClusterCoordinator, number: int
) -> None:
    holder, expected = HOLDERS[number]
    fetched = in_threads.fetch(holder(in_threads.schedule(abs, (-3,))))
    assert (fetched.tolist() if isinstance(fetched, np.ndarray) else fetched) == expected


@pytest.mark.parametrize(
    ("holder", "path"),
    [
        (Plain, "results of a tests.scheduling.coordinator.test_remote_value.Plain"),
        (
            lambda v: [Plain([{"x": v}])],
            "results of a tests.scheduling.coordinator.test_remote_value.Plain",
        ),
        (Slotted, "results of a tests.scheduling.coordinator.test_remote_value.Slotted"),
        (lambda v: types.SimpleNamespace(a=v), "a of a types.SimpleNamespace"),
        (lambda v: types.MappingProxyType({"a": v}), r"\['a'\] of a mappingproxy"),
        (lambda v: functools.partial(abs, v), r"args\[0\] of a functools.partial"),
    ],
)
def test_fetch_refuses_opaque_holder_of_remote_value(
    in_threads: ClusterCoordinator, holder: Any, path: str
) -> None:
    with pytest.raises(
        TypeError,
        match=rf"does not replace the RemoteValue in {path}: call its result\(\), or put it",
    ):
        in_threads.fetch(holder(in_threads.schedule(abs, (-3,))))


def test_fetch_and_get_return_same_object_each_time(in_threads: ClusterCoordinator) -> None:
    value = in_threads.schedule(lambda: [np.ones(3)])
    assert value.fetch(20) is value.get()
    assert value.get() is value.get()


def test_value_can_be_fetched_by_several_threads(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    value = in_processes.schedule(waits, (tmp_path,))
    results: list[Any] = []
    fetchers = [threading.Thread(target=lambda: results.append(value.fetch(20))) for _ in range(4)]
    for fetcher in fetchers:
        fetcher.start()
    until(lambda: begun(tmp_path))
    go(tmp_path)
    for fetcher in fetchers:
        fetcher.join()
    assert results == ["x"] * 4
    assert all(item is results[0] for item in results)


# -- errors ----------------------------------------------------------------------------------------


class Broke(ValueError):
    """An exception of the user's own."""

    def __init__(self, subject: str, number: int) -> None:
        super().__init__(f"{subject} broke")
        self.number = number


def breaks() -> None:
    raise Broke("it", 7)


def clear(coordinator: ClusterCoordinator, kind: type[BaseException]) -> None:
    """Take the round's error, so that the next test begins without."""
    with pytest.raises(kind):
        coordinator.join(20)


def test_error_keeps_class_and_traceback(
    in_processes: ClusterCoordinator,
) -> None:
    value = in_processes.schedule(breaks)
    for call in (value.get, value.fetch, value.get, value.fetch):
        with pytest.raises(Broke, match="it broke") as caught:
            call(20)
        assert caught.value.number == 7
        assert "in breaks" in str(caught.value.__cause__)
    assert isinstance(value.exception(), Broke)
    clear(in_processes, Broke)
    with pytest.raises(Broke):  # the end of the round clears the round, not the value
        value.get()


def test_raised_errors_are_copies_with_short_tracebacks(
    in_threads: ClusterCoordinator,
) -> None:
    value = in_threads.schedule(breaks)
    caught = []
    for _ in range(3):
        try:
            value.get(20)
        except Broke as error:
            caught.append(error)
    assert len({id(error) for error in caught}) == 3
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in caught}) == 1
    clear(in_threads, Broke)


def unpicklable() -> None:
    error = RuntimeError("the reason")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def leaks_stop() -> Any:
    return next(iter(()))


def leaves() -> None:
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


def returns_a_lock() -> Any:
    return {"good": 1, "bad": [threading.Lock()]}


ENDS: list[tuple[Any, type[BaseException], str]] = [
    (unpicklable, RuntimeError, "the reason"),
    (leaks_stop, errors.OutOfRangeError, "StopIteration"),
    (leaves, errors.UnknownError, r"SystemExit\(3\)"),
    (interrupts, errors.UnknownError, "KeyboardInterrupt"),
    (
        returns_a_lock,
        errors.InvalidArgumentError,
        r"value\['bad'\]\[0\], a _thread.lock, cannot be pickled",
    ),
]


@pytest.mark.parametrize(("fn", "kind", "message"), ENDS, ids=[fn.__name__ for fn, _, _ in ENDS])
@both_clusters
def test_unraisable_error_is_replaced_with_its_text(
    coordinator: ClusterCoordinator, fn: Any, kind: type[BaseException], message: str
) -> None:
    value = coordinator.schedule(fn)
    with pytest.raises(kind, match=message) as caught:
        value.get(20)
    if fn is not returns_a_lock:
        assert fn.__name__ in str(caught.value.__cause__)
    clear(coordinator, kind)
    assert coordinator.schedule(int).get(20) == 0


def test_result_unpicklable_in_program_fails_get(
    in_processes: ClusterCoordinator,
) -> None:
    value = in_processes.schedule(lambda: Hostile())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="not here"):
            value.get(20)


class Hostile:
    def __reduce__(self) -> Any:
        return refuses, ()


def refuses() -> None:
    raise ZeroDivisionError("not here")


# -- waiting ---------------------------------------------------------------------------------------


def test_value_is_usable_after_time_out(in_processes: ClusterCoordinator, tmp_path: Path) -> None:
    value = in_processes.schedule(waits, (tmp_path,))
    for call in (value.get, value.fetch, value.exception):
        with pytest.raises(
            errors.DeadlineExceededError, match=r"work.waits has not ended after 0\.01 s"
        ) as caught:
            call(0.01)
        assert isinstance(caught.value, TimeoutError)
    with pytest.raises(TimeoutError):
        value.get(-1)
    assert not value.done()
    go(tmp_path)
    assert value.get(20) == "x"
    assert value.done()
    assert value.exception() is None


def test_repr_has_function_and_status(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    value = in_threads.schedule(waits, (tmp_path,))
    assert repr(value) == "<RemoteValue of tests.scheduling.work.waits: pending>"
    go(tmp_path)
    value.get(20)
    assert repr(value).endswith(": ready>")


def test_value_can_be_awaited(in_threads: ClusterCoordinator) -> None:
    async def main() -> list[Any]:
        ready = in_threads.schedule(int, ("3",))
        ready.get(20)
        values = [in_threads.schedule(int, (text,)) for text in "12"]
        return [*await asyncio.gather(*(awaited(value) for value in values)), await ready]

    async def awaited(value: RemoteValue) -> Any:
        return await value

    assert asyncio.run(main()) == [1, 2, 3]


def test_await_raises_error_of_function(in_threads: ClusterCoordinator) -> None:
    async def main() -> None:
        await in_threads.schedule(breaks)

    with pytest.raises(Broke):
        asyncio.run(main())
    clear(in_threads, Broke)


def test_large_result_of_dropped_value_is_not_fetched(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    def large() -> Any:
        waits(tmp_path)
        return np.zeros(4_000_000)

    value = in_processes.schedule(large)
    second_value = in_processes.schedule(large)
    until(lambda: len(begun(tmp_path)) == 2)
    del value
    gc.collect()
    go(tmp_path)
    in_processes.join(20)
    assert in_processes.snapshot().memories == 1, "that of the other one's worker"
    assert len(second_value.get()) == 4_000_000


# -- cancel ----------------------------------------------------------------------------------------


def test_cancelled_queued_work_never_starts(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    running = [in_processes.schedule(waits, (tmp_path, f"running{i}")) for i in range(2)]
    until(lambda: len(begun(tmp_path)) == 2)
    queued = [in_processes.schedule(waits, (tmp_path, f"queued{i}")) for i in range(5)]
    assert all(value.cancel() for value in queued)
    for value in queued:
        with pytest.raises(errors.CancelledError, match=r"waits was cancelled.* schedule it again"):
            value.get(20)
    go(tmp_path)
    in_processes.join(20)  # what was cancelled on purpose is no failure
    assert [value.get() for value in running] == ["running0", "running1"]
    assert not begun(tmp_path, "queued*")
    assert not queued[0].cancel()
    assert not running[0].cancel()


def test_cancelled_running_function_is_cut_off_after_grace(
    in_processes: ClusterCoordinator, tmp_path: Path
) -> None:
    value = in_processes.schedule(writes, (tmp_path,))
    until(lambda: begun(tmp_path))
    assert value.cancel()
    with pytest.raises(errors.CancelledError):
        value.get(20)
    before = written(tmp_path)
    assert in_processes.schedule(int).get(20) == 0
    in_processes.join(20)
    assert written(tmp_path) == before


@both_clusters
def test_cancelled_running_function_can_see_it(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    """What it returns then is dropped."""
    value = coordinator.schedule(waits, (tmp_path,))
    until(lambda: begun(tmp_path))
    assert value.cancel()
    with pytest.raises(errors.CancelledError):
        value.get(20)
    assert (tmp_path / "cancelled-x").exists()
    assert not zd.cancelled()


# -- callbacks -------------------------------------------------------------------------------------


def test_callbacks_run_in_order_and_failures_are_logged(
    in_threads: ClusterCoordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = in_threads.schedule(waits, (tmp_path,))
    called: list[Any] = []
    value.add_done_callback(lambda value: called.append((1, value.get())))
    value.add_done_callback(lambda value: 1 // 0)
    value.add_done_callback(lambda value: sys.exit())
    value.add_done_callback(lambda value: called.append((2, value.get())))
    assert not called
    with caplog.at_level(logging.ERROR, "zmqdist.coordinator"):
        go(tmp_path)
        until(lambda: len(called) == 2)
    assert called == [(1, "x"), (2, "x")]
    assert (
        "a done callback of <RemoteValue of tests.scheduling.work.waits: ready> failed"
        in caplog.text
    )
    assert "ZeroDivisionError" in caplog.text
    value.add_done_callback(lambda value: sys.exit())  # of a value that is ready
    value.add_done_callback(lambda value: called.append((3, value.get())))
    until(lambda: called[-1] == (3, "x"))


def test_callback_of_dropped_value_is_called(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    called: list[Any] = []
    in_threads.schedule(waits, (tmp_path,)).add_done_callback(
        lambda value: called.append(value.get())
    )
    gc.collect()
    go(tmp_path)
    until(lambda: called == ["x"])


def test_callbacks_are_called_for_errors_and_close(
    threads: zd.local_cluster, tmp_path: Path
) -> None:
    called: list[Any] = []
    with ClusterCoordinator(threads) as coordinator:
        coordinator.schedule(breaks).add_done_callback(
            lambda value: called.append(type(value.exception()))
        )
        until(lambda: called)
        clear(coordinator, Broke)
        coordinator.schedule(waits, (tmp_path,)).add_done_callback(
            lambda value: called.append(type(value.exception()))
        )
    until(lambda: called == [Broke, errors.CancelledError])
    go(tmp_path)
