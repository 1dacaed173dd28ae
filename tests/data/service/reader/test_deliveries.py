"""The delivery machines alone, in cases that the simulation of the data service does not reach."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from zmqdist.data.service.reader.coordinated_machine import CoordinatedDelivery
from zmqdist.data.service.reader.delivery import (
    FAILED,
    SKIP,
    SOME,
    BatchTaken,
    ConsumerBegan,
    ConsumerStarved,
    Deliver,
    Effect,
    News,
    ReadingEnded,
    RequestElements,
    RequestNews,
    TaskLocation,
    TaskReplied,
)
from zmqdist.data.service.reader.exactly_once_machine import (
    LATER_BYTES_MAX,
    Consumed,
    Consumption,
    ExactlyOnceDelivery,
)
from zmqdist.data.service.reader.plain_machine import PlainDelivery
from zmqdist.data.service.reader.window_machine import TaskWindow
from zmqdist.errors import InvalidArgumentError, OpError, UnavailableError
from zmqdist.events import Ticked


def news(
    *places: TaskLocation,
    finished: bool = False,
    hold: bool = False,
    ended: dict[int, int] | None = None,
) -> News:
    return News(places, False, finished, hold, ended or {})


def there(task: int, start: int = 0, incarnation: int = 7) -> TaskLocation:
    return TaskLocation(task, f"host:{task}", f"host:{task}", incarnation, start)


class Consumer:
    """One consumer of a coordinated read and its machine, driven by hand."""

    def __init__(self) -> None:
        self.machine = CoordinatedDelivery(5, 0, -1, lambda value: value[1])
        self.asked: dict[int, RequestElements] = {}
        self.given: list[Any] = []
        self.over: list[OpError | None] = []
        self.wants_news = 0
        self.now = 0.0

    def tell(self, event: Any) -> None:
        self.perform(self.machine.handle(event, self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RequestElements):
                self.asked[effect.source.task] = effect
            elif isinstance(effect, Deliver):
                self.given += effect.items
            elif isinstance(effect, ReadingEnded):
                self.over.append(effect.error)
            elif isinstance(effect, RequestNews):
                self.wants_news += 1
                self.machine.watch_args()

    def answer(self, task: int, elements: list[str] | None, then: int, common: int) -> None:
        kind = SKIP if elements is None else SOME
        self.tell(
            TaskReplied(self.asked.pop(task).source, kind, ("", elements, (then, common)), None)
        )

    def fail(self, task: int, error: OpError) -> None:
        self.tell(TaskReplied(self.asked.pop(task).source, FAILED, None, error))

    @property
    def elements(self) -> list[str]:
        return [element for batch in self.given for element in batch]


def test_tasks_take_turns_by_number_whichever_replies_first() -> None:
    consumer = Consumer()
    consumer.tell(news(there(2), there(1)))
    consumer.answer(2, ["two 0", "two 1"], 2, -1)
    consumer.answer(1, ["one 0", "one 1"], 2, -1)
    assert consumer.elements == []
    consumer.answer(2, None, 3, 1)
    consumer.answer(1, None, 3, 1)
    assert consumer.elements == ["one 0", "two 0", "one 1", "two 1"]


def test_element_waits_until_all_consumers_have_their_parts() -> None:
    consumer = Consumer()
    consumer.tell(news(there(1)))
    consumer.answer(1, ["a", "b", "c"], 3, 0)
    assert consumer.elements == ["a"]
    consumer.tell(news(there(1), ended={1: 2}))
    assert consumer.elements == ["a", "b"]


def test_held_consumer_begins_no_later_round() -> None:
    consumer = Consumer()
    consumer.tell(news(there(1)))
    consumer.tell(news(there(1), hold=True))
    assert consumer.wants_news == 1
    consumer.answer(1, ["a", "b"], 2, 1)
    assert consumer.elements == ["a"]
    consumer.tell(news(there(1)))
    assert consumer.elements == ["a", "b"]


def test_silent_task_of_lost_worker_is_reported() -> None:
    consumer = Consumer()
    consumer.tell(news(there(1)))
    consumer.tell(news(there(1, incarnation=-1)))
    consumer.fail(1, UnavailableError("gone"))
    assert consumer.wants_news == 1
    assert consumer.machine.watch_args() == (-1, {1: 0})


def test_failed_task_ends_reading_at_its_turn() -> None:
    consumer = Consumer()
    consumer.tell(news(there(1), there(2)))
    consumer.fail(2, InvalidArgumentError("bad element"))
    assert consumer.over == []
    consumer.answer(1, ["a"], 1, 0)
    assert consumer.elements == ["a"]
    assert [type(error) for error in consumer.over] == [InvalidArgumentError]


def test_full_queue_requests_no_rounds() -> None:
    consumer = Consumer()
    consumer.tell(news(there(1)))
    for first in range(0, 64, 32):
        consumer.answer(
            1, [str(number) for number in range(first, first + 32)], first + 32, first + 31
        )
    assert not consumer.asked
    consumer.tell(BatchTaken())
    assert 1 in consumer.asked


def test_unanswered_request_repeats_after_growing_pauses() -> None:
    machine = PlainDelivery(5, "", -1)
    machine.handle(news(there(1)), 0.0)
    asks = [
        effect
        for effect in machine.handle(ConsumerBegan(), 0.0)
        if isinstance(effect, RequestElements)
    ]
    pauses = []
    now = 0.0
    for _ in range(60):
        machine.handle(TaskReplied(asks[0].source, FAILED, None, UnavailableError("away")), now)
        pauses.append(round(machine.deadline - now, 6))
        now = machine.deadline
        assert [
            effect
            for effect in machine.handle(Ticked(), now)
            if isinstance(effect, RequestElements)
        ]
    assert pauses[0] < 0.01
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.01


def test_two_requests_that_fail_together_lengthen_the_pause_once() -> None:
    machine = PlainDelivery(5, "", -1)
    machine.handle(news(there(1)), 0.0)
    asks = [
        effect
        for effect in machine.handle(ConsumerBegan(), 0.0)
        if isinstance(effect, RequestElements)
    ]
    assert len(asks) == 2
    pauses = []
    for ask in asks:
        machine.handle(TaskReplied(ask.source, FAILED, None, UnavailableError("away")), 0.0)
        pauses.append(machine.deadline)
    assert pauses == [0.001, 0.001]


def test_replying_task_gets_request_despite_failed_one() -> None:
    machine = PlainDelivery(5, "", -1)
    machine.handle(ConsumerBegan(), 0.0)
    first, second = machine.handle(news(there(1)), 0.0)
    assert isinstance(first, RequestElements)
    assert isinstance(second, RequestElements)
    assert (
        machine.handle(
            TaskReplied(first.source, FAILED, None, UnavailableError("not there yet")), 0.0
        )
        == []
    )
    delivered, *asked = machine.handle(TaskReplied(second.source, SOME, "batch", None), 0.001)
    assert delivered == Deliver(["batch"])
    assert [type(effect) for effect in asked] == [RequestElements, RequestElements]


def test_ordered_read_requests_next_portion() -> None:
    """When many elements wait for their turn, the reader requests nothing from other tasks, so no
    other reply would let it continue."""
    consumption = Consumption(nullcontext(), 1, Consumed())
    machine = ExactlyOnceDelivery(TaskWindow(5, "", -1), consumption, 1, 0, True, Consumed())
    machine.handle(news(*map(there, range(4))), 0.0)
    asked: dict[int, list[Any]] = {}

    def tell(event: Any) -> list[Effect]:
        effects = machine.handle(event, 0.0)
        for effect in effects:
            if isinstance(effect, RequestElements):
                asked.setdefault(effect.source.task, []).append(effect.source)
        return effects

    def answer(task: int, nbytes: int) -> list[Effect]:
        tag = (((task, 0, 0, 1, False, 0, ""),), nbytes, (task,))
        return tell(TaskReplied(asked[task].pop(), SOME, ("", [task], tag), None))

    tell(ConsumerBegan())
    for other in (1, 2, 3):
        answer(other, LATER_BYTES_MAX // 2)
    delivered, *next_ = answer(0, 8)
    assert isinstance(delivered, Deliver)
    assert [effect.source.task for effect in next_ if isinstance(effect, RequestElements)] == [0]


@pytest.mark.parametrize("ends", ["a lost answer", "another life"])
def test_ordered_read_ignores_lost_portions_in_hand(
    ends: str,
) -> None:
    """Meanwhile another task may have the portion. When many elements wait, only the task that
    counts as the holder gets requests."""
    machine = ExactlyOnceDelivery(
        TaskWindow(5, "", -1), Consumption(nullcontext(), 1, Consumed()), 1, 0, True, Consumed()
    )
    machine.handle(news(*map(there, range(3))), 0.0)
    asked: dict[int, list[Any]] = {}

    def tell(event: Any, now: float = 0.0) -> set[int]:
        """Return the tasks that get requests."""
        sources = [
            effect.source
            for effect in machine.handle(event, now)
            if isinstance(effect, RequestElements)
        ]
        for source in sources:
            asked.setdefault(source.task, []).append(source)
        return {source.task for source in sources}

    def answer(task: int, portion: int, nbytes: int, *in_hand: int) -> set[int]:
        tag = (((portion, 0, 0, 1, True, 0, ""),), nbytes, in_hand)
        return tell(TaskReplied(asked[task].pop(), SOME, ("", [portion], tag), None))

    tell(ConsumerBegan())
    answer(1, 5, 8, 0)
    answer(2, 7, 2 * LATER_BYTES_MAX)
    assert not answer(0, 8, 8) | answer(0, 9, 8), "task 1 has portion 0, which is next"
    if ends == "a lost answer":
        tell(TaskReplied(asked[1].pop(), FAILED, None, UnavailableError("gone")))
        tell(Ticked(), 1.0)
        assert 0 in answer(0, 10, 8)
    else:
        assert 0 in tell(news(there(0), there(1, incarnation=8), there(2)))


@pytest.mark.parametrize(("allowed", "asked"), [(-1, [0, 1, 2]), (4, [0])])
def test_w2_full_window_does_not_delay_next_element(allowed: int, asked: list[int]) -> None:
    """Batches out of turn fill the window. If the task with the next batch got no request, the
    reader would wait for ever."""
    window = TaskWindow(5, "", allowed)
    window.note(news(*map(there, range(3))))
    window.outstanding = 100
    assert window.requests(window.available()) == []
    assert [
        each.source.task for each in window.requests(window.available(), starving=True)
    ] == asked
    assert window.requests(window.available(), starving=True) == [], "once"


def test_ordered_read_requests_from_idle_tasks() -> None:
    consumption = Consumption(nullcontext(), 1, Consumed())
    window = TaskWindow(5, "", -1)
    machine = ExactlyOnceDelivery(window, consumption, 1, 0, True, Consumed())
    machine.handle(news(there(4)), 0.0)
    window.outstanding = 100
    assert machine.handle(ConsumerBegan(), 0.0) == []
    consumption.waits = True
    (question,) = machine.handle(ConsumerStarved(), 0.0)
    assert isinstance(question, RequestElements)


def test_w3_returning_incarnation_keeps_two_requests() -> None:
    window = TaskWindow(5, "", -1)
    window.note(news(there(1, incarnation=7)))
    assert [ask.source.incarnation for ask in window.requests(window.available())] == [7, 7]
    window.note(news(there(1, incarnation=8)))
    assert [ask.source.incarnation for ask in window.requests(window.available())] == [8, 8]
    window.note(news(there(1, incarnation=7)))
    assert window.requests(window.available()) == [], "its two requests are still in flight"
