"""The queue of calls in an actor's process."""

from __future__ import annotations

import pytest

from zmqdist.errors import InternalError
from zmqdist.limits import ACTOR_CALL_BYTES_MAX, ACTOR_CALLS_MAX
from zmqdist.scheduling.worker.actor_calls_machine import (
    TURN_CALLS,
    ActorCall,
    ActorCallQueue,
    CallState,
)


def calls(*works: int, payload: bytes = b"") -> list[tuple[int, int, str, bytes]]:
    return [(work, 0, "add", payload) for work in works]


def numbers(given: list[ActorCall]) -> list[tuple[object, int]]:
    return [(call.caller, call.work) for call in given]


def test_calls_of_caller_run_in_order() -> None:
    queue = ActorCallQueue(10)
    queue.add("a", calls(3, 1))
    queue.add("a", calls(2))
    assert numbers(queue.next_calls()) == [("a", 3), ("a", 1), ("a", 2)]


def test_callers_take_turns() -> None:
    queue = ActorCallQueue(10_000)
    queue.add("a", calls(*range(2 * TURN_CALLS)))
    queue.add("b", calls(7))
    order = numbers(queue.next_calls())
    assert order.index(("b", 7)) == TURN_CALLS
    assert len(order) == 2 * TURN_CALLS + 1


def test_running_calls_are_bounded() -> None:
    queue = ActorCallQueue(2)
    queue.add("a", calls(1, 2, 3))
    first, _ = queue.next_calls()
    assert queue.next_calls() == []
    assert queue.ended(first)
    assert numbers(queue.next_calls()) == [("a", 3)]


@pytest.mark.parametrize(
    ("count", "payload", "accepted"),
    [(ACTOR_CALLS_MAX + 3, b"", ACTOR_CALLS_MAX), (3, bytes(ACTOR_CALL_BYTES_MAX), 2)],
)
def test_waiting_calls_are_bounded(count: int, payload: bytes, accepted: int) -> None:
    queue = ActorCallQueue(0)
    refused = queue.add("a", calls(*range(count), payload=payload))
    assert refused == [(work, 0) for work in range(accepted, count)]


def test_repeated_number_is_refused() -> None:
    queue = ActorCallQueue(1)
    assert queue.add("a", calls(1, 1)) == [(1, 0)]
    assert queue.add("b", calls(1)) == []


def test_waiting_call_is_cancelled_silently() -> None:
    queue = ActorCallQueue(1)
    queue.add("a", calls(1, 2))
    (running,) = queue.next_calls()
    assert queue.cancel("a", [(2, 0), (9, 0)]) == []
    assert queue.ended(running)
    assert queue.next_calls() == []


def test_running_call_is_dropped_once() -> None:
    queue = ActorCallQueue(1)
    queue.add("a", calls(1))
    (running,) = queue.next_calls()
    assert queue.cancel("a", [(1, 0)]) == [running]
    assert queue.cancel("a", [(1, 0)]) == []
    assert running.state is CallState.DROPPED
    assert not queue.ended(running)


def test_calls_of_gone_caller_are_dropped() -> None:
    queue = ActorCallQueue(1)
    queue.add("a", calls(1, 2))
    queue.add("b", calls(1))
    (running,) = queue.next_calls()
    assert queue.caller_gone("a") == [running]
    assert queue.caller_gone("nobody") == []
    assert not queue.ended(running)
    assert numbers(queue.next_calls()) == [("b", 1)]


def test_new_connection_drops_calls_of_the_one_before() -> None:
    queue = ActorCallQueue(1)
    assert queue.former("a", 7) is None
    queue.add("a", calls(1, 2))
    (running,) = queue.next_calls()
    assert queue.former("a", 7) is None
    assert queue.former("b", 8) is None
    assert queue.former("c", 7) == "a"
    queue.caller_gone("a")
    queue.add("c", calls(3))
    assert not queue.ended(running)
    assert numbers(queue.next_calls()) == [("c", 3)]
    queue.caller_gone("c")
    assert queue.former("d", 7) is None


def test_closed_queue_gives_no_call() -> None:
    queue = ActorCallQueue(1)
    queue.add("a", calls(1))
    queue.close()
    assert queue.next_calls() == []


def test_call_ends_once() -> None:
    queue = ActorCallQueue(1)
    queue.add("a", calls(1))
    (running,) = queue.next_calls()
    queue.ended(running)
    with pytest.raises(InternalError, match="call 1 cannot go from ENDED to ENDED"):
        running.move(CallState.ENDED)
