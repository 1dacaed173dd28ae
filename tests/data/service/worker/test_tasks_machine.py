"""The requests and tasks of a worker of the data service, and which reader gets its elements
(promises T, B and L of the machines)."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.data.service.dispatcher.machine.records import DYNAMIC, OFF
from zmqdist.data.service.reader.delivery import END, FAILED, SOME, Demand
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer
from zmqdist.data.service.worker.portions_machine import (
    GIVEN_MAX,
    QUICK_S,
    SEGMENTS_MAX,
    PortionsLane,
)
from zmqdist.data.service.worker.task_replies import TaskReply
from zmqdist.data.service.worker.tasks_machine import (
    BeginTask,
    DropTask,
    GiveBackPositions,
    RequestWork,
    RequestWorkLater,
    WorkerTasks,
    WorkerTasksEffect,
    WorkerTaskState,
)
from zmqdist.errors import CancelledError, InternalError

MANY = 1 << 20


def definition(number: int, mode: int = DYNAMIC, delivery: str = "at_most_once") -> list[Any]:
    return [
        number,
        2000,
        "1000",
        "fingerprint",
        ("1000", mode, 0, "AUTO", False, delivery),
        0,
        0,
        0,
        -1,
        "job",
        0,
    ]


def with_tasks(*tasks: list[Any]) -> tuple[WorkerTasks, RequestWork]:
    """A worker with these tasks, and its pending request at the dispatcher."""
    machine = WorkerTasks()
    effects = machine.work_received(last(machine.ask()).request, (7, tasks, []))
    assert [each.task.id for each in effects if isinstance(each, BeginTask)] == [
        each[0] for each in tasks
    ]
    return machine, last(effects)


def last(effects: list[WorkerTasksEffect]) -> RequestWork:
    question = effects[-1]
    assert isinstance(question, RequestWork)
    return question


# -- tasks of a worker -----------------------------------------------------------------------------


def test_t1_only_the_reply_to_the_last_request_counts() -> None:
    machine = WorkerTasks()
    first, second = last(machine.ask()), last(machine.ask())
    assert machine.work_received(first.request, (7, [definition(1)], [])) == []
    assert machine.request_failed(first.request) == []
    assert machine.request_failed(second.request) == [RequestWorkLater()]
    begun, question = machine.work_received(second.request, (7, [definition(1)], []))
    assert isinstance(begun, BeginTask)
    assert question == RequestWork(second.request + 1, (1,), ())


def test_t1_a_reply_without_work_is_followed_by_another_request() -> None:
    machine = WorkerTasks()
    first = last(machine.ask())
    assert machine.work_received(first.request, None) == [RequestWork(first.request + 1, (), ())]


def test_t2_an_ended_task_is_reported_until_it_is_dropped() -> None:
    machine, _ = with_tasks(definition(1), definition(2))
    question = last(machine.finished(1))
    assert (question.tasks, question.finished) == ((1, 2), (1,))
    assert last(machine.ask()).finished == (1,)
    dropped, question = machine.work_received(last(machine.ask()).request, (7, [], [1]))  # type: ignore[misc]
    assert dropped == DropTask(1)
    assert (question.tasks, question.finished) == ((2,), ())
    assert machine.num_tasks == 1


def test_t2_the_end_of_an_unknown_or_deleted_task_is_ignored() -> None:
    machine, _ = with_tasks(definition(1))
    machine.tasks[1].enter(WorkerTaskState.DELETED)
    assert machine.finished(1) == machine.finished(9) == []
    assert machine.num_tasks == 0


def test_t3_tasks_of_lost_state_are_dropped_first() -> None:
    machine, question = with_tasks(definition(1))
    dropped, begun, after = machine.work_received(question.request, (8, [definition(1)], [1, 5]))
    assert dropped == DropTask(1)
    assert isinstance(begun, BeginTask)
    assert machine.state == 8
    assert isinstance(after, RequestWork)


def test_t4_leaving_worker_gives_positions_back() -> None:
    portioned = definition(3, delivery="exactly_once")
    machine, _ = with_tasks(definition(1), definition(2), portioned, definition(4, OFF))
    machine.finished(2)
    *given_back, question = machine.drain()
    assert given_back == [GiveBackPositions(1)]
    assert last([question]).finished == (2, 3)
    assert last(machine.finished(1)).finished == (1, 2, 3)
    assert machine.num_tasks == 1, "the whole dataset for itself"


def test_t5_a_released_worker_sends_no_request() -> None:
    machine, question = with_tasks(definition(1))
    machine.leave()
    assert (
        machine.ask()
        == machine.work_received(question.request, (7, [], [1]))
        == machine.request_failed(question.request)
        == []
    )


# -- elements first come, first served -------------------------------------------------------------


def buffer(*elements: Any, fit: int = 100) -> FirstComeBuffer:
    made = FirstComeBuffer(2, lambda some, bytes_max: min(fit, len(list(some))))
    made.elements.extend(elements)
    return made


def reply_to(
    machine: FirstComeBuffer | PortionsLane, reply: str, elements_max: int = 100
) -> TaskReply | None:
    machine.add_request(Demand(elements_max, MANY), reply)
    return machine.next_reply()


@pytest.mark.parametrize(
    ("wants", "fit", "gets"), [(100, 100, [1, 2, 3]), (2, 100, [1, 2]), (100, 1, [1])]
)
def test_b1_a_request_gets_the_present_elements_as_many_as_fit(
    wants: int, fit: int, gets: list[int]
) -> None:
    machine = buffer(1, 2, 3, fit=fit)
    assert reply_to(machine, "a", wants) == TaskReply("a", SOME, gets)
    assert machine.taken_count == len(gets)


def test_b1_element_appended_during_reply_waits() -> None:
    """The computing thread appends without the lock."""

    def fits_and_appends(elements: Any, bytes_max: int) -> int:
        machine.elements.append(3)
        return len(list(elements))

    machine = FirstComeBuffer(2, fits_and_appends)
    machine.elements.extend([1, 2])
    assert reply_to(machine, "a") == TaskReply("a", SOME, [1, 2])
    assert list(machine.elements) == [3]


def test_b1_requests_are_answered_in_their_order() -> None:
    machine = buffer()
    assert reply_to(machine, "a") is reply_to(machine, "b") is None
    machine.elements.extend((1, 2))
    assert machine.next_reply() == TaskReply("a", SOME, [1, 2])
    assert machine.next_reply() is None


def test_b2_failure_goes_to_one_request() -> None:
    machine, error = buffer(1), InternalError("broken")
    machine.failed(error)
    assert not machine.may_add()
    assert reply_to(machine, "a") == TaskReply("a", SOME, [1])
    assert not machine.may_add()
    assert reply_to(machine, "b") == TaskReply("b", FAILED, error)
    assert machine.may_add()
    assert machine.taken_count == 2


def test_b3_end_is_reported_once() -> None:
    machine = buffer(1)
    machine.end()
    assert not machine.has_finished()
    assert reply_to(machine, "a") == TaskReply("a", SOME, [1])
    assert [machine.has_finished(), machine.has_finished()] == [True, False]
    assert reply_to(machine, "b") == TaskReply("b", END)


def test_b3_a_pipeline_that_died_has_no_end() -> None:
    machine, error = buffer(), InternalError("no such file")
    machine.end(error)
    assert reply_to(machine, "a") == TaskReply("a", FAILED, error)
    assert reply_to(machine, "b") == TaskReply("b", FAILED, error)
    assert not machine.has_finished()


def test_b4_the_elements_that_are_made_ahead_are_bounded() -> None:
    machine = buffer(1, 2)
    assert not machine.may_add()
    reply_to(machine, "a", 1)
    assert machine.may_add()


def test_b5_after_close_no_request_gets_elements() -> None:
    machine = buffer(1)
    machine.add_request(Demand(0, MANY), "a")
    machine.close()
    machine.elements.append(2)  # the thread makes one more element
    for reply in "ab":
        answer = machine.next_reply()
        assert answer is not None
        assert answer.kind == FAILED
        assert isinstance(answer.value, CancelledError)
        machine.add_request(Demand(1, MANY), reply)
    assert not machine.has_finished()


# -- portions --------------------------------------------------------------------------------------


def lane(*numbers: int) -> PortionsLane:
    machine = PortionsLane(10)
    machine.portions_received(list(numbers), 0.0)
    return machine


def test_l1_a_reply_spans_portions_and_says_where_each_begins() -> None:
    machine = lane(4, 5)
    for number, skip, elements in ((4, 2, "cd"), (5, 0, "xyz")):
        segment = machine.begin(number, skip)
        segment.elements.extend(elements)
        segment.is_complete = number == 4
    answer = reply_to(machine, "a", 3)
    assert answer is not None
    assert answer.value == ["c", "d", "x"]
    assert answer.tag[0] == ((4, 2, 2, 2, True, 0, ""), (5, 0, 0, 1, False, 0, ""))
    answer = reply_to(machine, "b")
    assert answer is not None
    assert answer.tag[0] == ((5, 0, 1, 2, False, 0, ""),)


def test_l2_a_portion_without_elements_is_reported_as_done() -> None:
    machine = lane(4)
    machine.begin(4, 3).is_complete = True
    answer = reply_to(machine, "a")
    assert answer is not None
    assert answer.tag == (((4, 3, 3, 0, True, 0, ""),), 0, ())


def test_l3_an_error_has_its_offset_and_is_the_last_of_its_run() -> None:
    machine = lane(4)
    segment = machine.begin(4, 0)
    segment.elements.append("a")
    machine.failed(segment, 13, "broken")
    segment.elements.append("c")
    segment.is_complete = True
    answer = reply_to(machine, "a")
    assert answer is not None
    assert answer.value == ["a", "c"]
    runs = (4, 0, 0, 1, False, 0, ""), (4, 0, 1, 1, False, 13, "broken"), (4, 0, 2, 1, True, 0, "")
    assert answer.tag[0] == runs


def test_l4_elements_and_portions_in_the_buffer_are_bounded() -> None:
    machine = lane(*range(SEGMENTS_MAX + 1))
    segment = machine.begin(0, 0)
    segment.elements.extend(range(10))
    assert not machine.may_add()
    assert not machine.may_begin()
    segment.is_complete = True
    reply_to(machine, "a")
    assert machine.may_begin()
    for number in range(1, SEGMENTS_MAX + 1):
        machine.begin(number, 0).is_complete = True
    assert not machine.may_begin()
    reply_to(machine, "b")
    assert machine.may_begin()


def test_l5_reply_names_portions_in_hand() -> None:
    machine = lane(4, 5, 6)
    for number in (4, 5):
        machine.begin(number, 0).elements.append("x")
    answer = reply_to(machine, "a", 1)
    assert answer is not None
    assert answer.tag[2] == (4, 5, 6)


def test_more_portions_are_requested_while_they_are_quick() -> None:
    machine = PortionsLane(10)
    now, counts = 0.0, []
    for step in [QUICK_S / 2] * 8 + [QUICK_S * 2] * 3:
        machine.portions_received([], now)
        now += step
        counts.append(machine.request_size(now))
    assert counts == [2, 4, 8, 16, 32, GIVEN_MAX, GIVEN_MAX, GIVEN_MAX, 32, 16, 8]


def test_lane_without_portions_gives_end_or_error() -> None:
    for error, expected in ((None, TaskReply("a", END)), (InternalError("broken"), None)):
        machine = lane()
        machine.end(error)
        answer = reply_to(machine, "a")
        assert answer == (expected or TaskReply("a", FAILED, error))


def test_closed_lane_returns_no_elements() -> None:
    machine = lane(4)
    machine.begin(4, 0).elements.append("x")
    machine.close()
    assert reply_to(machine, "a") == TaskReply("a", END)
    assert machine.room == 0
