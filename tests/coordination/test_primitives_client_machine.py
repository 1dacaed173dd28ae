"""A process that uses locks, semaphores, queues and events: its calls to the dispatcher, for tables
of outcomes."""

from __future__ import annotations

import contextlib
from math import inf
from typing import Any

import pytest

from tests.interrupts import interrupted_runs
from zmqdist.coordination.primitives_client_machine import (
    RENEWALS,
    TRANSITIONS,
    ClientState,
    KeeperCall,
    Operation,
    PrimitivesClient,
)
from zmqdist.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
)
from zmqdist.limits import CLUSTER_LOST_LIMIT_S, CONNECT_S
from zmqdist.transitions import enter

LOCK, JOBS = ("lock", "l"), ("queue", "q")
LEASE_S = 10.0
GONE, UNKNOWN = UnavailableError("the connection ended"), AbortedError("unknown")


class Process:
    """The machine, with a clock that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.machine = PrimitivesClient("host:1", 77, 101)

    def go(self, operation: Operation[Any], outcome: Any = None) -> Any:
        """Continue an operation. Return its next step as (method, *arguments), or its result."""
        try:
            if isinstance(outcome, OpError):
                step = operation.throw(outcome)
            else:
                step = operation.send(None if outcome is None else outcome[0])
        except StopIteration as end:
            return end.value
        assert isinstance(step, KeeperCall)
        return step.method, *step.args

    def opened(self, keeper: int = 5, *holding: int) -> list[Any]:
        """The outcome of "open"."""
        return [(keeper, LEASE_S, list(holding))]

    def request(self, verb: str, key: Any, keeper: int = 0, due: float = inf) -> Operation[Any]:
        return self.machine.request(verb, key, 1, b"", due, keeper)

    def acquired(self, fence: int = 9) -> Process:
        """Take the lock."""
        operation = self.request("acquire", LOCK)
        self.go(operation)
        self.go(operation, self.opened())
        assert self.go(operation, [fence]) == (fence, 0)
        return self


def test_first_request_opens_client() -> None:
    process = Process()
    operation = process.request("acquire", LOCK)
    assert process.go(operation) == ("open", 101, 77, [])
    assert process.go(operation, process.opened()) == (
        "request",
        *(101, 1, "acquire", "lock", "l", 1, b"", None),
    )
    assert process.go(operation, [9]) == (9, 0)
    hold = process.machine.hold(LOCK, 0.0)
    assert hold is not None
    assert hold.fence == 9
    release = process.machine.release(LOCK)
    assert process.go(release) == ("renew", 101, 77, [], [1])
    assert process.go(release, [None]) is True
    assert not process.machine.is_needed


def test_release_without_place_is_refused() -> None:
    assert Process().go(Process().machine.release(LOCK)) is False


def test_item_is_confirmed_before_program_gets_it() -> None:
    process = Process()
    operation = process.request("get", JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    assert process.go(operation, [b"1"]) == ("renew", 101, 77, [1], [])
    assert process.go(operation, [None]) == (b"1", 5)


@pytest.mark.parametrize("verb", ["acquire", "get"])
def test_request_with_lost_reply_is_withdrawn_first(verb: str) -> None:
    process = Process()
    operation = process.request(verb, LOCK if verb == "acquire" else JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    assert process.go(operation, GONE) == ("renew", 101, 77, [], [1])
    assert process.go(operation, [None])[:4] == ("request", 101, 2, verb)


def test_put_with_lost_reply_is_not_sent_again() -> None:
    process = Process()
    operation = process.request("put", JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    with pytest.raises(AbortedError, match="may be in queue 'q', or not"):
        process.go(operation, GONE)


def test_refused_put_is_sent_again_as_new_client() -> None:
    process = Process()
    operation = process.request("put", JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    assert process.go(operation, UNKNOWN) == ("open", 102, 77, [])
    assert process.go(operation, process.opened())[:4] == ("request", 102, 2, "put")


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ([[None]], (b"1", 5)),
        ([GONE, [None], [None]], (b"1", 5)),
        ([UNKNOWN, [(5, LEASE_S, [])]], "request"),
        ([GONE, UNKNOWN, [(5, LEASE_S, [])]], "may be lost"),
    ],
    ids=["confirmed", "repeated", "returned", "unclear"],
)
def test_outcome_of_confirmation_decides_about_item(outcomes: list[Any], result: Any) -> None:
    process = Process()
    operation = process.request("get", JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    step = process.go(operation, [b"1"])
    for outcome in outcomes[:-1]:
        step = process.go(operation, outcome)
    assert step[0] in ("renew", "open")
    if result == "may be lost":
        with pytest.raises(AbortedError, match=result):
            process.go(operation, outcomes[-1])
    else:
        step = process.go(operation, outcomes[-1])
        assert result in (step, step[0])


def test_places_are_named_to_new_dispatcher() -> None:
    process = Process().acquired()
    renewal = process.machine.renew()
    assert process.go(renewal)[0] == "renew"
    assert process.go(renewal, UNKNOWN) == ("open", 102, 77, [(1, *LOCK, 1, 9)])
    assert process.go(renewal, process.opened(6, 1)) == LEASE_S / RENEWALS
    assert process.machine.hold(LOCK, 0.0) is not None


def test_release_of_place_that_new_dispatcher_refused_raises() -> None:
    process = Process().acquired()
    renewal = process.machine.renew()
    process.go(renewal)
    process.go(renewal, UNKNOWN)
    process.go(renewal, process.opened(6))
    with pytest.raises(AbortedError, match="lost lock 'l' before the release"):
        process.go(process.machine.release(LOCK))
    assert process.go(process.machine.release(LOCK)) is False, "once"


def test_place_is_lost_at_end_of_lease() -> None:
    process = Process().acquired()
    assert process.machine.hold(LOCK, LEASE_S - 1) is not None
    assert process.machine.hold(LOCK, LEASE_S) is None
    process.machine.now = LEASE_S
    with pytest.raises(AbortedError, match="lost lock 'l'"):
        process.go(process.machine.release(LOCK))


def test_lease_counts_from_sending() -> None:
    process = Process().acquired()
    renewal = process.machine.renew()
    process.go(renewal)
    process.machine.now = 4.0
    process.go(renewal, [None])
    assert process.machine.hold(LOCK, LEASE_S) is None


def test_place_is_not_named_after_end_of_its_lease() -> None:
    process = Process().acquired()
    operation = process.request("get", JOBS)
    process.go(operation)
    assert process.go(operation, UNKNOWN)[3] == [(1, *LOCK, 1, 9)]
    process.machine.now = LEASE_S  # the deadline of "open"
    assert process.go(operation, DeadlineExceededError("late")) == ("open", 103, 77, [])


def test_reply_to_former_client_grants_nothing() -> None:
    process = Process()
    one, two = process.request("acquire", LOCK), process.request("get", JOBS)
    process.go(one)
    process.go(one, process.opened())
    process.go(two)
    assert process.go(two, UNKNOWN)[0] == "open"
    process.go(two, process.opened())
    assert process.go(one, [9])[:4] == ("request", 102, 4, "acquire")
    assert not process.machine.is_needed


def test_first_of_several_replies_to_open_counts() -> None:
    process = Process()
    one, two = process.request("acquire", LOCK), process.request("acquire", LOCK)
    assert process.go(one) == process.go(two) == ("open", 101, 77, [])
    process.go(one, process.opened())
    process.go(one, [9])
    process.go(two, process.opened())
    assert process.machine.hold(LOCK, 0.0) is not None


def test_closed_request_is_withdrawn() -> None:
    process = Process()
    operation = process.request("acquire", LOCK)
    process.go(operation)
    process.go(operation, process.opened())
    operation.close()
    assert process.machine.is_needed
    renewal = process.machine.renew()
    assert process.go(renewal) == ("renew", 101, 77, [], [1])
    process.go(renewal, [None])
    assert not process.machine.is_needed


def test_interrupted_request_has_no_place() -> None:
    made: list[tuple[Process, Operation[Any]]] = []

    def grant() -> None:
        with contextlib.suppress(StopIteration):
            made[-1][1].send(9)

    def fresh() -> None:
        process = Process()
        operation = process.request("acquire", LOCK)
        process.go(operation)
        process.go(operation, process.opened())
        made.append((process, operation))

    fresh()
    for point in interrupted_runs(grant):
        process, operation = made[-1]
        operation.close()
        renewal = process.machine.renew()
        has_place = process.machine.hold(LOCK, 0.0) is not None
        assert process.go(renewal)[4] == ([] if has_place else [1]), point
        made.append((process, renewal))  # an operation that is not closed must not be collected
        fresh()
    assert point > 1


def test_interrupted_release_is_withdrawn() -> None:
    made: list[tuple[Process, Operation[Any]]] = []

    def fresh() -> None:
        process = Process().acquired()
        made.append((process, process.machine.release(LOCK)))

    fresh()
    for point in interrupted_runs(lambda: made[-1][1].send(None)):
        process, operation = made[-1]
        operation.close()
        again = process.machine.release(LOCK)
        if process.machine.hold(LOCK, 0.0) is None:
            assert process.go(again) is False, point
            again = process.machine.renew()
        assert process.go(again)[4] == [1], point
        made.append((process, again))
        fresh()
    assert point > 3


def test_state_of_queue_is_lost_with_dispatcher() -> None:
    process = Process()
    operation = process.request("get", JOBS, keeper=4)
    process.go(operation)
    with pytest.raises(AbortedError, match="was restarted, so the state of queue 'q' is lost"):
        process.go(operation, process.opened())


def test_wait_for_item_ends_with_dispatcher() -> None:
    process = Process()
    operation = process.request("get", JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    process.go(operation, GONE)
    process.go(operation, UNKNOWN)
    with pytest.raises(AbortedError, match="was restarted"):
        process.go(operation, process.opened(6))


@pytest.mark.parametrize(
    ("timeout_s", "patience_s"),
    [(0.0, CONNECT_S), (30.0, 30.0), (inf, CLUSTER_LOST_LIMIT_S)],
)
def test_operation_ends_without_dispatcher(timeout_s: float, patience_s: float) -> None:
    process = Process()
    operation = process.request("acquire", LOCK, due=timeout_s)
    step = operation.send(None)
    assert (step.due, step.waits) == (patience_s, True)
    process.machine.now = patience_s
    with pytest.raises(UnavailableError, match=f"for {patience_s:g} s"):
        process.go(operation, DeadlineExceededError("late"))


def test_idle_process_renews_no_lease() -> None:
    process = Process()
    assert process.go(process.machine.renew()) > 0
    process.go(process.request("look", LOCK), None)


def test_refusal_of_request_is_its_error() -> None:
    process = Process()
    operation = process.request("put", JOBS)
    process.go(operation)
    process.go(operation, process.opened())
    with pytest.raises(InvalidArgumentError, match="other size"):
        process.go(operation, InvalidArgumentError("other size"))
    assert process.go(process.machine.renew()) == LEASE_S / RENEWALS


@pytest.mark.parametrize("before", ClientState)
@pytest.mark.parametrize("after", ClientState)
def test_client_only_makes_listed_transitions(before: ClientState, after: ClientState) -> None:
    if after in TRANSITIONS[before]:
        assert enter(TRANSITIONS, before, after) is after
    else:
        with pytest.raises(InternalError):
            enter(TRANSITIONS, before, after)
