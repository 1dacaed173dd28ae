"""The task of a cross-trainer cache: a window of the latest batches, with a place for each
trainer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import Answer
from zmqdist.data import Dataset
from zmqdist.data.service.elements import weigh
from zmqdist.data.service.reader.delivery import Demand
from zmqdist.data.service.worker.shared_task import SharedRunner
from zmqdist.errors import CancelledError, InvalidArgumentError

LARGE = 1 << 30
BYTES = weigh(np.int64(0))


@contextmanager
def running(limit: int = LARGE, dataset: Dataset | None = None) -> Iterator[SharedRunner]:
    runner = SharedRunner(
        "test", lambda: iter(dataset or Dataset.counter()), lambda error, what: error, limit
    )
    try:
        yield runner
    finally:
        runner.close()


def ask(runner: SharedRunner, trainer: str, elements: int = 1) -> Answer:
    answer = Answer()
    runner.ask(Demand(elements, LARGE, trainer=trainer), answer)
    return answer


def read(runner: SharedRunner, trainer: str, count: int) -> list[int]:
    return [each for _ in range(count) for each in ask(runner, trainer).result()]


def counter_behind(gate: threading.Event) -> Dataset:
    """Return a counter whose elements are computed once the gate is open."""

    def wait_at_gate(x: Any) -> Any:
        gate.wait()
        return x

    counter = Dataset.counter()
    return counter.map(wait_at_gate, output_signature=counter.element_spec)


def test_trainer_gets_all_in_order() -> None:
    with running() as runner:
        assert read(runner, "a", 10) == list(range(10))


def test_trainers_get_the_same_whenever_they_come() -> None:
    with running() as runner:
        for trainer in "abc":
            assert read(runner, trainer, 10) == list(range(10))


def test_concurrent_trainers_get_the_same() -> None:
    got: dict[str, list[int]] = {}
    with running() as runner:

        def consume(trainer: str) -> None:
            got[trainer] = read(runner, trainer, 100)

        threads = [threading.Thread(target=consume, args=(each,)) for each in "abcdefgh"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(map(tuple, got.values())) == {tuple(range(100))}


def test_two_readers_with_one_name_share_a_place() -> None:
    with running() as runner:
        assert read(runner, "a", 5) == [0, 1, 2, 3, 4]
        assert read(runner, "a", 5) == [5, 6, 7, 8, 9]


def test_late_trainer_continues_at_oldest_element() -> None:
    with running(limit=5 * BYTES) as runner:
        assert read(runner, "slow", 1) == [0]
        assert read(runner, "fast", 20) == list(range(20))
        assert read(runner, "slow", 5) == [15, 16, 17, 18, 19]
        assert read(runner, "new", 1) == [15]


def test_window_keeps_its_bytes() -> None:
    with running(limit=5 * BYTES) as runner:
        for _ in range(50):
            read(runner, "a", 1)
            assert runner.window.nbytes <= 5 * BYTES


def counts(runner: SharedRunner) -> tuple[int, int, int]:
    window = runner.window
    return window.replies_count, window.batches_count, window.nbytes


def test_elements_are_computed_once_and_counted() -> None:
    with running() as runner:
        read(runner, "a", 10)
        assert counts(runner) == (10, 10, 10 * BYTES)
        read(runner, "b", 10)
        assert counts(runner) == (20, 10, 10 * BYTES)


def test_batch_is_packed_once() -> None:
    given: list[Any] = []

    class Kept(Answer):
        def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
            given.append(value.form("GZIP"))
            super().answer(kind, value, tag)

    with running() as runner:
        for trainer in "ab":
            answer = Kept()
            runner.ask(Demand(1, LARGE, trainer=trainer), answer)
            answer.result()
    assert given[0] is given[1]


def test_error_goes_to_one_trainer() -> None:
    def fails_at_2(x: Any) -> Any:
        if x == 2:
            raise ValueError("two")
        return x

    with running(dataset=Dataset.counter().map(fails_at_2)) as runner:
        assert read(runner, "a", 2) == [0, 1]
        with pytest.raises(Exception, match="two"):
            ask(runner, "a").result()
        assert read(runner, "a", 2) == [3, 4]
        assert read(runner, "b", 4) == [0, 1, 3, 4]


def test_element_above_window_is_error() -> None:
    sizes = Dataset.from_tensor_slices([1, 5000, 2]).repeat()
    with running(limit=4000, dataset=sizes.map(lambda n: np.zeros(n, np.uint8))) as runner:
        assert ask(runner, "a").result() == [[0]]
        with pytest.raises(InvalidArgumentError, match="cross_trainer_cache_size_bytes"):
            ask(runner, "a").result()
        assert ask(runner, "a").result() == [[0, 0]]


def test_ending_pipeline_is_error() -> None:
    with running(dataset=Dataset.range(3)) as runner:
        assert read(runner, "a", 3) == [0, 1, 2]
        for trainer in "aa":
            with pytest.raises(
                InvalidArgumentError, match="requires the input dataset to be infinite"
            ):
                ask(runner, trainer).result()
        assert read(runner, "b", 3) == [0, 1, 2]


def test_trainer_without_name_is_refused() -> None:
    with running() as runner, pytest.raises(InvalidArgumentError, match="non-empty trainer ID"):
        ask(runner, "").result()


def test_stopped_task_fails_waiting_requests() -> None:
    gate = threading.Event()
    with running(dataset=counter_behind(gate)) as runner:
        waiting = [ask(runner, trainer) for trainer in "abb"]
    for answer in [*waiting, ask(runner, "c")]:
        with pytest.raises(CancelledError):
            answer.result()
    gate.set()


def test_unwanted_request_gets_no_batch() -> None:
    gate = threading.Event()
    with running(dataset=counter_behind(gate)) as runner:
        gone = ask(runner, "a")
        gone.is_wanted = False
        other = ask(runner, "a")
        gate.set()
        assert other.result() == [0]
        assert gone.waits


def test_expired_request_is_skipped() -> None:
    gate = threading.Event()
    with running(dataset=counter_behind(gate)) as runner:
        answer = ask(runner, "a")
        runner.expire(answer)
        assert answer.result() == Answer.SKIPPED
        gate.set()
        assert read(runner, "a", 1) == [0]


def test_batch_respects_limit_of_request() -> None:
    with running() as runner:
        batches = [ask(runner, "a", elements=4).result() for _ in range(12)]
        assert max(map(len, batches)) <= 4
        assert [each for batch in batches for each in batch] == list(range(sum(map(len, batches))))
