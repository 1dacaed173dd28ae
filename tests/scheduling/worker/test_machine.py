"""A worker and its leases: registration, work for slots, reports, returned work and aborts.

In these tests a lease's payload is its number, and all work is of coordinator 1, for function 7.
The loss of contact and the end of the worker are in test_worker_stops.py.
"""

from __future__ import annotations

import pytest

from tests.scheduling.worker.worked import (
    BEAT_S,
    LEASE_S,
    LIFE,
    ORPHAN_S,
    WELCOME,
    assign,
    batches,
    do,
    finish,
    give,
    hear,
    make,
    outcome,
    ready,
    registration,
    returned,
    say,
    started,
    welcome,
)
from zmqdist import errors
from zmqdist.events import Heard, Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import (
    ALL_NUMBERS,
    CANCELLED,
    VALUE,
    AbortLeases,
    Assign,
    Beat,
    Done,
    Forget,
    Goodbye,
    Leave,
    Message,
    Refused,
    Registered,
    SlotsLost,
    StealRequest,
)
from zmqdist.scheduling.worker.machine import DISPATCHER, SPAWN_FAILURES_MAX, STUCK_S, WorkerMachine
from zmqdist.scheduling.worker.worker_events import (
    NOT_RUN,
    DispatcherConnected,
    DispatcherDisconnected,
    Effect,
    Event,
    Exit,
    ForgetFunctions,
    Give,
    Interrupt,
    Kill,
    Reclaim,
    SlotDied,
    SlotFinished,
    SlotReady,
    SlotReclaimed,
    SlotSeen,
    Spawn,
)

# -- registering and beating -----------------------------------------------------------------------


def test_a_worker_starts_its_slots_and_registers_when_there_is_a_dispatcher() -> None:
    worker = make(2)
    assert worker.start() == [Spawn(0), Spawn(1)]
    assert do(worker, DispatcherConnected(LIFE)) == [registration(index=-1, slots=2)]
    assert not worker.registered
    assert hear(worker, WELCOME) == []
    assert (worker.registered, worker.index, worker.lease_s) == (True, 3, LEASE_S)


def test_a_registered_worker_beats(worker: WorkerMachine) -> None:
    for now in (1.0, 2.0):
        assert worker.deadline == now
        assert do(worker, Ticked(), now=now - 0.01) == []
        assert do(worker, Ticked(), now=now) == [say(Beat())]


def times(worker: WorkerMachine, event: Event, now: float) -> list[tuple[int, int]]:
    """Return (busy_us, trip_us) of the reports that an event causes."""
    sends = [effect.message for effect in worker.handle(event, now) if isinstance(effect, Send)]
    return [(message.busy_us, message.trip_us) for message in sends if isinstance(message, Done)]


def work(*leases: int) -> Heard:
    return Heard(DISPATCHER, Assign([(1, 7, b"f")], [(n, 1, 0, 7, b"%d" % n) for n in leases]))


def ended(position: int) -> SlotFinished:
    return SlotFinished(0, [(position, VALUE, b"r")])


def test_a_report_has_the_time_in_which_the_worker_had_work_since_the_last_report(
    worker: WorkerMachine,
) -> None:
    worker.handle(work(1, 2), 10.0)
    assert times(worker, ended(1), 10.5) == [(500_000, 0)]
    assert times(worker, ended(2), 10.75) == [(250_000, 0)]
    worker.handle(work(3), 20.0)  # it had no work before
    worker.handle(work(4), 20.5)  # and it still has work
    assert times(worker, ended(3), 21.0) == [(1_000_000, 0)]


def test_a_report_has_the_shortest_of_the_last_round_trips() -> None:
    worker = make()
    worker.handle(SlotReady(0), 0.0)
    worker.handle(DispatcherConnected(LIFE), 0.0)
    worker.handle(Heard(DISPATCHER, WELCOME), 0.5)  # the reply to the registration
    reports = []
    for position, trip_s in enumerate((0.25, 0.125, 0.25, 0.25, 0.25, 0.25), 1):
        at = worker.deadline
        assert at is not None
        assert worker.handle(Ticked(), at) == [say(Beat())]
        worker.handle(Heard(DISPATCHER, Beat()), at + trip_s)
        worker.handle(work(position), at + trip_s)
        reports += times(worker, ended(position), at + trip_s)
    assert [trip_us for _, trip_us in reports] == [250_000, *[125_000] * 4, 250_000]


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (errors.ALREADY_EXISTS, True),
        (errors.FAILED_PRECONDITION, True),
        (errors.INVALID_ARGUMENT, False),
        (errors.RESOURCE_EXHAUSTED, False),
    ],
)
def test_after_a_temporary_refusal_the_worker_registers_again(code: int, again: bool) -> None:
    worker = make()
    do(worker, DispatcherConnected(LIFE))
    effects = hear(worker, Refused(code, "no"), 1.0)
    assert effects == ([] if again else [say(Goodbye()), Exit(code, "no")])
    if again:
        assert worker.deadline == 1.25
        assert do(worker, Ticked(), now=1.25) == [registration(index=-1, serial=2)]
        assert do(worker, Ticked(), now=9.0) == [], "it waits for the reply"


def test_a_lasting_refusal_ends_the_worker_when_its_leases_must_have_expired() -> None:
    worker = make()
    do(worker, DispatcherConnected(LIFE))
    now, refusals, effects = 0.0, 0, []
    while worker.exit is None:
        effects = hear(worker, Refused(errors.ALREADY_EXISTS, "is here already"), now)
        refusals += 1
        if worker.exit is None:
            now = worker.deadline or 0.0
            assert do(worker, Ticked(), now=now) == [registration(index=-1, serial=refusals + 1)]
    assert effects[-1] == Exit(errors.ALREADY_EXISTS, "is here already")
    assert LEASE_S < now < 2 * LEASE_S


def test_a_worker_without_an_index_takes_another_if_its_index_is_now_used_by_another(
    worker: WorkerMachine,
) -> None:
    do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE + 1))
    hear(worker, Refused(errors.ALREADY_EXISTS, "worker:3 is here already"))
    assert do(worker, Ticked(), now=0.25) == [registration(index=-1, serial=2)]
    hear(worker, Registered(5, BEAT_S, LEASE_S, 5.0, 2))
    assert do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE + 1)) == [
        registration(index=5)
    ]


def test_a_worker_that_named_its_index_insists_on_it() -> None:
    worker = make(index=3)
    do(worker, DispatcherConnected(LIFE))
    hear(worker, Refused(errors.ALREADY_EXISTS, "worker:3 is here already"))
    assert do(worker, Ticked(), now=0.25) == [registration(index=3, named=True, serial=2)]


def test_a_registration_says_whether_a_dispatcher_assigned_the_index() -> None:
    for named in (False, True):
        worker = make(index=3 if named else -1)
        do(worker, DispatcherConnected(LIFE))
        hear(worker, WELCOME)
        (again,) = do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE + 1))
        assert again == registration(index=3, named=named)
        assert (again.message.index, again.message.named) == (3, named)


def test_an_accepted_registration_resets_the_count_of_refusals(worker: WorkerMachine) -> None:
    now = 0.0
    for round_ in range(3):
        for refusal in range(1, 31):
            assert hear(worker, Refused(errors.FAILED_PRECONDITION, "who?"), now) == []
            now += 0.25
            assert registration(index=3, serial=30 * round_ + refusal + 1) in do(
                worker, Ticked(), now=now
            )
        hear(worker, welcome(30 * (round_ + 1) + 1), now)


def test_a_reply_without_the_number_of_a_registration_applies_to_the_latest(
    worker: WorkerMachine,
) -> None:
    hear(worker, Refused(errors.FAILED_PRECONDITION, "who?"))
    assert do(worker, Ticked(), now=0.25) == [registration(index=3, serial=2)]
    hear(worker, welcome(0), 0.25)
    assert assign(worker, 1, now=0.25) == [give((1, 1), new=True)]
    assert do(worker, Ticked(), now=0.75) == [], "the registration is not repeated"


def test_messages_that_are_refused_together_count_as_one_refusal(worker: WorkerMachine) -> None:
    """Another process has registered as this worker, so the dispatcher refuses each report that was
    in flight."""
    for _ in range(1000):
        assert (
            hear(
                worker,
                Refused(errors.FAILED_PRECONDITION, "Done from somebody who has not registered"),
            )
            == []
        )
    assert do(worker, Ticked(), now=0.25) == [registration(index=3, serial=2)]


def test_a_refused_worker_keeps_its_outcomes_until_it_is_welcome_again(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1)
    hear(worker, Refused(errors.FAILED_PRECONDITION, "who?"))
    assert finish(worker, 1) == []
    assert do(worker, Ticked(), now=0.25) == [registration(1, serial=2)]
    assert hear(worker, welcome(2), 0.25) == [outcome(1)]


def test_a_new_connection_makes_the_repeated_registration_unnecessary(
    worker: WorkerMachine,
) -> None:
    hear(worker, Refused(errors.FAILED_PRECONDITION, "who?"))
    assert do(worker, DispatcherConnected(LIFE), now=0.1) == [registration()]
    assert do(worker, Ticked(), now=0.3) == []


@pytest.mark.parametrize("had_one", [True, False])
def test_p7_a_worker_without_a_dispatcher_ends_itself(had_one: bool) -> None:
    worker = make()
    if had_one:
        do(worker, DispatcherConnected(LIFE), Heard(DISPATCHER, WELCOME), DispatcherDisconnected())
        do(worker, Ticked(), now=LEASE_S)  # it stops its work, of which it has none
    assert worker.deadline == ORPHAN_S
    assert do(worker, Ticked(), now=ORPHAN_S) == [
        Exit(errors.UNAVAILABLE, "no dispatcher for 60 s")
    ]
    assert worker.deadline is None
    assert do(worker, DispatcherConnected(LIFE)) == [], "it has ended"


# -- slots -----------------------------------------------------------------------------------------


def test_work_waits_for_a_slot_and_is_reported_when_it_ends() -> None:
    worker = make()
    do(worker, DispatcherConnected(LIFE), Heard(DISPATCHER, WELCOME))
    assert assign(worker, 1, 2) == []
    assert do(worker, SlotReady(0)) == [give((1, 1), new=True)], (
        "its start does not need a message of its own yet"
    )
    assert (worker.busy_slots, worker.running, worker.lease_at(0, 1), worker.lease_at(0, 2)) == (
        1,
        2,
        1,
        None,
    )
    assert finish(worker, 1, now=1.0) == [give((2, 2)), outcome(1, then=(2,))], (
        "the slot has the function already"
    )
    assert finish(worker, 2, now=2.0) == [outcome(2)]


def test_each_slot_gets_work_and_its_own_copy_of_the_function() -> None:
    worker = ready(2)
    effects = assign(worker, 1, 2, 3)
    assert effects == [give((1, 1), new=True), give((1, 2), slot=1, new=True)]


def test_p1_a_slot_works_in_order_and_gets_quick_work_in_growing_batches(
    worker: WorkerMachine,
) -> None:
    effects = assign(worker, *range(1, 100))
    sizes, positions = [], []
    for _ in range(5):
        (items,) = (effect.items for effect in effects if isinstance(effect, Give))
        sizes.append(len(items))
        positions += [position for position, *_ in items]
        effects = finish(worker, *(position for position, *_ in items))
    assert sizes == [1, 2, 4, 8, 16]
    assert positions == list(range(1, 32))


def test_p1_a_slot_gets_slow_work_one_by_one(worker: WorkerMachine) -> None:
    batches(worker)
    assert assign(worker, 2, 3, 4) == [give((2, 2), (3, 3))]
    assert finish(worker, 2, 3, now=60.0)[0] == give((4, 4))
    assert assign(worker, 5, now=60.0) == []


def test_p1_a_thread_gets_one_work_item_at_a_time(threads: WorkerMachine) -> None:
    assign(threads, *range(1, 9))
    for position in range(1, 8):
        assert finish(threads, position)[0] == give((position + 1, position + 1))


def test_a_batch_is_refilled_when_half_of_it_is_done(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2, 3, 4)
    assert finish(worker, 2) == [give((4, 4)), outcome(2, then=(3,))]


def test_a_look_at_a_slot_shows_which_work_has_begun(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2, 3)
    assert do(worker, SlotSeen(0, 2)) == [started(2)]
    assert do(worker, SlotSeen(0, 2)) == []
    assert do(worker, SlotSeen(0, 3)) == [started(3)]
    assert finish(worker, 2) == [outcome(2)]


def test_starts_in_threads_are_reported_at_once(threads: WorkerMachine) -> None:
    assert assign(threads, 1, 2) == [give((1, 1), new=True), started(1)]
    assert finish(threads, 1) == [give((2, 2)), outcome(1, then=(2,))]


def test_many_outcomes_are_reported_in_several_messages(worker: WorkerMachine) -> None:
    count = BATCH_ITEMS_MAX + 1
    assign(worker, *range(1, count + 1))
    do(worker, DispatcherDisconnected())
    for position in range(1, count + 1):
        assert not [effect for effect in finish(worker, position) if isinstance(effect, Send)]
    do(worker, DispatcherConnected(LIFE))
    sizes = [len(e.message.outcomes) for e in hear(worker, WELCOME) if isinstance(e, Send)]
    assert sizes == [BATCH_ITEMS_MAX, 1]


def test_outcomes_without_contact_are_reported_when_it_is_back(worker: WorkerMachine) -> None:
    assign(worker, 1, 2)
    do(worker, DispatcherDisconnected(), now=1.0)
    assert finish(worker, 1, now=1.0) == [give((2, 2))]
    assert do(worker, DispatcherConnected(LIFE), now=2.0) == [registration(2, 1)]
    assert hear(worker, WELCOME, 2.0) == [outcome(1, then=(2,))]


def test_work_that_is_stuck_behind_long_work_goes_to_an_idle_slot() -> None:
    worker = ready(2)
    assign(worker, 1, 2)
    finish(worker, 1)
    finish(worker, 1, slot=1)
    assign(worker, 3, 4)
    assert worker.deadline == STUCK_S
    assert do(worker, Ticked(), now=STUCK_S) == [Reclaim(0)]
    assert do(worker, SlotReclaimed(0, 2), now=STUCK_S) == [give((2, 4), slot=1), started(3)]
    assert worker.deadline == BEAT_S


def test_a_slot_is_stuck_when_it_reported_nothing_for_a_while(worker: WorkerMachine) -> None:
    worker = ready(2)
    assign(worker, 1, 2)
    finish(worker, 1)
    assign(worker, 3, 4, 5)
    finish(worker, 2)  # that is lease 3, and lease 5 replaces it
    assert finish(worker, 1, slot=1, now=0.01) == [outcome(2)]
    assert worker.deadline == STUCK_S
    finish(worker, 3, now=0.015)
    assign(worker, 6, now=0.015)
    assert do(worker, Ticked(), now=STUCK_S) == []


# -- how a lease ends ------------------------------------------------------------------------------


def test_p2_recalled_work_that_has_not_begun_is_given_back(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2, 3, 4, 5)
    assert hear(worker, StealRequest([3, 5, 99])) == [returned(5), Reclaim(0)]
    assert do(worker, SlotReclaimed(0, 2)) == [returned(3), started(2)]
    assert finish(worker, 2)[0] == give((4, 4)), "which was not recalled"


def test_p2_recalled_work_that_has_begun_meanwhile_is_not_given_back(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2, 3)
    reports = [returned(), Reclaim(0), started(2)]
    assert hear(worker, StealRequest([2, 3])) == reports, "a recall has one reply, and 2 is running"
    assert do(worker, SlotReclaimed(0, 3)) == [started(3)]
    assert finish(worker, 2, 3) == [outcome(2, 3)]


@pytest.mark.parametrize(
    "seen", [SlotSeen(0, 1), SlotReclaimed(0, 1)], ids=["by a look", "by what it gave up"]
)
def test_a_start_whose_report_was_lost_is_reported_again_at_a_recall(
    worker: WorkerMachine, seen: SlotSeen | SlotReclaimed
) -> None:
    """Otherwise the dispatcher would learn only by the outcome that the recall came too late."""
    assign(worker, 1)
    assert do(worker, seen) == [started(1)]
    do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE))
    hear(worker, WELCOME)
    assert hear(worker, StealRequest([1])) == [returned(), started(1)]
    assert do(worker, SlotSeen(0, 1)) == [], "no recall this time"


def test_a_slot_gets_no_work_while_its_work_is_being_taken_back(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2, 3, 4)
    hear(worker, StealRequest([3]))
    assert finish(worker, 2) == [outcome(2, then=(3,))]
    assert do(worker, SlotReclaimed(0, 3)) == []
    assert finish(worker, 3)[0] == give((4, 4))


@pytest.mark.parametrize(
    "again",
    [StealRequest([3]), AbortLeases([3], 0.5), Leave(5.0)],
    ids=lambda again: type(again).__name__,
)
def test_only_one_request_at_a_time_takes_work_back_from_a_slot(
    worker: WorkerMachine, again: Message
) -> None:
    """The reply to a second request would arrive after the slot got more work, and take that work
    back although it runs."""
    batches(worker)
    assign(worker, 2, 3)
    assert hear(worker, StealRequest([3])) == [returned(), Reclaim(0)]
    assert Reclaim(0) not in hear(worker, again)
    assert do(worker, SlotReclaimed(0, 2)) == [returned(3), started(2)]


@pytest.mark.parametrize("recalled", [True, False])
def test_p2_work_that_was_taken_back_from_a_slot_is_given_back_or_goes_to_another_slot(
    worker: WorkerMachine, recalled: bool
) -> None:
    batches(worker)
    assign(worker, 2, 3)
    hear(worker, StealRequest([3] if recalled else [99]))
    finish(worker, 2)
    effects = finish(worker, 3, kind=NOT_RUN)
    assert (returned(3) in effects) == recalled
    effects += do(worker, SlotReclaimed(0, 3))
    assert (give((4, 3)) in effects) == (not recalled)


def test_p2_when_a_slot_dies_the_running_work_is_lost_and_the_rest_runs_in_its_successor(
    worker: WorkerMachine,
) -> None:
    batches(worker)
    assign(worker, 2, 3)
    finish(worker, 2, 3)
    assign(worker, 4, 5, 6, 7)
    assert do(worker, SlotDied(0, 5, -11, "log")) == [
        started(5),
        say(SlotsLost([(5, -11, "log")])),
        returned(4),  # it ended, and its outcome was lost with the slot
        Spawn(0),
    ]
    assert do(worker, SlotReady(0)) == [give((1, 6), new=True)]


def test_p2_a_slot_that_dies_before_it_begins_anything_costs_nothing(worker: WorkerMachine) -> None:
    assign(worker, 1)
    assert do(worker, SlotDied(0, 0, -9, "")) == [Spawn(0)]
    assert do(worker, SlotReady(0))[0] == give((1, 1), new=True)


def test_p2_an_outcome_for_something_that_a_slot_does_not_have_is_dropped(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1)
    assert finish(worker, 2) == []
    assert finish(worker, 1) == [outcome(1)]
    assert finish(worker, 1) == []


@pytest.mark.parametrize("log", ["boom", ""])
def test_slots_that_die_before_they_are_ready_end_the_worker(log: str) -> None:
    worker = make()
    do(worker, DispatcherConnected(LIFE), Heard(DISPATCHER, WELCOME))
    for _ in range(SPAWN_FAILURES_MAX - 1):
        assert do(worker, SlotDied(0, 0, 1, log)) == [Spawn(0)]
    bye, ended = do(worker, SlotDied(0, 0, 1, log))
    assert (bye, ended) == (say(Goodbye()), worker.exit)
    assert isinstance(ended, Exit)
    assert (ended.code, (log or "it wrote nothing") in ended.error) == (errors.INTERNAL, True)


def test_a_slot_that_becomes_ready_forgives_the_failures_before_it() -> None:
    worker = make()
    for _ in range(2 * SPAWN_FAILURES_MAX):
        assert do(worker, SlotDied(0, 0, 1, ""), SlotReady(0), SlotDied(0, 0, 1, "")) == [
            Spawn(0),
            Spawn(0),
        ]


# -- aborts ----------------------------------------------------------------------------------------


def test_p5_aborted_work_is_interrupted_and_killed_after_its_grace(worker: WorkerMachine) -> None:
    assign(worker, 1, now=0.1)
    assert hear(worker, AbortLeases([1], 0.5), 0.1) == [returned(), Interrupt(0, 1)]
    assert worker.deadline == 0.6
    assert do(worker, Ticked(), now=0.59) == []
    assert do(worker, Ticked(), now=0.6) == [Kill(0)]
    assert do(worker, Ticked(), now=0.7) == [], "it is killed once"
    assert do(worker, SlotDied(0, 1, -9, ""), now=0.7) == [Spawn(0), outcome(1, kind=CANCELLED)]


def test_p5_aborted_work_that_ends_within_its_grace_is_not_killed(worker: WorkerMachine) -> None:
    assign(worker, 1)
    hear(worker, AbortLeases([1], 0.5))
    assert finish(worker, 1, now=0.4) == [outcome(1)]
    assert do(worker, Ticked(), now=0.5) == []


def test_p5_aborted_work_that_has_not_begun_is_given_back(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2, 3, 4)
    assert hear(worker, AbortLeases([3, 4], 0.5)) == [returned(4), Reclaim(0)]
    assert do(worker, SlotReclaimed(0, 2)) == [returned(3), started(2)]
    assert do(worker, Ticked(), now=0.5) == [], "and the running work was not aborted"


def test_p5_aborted_work_that_has_begun_meanwhile_is_interrupted_and_killed(
    worker: WorkerMachine,
) -> None:
    batches(worker)
    assign(worker, 2, 3)
    hear(worker, AbortLeases([3], 0.5))
    finish(worker, 2)
    assert do(worker, SlotReclaimed(0, 3)) == [Interrupt(0, 3)]
    assert do(worker, Ticked(), now=0.5) == [Kill(0)]


def test_an_aborted_thread_is_interrupted_and_waited_for(threads: WorkerMachine) -> None:
    assign(threads, 1)
    assert hear(threads, AbortLeases([1], 0.0)) == [returned(), Interrupt(0, 1)]
    assert do(threads, Ticked(), now=0.5) == []
    assert finish(threads, 1, now=0.6) == [outcome(1)]


# -- careful work ----------------------------------------------------------------------------------


def test_p6_careful_work_begins_when_the_report_of_its_start_has_arrived(
    worker: WorkerMachine,
) -> None:
    assert assign(worker, 1, 2, careful=True) == [started(1), say(Beat())]
    assert do(worker, SlotSeen(0, 0)) == []
    assert hear(worker, Beat()) == [give((1, 1), new=True)]
    assert finish(worker, 1) == [started(2), say(Beat()), outcome(1)]
    assert hear(worker, Beat()) == [give((2, 2))]


def test_p6_the_echo_of_an_earlier_beat_is_not_enough(worker: WorkerMachine) -> None:
    do(worker, Ticked(), now=1.0)  # a heartbeat for this start
    assert assign(worker, 1, careful=True, now=1.0) == [started(1), say(Beat())]
    assert hear(worker, Beat(), 1.0) == []
    assert hear(worker, Beat(), 1.0)[0] == give((1, 1), new=True)


def test_p6_over_a_new_connection_the_start_is_reported_again(worker: WorkerMachine) -> None:
    assign(worker, 1, careful=True)
    do(worker, DispatcherDisconnected(), DispatcherConnected(LIFE))
    assert hear(worker, WELCOME) == [started(1), say(Beat())]
    assert hear(worker, Beat())[0] == give((1, 1), new=True), (
        "echoes that were lost with the old connection do not count"
    )


def test_p6_careful_work_waits_for_an_empty_slot(worker: WorkerMachine) -> None:
    batches(worker)
    assign(worker, 2)
    assert assign(worker, 3, careful=True) == []
    assert finish(worker, 2) == [started(3), say(Beat()), outcome(2)]


def test_all_slots_that_have_started_forget_a_resource() -> None:
    worker = make(slots=2)
    do(worker, SlotReady(1), DispatcherConnected(LIFE), Heard(DISPATCHER, WELCOME))
    forget = Forget(1, [40, ALL_NUMBERS], everywhere=True)
    assert hear(worker, forget) == [ForgetFunctions(1, [(1, ALL_NUMBERS), (1, 40)])]


# -- P9: pinned work -------------------------------------------------------------------------------


def order(worker: WorkerMachine, count: int) -> list[int]:
    """The leases that run next, one after the other."""
    ran = []
    for _ in range(count):
        (position, item), *_ = worker.slots[0].given
        ran.append(item[0])
        finish(worker, position, now=1000.0 * len(ran))
    return ran


def test_p9_pinned_work_runs_before_waiting_work_and_after_earlier_pinned_work(
    worker: WorkerMachine,
) -> None:
    assign(worker, 1, 2, 3)
    assign(worker, 4, 5, first=True)
    assign(worker, 6)
    assign(worker, 7, first=True)
    assert order(worker, 7) == [1, 4, 5, 7, 2, 3, 6]


def test_p9_work_that_a_slot_has_not_begun_for_a_while_is_taken_back_for_pinned_work(
    worker: WorkerMachine,
) -> None:
    batches(worker)
    assign(worker, 2, 3)
    finish(worker, 2, 3)
    assign(worker, 4, 5, 6, 7)
    assert assign(worker, 8, first=True) == []
    assert worker.deadline is not None
    assert worker.deadline <= STUCK_S
    assert Reclaim(0) in do(worker, Ticked(), now=STUCK_S)
    do(worker, SlotReclaimed(0, 4), now=STUCK_S)
    assign(worker, 9, first=True, now=STUCK_S)
    assert order(worker, 6) == [4, 8, 9, 5, 6, 7]


def test_p9_work_that_a_slot_gives_back_runs_after_pinned_work_unless_it_is_pinned_too(
    worker: WorkerMachine,
) -> None:
    batches(worker)
    assign(worker, 2, 3)
    finish(worker, 2, 3)
    assign(worker, 4, 5, first=True)
    assign(worker, 6, 7)
    assign(worker, 8, first=True)
    hear(worker, StealRequest([7]))
    assert do(worker, SlotReclaimed(0, 4))[0] == returned(7)
    assign(worker, 9, first=True)
    assert order(worker, 5) == [4, 5, 8, 9, 6]


def test_p9_careful_work_whose_start_was_reported_is_not_overtaken(worker: WorkerMachine) -> None:
    assert assign(worker, 1, 2, careful=True) == [started(1), say(Beat())]
    assert assign(worker, 3, first=True) == []
    assert hear(worker, Beat())[0] == give((1, 1), new=True)
    assert order(worker, 2) == [1, 3]


def test_p9_pinned_careful_work_runs_first_too(worker: WorkerMachine) -> None:
    assign(worker, 1, 2)
    assign(worker, 3, careful=True, first=True)
    finish(worker, 1, now=100.0)
    assert hear(worker, Beat(), 100.0)[0] == give((2, 3))


# -- P8: a start delay -----------------------------------------------------------------------------


def given_out(effects: list[Effect]) -> list[Give]:
    return [effect for effect in effects if isinstance(effect, Give)]


@pytest.mark.parametrize(
    ("delay", "begins_at"), [((2.0, 0.0), 6.0), ((2.0, 4.0), 4.0), ((0.0, 4.0), 0.0)]
)
def test_p8_the_first_work_of_a_coordinator_waits_by_the_index_of_the_worker(
    delay: tuple[float, float], begins_at: float
) -> None:
    worker = ready(start_delay=delay)
    effects = assign(worker, 1, now=0.0)
    if begins_at:
        assert not given_out(effects)
        assert worker.deadline is not None
        assert worker.deadline <= begins_at
        assert not given_out(worker.handle(Ticked(), begins_at - 0.01))
        effects = worker.handle(Ticked(), begins_at)
    assert len(given_out(effects)) == 1
    finish(worker, 1, now=begins_at)
    assert len(given_out(assign(worker, 2, now=begins_at))) == 1, (
        "the same coordinator's next work does not wait"
    )


def test_p8_another_coordinators_first_work_waits_again() -> None:
    worker = ready(start_delay=(1.0, 0.0))
    assign(worker, 1)
    worker.handle(Ticked(), 3.0)
    finish(worker, 1, now=3.0)
    other = Assign([(2, 7, b"f")], [(9, 2, 0, 7, b"9")], workers=4)
    assert not given_out(hear(worker, other, 5.0))
    assert len(given_out(worker.handle(Ticked(), 8.0))) == 1
    assert worker.workers == 4
