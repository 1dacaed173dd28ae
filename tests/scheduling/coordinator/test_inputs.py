"""Results as arguments of other functions: before they have ended, when they are here, when their
worker keeps them."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import begun, go, until, waits
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.limits import INLINE_BYTES_MAX

pytestmark = pytest.mark.timeout(60)

MIB = 2**20


def add(a: Any, b: Any = 1) -> Any:
    return a + b


def fails(text: str = "no such row", *_: Any) -> None:
    raise KeyError(text)


def large() -> np.ndarray[Any, Any]:
    return np.ones(MIB, np.uint8)


def changes(array: np.ndarray[Any, Any]) -> int:
    array += 1
    return int(array.sum(dtype=np.int64))


ARGUMENTS: list[Any] = [
    lambda value: (add, (value,), None),
    lambda value: (lambda nested: nested[0]["a"][0] + 1, ([{"a": (value,)}],), None),
    lambda value: (add, None, {"a": value}),
    lambda value: (lambda: value + 1, None, None),  # type: ignore[operator]
    lambda value: (functools.partial(add, value), None, None),
]


@pytest.mark.parametrize("keep", [False, True], ids=["here", "kept"])
@pytest.mark.parametrize(
    "arguments", ARGUMENTS, ids=["argument", "nested", "keyword", "captured", "partial"]
)
def test_result_can_be_input_at_any_depth(
    coordinator: ClusterCoordinator, arguments: Any, keep: bool, tmp_path: Path
) -> None:
    value = coordinator.schedule(lambda: len(waits(tmp_path, "12345")), keep=keep)
    before = coordinator.schedule(*arguments(value))
    go(tmp_path)
    assert before.fetch(20) == 6
    assert coordinator.schedule(*arguments(value)).fetch(20) == 6
    assert value.fetch(20) == 5
    assert coordinator.schedule(*arguments(value)).fetch(20) == 6


def test_captured_results_of_same_code_stay_apart(
    coordinator: ClusterCoordinator,
) -> None:
    def adds(value: Any) -> Any:
        return lambda: value + 1

    values = coordinator.map(add, [1, 2])
    assert coordinator.fetch([coordinator.schedule(adds(value)) for value in values]) == [3, 4]


@pytest.mark.parametrize("keep", [False, True], ids=["here", "kept"])
@pytest.mark.parametrize("pending", [True, False], ids=["before", "after"])
def test_large_input_is_private_to_each_function(
    coordinator: ClusterCoordinator, keep: bool, pending: bool
) -> None:
    value = coordinator.schedule(large, keep=keep)
    if not pending:
        assert value.exception(20) is None
    assert (
        coordinator.fetch([coordinator.schedule(changes, (value,)) for _ in range(4)])
        == [2 * MIB] * 4
    )
    mine = value.get(20)
    assert mine.sum(dtype=np.int64) == MIB
    until(lambda: coordinator.snapshot().held.parts == 0)


def test_changed_result_is_input_as_it_is_at_schedule(
    in_threads: ClusterCoordinator,
) -> None:
    value = in_threads.schedule(dict, (), {"a": 1})
    value.get(20)["b"] = 2
    copy = in_threads.schedule(dict, (value,))
    value.get()["c"] = 3
    assert copy.fetch(20) == {"a": 1, "b": 2}


def test_inputs_too_large_together_for_message_arrive(coordinator: ClusterCoordinator) -> None:
    size = INLINE_BYTES_MAX // 4
    values = [coordinator.schedule(bytes, (size,)) for _ in range(8)]
    assert coordinator.schedule(lambda items: sum(map(len, items)), (values,)).fetch(20) == 8 * size
    until(lambda: coordinator.snapshot().held.parts == 0)


def test_chain_of_inputs_runs_in_order(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(int)
    for _ in range(100):
        value = coordinator.schedule(add, (value,))
    assert value.fetch(20) == 100
    coordinator.join(20)
    assert coordinator.snapshot().records == 0


def test_input_lives_until_dependents_end(in_threads: ClusterCoordinator, tmp_path: Path) -> None:
    first = in_threads.schedule(waits, (tmp_path,))
    first_reference = weakref.ref(first)
    second = in_threads.schedule(len, (first,))
    del first
    gc.collect()
    assert first_reference() is not None
    go(tmp_path)
    assert second.fetch(20) == 1
    until(lambda: first_reference() is None)


def test_work_waiting_for_input_counts_for_queue_max(
    threads: zd.local_cluster, tmp_path: Path
) -> None:
    with ClusterCoordinator(threads, queue_max=2) as coordinator:
        first = coordinator.schedule(waits, (tmp_path,))
        until(lambda: begun(tmp_path))
        for _ in range(2):
            coordinator.schedule(len, (first,))
        scheduling = threading.Thread(target=coordinator.schedule, args=(len, (first,)))
        scheduling.start()
        # its loop takes them one after the other
        until(lambda: coordinator.snapshot().waiting_for_inputs == 2)
        until(lambda: coordinator.snapshot().waiting_for_room == 1)
        assert coordinator.snapshot().waiting_for_inputs == 2
        go(tmp_path)
        scheduling.join(20)
        coordinator.join(20)
        assert (
            coordinator.fetch([coordinator.schedule(len, (first,)) for _ in range(20)]) == [1] * 20
        )


# -- inputs without a value ------------------------------------------------------------------------


def test_failed_input_fails_direct_and_indirect_dependents(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    first = coordinator.schedule(
        fails, (coordinator.schedule(lambda: waits(tmp_path, "no such row")),)
    )
    second = coordinator.schedule(add, (first,))
    third = coordinator.schedule(add, (1, second))
    go(tmp_path)
    for value in (second, third):
        with pytest.raises(
            errors.ClosureInputError, match=r"Input has an error.*no such row"
        ) as caught:
            value.fetch(20)
        assert isinstance(caught.value.original_exception, KeyError)
        assert "in fails" in str(caught.value.original_exception.__cause__)
    with pytest.raises(KeyError):
        coordinator.join(20)
    coordinator.join(0)


def test_cancelled_input_fails_its_dependents_only(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    first, independent = (
        in_threads.schedule(waits, (tmp_path,)),
        in_threads.schedule(waits, (tmp_path,)),
    )
    second = in_threads.schedule(len, (first,))
    third = in_threads.schedule(len, (independent,))
    assert first.cancel()
    with pytest.raises(errors.ClosureInputError) as caught:
        second.fetch(20)
    assert isinstance(caught.value.original_exception, errors.CancelledError)
    go(tmp_path)
    assert third.fetch(20) == 1


def test_dependent_can_be_cancelled_without_its_input(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    first = in_threads.schedule(waits, (tmp_path,))
    second = in_threads.schedule(len, (first,))
    assert second.cancel()
    with pytest.raises(errors.CancelledError):
        second.fetch(20)
    go(tmp_path)
    assert first.fetch(20) == "x"
    in_threads.join(20)


def test_value_of_another_coordinator_is_refused(
    in_threads: ClusterCoordinator, threads: Any
) -> None:
    value = in_threads.schedule(int)
    with (
        ClusterCoordinator(threads) as stranger,
        pytest.raises(ValueError, match="functions of its own coordinator"),
    ):
        stranger.schedule(len, (value,))
    in_threads.join(20)


def test_close_cancels_waiting_work(threads: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(threads, cancel_grace_s=0.0) as coordinator:
        values = [coordinator.schedule(waits, (tmp_path,))]
        values.append(coordinator.schedule(len, (values[0],)))
    for value in values:
        with pytest.raises(errors.CancelledError):
            value.fetch(0)
