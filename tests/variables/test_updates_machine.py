"""What a parameter server remembers of updates, steps and sessions, rule by rule;
tests/sim/test_variables.py adds faults."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError
from zmqdist.variables.updates_machine import (
    APPLIED,
    DONE,
    LATE,
    NEW,
    RUNNING,
    SETTLED,
    KeptSessions,
    Repeated,
    Steps,
    Update,
    UpdateKeys,
    UpdateLog,
    Updates,
)


def test_u2_a_repeated_request_gets_the_same_reply() -> None:
    log = UpdateLog(8)
    assert log.begin(1, 1, 0) == (NEW, None)
    assert log.begin(1, 1, 0) == (RUNNING, None)
    log.end(1, 1, "five")
    assert log.begin(1, 1, 0) == (DONE, "five")
    assert log.begin(2, 1, 0) == (NEW, None)


def test_u1_a_late_request_for_a_settled_update_is_not_executed() -> None:
    log = UpdateLog(8)
    log.begin(1, 1, 0)
    log.end(1, 1, "five")
    log.begin(1, 2, 1)
    assert len(log) == 1
    assert log.begin(1, 1, 0) == (SETTLED, None)


def test_u3_a_failed_update_may_be_requested_again() -> None:
    log = UpdateLog(8)
    log.begin(1, 1, 0)
    log.fail(1, 1)
    assert log.begin(1, 1, 0) == (NEW, None)


def test_u4_the_longest_silent_client_is_forgotten_first_but_none_with_a_running_update() -> None:
    log = UpdateLog(2)
    for client in (1, 2):
        log.begin(client, 1, 0)
    log.end(2, 1, None)
    log.begin(3, 1, 0)
    assert log.clients == 2
    assert log.begin(1, 1, 0) == (RUNNING, None)


def test_u1_an_update_with_a_key_is_executed_once_and_keys_are_bounded() -> None:
    keys = UpdateKeys(2)
    assert keys.begin("a") == (NEW, None)
    assert keys.begin("a") == (RUNNING, None)
    keys.fail("a")
    assert keys.begin("a") == (NEW, None)
    keys.end("a", 1)
    assert keys.begin("a") == (DONE, 1)
    for key in ("b", "c"):
        keys.begin(key)
    assert len(keys) == 2
    assert keys.begin("b") == (RUNNING, None)


# -- steps -----------------------------------------------------------------------------------------


def test_u5_a_step_is_applied_with_the_last_of_its_gradients_and_later_ones_are_late() -> None:
    steps = Steps(4)
    assert steps.push(0, "a", 2).verdict == ""
    pushed = steps.push(0, "b", 2)
    assert (pushed.verdict, pushed.applied) == (APPLIED, ("a", "b"))
    assert steps.push(0, "c", 2).verdict == LATE
    assert steps.waiting() == []


def test_u6_gradients_that_wait_in_an_earlier_step_are_late_when_a_later_step_is_applied() -> None:
    steps = Steps(4)
    steps.push(0, "a", 2)
    steps.push(1, "b", 2)
    pushed = steps.push(1, "c", 2)
    assert (pushed.applied, pushed.late, pushed.dropped) == (("b", "c"), ("a",), (0,))
    assert steps.applied == 1


def test_an_impossible_step_changes_nothing() -> None:
    steps = Steps(1)
    steps.push(0, "a", 2)
    for step, wanted, error in (
        (0, 3, InvalidArgumentError),
        (-1, 2, InvalidArgumentError),
        (1, 0, InvalidArgumentError),
        (1, 2, ResourceExhaustedError),
    ):
        with pytest.raises(error):
            steps.push(step, "b", wanted)
    assert steps.waiting() == ["a"]


# -- sessions --------------------------------------------------------------------------------------


def test_u7_a_session_whose_program_is_long_gone_is_dropped_when_another_program_opens_one() -> (
    None
):
    sessions = KeptSessions(10)
    assert sessions.open(1, 100, 11, [11], 0.0) == []
    sessions.disconnected(11, 5.0)
    assert sessions.open(2, 200, 22, [22], 14.0) == []
    assert sessions.open(2, 201, 22, [22], 15.0) == [100]
    assert 100 not in sessions
    assert len(sessions) == 2


def test_u7_a_program_that_is_connected_again_keeps_its_session() -> None:
    sessions = KeptSessions(10)
    sessions.open(1, 100, 11, [11], 0.0)
    sessions.disconnected(11, 0.0)
    assert sessions.open(2, 200, 22, [11, 22], 50.0) == []
    assert sessions.open(2, 200, 22, [22], 55.0) == []
    assert sessions.close(100)
    assert not sessions.close(100)


def test_u2_requests_for_a_running_update_get_its_outcome() -> None:
    updates, keys = Updates(8), UpdateKeys(8)
    update = updates.begin("first", 1, 1, 0, "k", keys)
    assert isinstance(update, Update)
    assert updates.begin("again", 1, 1, 0, "k", keys) is None
    assert updates.begin("another client with its key", 2, 1, 0, "k", keys) is None
    assert update.tickets == ["first", "again", "another client with its key"]
    updates.ended(update, "five")
    assert (
        updates.begin("late", 1, 1, 0, "k", keys)
        == updates.begin("new id", 3, 1, 0, "k", keys)
        == Repeated("five")
    )


def test_u3_a_failed_update_with_a_key_may_be_requested_again_by_either_client() -> None:
    updates, keys = Updates(8), UpdateKeys(8)
    update = updates.begin("first", 1, 1, 0, "k", keys)
    updates.begin("joined", 2, 1, 0, "k", keys)
    assert isinstance(update, Update)
    assert updates.failed(update)
    assert not updates.failed(update)
    assert isinstance(updates.begin("again", 2, 1, 0, "k", keys), Update)


def test_u5_u6_in_any_order_each_step_has_exactly_k_gradients_and_each_gradient_one_verdict(
    seed: int,
) -> None:
    rng = random.Random(seed)
    wanted, steps = rng.randint(1, 3), Steps(100)
    pushes = [(step, (step, worker)) for step in range(6) for worker in range(rng.randint(0, 5))]
    rng.shuffle(pushes)
    verdicts: dict[Any, str] = {}
    applied: list[int] = []
    for step, ticket in pushes:
        pushed = steps.push(step, ticket, wanted)
        given = {**dict.fromkeys(pushed.applied, APPLIED), **dict.fromkeys(pushed.late, LATE)}
        if pushed.verdict == LATE:
            given[ticket] = LATE
        assert not given.keys() & verdicts.keys()
        verdicts |= given
        if pushed.verdict == APPLIED:
            applied.append(step)
            assert len(pushed.applied) == wanted
            assert {each[0] for each in pushed.applied} == {step}
    assert applied == sorted(set(applied))
    assert verdicts.keys() | set(steps.waiting()) == {ticket for _, ticket in pushes}
    assert all(ticket[0] > steps.applied for ticket in steps.waiting())  # type: ignore[index]
