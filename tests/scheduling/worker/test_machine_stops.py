"""A worker that loses contact, its bulk results and functions, and how it leaves.

In these tests a lease's payload is its number, and all work is of coordinator 1, for function 7.
"""

from __future__ import annotations

import pytest

from tests.scheduling.worker.worked import (
    GONE,
    LIFE,
    WELCOME,
    assign,
    batches,
    do,
    finish,
    give,
    hear,
    outcome,
    ready,
    registration,
    returned,
    say,
    started,
    welcome,
)
from zmqdist import errors
from zmqdist.events import Heard, Ticked
from zmqdist.messages import (
    BULK,
    CANCELLED,
    AbortLeases,
    Beat,
    Forget,
    FreeResult,
    Leave,
    SlotsLost,
)
from zmqdist.scheduling.worker.machine import DISPATCHER, SPAWN_FAILURES_MAX, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    DispatcherConnected,
    DispatcherDisconnected,
    Effect,
    Event,
    Exit,
    ForgetFunctions,
    FreeBulk,
    Interrupt,
    Kill,
    LeaveRequested,
    Reclaim,
    SlotDied,
    SlotReady,
    SlotReclaimed,
    Spawn,
)

# -- contact lost ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent_at", "read_at", "down_at", "stop_at"),
    [
        (1.0, 1.0, 1.0, 6.0),
        (20.0, 20.0, 25.0, 27.5),
        (1.0, 1.0, 5.0, 8.5),
        (1.0, 1.0, 9.0, 9.0),
        (1.0, 9.0, 9.0, 9.0),
    ],
    ids=[
        "at once",
        "later",
        "silent before: by the last beat that came back",
        "silent for too long before",
        "frozen before",
    ],
)
def test_p3_all_work_is_stopped_before_the_dispatchers_lease_has_expired(
    worker: WorkerMachine, sent_at: float, read_at: float, down_at: float, stop_at: float
) -> None:
    """The dispatcher may have heard nothing since the worker sent the last beat that was echoed,
    however late the worker reads the echo."""
    assert do(worker, Ticked(), now=sent_at) == [say(Beat())]
    hear(worker, Beat(), read_at)
    assign(worker, 1, 2, now=read_at)
    do(worker, DispatcherDisconnected(), now=down_at)
    assert worker.deadline == stop_at
    if stop_at > down_at:
        assert do(worker, Ticked(), now=stop_at - 0.01) == []
    assert do(worker, Ticked(), now=stop_at) == [Kill(0)]
    assert worker.running == 0
    assert finish(worker, 1, now=stop_at) == [], "its outcome was in flight"
    assert do(worker, SlotDied(0, 1, -9, ""), now=stop_at) == [Spawn(0)]
    assert do(worker, DispatcherConnected(LIFE), now=stop_at) == [registration()]


def test_p3_contact_that_is_back_in_time_stops_nothing(worker: WorkerMachine) -> None:
    assign(worker, 1, 2)
    do(worker, DispatcherDisconnected(), now=1.0)
    assert do(worker, DispatcherConnected(LIFE), now=2.0) == [registration(2, 1)]
    hear(worker, WELCOME, 2.0)
    assert do(worker, Ticked(), now=50.0) == [say(Beat())]


def test_p2_another_registration_replaces_one_whose_work_has_stopped_meanwhile(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1, 2)
    do(worker, DispatcherDisconnected(), now=1.0)
    assert do(worker, DispatcherConnected(LIFE), now=5.9) == [registration(2, 1)]
    assert do(worker, Ticked(), now=6.0) == [Kill(0), registration(serial=2)]
    do(worker, SlotDied(0, 1, -9, ""), SlotReady(0), now=6.0)
    assert hear(worker, WELCOME, 6.1) == [], (
        "it replies to a registration that is not true any more"
    )
    assert assign(worker, 3, now=6.1) == [], (
        "the second registration does not name it, so it goes to another"
    )
    assert hear(worker, welcome(2), 6.2) == []
    assert assign(worker, 4, now=6.2) == [give((1, 4), new=True)]
    assert do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE), now=7.0) == [
        registration(4)
    ], "that dispatcher knows the thread"


def test_p2_a_thread_that_is_stopped_while_a_registration_is_in_flight_is_named_as_leftover(
    threads: WorkerMachine,
) -> None:
    assign(threads, 1)
    do(threads, DispatcherDisconnected(), now=1.0)
    assert do(threads, DispatcherConnected(LIFE), now=5.9) == [registration(1)]
    assert do(threads, Ticked(), now=6.0) == [
        Interrupt(0, 1),
        registration(leftover=[(1, 1)], serial=2),
    ]


def test_p4_for_another_dispatcher_all_work_is_killed_before_the_registration(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1, 2)
    do(worker, DispatcherDisconnected())
    assert do(worker, DispatcherConnected(LIFE + 1)) == [Kill(0), registration()]
    hear(worker, WELCOME)
    assert assign(worker, 1) == [], "its process is ending"
    assert do(worker, SlotDied(0, 1, -9, "")) == [Spawn(0)]
    assert do(worker, SlotReady(0)) == [give((1, 1), new=True)]


def test_slots_that_the_worker_killed_itself_are_no_failures(worker: WorkerMachine) -> None:
    for life in range(2 * SPAWN_FAILURES_MAX):
        do(worker, DispatcherConnected(life))
        hear(worker, WELCOME)
        assign(worker, 1)
        assert do(worker, DispatcherDisconnected(), DispatcherConnected(-1))[0] == Kill(0)
        assert do(worker, SlotDied(0, 1, -9, "")) == [Spawn(0)]
        do(worker, SlotReady(0))


def test_p4_a_thread_that_continues_is_named_and_its_end_is_reported(
    threads: WorkerMachine,
) -> None:
    assign(threads, 1, 2)
    do(threads, DispatcherDisconnected())
    assert do(threads, DispatcherConnected(LIFE + 1)) == [
        Interrupt(0, 1),
        registration(leftover=[(1, 1)]),
    ]
    hear(threads, WELCOME)
    assert assign(threads, 5) == [], "the thread is not free"
    assert finish(threads, 1) == [returned(1), give((2, 5)), started(5)]


def test_p2_the_end_of_a_thread_is_reported_after_the_reply_to_the_registration(
    threads: WorkerMachine,
) -> None:
    assign(threads, 1)
    do(threads, DispatcherDisconnected(), DispatcherConnected(LIFE + 1))
    assert finish(threads, 1) == []
    assert hear(threads, WELCOME) == [returned(1)]


def test_p2_the_death_of_a_slot_is_reported_after_the_reply_to_the_registration(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1)
    assert do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE)) == [registration(1)]
    assert do(worker, SlotDied(0, 1, -11, "log")) == [Spawn(0)]
    assert hear(worker, WELCOME) == [say(SlotsLost([(1, -11, "log")])), started(1)]


def test_work_that_ended_before_the_registration_is_reported_only_by_it(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1)
    assert do(worker, DispatcherDisconnected(), SlotDied(0, 1, -11, "log")) == [Spawn(0)], (
        "no other message may come before the registration"
    )
    assert do(worker, DispatcherConnected(LIFE)) == [registration()]
    assert hear(worker, WELCOME) == [started(1)]


def test_p4_a_bulk_value_of_such_a_thread_is_freed(threads: WorkerMachine) -> None:
    assign(threads, 1)
    do(threads, DispatcherDisconnected(), DispatcherConnected(LIFE + 1))
    hear(threads, WELCOME)
    assert finish(threads, 1, kind=BULK) == [FreeBulk(1), returned(1)]


# -- bulk results and functions --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "freed"),
    [
        (Heard(DISPATCHER, FreeResult([1, 9])), [FreeBulk(1)]),
        (Heard(DISPATCHER, AbortLeases([1], 0.0)), [returned(), FreeBulk(1)]),
    ],
    ids=["released", "cut off"],
)
def test_a_bulk_result_is_held_and_reported_until_it_is_freed(
    worker: WorkerMachine, event: Event, freed: list[Effect]
) -> None:
    assign(worker, 1)
    assert finish(worker, 1, kind=BULK) == [outcome(1, kind=BULK)]
    do(worker, DispatcherDisconnected())
    assert do(worker, DispatcherConnected(LIFE)) == [registration(1)]
    assert hear(worker, WELCOME) == [outcome(1, kind=BULK)], (
        "the report may have been lost with the connection"
    )
    assert do(worker, event) == freed
    assert do(worker, event)[-1:] == ([returned()] if len(freed) == 2 else []), "it is freed once"
    do(worker, DispatcherDisconnected())
    assert do(worker, DispatcherConnected(LIFE)) == [registration()]


def test_a_bulk_result_of_work_that_was_aborted_meanwhile_is_freed_at_once(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1)
    hear(worker, AbortLeases([1], 5.0))
    assert finish(worker, 1, kind=BULK) == [FreeBulk(1), outcome(1, kind=CANCELLED)]


def test_bulk_results_are_freed_for_another_dispatcher(worker: WorkerMachine) -> None:
    assign(worker, 1)
    finish(worker, 1, kind=BULK)
    do(worker, DispatcherDisconnected())
    assert do(worker, DispatcherConnected(LIFE + 1)) == [FreeBulk(1), registration()]


def test_a_function_is_forgotten_by_the_slots_that_have_it() -> None:
    worker = ready(2)
    batches(worker)
    assert hear(worker, Forget(1, [7, 8])) == [ForgetFunctions(0, [(1, 7)])]
    assert assign(worker, 2)[0] == give((2, 2), new=True)


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [LeaveRequested(3.0), Heard(DISPATCHER, Leave(3.0))], ids=["by the user", "told"]
)
def test_a_worker_that_leaves_gives_back_waiting_work_and_finishes_running_work(
    worker: WorkerMachine, event: Event
) -> None:
    batches(worker)
    assign(worker, 2, 3, 4)
    assert do(worker, event) == [say(Leave(0.0)), returned(4), Reclaim(0)]
    assert do(worker, SlotReclaimed(0, 2)) == [returned(3), started(2)]
    assert assign(worker, 5) == [returned(5)], "which was in flight"
    assert finish(worker, 2) == [outcome(2), *GONE]
    assert worker.exit == Exit(errors.OK, "")


def test_a_worker_without_work_leaves_at_once(worker: WorkerMachine) -> None:
    assert do(worker, LeaveRequested(3.0)) == [say(Leave(0.0)), *GONE]
    assert hear(worker, Leave(3.0)) == []


def test_work_that_runs_after_the_grace_of_leaving_is_killed_and_given_back(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1)
    do(worker, LeaveRequested(0.5))
    assert worker.deadline == 0.5
    assert Kill(0) in do(worker, Ticked(), now=0.5)
    assert do(worker, SlotDied(0, 1, -9, ""), now=0.6) == [returned(1), *GONE]


def test_a_thread_that_runs_when_the_grace_of_leaving_is_over_ends_with_the_worker(
    threads: WorkerMachine,
) -> None:
    assign(threads, 1)
    do(threads, LeaveRequested(0.5))
    effects = do(threads, Ticked(), now=0.5)
    assert Interrupt(0, 1) in effects
    assert effects[-3:] == [returned(1), *GONE]


@pytest.mark.parametrize(
    ("second_s", "end_s"), [(0.2, 0.3), (9.0, 1.0)], ids=["sooner", "not later"]
)
def test_a_second_request_to_leave_can_only_shorten_the_grace(
    worker: WorkerMachine, second_s: float, end_s: float
) -> None:
    assign(worker, 1)
    do(worker, LeaveRequested(1.0))
    do(worker, LeaveRequested(second_s), now=0.1)
    do(worker, Ticked(), now=end_s - 0.01)
    assert worker.deadline == pytest.approx(end_s)
    assert Kill(0) in do(worker, Ticked(), now=end_s + 1e-9)


def test_a_worker_that_leaves_says_so_again_over_a_new_connection(worker: WorkerMachine) -> None:
    assign(worker, 1)
    do(worker, LeaveRequested(3.0), DispatcherDisconnected(), DispatcherConnected(LIFE))
    assert hear(worker, WELCOME)[0] == say(Leave(0.0))


def test_work_for_a_forgotten_function_is_given_back_and_does_not_run(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1, 2, 3)
    assert hear(worker, Forget(1, [7])) == [returned(2, 3), ForgetFunctions(0, [(1, 7)])]
    assert finish(worker, 1) == [outcome(1)]
