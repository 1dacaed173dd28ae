"""The coordinator's record of what it has scheduled: submission, results, the first error, the end
of a round.

In these tests the payload of a work item is its number, and every work item is for function 7
unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from zmqdist.errors import LostStart
from zmqdist.events import Heard, Send, Ticked
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import (
    BULK,
    CANCELLED,
    ERROR,
    KEPT,
    SAID_GOODBYE,
    VALUE,
    CancelWork,
    CoordinatorRegistered,
    Define,
    EndRound,
    Forget,
    Members,
    Message,
    QueueProgress,
    RegisterCoordinator,
    ResultReceived,
    Results,
    RoundEnded,
    StartsLost,
    Submit,
    Workers,
)
from zmqdist.scheduling.coordinator.affinity import Scheduled
from zmqdist.scheduling.coordinator.closures import DISPATCHER, SUBMISSION_SHIFT, Closures
from zmqdist.scheduling.coordinator.coordinator_events import (
    BulkArrived,
    BulkUnreachable,
    CancelRequested,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    Event,
    FunctionsDefined,
    FunctionsDropped,
    KeptDropped,
)
from zmqdist.scheduling.coordinator.dependencies_and_retries import LOST, UNAVAILABLE
from zmqdist.scheduling.coordinator.effects import Effect, Fetch, Resolve, RoomMade, RoundSettled

ME, QUEUE_MAX, CUT_S, LOST_S = 5, 4, 2.0, 60.0
AGAIN = 1 << SUBMISSION_SHIFT
"""The first attempt number of a second submission."""
NO_DISPATCHER = b"the cluster was without a dispatcher for 60 s"
NO_WORKER = b"the cluster was without any worker for 60 s"


@pytest.fixture
def closures() -> Closures:
    """A coordinator that has not connected to a dispatcher yet."""
    return Closures(
        coordinator=ME, queue_max=QUEUE_MAX, cancel_grace_s=CUT_S, lost_limit_s=LOST_S, now=0.0
    )


@pytest.fixture
def ready(closures: Closures) -> Closures:
    """A coordinator with function 7, a dispatcher and a worker."""
    do(closures, FunctionsDefined([(7, b"f")]))
    up(closures)
    return closures


def do(closures: Closures, *events: Event, now: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in closures.handle(event, now)]


def hear(closures: Closures, message: Message, now: float = 0.0) -> list[Effect]:
    return closures.handle(Heard(DISPATCHER, message), now)


def up(closures: Closures, workers: int = 1, now: float = 0.0) -> list[Effect]:
    return do(
        closures, DispatcherUp(), Heard(DISPATCHER, CoordinatorRegistered(3, workers)), now=now
    )


def schedule(closures: Closures, *works: int, fn: int = 7, now: float = 0.0) -> list[Effect]:
    return do(closures, Scheduled([(work, fn, b"%d" % work) for work in works]), now=now)


def end_result(closures: Closures, work: int, kind: int = VALUE, attempt: int = 0) -> list[Effect]:
    return hear(closures, Results([(work, attempt, kind, b"r")]))


def to_dispatcher(message: Message) -> Send:
    return Send(DISPATCHER, message)


def submitted(*works: int, round: int = 1, attempt: int = 0, lost: int = 0, fn: int = 7) -> Send:
    return to_dispatcher(Submit(round, [(work, attempt, lost, fn, b"%d" % work) for work in works]))


ASK_END = to_dispatcher(EndRound(1, CUT_S))


# -- submission and results ------------------------------------------------------------------------


def test_what_was_scheduled_before_there_is_a_dispatcher_is_submitted_to_the_first_one(
    closures: Closures,
) -> None:
    assert do(closures, FunctionsDefined([(7, b"f")])) == []
    assert schedule(closures, 1, 2) == []
    assert do(closures, DispatcherUp()) == [
        to_dispatcher(RegisterCoordinator(ME, QUEUE_MAX, 1, False))
    ]
    assert closures.unfinished == 2
    assert hear(closures, CoordinatorRegistered(3, 0)) == [
        to_dispatcher(Define([(7, b"f")])),
        submitted(1, 2),
    ]


def test_with_a_dispatcher_functions_and_work_are_sent_at_once(ready: Closures) -> None:
    assert do(ready, FunctionsDefined([(8, b"g")])) == [to_dispatcher(Define([(8, b"g")]))]
    assert schedule(ready, 1, fn=8) == [submitted(1, fn=8)]


@pytest.mark.parametrize("kind", [VALUE, ERROR, CANCELLED])
def test_p1_each_work_item_is_resolved_once(ready: Closures, kind: int) -> None:
    schedule(ready, 1)
    assert end_result(ready, 1, kind) == [Resolve([(1, kind, b"r")])]
    assert ready.unfinished == 0
    for again in (VALUE, ERROR, CANCELLED):
        assert end_result(ready, 1, again) == []
    assert hear(ready, StartsLost([(1, 1, "worker:0", -9, "log", True)])) == []
    assert do(ready, BulkArrived(1, 0, b"late"))[:-1] == []
    assert do(ready, BulkUnreachable(1, 0, "late")) == []


def test_results_of_many_work_items_are_one_effect(ready: Closures) -> None:
    schedule(ready, 1, 2, 3)
    results = Results([(2, 0, VALUE, b"b"), (9, 0, VALUE, b"?"), (1, 0, ERROR, b"a")])
    assert hear(ready, results) == [Resolve([(2, VALUE, b"b"), (1, ERROR, b"a")])]
    assert ready.unfinished == 1


def test_much_work_is_submitted_in_several_messages(ready: Closures) -> None:
    sizes = [
        len(e.message.items)
        for e in schedule(ready, *range(BATCH_ITEMS_MAX + 1))
        if isinstance(e, Send)
    ]
    assert sizes == [BATCH_ITEMS_MAX, 1]


# -- bulk results ----------------------------------------------------------------------------------


def test_p2_a_bulk_result_is_resolved_when_it_has_arrived_and_is_then_freed(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    assert end_result(ready, 1, BULK, attempt=4) == [Fetch(1, 4, b"r")]
    assert ready.unfinished == 1
    taken = to_dispatcher(ResultReceived([(1, 4)]))
    assert do(ready, BulkArrived(1, 4, b"value")) == [Resolve([(1, VALUE, b"value")]), taken]
    assert ready.unfinished == 0


def test_a_bulk_result_is_freed_before_its_function_is_forgotten(ready: Closures) -> None:
    schedule(ready, 1)
    do(ready, FunctionsDropped([7]))
    end_result(ready, 1, BULK)
    told = [e.message for e in do(ready, BulkArrived(1, 0, b"r")) if isinstance(e, Send)]
    assert told == [ResultReceived([(1, 0)]), Forget(ME, [7])], (
        "otherwise the dispatcher could assign it again without having the function"
    )


def test_a_bulk_result_without_a_waiting_work_item_is_freed(ready: Closures) -> None:
    assert end_result(ready, 1, BULK, attempt=4) == [to_dispatcher(ResultReceived([(1, 4)]))]


def test_a_bulk_result_that_arrives_without_a_dispatcher_counts(ready: Closures) -> None:
    schedule(ready, 1)
    end_result(ready, 1, BULK)
    do(ready, DispatcherDown())
    assert do(ready, BulkArrived(1, 0, b"value")) == [Resolve([(1, VALUE, b"value")])]
    assert not [e for e in up(ready) if isinstance(e, Send) and isinstance(e.message, Submit)]


def test_a_bulk_result_that_cannot_be_reached_ends_its_work(ready: Closures) -> None:
    schedule(ready, 1)
    end_result(ready, 1, BULK, attempt=4)
    taken = to_dispatcher(ResultReceived([(1, 4)]))
    assert do(ready, BulkUnreachable(1, 4, "no route")) == [
        Resolve([(1, UNAVAILABLE, b"no route")]),
        taken,
    ]


def test_work_that_runs_again_does_not_end_because_its_old_result_is_out_of_reach(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    end_result(ready, 1, BULK, attempt=4)
    end_result(ready, 1, BULK, attempt=5)
    assert do(ready, BulkUnreachable(1, 4, "no route")) == []
    assert ready.unfinished == 1


# -- kept results ----------------------------------------------------------------------------------


def schedule_kept(closures: Closures, *works: int) -> None:
    do(closures, Scheduled([(work, 7, b"%d" % work) for work in works], keep=works))


def test_p8_a_kept_result_is_resolved_by_its_reference_and_freed_when_it_was_dropped(
    ready: Closures,
) -> None:
    schedule_kept(ready, 1, 2)
    taken = to_dispatcher(ResultReceived([(1, 4), (2, 0)], keep=True))
    results = Results([(1, 4, BULK, b"r"), (2, 0, BULK, b"s")])
    assert hear(ready, results) == [taken, Resolve([(1, KEPT, b"r"), (2, KEPT, b"s")])]
    assert ready.unfinished == 0
    assert do(ready, KeptDropped([1, 9])) == [to_dispatcher(ResultReceived([(1, 4)]))]
    assert do(ready, KeptDropped([1])) == []


@pytest.mark.parametrize("kind", [ERROR, CANCELLED])
def test_work_with_keep_that_has_no_result_ends_like_any_other(ready: Closures, kind: int) -> None:
    schedule_kept(ready, 1)
    assert end_result(ready, 1, kind) == [Resolve([(1, kind, b"r")])]
    assert do(ready, KeptDropped([1])) == []


def test_a_kept_result_that_was_recomputed_is_freed(ready: Closures) -> None:
    schedule_kept(ready, 1)
    end_result(ready, 1, BULK)
    assert end_result(ready, 1, BULK, attempt=1) == [to_dispatcher(ResultReceived([(1, 1)]))]
    assert do(ready, KeptDropped([1])) == [to_dispatcher(ResultReceived([(1, 0)]))]


def test_kept_results_are_forgotten_with_the_connection(ready: Closures) -> None:
    schedule_kept(ready, 1)
    end_result(ready, 1, BULK)
    do(ready, DispatcherDown())
    up(ready)
    assert do(ready, KeptDropped([1])) == []


def test_a_kept_result_that_arrives_while_its_round_ends_is_cancelled_with_the_round(
    ready: Closures,
) -> None:
    schedule_kept(ready, 1)
    do(ready, EndRoundRequested(1))
    assert end_result(ready, 1, BULK) == [], "the dispatcher releases it with its round"
    assert hear(ready, RoundEnded(1)) == [Resolve([(1, CANCELLED, b"")]), RoundSettled(1)]


# -- the end of a round ----------------------------------------------------------------------------


def test_p3_the_round_ends_when_the_dispatcher_says_that_nothing_of_it_can_be_executing(
    ready: Closures,
) -> None:
    schedule(ready, 1, 2, 3)
    end_result(ready, 1, ERROR)
    assert do(ready, EndRoundRequested(1)) == [ASK_END]
    assert ready.ending
    assert schedule(ready, 4) == [], "its result would belong to an ended round"
    assert end_result(ready, 2) == [Resolve([(2, VALUE, b"r")])]
    cancelled = Resolve([(3, CANCELLED, b""), (4, CANCELLED, b"")])
    assert hear(ready, RoundEnded(1)) == [cancelled, RoundSettled(1)]
    assert (ready.ending, ready.unfinished, ready.wire_round) == (False, 0, 2)
    assert schedule(ready, 5) == [submitted(5, round=2)]
    assert ready.queued == 1, "work 4, which was never in the queue, has not left it"


def lose_a_worker(ready: Closures, reason: str = "its connection was lost") -> None:
    hear(ready, Members([("worker:0", 11, 100, "host")], []))
    hear(ready, Members([], [("worker:0", 11, reason)]))


@pytest.mark.parametrize("lost", [True, False])
def test_p3_a_round_that_lost_a_worker_is_ended_by_the_next_dispatcher_although_it_has_no_work_left(
    ready: Closures, lost: bool
) -> None:
    """A worker runs the functions that it has begun until it misses the dispatcher, even those
    whose start it has not reported."""
    schedule(ready, 1)
    if lost:
        lose_a_worker(ready)
        end_result(ready, 1, ERROR)
    else:
        do(ready, DispatcherDown())
        up(ready)
        end_result(ready, 1, ERROR, attempt=AGAIN)
    do(ready, DispatcherDown(), now=10.0)
    assert do(ready, EndRoundRequested(1), now=10.0) == []
    assert ready.deadline == 10.0 + LOST_S
    assert up(ready, now=11.0)[-1] == ASK_END
    assert hear(ready, RoundEnded(1)) == [RoundSettled(1)]
    schedule(ready, 2)
    end_result(ready, 2, ERROR)
    do(ready, DispatcherDown())
    assert do(ready, EndRoundRequested(2)) == [RoundSettled(2)], (
        "no work of the second round was lost"
    )


def test_p3_when_there_will_be_no_other_dispatcher_no_round_waits_for_one(ready: Closures) -> None:
    schedule(ready, 1)
    lose_a_worker(ready)
    do(ready, DispatcherDown(for_good=True), CancelRequested([1]))
    assert do(ready, EndRoundRequested(1)) == [RoundSettled(1)]


def test_p3_a_round_that_is_ending_ends_when_there_will_be_no_other_dispatcher(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    assert do(ready, EndRoundRequested(1)) == [ASK_END]
    cancelled = Resolve([(1, CANCELLED, b"")])
    assert do(ready, DispatcherDown(for_good=True)) == [cancelled, RoundSettled(1)]


def test_p3_a_slot_that_died_and_a_worker_that_said_goodbye_execute_nothing(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    hear(ready, StartsLost([(1, 0, "worker:0", -9, "", False)]))
    lose_a_worker(ready, SAID_GOODBYE)
    end_result(ready, 1, ERROR)
    do(ready, DispatcherDown())
    assert do(ready, EndRoundRequested(1)) == [RoundSettled(1)]


def test_p3_without_another_dispatcher_the_round_that_lost_a_start_ends_when_the_cluster_is_given_up(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    lose_a_worker(ready)
    end_result(ready, 1, ERROR)
    do(ready, DispatcherDown(), EndRoundRequested(1), now=10.0)
    assert do(ready, Ticked(), now=10.0 + LOST_S) == [RoundSettled(1)]


@pytest.mark.parametrize("asked", [True, False])
def test_p3_the_end_of_another_round_ends_nothing(ready: Closures, asked: bool) -> None:
    schedule(ready, 1)
    do(ready, *([EndRoundRequested(1)] if asked else []))
    assert hear(ready, RoundEnded(2 if asked else 1)) == []
    assert ready.unfinished == 1


def test_p3_the_end_of_a_round_is_requested_again_when_the_dispatcher_is_back(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    do(ready, EndRoundRequested(1), DispatcherDown())
    assert do(ready, DispatcherUp()) == [to_dispatcher(RegisterCoordinator(ME, QUEUE_MAX, 1, True))]
    assert hear(ready, CoordinatorRegistered(3, 1)) == [to_dispatcher(Define([(7, b"f")])), ASK_END]
    assert hear(ready, RoundEnded(1)) == [Resolve([(1, CANCELLED, b"")]), RoundSettled(1)]


def test_p3_without_a_dispatcher_a_round_that_has_work_waits_and_one_without_ends(
    closures: Closures,
) -> None:
    assert do(closures, EndRoundRequested(1)) == [RoundSettled(1)]
    schedule(closures, 1)
    assert do(closures, EndRoundRequested(2)) == []
    assert up(closures)[-1] == to_dispatcher(EndRound(2, CUT_S))


def test_p15_the_end_of_another_round_is_not_requested(ready: Closures) -> None:
    schedule(ready, 1)
    assert do(ready, EndRoundRequested(2)) == []
    do(ready, EndRoundRequested(1))
    hear(ready, RoundEnded(1))
    schedule(ready, 2)
    assert do(ready, EndRoundRequested(1)) == [], (
        "the coordinator scheduled it before the first round had ended"
    )
    assert (ready.ending, ready.unfinished) == (False, 1)


# -- a dispatcher that ends and comes back ---------------------------------------------------------


def test_p4_what_is_unfinished_is_submitted_again_oldest_first_under_new_attempt_numbers(
    ready: Closures,
) -> None:
    schedule(ready, 1, 2)
    schedule(ready, 3)
    end_result(ready, 2)
    do(ready, DispatcherDown())
    schedule(ready, 4)
    assert do(ready, DispatcherUp()) == [to_dispatcher(RegisterCoordinator(ME, QUEUE_MAX, 1, True))]
    again = submitted(1, 3, 4, attempt=AGAIN)
    assert hear(ready, CoordinatorRegistered(3, 1)) == [to_dispatcher(Define([(7, b"f")])), again]
    do(ready, DispatcherDown())
    assert up(ready)[-1] == submitted(1, 3, 4, attempt=2 * AGAIN)


def test_p4_the_numbers_go_on_after_the_last_known_attempt(ready: Closures) -> None:
    schedule(ready, 1)
    end_result(ready, 1, BULK, attempt=AGAIN + 7)
    do(ready, DispatcherDown())
    assert up(ready)[-1] == submitted(1, attempt=2 * AGAIN)


def test_p4_a_new_round_begins_without_lost_starts(ready: Closures) -> None:
    schedule(ready, 1)
    do(ready, EndRoundRequested(1))
    hear(ready, RoundEnded(1))
    do(ready, DispatcherDown())
    assert do(ready, DispatcherUp()) == [
        to_dispatcher(RegisterCoordinator(ME, QUEUE_MAX, 2, False))
    ]


def test_p5_lost_starts_are_counted_over_dispatchers_and_told_when_the_work_fails(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    assert hear(ready, StartsLost([(1, 0, "worker:0", -9, "log", False)])) == []
    do(ready, DispatcherDown())
    assert up(ready)[-1] == submitted(1, attempt=AGAIN, lost=1)
    starts = (LostStart("worker:0", 0, -9, "log"), LostStart("worker:1", AGAIN, None, ""))
    assert hear(ready, StartsLost([(1, AGAIN, "worker:1", None, "", True)])) == [
        Resolve([(1, LOST, starts)])
    ]
    assert ready.unfinished == 0


# -- no dispatcher or worker -----------------------------------------------------------------------


def test_p6_without_a_dispatcher_for_too_long_everything_is_resolved_as_unavailable(
    closures: Closures,
) -> None:
    assert closures.deadline is None
    schedule(closures, 1, 2, now=100.0)
    assert closures.deadline == 100.0 + LOST_S, "the coordinator did not miss it before"
    assert do(closures, Ticked(), now=99.9 + LOST_S) == []
    lost = Resolve([(1, UNAVAILABLE, NO_DISPATCHER), (2, UNAVAILABLE, NO_DISPATCHER)])
    assert do(closures, Ticked(), now=100.0 + LOST_S) == [lost]
    assert (closures.unfinished, closures.queued, closures.deadline) == (0, 0, None)


def test_p6_a_dispatcher_that_ends_is_missed_from_then_on_and_new_work_does_not_postpone_it(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    assert ready.deadline is None
    do(ready, DispatcherDown(), now=10.0)
    schedule(ready, 2, now=20.0)
    assert ready.deadline == 10.0 + LOST_S
    up(ready, now=30.0)
    assert ready.deadline is None


def test_p6_without_any_worker_for_too_long_the_round_is_ended_too(ready: Closures) -> None:
    schedule(ready, 1)
    hear(ready, Workers(0), 10.0)
    assert (ready.workers, ready.deadline) == (0, 10.0 + LOST_S)
    assert do(ready, Ticked(), now=70.0) == [ASK_END, Resolve([(1, UNAVAILABLE, NO_WORKER)])]
    assert schedule(ready, 2, now=71.0) == [submitted(2, round=2)]


def test_p6_a_worker_that_comes_in_time_is_enough(ready: Closures) -> None:
    schedule(ready, 1)
    hear(ready, Workers(0), 10.0)
    hear(ready, Workers(1), 20.0)
    assert (ready.workers, ready.deadline) == (1, None)
    assert do(ready, Ticked(), now=1000.0) == []


def test_p6_a_round_that_is_ending_ends_when_no_dispatcher_replies_for_too_long(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    do(ready, EndRoundRequested(1), DispatcherDown(), now=10.0)
    effects = do(ready, Ticked(), now=10.0 + LOST_S)
    assert effects == [Resolve([(1, UNAVAILABLE, NO_DISPATCHER)]), RoundSettled(1)]
    assert (ready.ending, ready.wire_round) == (False, 2)


# -- functions -------------------------------------------------------------------------------------


FORGET = to_dispatcher(Forget(ME, [7]))


def test_p7_a_dropped_function_that_no_work_uses_is_forgotten_at_once(ready: Closures) -> None:
    assert do(ready, FunctionsDropped([7])) == [FORGET]
    do(ready, DispatcherDown())
    assert up(ready) == [to_dispatcher(RegisterCoordinator(ME, QUEUE_MAX, 1, False))]


@pytest.mark.parametrize(
    "message",
    [
        Results([(2, 0, VALUE, b"")]),
        Results([(2, 0, ERROR, b"")]),
        StartsLost([(2, 0, "worker:0", 1, "", True)]),
    ],
    ids=["a value", "an error", "lost starts"],
)
def test_p7_a_dropped_function_is_forgotten_with_the_last_work_that_uses_it(
    ready: Closures, message: Message
) -> None:
    schedule(ready, 1, 2)
    assert do(ready, FunctionsDropped([7])) == []
    assert FORGET not in end_result(ready, 1)
    assert hear(ready, message)[-1] == FORGET


def test_p7_a_function_that_was_not_dropped_is_kept_without_work(ready: Closures) -> None:
    schedule(ready, 1)
    assert FORGET not in end_result(ready, 1)
    assert schedule(ready, 2) == [submitted(2)]


def test_p7_a_function_that_was_forgotten_without_a_dispatcher_is_not_defined_again(
    ready: Closures,
) -> None:
    schedule(ready, 1)
    do(ready, FunctionsDropped([7]), DispatcherDown(), CancelRequested([1]))
    assert up(ready) == [to_dispatcher(RegisterCoordinator(ME, QUEUE_MAX, 1, True))]


# -- withdrawing -----------------------------------------------------------------------------------


def test_work_that_is_with_the_dispatcher_is_withdrawn_there_and_ends_with_its_result(
    ready: Closures,
) -> None:
    schedule(ready, 1, 2)
    assert do(ready, CancelRequested([2, 9])) == [to_dispatcher(CancelWork([2], CUT_S))]
    assert ready.unfinished == 2
    assert end_result(ready, 2, CANCELLED) == [Resolve([(2, CANCELLED, b"r")])]
    assert do(ready, CancelRequested([2])) == []


def test_work_is_withdrawn_at_once_while_there_is_no_dispatcher(ready: Closures) -> None:
    schedule(ready, 1, 2)
    do(ready, DispatcherDown())
    schedule(ready, 3)
    assert ready.queued == 3
    assert do(ready, CancelRequested([1, 3])) == [
        Resolve([(1, CANCELLED, b""), (3, CANCELLED, b"")])
    ]
    assert ready.queued == 1
    assert up(ready)[-1] == submitted(2, attempt=AGAIN)


# -- the queue's length ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "queued", "room"),
    [
        (QueueProgress(0), 4, False),
        (QueueProgress(1), 3, True),
        (QueueProgress(4), 0, True),
        (Results([(1, 0, VALUE, b"")]), 3, True),
        (Results([(1, 0, BULK, b"")]), 4, False),
        (StartsLost([(1, 0, "worker:0", 1, "", True)]), 3, True),
        (StartsLost([(1, 0, "worker:0", 1, "", False)]), 4, False),
    ],
    ids=[
        "no progress",
        "one left",
        "all left",
        "one ended",
        "one is being fetched",
        "one failed",
        "one lost a start",
    ],
)
def test_a_full_queue_has_room_when_work_has_left_it(
    ready: Closures, message: Message, queued: int, room: bool
) -> None:
    schedule(ready, 1, 2, 3, 4)
    assert ready.queued == QUEUE_MAX
    assert (RoomMade() in hear(ready, message)) == room
    assert ready.queued == queued
    assert RoomMade() not in hear(ready, message), "the event is reported once"


def test_work_that_left_the_queue_and_then_ended_is_counted_once(ready: Closures) -> None:
    schedule(ready, 1, 2, 3)
    hear(ready, QueueProgress(2))
    end_result(ready, 1)
    assert ready.queued == 1


def test_the_queue_is_counted_again_for_each_dispatcher(ready: Closures) -> None:
    schedule(ready, 1, 2, 3)
    hear(ready, QueueProgress(3))
    end_result(ready, 1)
    do(ready, DispatcherDown())
    assert ready.queued == 0
    up(ready)
    assert ready.queued == 2
    do(ready, EndRoundRequested(1), DispatcherDown())
    up(ready)  # it does not get work that is about to end
    end_result(ready, 2)
    assert ready.queued == 0
