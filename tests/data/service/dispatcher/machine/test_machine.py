"""The dispatcher's state: each change alone, and all changes again from their records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState, decode_state
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.errors import (
    ALREADY_EXISTS,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    InternalError,
)
from zmqdist.events import Ticked

STATE = 77
OFF, DYNAMIC = r.OFF, r.DYNAMIC


class Driven:
    """A machine with a journal that commits each record at once, unless it is `full`."""

    def __init__(self, **rules: Any) -> None:
        self.machine = DataDispatcherMachine(Rules(fault_tolerant=True, **rules), STATE, 0.0)
        self.first = r.encode(self.machine.state)
        self.records: list[bytes] = []
        self.full = False
        self.now = 0.0
        self.answers: dict[Any, Any] = {}

    def __call__(self, event: Any) -> Any:
        effects = list(self.machine.handle(event, self.now))
        while effects:
            effect = effects.pop(0)
            match effect:
                case ev.CommitJournal(records):
                    if self.full:
                        effects += self.machine.handle(
                            ev.JournalFailed(RESOURCE_EXHAUSTED, "disk full"), self.now
                        )
                    else:
                        self.records += records
                        effects += self.machine.handle(ev.JournalCommitted(), self.now)
                case ev.Reload():
                    self.reload(self.machine)
                case ev.ReplyToRequest(token, value):
                    self.answers[token] = value
                case ev.FailRequest(token, code, message):
                    self.answers[token] = (code, message)
        return self.answers.pop(getattr(event, "token", None), None)

    def reload(self, machine: DataDispatcherMachine) -> None:
        machine.restore(
            decode_state(self.first), [r.decode(record) for record in self.records], self.now
        )

    def tick(self, now: float) -> None:
        self.now = now
        self(Ticked())


@pytest.fixture
def driven() -> Driven:
    made = Driven()
    made(ev.WorkerJoined("worker:0", "a:1", 11))
    made(ev.WorkerJoined("worker:1", "b:1", 12))
    assert made(ev.RegisterRequest("t", 1, None, "print", "{}")) == ("1000", False)
    return made


def opened(
    driven: Driven, name: str | None, request: int, mode: int = OFF, repetition: int = 0
) -> Any:
    terms = r.Terms("1000", mode)
    return driven(
        ev.OpenRequest(
            "t",
            request,
            name,
            repetition,
            terms,
            (100,) if mode == DYNAMIC else (),
            f"anonymous_{request}",
        )
    )


def test_numbers_begin_where_those_of_tf_data_service_do(driven: Driven) -> None:
    assert opened(driven, "job", 5)[:3] == (3000, 2000, STATE)
    state = driven.machine.state
    assert (list(state.datasets), list(state.jobs), list(state.tasks)) == (
        ["1000"],
        [5000],
        [4000, 4001],
    )


def test_a_repeated_request_gets_the_same_reply(driven: Driven) -> None:
    assert driven(ev.RegisterRequest("t", 1, None, "print", "{}")) == ("1000", False)
    assert opened(driven, "job", 5) == opened(driven, "job", 5)
    assert len(driven.machine.state.clients) == 1


def test_readers_of_one_job_name_share_an_iteration_and_each_repetition_makes_another(
    driven: Driven,
) -> None:
    assert [opened(driven, "job", request)[1] for request in (5, 6)] == [2000, 2000]
    assert opened(driven, "job", 7, repetition=1)[1] == 2001
    assert opened(driven, None, 8)[1] == 2002


def test_an_iteration_ends_when_all_its_tasks_have(driven: Driven) -> None:
    opened(driven, "job", 5)
    iteration = driven.machine.state.iterations[2000]
    driven(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, (4000,)))
    assert driven.machine.state.tasks[4000].is_over
    assert iteration.state is not r.IterationState.FINISHED
    driven(ev.WorkRequest("v", STATE, 12, {4001: "b:1"}, (4001,)))
    assert iteration.state is r.IterationState.FINISHED
    assert not driven.machine.state.tasks


def test_the_last_reader_that_leaves_starts_the_time_after_which_an_iteration_is_collected() -> (
    None
):
    driven = Driven(gc_check_s=1.0, gc_timeout_s=10.0)
    driven(ev.RegisterRequest("t", 1, None, "print", "{}"))
    first, second = (opened(driven, "job", request)[0] for request in (5, 6))
    driven(ev.ReleaseRequest("t", STATE, first))
    driven.tick(20.0)
    assert driven.machine.state.iterations[2000].state is not r.IterationState.COLLECTED
    driven(ev.ReleaseRequest("t", STATE, second))
    driven.tick(29.0)
    assert driven.machine.state.iterations[2000].state is not r.IterationState.COLLECTED
    driven.tick(31.0)
    assert driven.machine.state.iterations[2000].state is r.IterationState.COLLECTED
    assert opened(driven, "job", 7)[1] == 2001


@pytest.mark.parametrize(("timeout_s", "left"), [(5.0, 0), (1000.0, 1)])
def test_silent_readers_are_released_after_their_time_out(timeout_s: float, left: int) -> None:
    driven = Driven(gc_check_s=1.0, client_timeout_s=timeout_s)
    driven(ev.RegisterRequest("t", 1, None, "print", "{}"))
    client = opened(driven, "job", 5)[0]
    driven.tick(500.0)
    assert client in driven.machine.state.clients, "not before its first request for news"
    driven(ev.WatchRequest("news", STATE, client, 0))
    driven.tick(600.0)
    assert len(driven.machine.state.clients) == left


REFUSED = [
    (
        ev.OpenRequest("t", 9, "job", 0, r.Terms("2222", OFF)),
        NOT_FOUND,
        "Dataset id 2222 not found",
    ),
    (
        ev.OpenRequest("t", 9, "job", 0, r.Terms("1000", DYNAMIC), (5,)),
        INVALID_ARGUMENT,
        "existing job with different parameters",
    ),
    (
        ev.RegisterRequest("t", 9, "1000", "print", '{"a": 1}'),
        INVALID_ARGUMENT,
        "should have the same structure",
    ),
    (
        ev.RegisterRequest("t", 9, "1000", "other", "{}", "error"),
        ALREADY_EXISTS,
        "another pipeline",
    ),
    (ev.WatchRequest("t", STATE, 3999, 0), NOT_FOUND, "Unknown iteration client id 3999."),
    (ev.WatchRequest("t", STATE + 1, 3000, 0), NOT_FOUND, "lost its state"),
    (ev.WorkRequest("t", STATE, 99, {}, ()), UNAVAILABLE, "not registered"),
    (
        ev.SplitsRequest("t", STATE, 4000, 11, 0, 1, 0, 1),
        FAILED_PRECONDITION,
        "is not of a DYNAMIC job",
    ),
    (ev.SplitsRequest("t", STATE, 4999, 11, 0, 1, 0, 1), NOT_FOUND, "does not exist"),
]


@pytest.mark.parametrize(("question", "code", "text"), REFUSED)
def test_a_refused_request_changes_nothing(
    driven: Driven, question: Any, code: int, text: str
) -> None:
    opened(driven, "job", 5)
    before = r.encode(driven.machine.state)
    told = driven(question)
    assert told[0] == code
    assert text in told[1]
    assert r.encode(driven.machine.state) == before


def test_the_records_restore_the_same_state(driven: Driven) -> None:
    opened(driven, "job", 5, DYNAMIC)
    driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 21, 0, 10))
    driven(ev.HandBackRequest("t", STATE, 4000, 11, 0, 22, 0, ((4, 6),)))
    driven(ev.WorkRequest("w", STATE, 11, {}, (4000,)))
    driven(ev.CompressionRequest("t", "1000", True))
    driven(ev.ReleaseRequest("t", STATE, 3000))
    other = DataDispatcherMachine(Rules(fault_tolerant=True), 5, 0.0)
    driven.reload(other)
    assert r.encode(other.state) == r.encode(driven.machine.state)
    assert decode_state(r.encode(other.state)) == other.state


def test_a_journal_that_fails_keeps_its_records_and_requests_for_news_are_repeated(
    driven: Driven,
) -> None:
    client = opened(driven, "job", 5, DYNAMIC)[0]
    driven(ev.WatchRequest("news", STATE, client, 0))
    version = driven.answers.pop("news")[0] if "news" in driven.answers else 0
    driven(ev.WatchRequest("waits", STATE, client, version))
    before = r.encode(driven.machine.state)
    driven.full = True
    told = driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 21, 0, 10))
    assert told[0] == RESOURCE_EXHAUSTED
    assert driven.answers.get("waits", (UNAVAILABLE,))[0] == UNAVAILABLE
    assert r.encode(driven.machine.state) == before
    driven.full = False
    start, length = driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 23, 0, 10))
    assert (start, length > 0) == (0, True)


def test_workers_have_time_to_come_back_after_a_restart() -> None:
    driven = Driven(worker_timeout_s=0.2)
    driven(ev.WorkerJoined("worker:0", "a:1", 11))
    other = DataDispatcherMachine(Rules(fault_tolerant=True, worker_timeout_s=0.2), 5, 0.0)
    driven.reload(other)
    other.handle(Ticked(), 5.0)
    assert other.state.workers
    other.handle(Ticked(), 11.0)
    assert not other.state.workers


def restarted(driven: Driven) -> Driven:
    """Return another dispatcher with the same journal, at second 1."""
    other = Driven()
    other.first, other.records, other.now = driven.first, driven.records, 1.0
    other.reload(other.machine)
    return other


def test_d4_dynamic_waits_after_a_restart_for_a_worker_that_may_have_positions(
    driven: Driven,
) -> None:
    opened(driven, "job", 5, DYNAMIC)
    for task, incarnation in ((4000, 11), (4001, 12)):
        driven(ev.SplitsRequest("t", STATE, task, incarnation, 0, 20 + task, 0, 10))
    other = restarted(driven)
    iteration = other.machine.state.iterations[2000]
    other(ev.WorkerJoined("worker:0", "a:1", 11))
    other(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, (4000,)))
    assert iteration.state is not r.IterationState.FINISHED, (
        "the other worker runs, and is about to register"
    )
    other(ev.WorkerJoined("worker:1", "b:1", 12))
    other(ev.WorkRequest("v", STATE, 12, {4001: "b:1"}, (4001,)))
    assert iteration.state is r.IterationState.FINISHED


def test_d4_after_a_restart_dynamic_does_not_wait_worker_timeout_for_an_absent_worker(
    driven: Driven,
) -> None:
    opened(driven, "job", 5, DYNAMIC)
    other = restarted(driven)
    other(ev.WorkerJoined("worker:0", "a:1", 11))
    other(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, (4000,)))
    iteration = other.machine.state.iterations[2000]
    other.tick(10.9)
    assert iteration.state is not r.IterationState.FINISHED
    assert other.machine.deadline <= 11.0
    other.tick(11.0)
    assert iteration.state is r.IterationState.FINISHED
    assert 2 in other.machine.state.workers, "its place is kept for worker_timeout_s"


@pytest.mark.parametrize("named", [False, True])
def test_after_a_restart_a_worker_keeps_its_place_even_if_another_has_its_name(
    driven: Driven, named: bool
) -> None:
    other = restarted(driven)
    other(ev.WorkerJoined("worker:0", "c:1", 13, (), False))
    other(ev.WorkerJoined("worker:1", "a:1", 11, (), named))
    other(ev.WorkerJoined("worker:2", "b:1", 12, (), named))
    assert {
        worker.incarnation: number for number, worker in other.machine.state.workers.items()
    } == {
        11: 1,
        12: 2,
        13: 3,
    }


@pytest.mark.parametrize(("named", "place"), [(False, 3), (True, 1)])
def test_after_a_restart_only_a_name_that_the_worker_asked_for_gives_it_the_place_of_another_incarnation(
    driven: Driven, named: bool, place: int
) -> None:
    other = restarted(driven)
    other(ev.WorkerJoined("worker:0", "c:1", 13, (), named))
    assert (
        next(
            number
            for number, worker in other.machine.state.workers.items()
            if worker.incarnation == 13
        )
        == place
    )


def test_a_name_that_the_dispatcher_gave_gives_the_place_of_one_that_was_seen_to_go(
    driven: Driven,
) -> None:
    driven(ev.WorkerGone(11))
    driven(ev.WorkerJoined("worker:0", "c:1", 13, (), False))
    assert {worker.incarnation for worker in driven.machine.state.workers.values()} == {12, 13}


def test_d6_a_successor_keeps_its_place_when_the_journal_fails_before_the_loss_of_the_other_is_known(
    driven: Driven,
) -> None:
    driven(ev.WorkerJoined("worker:2", "a:1", 13))
    driven.full = True
    driven(ev.CompressionRequest("t", "1000", True))
    driven.full = False
    driven.tick(1.0)
    driven(ev.WorkerGone(11))
    rows = driven.machine.place_rows()
    assert {row.incarnation for row in rows if row.connected} == {12, 13}


def test_a_disconnected_worker_gets_no_positions_before_it_is_back(driven: Driven) -> None:
    """It requests them over another connection than the broken one. No reader reads from it, and
    the iteration may end without it."""
    opened(driven, "job", 5, DYNAMIC)
    assert driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 20, 0, 10)) == (0, 10)
    driven(ev.WorkerGone(11))
    assert driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 20, 0, 10)) == (0, 10), (
        "these were given before"
    )
    assert driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 21, 0, 10))[0] == UNAVAILABLE
    driven(ev.WorkerJoined("worker:0", "a:1", 11))
    assert driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 21, 0, 10)) == (10, 10)


def test_a_worker_that_lost_its_place_does_not_serve_the_tasks_of_that_place_any_more(
    driven: Driven,
) -> None:
    """Otherwise readers would go to this worker, which is about to drop the tasks, and never to the
    worker that has the place now."""
    client = opened(driven, "job", 5)[0]
    driven(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, ()))
    driven(ev.WorkerGone(11))
    driven(ev.WorkerJoined("worker:0", "c:1", 13))
    driven(ev.WorkRequest("v", STATE, 13, {4000: "c:1"}, ()))
    driven(ev.WorkerJoined("worker:2", "a:1", 11))
    driven(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, ()))
    _, tasks, *_ = driven(ev.WatchRequest("news", STATE, client, 0))
    assert [(task[2], task[3]) for task in tasks if task[0] == 4000] == [("c:1", 13)]


def test_d1_a_worker_that_lost_its_place_does_not_take_its_task_for_done_and_continues_with_the_place(
    driven: Driven,
) -> None:
    opened(driven, "job", 5, DYNAMIC)
    driven(ev.WorkerGone(11))
    driven(ev.WorkerJoined("worker:0", "c:1", 13, (), False))
    assert driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 20, 0, 10))[0] == UNAVAILABLE, (
        "it must request again"
    )
    driven(ev.WorkerGone(13))
    driven(ev.WorkerJoined("worker:0", "a:1", 11, (), False))
    assert driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 20, 0, 10)) == (0, 10)


def test_a_worker_that_gets_another_place_drops_the_tasks_of_the_earlier_one(
    driven: Driven,
) -> None:
    """Until then it requests their positions again and again."""
    opened(driven, "job", 5, DYNAMIC)
    driven(ev.WorkerGone(11))
    driven(ev.WorkerJoined("worker:0", "c:1", 13, (), False))
    driven(ev.WorkerJoined("worker:2", "a:1", 11, (), False))
    _, _, drop = driven(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, ()))
    assert drop == [4000]


def test_d4_a_worker_that_returns_while_the_journal_fails_has_its_tasks_when_the_journal_works_again(
    driven: Driven,
) -> None:
    """It kept its place, so only its tasks of iterations that were opened meanwhile were lost with
    the records."""
    driven(ev.WorkerGone(11))
    driven(ev.WorkerGone(12))
    opened(driven, "job", 5, DYNAMIC)
    driven.full = True
    driven(ev.WorkerJoined("worker:0", "a:1", 11))
    driven.full = False
    driven.tick(driven.now + 1.0)
    (number,) = driven.machine.state.iterations[2000].tasks
    assert driven.machine.state.tasks[number].worker == driven.machine.state.workers[1].number
    driven.tick(driven.now + 1.0)
    assert len(driven.machine.state.iterations[2000].tasks) == 1


def test_a_worker_that_was_seen_to_leave_stays_gone_after_the_journal_failed(
    driven: Driven,
) -> None:
    opened(driven, "job", 5, DYNAMIC)
    driven(ev.WorkerGone(12))
    driven.full = True
    driven(ev.SplitsRequest("t", STATE, 4000, 11, 0, 21, 0, 10))
    driven.full = False
    driven(ev.WorkRequest("w", STATE, 11, {4000: "a:1"}, (4000,)))
    assert driven.machine.state.iterations[2000].state is r.IterationState.FINISHED


def test_a_state_begins_empty() -> None:
    assert decode_state(r.encode(DurableState(number=3))) == DurableState(number=3)


def test_a_reader_hears_of_tasks_that_do_not_serve_yet() -> None:
    """Otherwise a reader that knows only some tasks would take their end for the end of the
    iteration."""
    driven = Driven()
    for incarnation in (11, 12):
        driven(ev.WorkerJoined(f"worker:{incarnation}", f"host:{incarnation}", incarnation))
    driven(ev.RegisterRequest("t", 1, None, "print", "{}"))
    client = opened(driven, "job", 5)[0]
    driven(ev.WorkRequest("first", STATE, 11, {4000: "host:11"}, ()))
    version, tasks, *_ = driven(ev.WatchRequest("news", STATE, client, 0))
    assert [(task[0], task[2], task[3]) for task in tasks] == [
        (4000, "host:11", 11),
        (4001, "", 12),
    ]
    driven(ev.WorkRequest("second", STATE, 12, {4001: "host:12"}, ()))
    _, tasks, *_ = driven(ev.WatchRequest("news", STATE, client, version))
    assert [task[2] for task in tasks] == ["host:11", "host:12"]
    driven(ev.WorkerGone(12))
    _, tasks, *_ = driven(ev.WatchRequest("news", STATE, client, version))
    assert [task[0] for task in tasks] == [4000], (
        "the dispatcher, not the reader, waits for a worker that has gone"
    )


@pytest.mark.parametrize("mode", [OFF, DYNAMIC])
def test_the_iteration_of_a_killed_reader_without_others_ends_when_the_reader_is_given_up(
    mode: int,
) -> None:
    driven = Driven(gc_check_s=1.0, client_timeout_s=5.0)
    driven(ev.WorkerJoined("worker:0", "a:1", 11))
    driven(ev.RegisterRequest("t", 1, None, "print", "{}"))
    client = opened(driven, None, 5, mode)[0]
    driven(ev.WatchRequest("news", STATE, client, 0))
    driven.tick(60.0)
    assert (driven.machine.num_tasks, driven.machine.state.iterations) == (0, {})


def test_a_reader_that_has_opened_and_was_killed_before_it_asked_for_news_is_given_up_in_the_end() -> (
    None
):
    driven = Driven(gc_check_s=1.0, client_timeout_s=5.0)
    driven(ev.RegisterRequest("t", 1, None, "print", "{}"))
    opened(driven, "job", 5)
    driven.tick(3700.0)
    assert not driven.machine.state.clients


@pytest.mark.parametrize("ends", ["read to the end", "closed", "given up"])
def test_nothing_is_left_of_a_thousand_iterations_that_no_reader_can_join(
    driven: Driven, ends: str
) -> None:
    live = driven.machine._tables  # reach: a leak shows nowhere else
    tables = (
        *(
            "watches",
            "portion_requests",
            "iterations_to_serve",
            "last_heard",
            "unread_since",
            "versions",
            "serving",
        ),
        *("client_by_request", "iteration_by_key", "job_by_name"),
    )

    def size() -> tuple[int, ...]:
        driven.tick(driven.now + 700.0)
        kept = [len(getattr(live, name)) for name in tables]
        figures = driven.machine.figures
        left = (
            figures._reports,
            figures._rates,
            figures._scalers,
        )  # reach: a leak shows nowhere else
        kept += [len(left[0]), len(left[1]), len(left[2])]
        return (len(r.encode(driven.machine.state)) // 16, *kept, driven.machine.num_tasks)

    before = size()
    for request in range(1000, 2000):
        client, _, _, _ = opened(driven, None, request, DYNAMIC)
        tasks = dict.fromkeys(live.tasks_of[1], "a:1")
        driven(
            ev.WorkRequest(
                "w", STATE, 11, tasks, (), {task: ev.TaskReport(1, 1, 1, 1, 0.1) for task in tasks}
            )
        )
        driven(ev.WatchRequest("news", STATE, client, 0, target_s=0.1))
        if ends == "read to the end":
            for worker, incarnation in ((1, 11), (2, 12)):
                driven(ev.WorkRequest("w", STATE, incarnation, {}, tuple(live.tasks_of[worker])))
        if ends == "given up":
            driven.tick(driven.now + 1000.0)
        else:
            driven(ev.ReleaseRequest("t", STATE, client))
        driven.answers.clear()
    assert size() == before
    other = DataDispatcherMachine(Rules(fault_tolerant=True), 5, 0.0)
    driven.reload(other)
    assert r.encode(other.state) == r.encode(driven.machine.state)


def test_a_change_that_cannot_be_made_is_not_written_to_the_journal(driven: Driven) -> None:
    told = len(driven.records)
    with pytest.raises(KeyError):
        driven.machine._tables.change(r.ReleaseClient(9))  # reach: a leak shows nowhere else
    driven(Ticked())
    assert len(driven.records) == told


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ([4000, 2000, 1, False], r.DataTaskState.RUNNING),
        ([4000, 2000, 1, False, -1], r.DataTaskState.PENDING),
        ([4000, 2000, 1, True, 0, {}, False], r.DataTaskState.FINISHED),
        ([4000, 2000, 1, True, -1, {}, True], r.DataTaskState.INTERRUPTED),
        ([2000, 5000, 0, [], [], [], False, False], r.IterationState.OPEN),
        ([2000, 5000, 0, [], [], [], True, False], r.IterationState.FINISHED),
        ([2000, 5000, 0, [], [], [], False, True], r.IterationState.COLLECTED),
    ],
)
def test_the_bools_of_an_earlier_journal_are_states_now(row: list[Any], state: Any) -> None:
    kind = r.TaskEntry if isinstance(state, r.DataTaskState) else r.Iteration
    assert msgspec.msgpack.decode(r.encode(row), type=kind).state is state


def test_a_state_has_only_the_transitions_of_its_table() -> None:
    task = r.TaskEntry(4000, 2000, 1)
    task.enter(r.DataTaskState.INTERRUPTED)
    with pytest.raises(InternalError, match="data task 4000 cannot go from INTERRUPTED to RUNN"):
        task.enter(r.DataTaskState.RUNNING)
    iteration = r.Iteration(2000, 5000, 0, [], state=r.IterationState.COLLECTED)
    with pytest.raises(InternalError, match="iteration 2000 cannot go from COLLECTED to OPEN"):
        iteration.enter(r.IterationState.OPEN)
    portion = r.Portion(3000)
    portion.pass_to(3000, 11, 1)
    with pytest.raises(InternalError, match="portion of client 3000 cannot go from COMPUTED to C"):
        portion.pass_to(3000, 12, 2)


def test_a_worker_cannot_end_a_task_that_it_was_not_given(driven: Driven) -> None:
    terms = r.Terms("1000", OFF, 1)
    driven(ev.OpenRequest("t", 5, "job", 0, terms, consumer=0))
    driven(ev.WorkerJoined("worker:2", "c:1", 13))
    late = max(driven.machine.state.tasks)
    assert driven.machine.state.tasks[late].state is r.DataTaskState.PENDING
    driven(ev.WorkRequest("w", STATE, 13, {late: "c:1"}, (late,)))
    assert driven.machine.state.tasks[late].state is r.DataTaskState.PENDING
