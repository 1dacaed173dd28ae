"""Datasets that are opened and read at once."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.data.helpers import read
from tests.scheduling.work import until
from zmqdist.data import AUTOTUNE, Dataset

WAIT_S = 20


def numbers(elements: Any) -> list[int]:
    return [int(x) for x in elements]


class Meeting:
    """Functions of interleave that all wait until as many as this are being called, or read."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)

    def open_dataset(self, x: Any) -> Dataset:
        self.barrier.wait(WAIT_S)
        return Dataset.range(x * 10, x * 10 + 3)

    def read(self, x: Any) -> Dataset:
        def elements() -> Any:
            for place in range(3):
                self.barrier.wait(WAIT_S)
                yield int(x) * 10 + place

        return Dataset.from_generator(elements)


@pytest.mark.parametrize("calls", [3, AUTOTUNE])
@pytest.mark.parametrize("how", ["open_dataset", "read"])
def test_datasets_are_opened_and_read_concurrently(how: str, calls: int) -> None:
    function = getattr(Meeting(3), how)
    dataset = Dataset.range(3).interleave(function, cycle_length=3, num_parallel_calls=calls)
    assert numbers(dataset) == [0, 10, 20, 1, 11, 21, 2, 12, 22]


def test_later_datasets_are_opened_concurrently() -> None:
    dataset = Dataset.range(6).interleave(
        Meeting(3).open_dataset, 3, block_length=3, num_parallel_calls=3
    )
    assert numbers(dataset) == [x * 10 + place for x in range(6) for place in range(3)]


@pytest.mark.parametrize("cycle", [1, 2, 3, 7])
@pytest.mark.parametrize("calls", [1, 2, AUTOTUNE])
def test_order_is_that_without_threads(cycle: int, calls: int) -> None:
    def dataset_of(x: Any) -> Dataset:
        # of different lengths, some are empty
        return Dataset.range(x * 10, x * 10 + (int(x) * 5) % 4)

    plain = Dataset.range(12).interleave(dataset_of, cycle, 2)
    assert numbers(
        Dataset.range(12).interleave(dataset_of, cycle, 2, num_parallel_calls=calls)
    ) == numbers(plain)


@pytest.mark.parametrize("seeded", [True, False], ids=["a seed of the process", "seeds"])
def test_random_orders_are_independent_of_threads(seeded: bool) -> None:
    shared = Dataset.range(9).shuffle(9, seed=3)

    def dataset_of(x: Any) -> Dataset:
        return Dataset.range(9).shuffle(9) if seeded else shared

    found = []
    try:
        for calls in (None, 4, 4):
            zd.random.set_seed(5 if seeded else None)
            found.append(
                numbers(Dataset.range(8).interleave(dataset_of, 4, num_parallel_calls=calls))
            )
            shared = Dataset.range(9).shuffle(9, seed=3)
    finally:
        zd.random.set_seed(None)
    assert found[0] == found[1] == found[2]


def test_unordered_idle_dataset_blocks_no_other() -> None:
    gate = threading.Event()

    def dataset_of(x: Any) -> Dataset:
        def elements() -> Any:
            assert x or gate.wait(WAIT_S)
            yield int(x)

        return Dataset.from_generator(elements)

    dataset = Dataset.range(6).interleave(dataset_of, 3, num_parallel_calls=3, deterministic=False)
    with iter(dataset) as iterator:
        found = [int(next(iterator)) for _ in range(5)]
        gate.set()
        assert int(next(iterator)) == 0
    assert sorted(found) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("deterministic", [True, False])
def test_close_ends_wait_for_first_element(
    deterministic: bool,
) -> None:
    class Waiting:
        """A dataset's elements that come when its iterator is closed."""

        def __init__(self) -> None:
            self.read, self.gate = threading.Event(), threading.Event()

        def elements(self) -> Any:
            self.read.set()
            self.gate.wait(WAIT_S)
            yield 1

    waiting = Waiting()
    dataset = Dataset.range(2).interleave(
        lambda _: Dataset.from_generator(waiting.elements),
        2,
        num_parallel_calls=2,
        deterministic=deterministic,
    )
    iterator = iter(dataset)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(iterator))
    reader.start()
    assert waiting.read.wait(WAIT_S)
    closer = threading.Thread(target=iterator.close)
    closer.start()
    waiting.gate.set()
    closer.join(WAIT_S)
    reader.join(WAIT_S)
    assert not closer.is_alive()
    assert not reader.is_alive()


def failing(x: Any) -> Dataset:
    if x == 1:
        raise OSError("one")
    return Dataset.range(x * 10, x * 10 + 2)


@pytest.mark.parametrize("calls", [1, 3])
def test_unopenable_dataset_costs_only_itself(calls: int) -> None:
    below = Dataset.range(5).map(lambda x: x if x != 2 else 1 // int(x - 2))
    found: list[Any] = []
    iterator = iter(below.interleave(failing, 3, num_parallel_calls=calls))
    while True:
        try:
            found.append(int(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            found.append(type(error))
    assert found[0] == 0
    assert sorted(x for x in found if isinstance(x, int)) == [0, 1, 30, 31, 40, 41]
    assert [x for x in found if not isinstance(x, int)] == [OSError, ZeroDivisionError]


@pytest.mark.parametrize("calls", [1, 3])
def test_state_with_unopenable_dataset(calls: int) -> None:
    below = Dataset.range(5).map(lambda x: x if x != 2 else 1 // int(x - 2))
    dataset = below.interleave(failing, 3, num_parallel_calls=calls)
    wanted = read(iter(dataset), 20)
    for place in range(len(wanted) + 1):
        iterator = iter(dataset)
        for _ in range(place):
            try:
                next(iterator)
            except (OSError, ZeroDivisionError):
                pass
        state = json.loads(json.dumps(iterator.state_dict()))
        other = iter(dataset)
        other.load_state_dict(state)
        assert read(other, 20) == wanted[place:]
        iterator.close()


def test_close_ends_opening_threads() -> None:
    reached, gate = threading.Event(), threading.Event()

    def dataset_of(x: Any) -> Dataset:
        if x == 1:
            reached.set()
            assert gate.wait(WAIT_S)
        return Dataset.range(x, x + 5)

    before = set(threading.enumerate())
    iterator = iter(Dataset.range(9).interleave(dataset_of, 4, num_parallel_calls=4))
    assert next(iterator) == 0
    assert reached.wait(WAIT_S)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    gate.set()
    closing.join(WAIT_S)
    until(lambda: set(threading.enumerate()) <= before)


def test_function_cannot_change_saved_input() -> None:
    def dataset_of(x: Any) -> Dataset:
        x -= 1
        return Dataset.from_tensors(x)

    rows = Dataset.range(3).map(lambda x: np.full(2, x))
    with pytest.raises(ValueError, match="read-only"):
        list(rows.flat_map(dataset_of))
