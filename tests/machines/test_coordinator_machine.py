"""The coordinator's machine: events between its parts, and errors that fail a round (C1 to C4 of
scheduling/coordinator/machine.py)."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    CANCELLED,
    ERROR,
    INPUT_LOST,
    KEPT,
    VALUE,
    Begun,
    CancelWork,
    CoordinatorRegistered,
    ResultReceived,
    Results,
    RoundEnded,
    StartsLost,
    Submit,
)
from zmqdist.scheduling.coordinator.affinity import Scheduled, WorkOptions
from zmqdist.scheduling.coordinator.closures import DISPATCHER, Closures
from zmqdist.scheduling.coordinator.coordinator_events import (
    AttemptPacked,
    CancelRequested,
    CoordinatorRefused,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    Event,
    FunctionsDefined,
    FunctionsDropped,
    KeptDropped,
    PackingFailed,
)
from zmqdist.scheduling.coordinator.dependencies_and_retries import (
    FIRST_ATTEMPT,
    INPUT_FAILED,
    LOST,
    TIMED_OUT,
    UNAVAILABLE,
    Dependencies,
    Free,
    HandIn,
    Planned,
    Recomputed,
    ValueLost,
)
from zmqdist.scheduling.coordinator.effects import (
    Effect,
    KeepInput,
    KeptAt,
    Replace,
    Resolve,
    RoundRefused,
    RoundSettled,
)
from zmqdist.scheduling.coordinator.machine import ROUND, CoordinatorMachine

A, B, C = FIRST_ATTEMPT, FIRST_ATTEMPT + 1, FIRST_ATTEMPT + 2
"""The first attempts, in the order of their handing in."""


def new_machine(rounds: bool = True) -> CoordinatorMachine:
    closures = Closures(
        coordinator=5, queue_max=100, cancel_grace_s=2.0, lost_limit_s=60.0, now=0.0
    )
    plans = Dependencies(recomputations_max=1)
    return CoordinatorMachine(
        closures, plans, lambda payload: (int(payload), b"lost"), rounds=rounds
    )


@pytest.fixture
def machine() -> CoordinatorMachine:
    """A coordinator with function 7, a dispatcher and a worker."""
    machine = new_machine()
    connect(machine)
    return machine


def connect(machine: CoordinatorMachine) -> None:
    do(
        machine,
        FunctionsDefined([(7, b"f")]),
        DispatcherUp(),
        Heard(DISPATCHER, CoordinatorRegistered(3, 1)),
    )


def do(machine: CoordinatorMachine, *events: Event, now: float = 0.0) -> list[Effect]:
    """Return all effects of an event, with those of packed attempts: each HandIn gets its reply."""
    done: list[Effect] = []
    waiting = list(events)
    while waiting:
        effects = machine.handle(waiting.pop(0), now)
        waiting[:0] = [AttemptPacked(e.attempt, b"p") for e in effects if isinstance(e, HandIn)]
        done += effects
    return done


def end(
    machine: CoordinatorMachine, number: int, kind: int = VALUE, payload: Any = b"r"
) -> list[Effect]:
    return do(machine, Heard(DISPATCHER, Results([(number, 0, kind, payload)])))


def schedule(
    machine: CoordinatorMachine, *works: int, options: WorkOptions | None = None
) -> list[Effect]:
    chosen = dict.fromkeys(works, options) if options else None
    return do(machine, Scheduled([(work, 7, b"p") for work in works], (), chosen))


def numbers_of(effects: list[Effect], kind: type) -> list[list[int]]:
    return [
        [
            item if isinstance(item, int) else item[0]
            for item in getattr(e.message, "items", None) or e.message.works
        ]
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, kind)
    ]


# -- C1, C3: events between the parts --------------------------------------------------------------


def test_c1_a_plan_is_submitted_as_an_attempt_and_resolved_under_its_own_number(
    machine: CoordinatorMachine,
) -> None:
    effects = do(machine, Planned(1, 7, retries=1))
    assert numbers_of(effects, Submit) == [[A]]
    assert machine.user_of(A) == 1
    assert numbers_of(again := end(machine, A, ERROR), Submit) == [[B]]
    assert not [e for e in again if isinstance(e, Resolve)]
    assert end(machine, B) == [Resolve([(1, VALUE, b"r")]), Free(1)]
    assert (machine.closures.unfinished, len(machine.plans), machine.failed) == (0, 0, None)


def test_c1_the_late_end_of_an_unwanted_attempt_ends_no_plan(machine: CoordinatorMachine) -> None:
    do(machine, Planned(1, 7, until=5.0))
    assert do(machine, Ticked(), now=5.0)[0] == Resolve([(1, TIMED_OUT, b"")], {1})
    do(machine, EndRoundRequested(1), Heard(DISPATCHER, RoundEnded(1)))
    do(machine, Planned(2, 7, until=5.0))
    do(machine, Ticked(), now=6.0)
    machine.failed = None
    assert end(machine, B, ERROR) == []
    assert machine.failed is None


def test_c3_a_waiting_plan_gets_its_input_after_the_end_of_the_input_was_reported(
    machine: CoordinatorMachine,
) -> None:
    schedule(machine, 1)
    assert do(machine, Planned(2, 7, (1,))) == []
    effects = end(machine, 1)
    assert effects[:3] == [Resolve([(1, VALUE, b"r")]), KeepInput(1, b"r", (2,)), HandIn(2, A)]
    assert numbers_of(effects, Submit) == [[A]]


def test_each_attempt_has_the_options_and_keep_of_its_plan(machine: CoordinatorMachine) -> None:
    options = WorkOptions("worker:1", 3, False)
    (submit,) = [
        e.message
        for e in do(machine, Planned(1, 7, keep=True, options=options))
        if isinstance(e, Send) and isinstance(e.message, Submit)
    ]
    assert (submit.worker, submit.priority) == ("worker:1", 3)


def test_an_attempt_that_is_given_up_before_it_is_packed_is_not_submitted(
    machine: CoordinatorMachine,
) -> None:
    machine.handle(Planned(1, 7, until=5.0), 0.0)
    machine.handle(Ticked(), 5.0)
    assert machine.handle(AttemptPacked(A, b"p"), 5.0) == []


def test_a_function_is_forgotten_when_neither_plans_nor_work_need_it(
    machine: CoordinatorMachine,
) -> None:
    schedule(machine, 1)
    do(machine, Planned(2, 7, (1,)))
    assert do(machine, FunctionsDropped([7])) == []
    end(machine, 1)
    assert [type(e.message).__name__ for e in end(machine, A) if isinstance(e, Send)] == ["Forget"]


def test_a_cancelled_plan_ends_at_once_if_it_waits_and_with_its_attempt_if_it_runs(
    machine: CoordinatorMachine,
) -> None:
    schedule(machine, 1)
    do(machine, Planned(2, 7, (1,)), Planned(3, 7))
    effects = do(machine, CancelRequested([2, 3]))
    assert effects[:2] == [Resolve([(2, CANCELLED, b"")]), Free(2)]
    assert numbers_of(effects, CancelWork) == [[A]]
    assert end(machine, A, CANCELLED, b"") == [Resolve([(3, CANCELLED, b"")]), Free(3)]


# -- values that are kept and lost -----------------------------------------------------------------


def keep(machine: CoordinatorMachine, work: int, attempt: int) -> None:
    do(machine, Planned(work, 7, lineage=True, keep=True))
    end(machine, attempt, KEPT, b"there")


def test_a_kept_value_of_a_plan_is_reported_with_its_attempt(machine: CoordinatorMachine) -> None:
    do(machine, Planned(1, 7, keep=True, lineage=True))
    assert end(machine, A, KEPT, b"there") == [Resolve([(1, KEPT, KeptAt(A, b"there", True))])]


def test_a_lost_value_is_recomputed_until_it_was_lost_too_often(
    machine: CoordinatorMachine,
) -> None:
    keep(machine, 1, A)
    assert numbers_of(do(machine, ValueLost(1, A)), Submit) == [[B]]
    assert end(machine, B, KEPT, b"new") == [Replace(1, KEPT, KeptAt(B, b"new", True))]
    assert do(machine, ValueLost(1, A)) == [Recomputed(1, new=False)]
    gone, free = do(machine, ValueLost(1, B))
    assert isinstance(gone, Replace)
    assert (gone.work, gone.kind, free) == (1, UNAVAILABLE, Free(1))
    assert b"recomputed 1 times" in gone.payload
    assert machine.failed is None, "the work had succeeded"


def test_an_attempt_whose_input_was_lost_is_made_again_after_the_input(
    machine: CoordinatorMachine,
) -> None:
    keep(machine, 1, A)
    do(machine, Planned(2, 7, (1,)))
    assert numbers_of(end(machine, B, INPUT_LOST, b"1"), Submit) == [[C]]
    assert machine.user_of(C) == 1
    assert numbers_of(end(machine, C, KEPT, b"new"), Submit) == [[C + 1]]
    assert machine.failed is None


def test_an_unused_value_is_freed_by_both_parts(machine: CoordinatorMachine) -> None:
    keep(machine, 1, A)
    assert do(machine, KeptDropped([A])) == [Free(1)]


# -- C2: which errors fail a round -----------------------------------------------------------------


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    ("kind", "fails"), [(VALUE, False), (CANCELLED, False), (ERROR, True), (UNAVAILABLE, True)]
)
def test_c2_an_end_fails_the_round_by_its_kind(
    machine: CoordinatorMachine, kind: int, fails: bool, planned: bool
) -> None:
    schedule(machine, 8)
    if planned:
        do(machine, Planned(9, 7))
    else:
        schedule(machine, 9)
    first = next(e for e in end(machine, A if planned else 9, kind) if isinstance(e, Resolve))
    assert set(first.failures) == ({9} if fails else set())
    assert machine.failed == (9 if fails else None)
    end(machine, 8, ERROR)
    assert machine.failed == (9 if fails else 8), "the first one stays"


def test_c2_lost_starts_a_failed_input_and_a_time_out_fail_it(machine: CoordinatorMachine) -> None:
    schedule(machine, 1)
    do(machine, Planned(2, 7, (1,)), Planned(3, 7, until=1.0))
    effects = do(machine, Heard(DISPATCHER, StartsLost([(1, 0, "worker:0", -9, "", True)])))
    (resolve,) = [e for e in effects if isinstance(e, Resolve)]
    assert [(work, kind) for work, kind, _ in resolve.items] == [(1, LOST), (2, INPUT_FAILED)]
    assert resolve.items[1][2] == 1, "the input is named"
    assert resolve.failures == {1, 2}
    assert do(machine, Ticked(), now=1.0)[0] == Resolve([(3, TIMED_OUT, b"")], {3})


def test_c2_inputs_that_cannot_be_packed_fail_it(machine: CoordinatorMachine) -> None:
    assert do(machine, PackingFailed(1, b"why")) == [Resolve([(1, ERROR, b"why")], {1})]


def test_c2_an_error_that_is_retried_fails_no_round(machine: CoordinatorMachine) -> None:
    do(machine, Planned(1, 7, retries=1))
    end(machine, A, ERROR)
    assert machine.failed is None
    end(machine, B, ERROR)
    assert machine.failed == 1


def test_c2_detached_work_fails_no_round_and_neither_does_anything_without_rounds(
    machine: CoordinatorMachine,
) -> None:
    schedule(machine, 1, options=WorkOptions("", 0, True))
    end(machine, 1, ERROR)
    without = new_machine(rounds=False)
    connect(without)
    schedule(without, 1)
    assert end(without, 1, ERROR) == [Resolve([(1, ERROR, b"r")])]
    assert (machine.failed, without.failed) == (None, None)


def test_c2_the_next_round_begins_without_an_error_and_plans_end_before_the_round_does(
    machine: CoordinatorMachine,
) -> None:
    schedule(machine, 1)
    do(machine, Planned(2, 7, (3,)))
    end(machine, 1, ERROR)
    do(machine, EndRoundRequested(1))
    assert do(machine, Heard(DISPATCHER, RoundEnded(1))) == [
        Resolve([(2, CANCELLED, b"")]),
        RoundSettled(1),
        Free(2),
    ]
    assert machine.failed is None


def test_g5_the_request_for_the_end_of_another_round_holds_no_plan_back(
    machine: CoordinatorMachine,
) -> None:
    do(machine, EndRoundRequested(2))
    assert numbers_of(do(machine, Planned(1, 7)), Submit) == [[A]]


# -- C4: refusal -----------------------------------------------------------------------------------


def test_c4_a_coordinator_that_was_refused_for_good_ends_all_with_that_error() -> None:
    machine = new_machine()
    schedule(machine, 1)
    schedule(machine, 2, options=WorkOptions("", 0, True))
    do(machine, Planned(3, 7, (1,)), Planned(4, 7))
    refused, *effects = do(machine, CoordinatorRefused(b"no"))
    assert refused == RoundRefused(b"no", for_good=True)
    ends = {
        work: (kind, payload)
        for e in effects
        if isinstance(e, Resolve)
        for work, kind, payload in e.items
    }
    assert ends == dict.fromkeys((1, 2, 3, 4), (ERROR, b"no"))
    assert 2 not in [work for e in effects if isinstance(e, Resolve) for work in e.failures]
    assert machine.failed == ROUND
    for later in (Scheduled([(5, 7, b"p")]), Planned(6, 7)):
        (resolve,) = [e for e in do(machine, later) if isinstance(e, Resolve)]
        assert resolve.items[0][1:] == (ERROR, b"no")
    assert (machine.closures.unfinished, len(machine.plans)) == (0, 0)


def test_c4_a_refusal_over_an_open_connection_ends_only_unfinished_work(
    machine: CoordinatorMachine,
) -> None:
    schedule(machine, 1)
    keep(machine, 2, A)
    effects = do(machine, CoordinatorRefused(b"no"))
    assert effects[0] == RoundRefused(b"no", for_good=False)
    assert Recomputed(2, new=False) in effects
    assert Resolve([(1, ERROR, b"no")], {1}) in effects
    assert [1] in numbers_of(effects, CancelWork)
    assert numbers_of(schedule(machine, 3), Submit) == [[3]]


def test_c4_a_round_that_was_ending_ends_with_the_refusal(machine: CoordinatorMachine) -> None:
    schedule(machine, 1)
    do(machine, EndRoundRequested(1), DispatcherDown())
    effects = do(machine, CoordinatorRefused(b"no"))
    assert effects[0] == RoundRefused(b"no", for_good=True)
    assert RoundSettled(1) in effects
    assert machine.closures.unfinished == 0


def test_events_of_other_work_pass_unchanged(machine: CoordinatorMachine) -> None:
    schedule(machine, 1)
    do(machine, Planned(2, 7))
    assert do(machine, Heard(DISPATCHER, Begun([1])))
    assert not [
        e for e in end(machine, 1) if isinstance(e, Send) and isinstance(e.message, ResultReceived)
    ]
