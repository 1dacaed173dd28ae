"""Iterators: where they are, what they refuse, how they go."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from zmqdist.background import wait_finished
from zmqdist.data import Dataset, Options
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnimplementedError,
    UnknownError,
)


def values(iterator: Any) -> list[int]:
    return [int(x) for x in iterator]


def test_state_belongs_to_one_pipeline() -> None:
    state = iter(Dataset.range(5).batch(2)).state_dict()
    with pytest.raises(InvalidArgumentError, match="a state of the pipeline"):
        iter(Dataset.range(5)).load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="version 99"):
        iter(Dataset.range(5).batch(2)).load_state_dict(state | {"version": 99})


@pytest.mark.parametrize("state", [None, [], "state", {}, {"version": 1}])
def test_wrong_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="no state of an iterator"):
        iter(Dataset.range(5)).load_state_dict(state)


def test_iterator_stays_at_end() -> None:
    dataset = Dataset.range(2)
    state = iter(dataset).state_dict()
    iterator = iter(dataset)
    assert values(iterator) == [0, 1]
    with pytest.raises(FailedPreconditionError, match="stays ended"):
        iterator.load_state_dict(state)
    fresh = iter(dataset)
    fresh.load_state_dict(iterator.state_dict())
    assert values(fresh) == []


def test_closed_iterator_has_no_position() -> None:
    for read in range(2):
        closed = iter(Dataset.range(5))
        assert [int(next(closed)) for _ in range(read)] == list(range(read))
        state = closed.state_dict()
        closed.close()
        assert values(closed) == []
        with pytest.raises(
            FailedPreconditionError, match=r"call state_dict\(\) before you close it"
        ):
            closed.state_dict()
        with pytest.raises(FailedPreconditionError, match="load the state into a new one"):
            closed.load_state_dict(state)


def test_state_after_error_skips_failed_element() -> None:
    dataset = Dataset.range(-2, 3).map(lambda x: 12 // int(x)).shuffle(2, seed=1).batch(2)
    iterator = iter(dataset)
    with pytest.raises(ZeroDivisionError):
        for _ in iterator:
            pass
    state = json.loads(json.dumps(iterator.state_dict()))
    rest = [x.tolist() for x in iterator]
    other = iter(dataset)
    other.load_state_dict(state)
    assert [x.tolist() for x in other] == rest


def test_interrupt_does_not_end_data() -> None:
    def interrupted(x: Any) -> Any:
        if x == 1:
            raise KeyboardInterrupt
        return x

    iterator = iter(Dataset.range(4).map(interrupted))
    assert next(iterator) == 0
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert values(iterator) == [2, 3]


def test_buffered_error_is_saved_as_text() -> None:
    reached = threading.Event()

    def divided(x: Any) -> Any:
        if x == 1:
            reached.set()
        return 6 // int(x)

    dataset = Dataset.range(-1, 3).map(divided).prefetch(5)
    iterator, other = iter(dataset), iter(dataset)
    assert next(iterator) == -6
    assert reached.wait(20)  # the error lies in the buffer
    other.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    with pytest.raises(UnknownError, match="ZeroDivisionError: "):
        next(other)
    assert values(other) == [6, 3]
    iterator.close()


def test_buffered_datasets_with_functions_have_no_state() -> None:
    nested = Dataset.range(3).map(lambda x: Dataset.range(x).map(lambda y: y + 1)).shuffle(2)
    iterator = iter(nested)
    next(iterator)
    with pytest.raises(UnimplementedError, match="datasets with user functions"):
        iterator.state_dict()
    windows = iter(Dataset.range(6).window(2).shuffle(2, seed=1))
    next(windows)
    again = iter(Dataset.range(6).window(2).shuffle(2, seed=1))
    again.load_state_dict(json.loads(json.dumps(windows.state_dict())))
    assert [values(one) for one in again] == [values(one) for one in windows]


class Payload:
    """What only a pipeline refers to."""

    def absolute(self, x: Any) -> Any:
        return abs(x)


def test_iterator_is_freed_with_last_user() -> None:
    gc.collect()
    gc.disable()  # without the collector's help
    try:
        held = Payload()
        iterator = iter(
            Dataset.range(9).map(held.absolute).shuffle(3).repeat().batch(2).prefetch(1)
        )
        next(iterator)
        gone = weakref.ref(held)
        del held  # now the pipeline alone has it
        before = [thread for thread in threading.enumerate() if "zmqdist-data" in thread.name]
        assert len(before) == 1
        del iterator
        before[0].join(20)
        assert not before[0].is_alive()
    finally:
        gc.enable()
    wait_finished(20)
    gc.collect()
    assert gone() is None


def test_garbage_collection_does_not_wait_for_function() -> None:
    begun, leave = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        if x:
            begun.set()
            leave.wait(20)
        return x

    box: list[Any] = [iter(Dataset.range(3).map(slow).prefetch(1))]
    assert next(box[0]) == 0
    assert begun.wait(20)
    (ahead,) = [thread for thread in threading.enumerate() if thread.name == "zmqdist-data-ahead"]
    box.append(box)
    del box
    gc.collect()
    assert ahead.is_alive(), "the collector has waited for it"
    leave.set()
    ahead.join(20)
    assert not ahead.is_alive()


def test_stats_count_operator_work() -> None:
    options = Options()
    options.stats = True

    def slow(x: Any) -> Any:
        if x == 5:
            raise ValueError("five")
        return sum(range(3000)) * 0 + x

    dataset = (
        Dataset.range(10)
        .repeat(2)
        .map(slow)
        .ignore_errors()
        .prefetch(2)
        .batch(3)
        .with_options(options)
    )
    with iter(dataset) as iterator:
        assert len(list(iterator)) == 6
        stats = iterator.stats()
    assert [(one.name, one.elements) for one in stats] == [
        ("range", 20),
        ("repeat", 20),
        ("map", 18),
        ("ignore_errors", 18),
        ("prefetch", 18),
        ("batch", 6),
        ("options", 6),
    ]
    assert all(one.seconds >= 0 for one in stats)
    assert stats[2].seconds > 0
    with pytest.raises(FailedPreconditionError, match=r"options\.stats = True"):
        iter(Dataset.range(3)).stats()


def test_generator_is_closed_with_iterator() -> None:
    closed: list[str] = []

    def numbers() -> Any:
        try:
            yield from range(9)
        finally:
            closed.append("closed")

    with iter(Dataset.from_generator(numbers)) as iterator:
        assert next(iterator) == 0
    assert closed == ["closed"]


@pytest.mark.parametrize(
    "buffered",
    [
        lambda rows: rows.shuffle(4, seed=1),
        lambda rows: rows.cache(),
        lambda rows: rows.window(4).flat_map(lambda window: window),
        lambda rows: rows.shuffle(2, seed=1).cache(),
    ],
    ids=["shuffle", "cache", "window", "two together"],
)
def test_state_above_bound_is_refused(buffered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmqdist.data.iterators.STATE_BYTES_MAX", 2000)
    iterator = iter(buffered(Dataset.from_tensors(np.zeros(100)).repeat(8)))
    json.dumps(iterator.state_dict())
    for _ in range(3):
        next(iterator)
    with pytest.raises(ResourceExhaustedError, match="lie in the buffers"):
        iterator.state_dict()
    assert len(list(iterator)) == 5


def test_state_holds_only_buffered_elements() -> None:
    iterator = iter(Dataset.from_tensor_slices(np.zeros((1000, 100))).shuffle(10, seed=1))
    next(iterator)
    assert len(json.dumps(iterator.state_dict())) < 3 * 10 * 800
