"""Functions in threads and in child processes: what runs at once, what an error and a dead child
cost, how it ends."""

from __future__ import annotations

import json
import threading
import traceback
from sys import _current_frames
from typing import Any

import numpy as np
import pytest

from tests.scheduling.work import until
from zmqdist.data import Dataset
from zmqdist.data.ops.background import AHEAD_MAX, AHEAD_SPLITS_MAX
from zmqdist.data.splits import open_split
from zmqdist.errors import InvalidArgumentError


class Unfit(Exception):
    """An error of the user's."""

    def __init__(self, what: str, place: int) -> None:
        super().__init__(f"{what} at {place}")
        self.place = place


def numbers(elements: Any) -> list[Any]:
    return [np.asarray(x).tolist() for x in elements]


def settled(iterator: Any) -> list[Any]:
    """The elements, with errors in their places."""
    found: list[Any] = []
    while True:
        try:
            found.append(np.asarray(next(iterator)).tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)


# -- threads ---------------------------------------------------------------------------------------


def test_cheap_calls_keep_order_and_errors() -> None:
    dataset = Dataset.range(5000).map(lambda x: 10 // int(x % 50), num_parallel_calls=3)
    found = settled(iter(dataset))
    assert [isinstance(x, ZeroDivisionError) for x in found] == [x % 50 == 0 for x in range(5000)]
    assert [x for x in found if not isinstance(x, Exception)] == [
        10 // (x % 50) for x in range(5000) if x % 50
    ]


def test_slow_call_does_not_block_later_calls() -> None:
    gate = threading.Event()

    def waits_for_the_next(x: Any) -> Any:
        if x == 1500:
            assert gate.wait(30)
        if x == 1501:
            gate.set()
        return x

    assert numbers(Dataset.range(2000).map(waits_for_the_next, num_parallel_calls=2)) == list(
        range(2000)
    )


def test_calls_ahead_are_bounded() -> None:
    read: list[int] = []
    source = Dataset.range(5 * AHEAD_MAX).map(lambda x: read.append(int(x)) or x)
    with iter(source.map(lambda x: x, num_parallel_calls=2)) as iterator:
        for place in range(AHEAD_MAX):
            next(iterator)
            assert len(read) <= place + 1 + AHEAD_MAX


def test_split_positions_are_read_little_ahead() -> None:
    requests: list[int] = []

    def deal(source: int, repetition: int) -> int:
        requests.append(len(requests))
        return requests[-1]

    for dataset in (
        Dataset.range(10**6).map(lambda x: x, num_parallel_calls=2),
        Dataset.range(10**6).prefetch(-1),
    ):
        requests.clear()
        with open_split(dataset, deal) as iterator:
            for place in range(2000):
                assert next(iterator) == place
                assert len(requests) <= place + 2 + AHEAD_SPLITS_MAX


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_prefetch_reads_exactly_buffer_size_ahead(size: int) -> None:
    read: list[int] = []
    reached = threading.Semaphore(0)

    def record(x: Any) -> Any:
        read.append(int(x))
        reached.release()
        return x

    with iter(Dataset.range(100).map(record).prefetch(size)) as iterator:
        for place in range(20):
            assert next(iterator) == place
            assert len(read) <= place + 2 + size  # one may be on its way to the buffer
        for _ in range(20 + size):
            assert reached.acquire(timeout=20)


def test_state_is_saved_while_thread_reads() -> None:
    dataset = Dataset.range(20000).prefetch(-1)
    with iter(dataset) as iterator:
        for _ in range(3):
            for _ in range(1000):
                next(iterator)
            state = json.loads(json.dumps(iterator.state_dict()))
            with iter(dataset) as other:
                other.load_state_dict(state)
                assert next(other) == next(iterator)
        assert numbers(iterator) == list(range(3003, 20000))


def test_batches_are_stacked_in_threads() -> None:
    rows = Dataset.range(10).map(lambda x: np.arange(2) + x)
    assert numbers(rows.batch(4, num_parallel_calls=2)) == numbers(rows.batch(4))
    uneven = Dataset.range(1, 7).map(np.arange).batch(2, num_parallel_calls=2)
    assert all(isinstance(error, InvalidArgumentError) for error in settled(iter(uneven)))
    dropped = Dataset.range(10).batch(
        4, drop_remainder=True, num_parallel_calls=2, deterministic=False
    )
    assert sorted(numbers(dropped)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_failed_input_costs_itself_not_batch() -> None:
    found = settled(
        iter(Dataset.range(-2, 3).map(lambda x: 12 // int(x)).batch(2, num_parallel_calls=2))
    )
    assert [type(x) for x in found] == [list, ZeroDivisionError, list]
    assert [x for x in found if isinstance(x, list)] == [[-6, -12], [12, 6]]


def test_close_beside_running_call_ends_reader() -> None:
    begun, may_end, rest = threading.Event(), threading.Event(), list[Any]()

    def wait(x: int) -> int:
        begun.set()
        assert may_end.wait(30)
        return x

    iterator = iter(Dataset.range(100).map(wait, num_parallel_calls=2))
    reader = threading.Thread(target=lambda: rest.append(list(iterator)), daemon=True)
    reader.start()
    assert begun.wait(30)
    closer = threading.Thread(target=iterator.close)
    closer.start()
    until(lambda: "_join" in stack_of(closer))
    may_end.set()
    reader.join(20)
    closer.join(30)
    assert rest
    assert rest[0] in ([], [0], [0, 1])


def stack_of(thread: threading.Thread) -> list[str]:
    frame = _current_frames().get(thread.ident or 0)
    return [call.name for call in traceback.extract_stack(frame)]
