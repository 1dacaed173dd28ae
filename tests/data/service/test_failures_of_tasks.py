"""A bug while a task serves its readers: the request that it hits gets an error, and the others are
served."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from tests.data.service.helpers import PATIENCE_S, Answer, TestCluster, values
from zmqdist.data import Dataset
from zmqdist.data.service.reader.delivery import SOME, Demand
from zmqdist.data.service.task_errors import describe_error
from zmqdist.data.service.worker import task_threads
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer
from zmqdist.data.service.worker.first_come_task import FirstComeRunner
from zmqdist.data.service.worker.portions_machine import PortionsLane
from zmqdist.data.service.worker.portions_task import PortionsRunner
from zmqdist.data.service.worker.rounds_machine import RoundsMachine
from zmqdist.data.service.worker.rounds_task import RoundsRunner
from zmqdist.data.service.worker.shared_task import SharedRunner
from zmqdist.data.service.worker.task_runner import Runner
from zmqdist.errors import InternalError, UnknownError

MANY = 1 << 20
DESCRIBE = partial(describe_error, where="dataset 1000 (job 'j', task 5 of worker w)")
TEXT = r"(?s)a bug in zmqdist: RuntimeError: spoiled\na reply of dataset 1000 \(job 'j', task 5 of worker w\)"


def first_come() -> Runner:
    return FirstComeRunner(
        "5", lambda: iter(Dataset.range(9)), lambda: None, DESCRIBE, array("q", [0] * 8)
    )


def portions() -> Runner:
    left = [[(0, 0, 0, 9, 0)]]
    return PortionsRunner(
        "5",
        lambda _, start, length: iter(Dataset.range(start, start + length)),
        DESCRIBE,
        lambda client, count: left.pop() if left else [],
    )


def rounds() -> Runner:
    return RoundsRunner("5", lambda: iter(Dataset.counter()), DESCRIBE, 1)


def shared() -> Runner:
    return SharedRunner("5", lambda: iter(Dataset.counter()), DESCRIBE, MANY)


class Spoiled(Answer):
    """A reply that cannot be made."""

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        if kind == SOME:
            raise RuntimeError("spoiled")
        super().answer(kind, value, tag)


def ask(runner: Runner, number: int, answer: Answer) -> Answer:
    runner.ask(Demand(1, MANY, None, 1, 0, number, False, "trainer"), answer)
    return answer


@pytest.mark.parametrize("start", [first_come, portions, rounds, shared])
def test_impossible_reply_fails_only_its_request(
    start: Callable[[], Runner], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(start()) as runner:
        for number in range(2):
            with pytest.raises(InternalError, match=TEXT):
                ask(runner, number, Spoiled()).result()
        assert len(ask(runner, 2, Answer()).result()) == 1
    assert (
        caplog.text.count("requests of readers fail: a bug in zmqdist: RuntimeError: spoiled") == 1
    )


@pytest.mark.parametrize(
    ("start", "machine", "method"),
    [
        (first_come, FirstComeBuffer, "next_reply"),
        (portions, PortionsLane, "next_reply"),
        (rounds, RoundsMachine, "add_request"),
        (rounds, RoundsMachine, "serve"),
    ],
)
def test_raising_machine_fails_only_waiting_request(
    start: Callable[[], Runner], machine: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = getattr(machine, method)
    raised: list[bool] = []

    def raises_once(self: Any, *args: Any) -> Any:
        waiting = self.waiting() if callable(self.waiting) else self.waiting
        if raised or not (waiting or args):
            return works(self, *args)
        raised.append(True)
        raise RuntimeError("spoiled")

    monkeypatch.setattr(machine, method, raises_once)
    with closing(start()) as runner:
        with pytest.raises(InternalError, match=TEXT):
            ask(runner, 0, Answer()).result()
        assert len(ask(runner, 1, Answer()).result()) == 1


class Stopped(Answer):
    """A reply to a reader of this process that stops while it waits."""

    def soon(self, fn: Callable[[], None]) -> bool:
        return False


@pytest.mark.parametrize("kind", [FirstComeRunner, PortionsRunner, RoundsRunner])
def test_stopped_reader_does_not_delay_others(
    kind: type,
) -> None:
    """Elements are made while both requests wait, so the loop of the reader that has stopped is the
    one to be woken."""
    go = threading.Event()

    def slow() -> Iterator[int]:
        go.wait(PATIENCE_S)
        yield from itertools.count()

    dataset = Dataset.from_generator(slow)
    left = [[(0, 0, 0, 9, 0)]]
    runner: Runner
    if kind is FirstComeRunner:
        runner = FirstComeRunner(
            "5", lambda: iter(dataset), lambda: None, DESCRIBE, array("q", [0] * 8)
        )
    elif kind is PortionsRunner:
        runner = PortionsRunner(
            "5", lambda *_: iter(dataset), DESCRIBE, lambda *_: left.pop() if left else []
        )
    else:
        runner = RoundsRunner("5", lambda: iter(dataset), DESCRIBE, 2)
    with closing(runner):
        ask(runner, 0, Stopped())
        answer = Answer()
        runner.ask(Demand(1, MANY, None, 1, 1, 0), answer)
        go.set()
        assert len(answer.result()) == 1


def test_task_that_cannot_begin_fails_local_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spoiled(*args: Any) -> Runner:
        raise RuntimeError("spoiled")

    monkeypatch.setattr(task_threads, "FirstComeRunner", spoiled)
    with TestCluster(1) as cluster, pytest.raises(UnknownError, match="RuntimeError: spoiled"):
        values(cluster.distribute(Dataset.range(3)))
