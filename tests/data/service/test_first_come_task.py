"""The task of a read in which elements go to the reader that asks first."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import pytest

from tests.data.service.helpers import Answer
from zmqdist.data import Dataset
from zmqdist.data.service.reader.delivery import Demand
from zmqdist.data.service.worker.first_come_task import FirstComeRunner
from zmqdist.errors import CancelledError

MANY = 1 << 20


def ask(runner: FirstComeRunner) -> Answer:
    answer = Answer()
    runner.ask(Demand(2, MANY, None, 1), answer)
    return answer


def test_stopped_task_gives_no_later_element() -> None:
    """Else its reader gets an element from behind a gap."""
    making, go = threading.Event(), threading.Event()
    finished = threading.Event()

    def slow() -> Iterator[int]:
        yield 0
        making.set()
        go.wait(20)
        yield 1

    runner = FirstComeRunner(
        "test",
        lambda: iter(Dataset.from_generator(slow)),
        finished.set,
        lambda error, what: error,
        array("q", [0] * 8),
    )
    assert ask(runner).result() == [0]
    assert making.wait(20)
    first = ask(runner)
    runner.close()
    second = ask(runner)
    go.set()
    for answer in (first, second):
        with pytest.raises(CancelledError, match="the task was stopped"):
            answer.result()
    third = ask(runner)
    with pytest.raises(CancelledError):
        third.result()
    assert not finished.is_set(), "a task that was stopped has not come to its end"
