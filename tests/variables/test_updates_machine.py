"""What a parameter server remembers of updates, steps and sessions, rule by rule;
tests/sim/test_variables.py adds faults."""

from __future__ import annotations

import random
from typing import Any

import pytest

from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError
from zmqdist.variables.updates_machine import (
    APPLIED,
    LATE,
    KeptSessions,
    Repeated,
    Steps,
    Update,
    Updates,
)


def begun(updates: Updates, *request: Any) -> Update:
    """Begin an update that has to be executed."""
    update = updates.begin("request", *request)
    assert isinstance(update, Update)
    return update


def test_u2_repeated_request_gets_same_reply() -> None:
    updates = Updates(8)
    update = begun(updates, 1, 1, 0)
    assert updates.begin("again", 1, 1, 0) is None
    assert update.tickets == ["request", "again"]
    updates.ended(update, "five")
    assert updates.begin("late", 1, 1, 0) == Repeated("five")
    begun(updates, 2, 1, 0)


def test_u1_settled_update_is_not_executed() -> None:
    updates = Updates(8)
    updates.ended(begun(updates, 1, 1, 0), "five")
    begun(updates, 1, 2, 1)
    assert len(updates) == 1
    assert updates.begin("late", 1, 1, 0) == Repeated(None)


def test_u3_failed_update_may_be_repeated() -> None:
    updates = Updates(8)
    assert updates.failed(begun(updates, 1, 1, 0))
    begun(updates, 1, 1, 0)


def test_u4_silent_idle_client_is_forgotten() -> None:
    updates = Updates(2)
    begun(updates, 1, 1, 0)
    updates.ended(begun(updates, 2, 1, 0), None)
    begun(updates, 3, 1, 0)
    assert updates.clients == 2
    assert updates.begin("again", 1, 1, 0) is None


def test_u1_key_runs_once_at_a_time() -> None:
    updates = Updates(8)
    update = begun(updates, 1, 1, 0, "k", "session")
    assert updates.begin("another client", 2, 1, 0, "k", "session") is None
    begun(updates, 3, 1, 0, "k", "another session")
    updates.ended(update, "five")
    assert updates.begin("late", 1, 1, 0, "k", "session") == Repeated("five")
    begun(updates, 2, 1, 0, "k", "session")


def test_u3_failed_key_may_be_repeated() -> None:
    updates = Updates(8)
    update = begun(updates, 1, 1, 0, "k")
    assert updates.begin("joined", 2, 1, 0, "k") is None
    assert updates.failed(update)
    assert not updates.failed(update)
    begun(updates, 2, 1, 0, "k")


# -- steps -----------------------------------------------------------------------------------------


def test_u5_step_ends_with_its_last_gradient() -> None:
    steps = Steps(4)
    assert steps.push(0, "a", 2).verdict == ""
    pushed = steps.push(0, "b", 2)
    assert (pushed.verdict, pushed.applied) == (APPLIED, ("a", "b"))
    assert steps.push(0, "c", 2).verdict == LATE
    assert steps.waiting() == []


def test_u6_gradient_of_earlier_step_is_late() -> None:
    steps = Steps(4)
    steps.push(0, "a", 2)
    steps.push(1, "b", 2)
    pushed = steps.push(1, "c", 2)
    assert (pushed.applied, pushed.late, pushed.dropped) == (("b", "c"), ("a",), (0,))
    assert steps.applied == 1


def test_impossible_step_changes_nothing() -> None:
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


def test_u7_session_of_lost_program_is_dropped() -> None:
    sessions = KeptSessions(10)
    assert sessions.open(1, 100, 11, [11], 0.0) == []
    sessions.disconnected(11, 5.0)
    assert sessions.open(2, 200, 22, [22], 14.0) == []
    assert sessions.open(2, 201, 22, [22], 15.0) == [100]
    assert 100 not in sessions
    assert len(sessions) == 2


def test_u7_reconnected_program_keeps_session() -> None:
    sessions = KeptSessions(10)
    sessions.open(1, 100, 11, [11], 0.0)
    sessions.disconnected(11, 0.0)
    assert sessions.open(2, 200, 22, [11, 22], 50.0) == []
    assert sessions.open(2, 200, 22, [22], 55.0) == []
    assert sessions.close(100)
    assert not sessions.close(100)


def test_u5_u6_gradients_in_any_order(
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
