"""The call tables of both ends, held to their promises without a socket."""

from __future__ import annotations

import random
from math import inf, nan

import pytest

from zmqdist import errors
from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX
from zmqdist.messages import Call, CancelCall, Reply
from zmqdist.transport.calls_machine import ClientCall, ClientCalls, ServedCall, ServerCalls

HOME = "host:1"
LIFE = 77


def client(up: bool = True, pending_max: int = 100_000) -> ClientCalls:
    table = ClientCalls(HOME, pending_max)
    if up:
        table.server_up(LIFE)
    return table


def requests(table: ClientCalls, now: float = 0.0) -> list[Call]:
    """Return the calls of the next message."""
    return [table.request(call, now) for call in table.next_message()]


def ask(table: ClientCalls, due: float = inf) -> ClientCall:
    """A call that waits."""
    call = ClientCall("m", b"args", (), due)
    table.submitted(call)
    return call


def fly(table: ClientCalls, due: float = inf) -> ClientCall:
    """A call that is in flight."""
    call = ask(table, due)
    assert table.next_message() == [call]
    return call


def empty(table: ClientCalls) -> bool:
    return not table.in_flight and not table.waiting


# -- the client's end ------------------------------------------------------------------------------


def test_call_names_incarnation_of_server() -> None:
    table = client()
    ask(table)
    assert requests(table) == [Call(1, "m", LIFE, 0, b"args")]
    ask(table)
    assert requests(table) == [Call(2, "m", LIFE, 0, b"args")]
    assert requests(table) == []


@pytest.mark.parametrize(
    ("due", "now", "left_ms"),
    [
        (inf, 5.0, 0),
        (5.25, 5.0, 250),
        (5.0001, 5.0, 1),
        (5.0, 5.0, 1),
        (4.0, 5.0, 1),
        (1e300, 5.0, 0),
        (nan, 5.0, 0),
    ],
    ids=[
        "no deadline",
        "a quarter second",
        "rounded up",
        "just due: not 0, which is for ever",
        "past",
        "far",
        "no number",
    ],
)
def test_call_names_time_left(due: float, now: float, left_ms: int) -> None:
    table = client()
    ask(table, due)
    assert requests(table, now) == [Call(1, "m", LIFE, left_ms, b"args")]


def test_first_call_leaves_and_later_calls_gather() -> None:
    table = client()
    assert table.submitted(ClientCall("m", b""))
    first = table.next_message()[0]
    assert not table.submitted(ClientCall("m", b""))
    assert not table.submitted(ClientCall("m", b""))
    assert [call.id for call in table.next_message()] == [2, 3]
    for number in (first.id, 2, 3):
        table.replied(Reply(number, 0, "", b""), ())
    assert table.submitted(ClientCall("m", b""))


def later(frames: tuple[bytes, ...] = ()) -> ClientCall:
    call = ClientCall("m", b"", frames)
    call.later = True
    return call


def test_later_call_leaves_with_the_next() -> None:
    table = client()
    assert not table.submitted(later())
    assert table.submitted(ClientCall("m", b""))
    assert [call.id for call in table.next_message()] == [1, 2]


def test_later_calls_leave_when_they_fill_a_message() -> None:
    table = client()
    filling = [table.submitted(later()) for _ in range(BATCH_ITEMS_MAX)]
    assert filling == [False] * (BATCH_ITEMS_MAX - 1) + [True]
    table = client()
    assert not table.submitted(later((b"frame",)))
    assert table.submitted(later((b"frame",)))


def test_message_is_full_by_count() -> None:
    table = client()
    fly(table)
    assert [table.submitted(ClientCall("m", b"")) for _ in range(BATCH_ITEMS_MAX)] == [False] * (
        BATCH_ITEMS_MAX - 1
    ) + [True]
    ask(table)
    assert [len(table.next_message()) for _ in range(3)] == [BATCH_ITEMS_MAX, 1, 0]


def test_message_is_full_by_bytes() -> None:
    table = client()
    fly(table)
    body = bytes(BATCH_BYTES_MAX // 4)
    assert [table.submitted(ClientCall("m", body)) for _ in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert [len(table.next_message()) for _ in range(3)] == [4, 1, 0]
    assert not table.submitted(ClientCall("m", body))  # calls that were sent do not count any more
    for call in list(table.waiting.values()):
        table.cancelled(call)
    # nor do cancelled calls
    assert [table.submitted(ClientCall("m", body)) for _ in range(3)] == [False] * 3


def test_call_with_frames_leaves_alone_in_order() -> None:
    table = client()
    fly(table)
    ask(table)
    ask(table)
    assert table.submitted(ClientCall("m", b"", ["frame"]))
    ask(table)
    assert [[call.id for call in table.next_message()] for _ in range(4)] == [[2, 3], [4], [5], []]


def test_reply_ends_call_with_value_or_error() -> None:
    table = client()
    call = fly(table)
    assert table.replied(Reply(1, 0, "", b"value"), ["frame"]) is call
    assert (call.ended, call.code, call.message, call.body, call.frames) == (
        True,
        0,
        "",
        b"value",
        ["frame"],
    )
    assert empty(table)


def test_reply_to_unknown_call_is_ignored() -> None:
    table = client()
    call = fly(table)
    table.replied(Reply(1, 0, "", b"first"), ())
    assert table.replied(Reply(1, 3, "again", b"second"), ()) is None
    assert table.replied(Reply(9, 0, "", b""), ()) is None
    assert (call.code, call.body) == (0, b"first")


def test_waiting_calls_leave_in_order_with_time_left() -> None:
    table = client(up=False)
    assert not table.submitted(first := ClientCall("m", b"args", (), 10.0))
    second = ask(table)
    assert not first.ended
    assert table.next_message() == []
    table.server_up(LIFE)
    assert requests(table, 8.0) == [
        Call(1, "m", LIFE, 2000, b"args"),
        Call(2, "m", LIFE, 0, b"args"),
    ]
    assert list(table.in_flight.values()) == [first, second]
    assert not table.waiting


def test_calls_in_flight_end_with_connection() -> None:
    table = client()
    call = fly(table)
    assert table.connection_lost() == [call]
    assert (call.code, call.ended) == (errors.UNAVAILABLE, True)
    assert table.connection_lost() == []
    table.server_up(LIFE + 1)
    assert requests(table) == []


def test_gathered_calls_wait_for_next_server() -> None:
    table = client()
    flying, gathered = fly(table), ask(table)
    assert table.connection_lost() == [flying]
    assert not gathered.ended
    assert requests(table) == []
    table.server_up(LIFE + 1)
    assert requests(table) == [Call(gathered.id, "m", LIFE + 1, 0, b"args")]


def test_leaving_server_still_replies() -> None:
    table = client()
    old = fly(table)
    gathered = ask(table)
    table.server_leaving()
    new = ask(table)
    assert requests(table) == []
    assert table.replied(Reply(old.id, 0, "", b"value"), ()) is old
    assert table.connection_lost() == []
    table.server_up(LIFE + 1)
    assert [call.id for call in requests(table)] == [gathered.id, new.id]


def test_call_waits_for_next_incarnation() -> None:
    table = client()
    table.connection_lost()
    ask(table)
    assert requests(table) == []
    assert table.connection_lost() == []
    table.server_up(LIFE + 1)
    assert requests(table) == [Call(1, "m", LIFE + 1, 0, b"args")]


def impatient() -> ClientCall:
    call = ClientCall("m", b"")
    call.waits_for_server = False
    return call


def test_impatient_call_ends_without_server() -> None:
    table = client(up=False)
    call = impatient()
    assert not table.submitted(call)
    assert (call.ended, call.code) == (True, errors.UNAVAILABLE)
    assert "was not sent" in call.message
    assert empty(table)


def test_impatient_unsent_call_ends_with_server() -> None:
    table = client()
    flying, other, call = fly(table), ask(table), impatient()
    assert not table.submitted(call)
    assert not call.ended
    assert table.connection_lost() == [flying, call]
    assert (call.code, list(table.waiting.values())) == (errors.UNAVAILABLE, [other])


def test_undelivered_calls_wait_before_later_calls() -> None:
    table = client()
    ask(table)
    ask(table)
    sent = table.next_message()
    ask(table)
    table.undelivered(sent)
    assert table.connection_lost() == []
    table.server_up(LIFE + 1)
    assert [call.id for call in requests(table)] == [1, 2, 3]


def test_deadline_ends_sent_and_waiting_calls() -> None:
    table = client()
    flying, later, forever = fly(table, due=2.0), fly(table, due=9.0), fly(table)
    table.server_leaving()
    waiting = ask(table, due=1.0)
    assert table.deadline == 1.0
    assert table.ticked(0.999) == []
    assert table.ticked(1.0) == [waiting]
    assert "waited for a server at host:1" in waiting.message
    assert table.deadline == 2.0
    assert table.ticked(5.0) == [flying]
    assert "waited for an answer" in flying.message
    assert flying.code == waiting.code == errors.DEADLINE_EXCEEDED
    table.replied(Reply(later.id, 0, "", b""), ())
    assert table.ticked(9.0) == []
    assert table.deadline == inf
    assert list(table.in_flight) == [forever.id]


def test_cancel_message_names_only_sent_calls() -> None:
    table = client()
    flying, waiting = fly(table), ask(table)
    assert table.cancelled(waiting) is None
    assert table.cancelled(flying) == CancelCall(flying.id)
    assert table.cancelled(flying) is None
    assert flying.code == waiting.code == errors.CANCELLED
    assert empty(table)


def test_refusal_ends_every_call() -> None:
    table = client()
    flying, waiting = fly(table), ask(table)
    assert set(table.failed(errors.UNAUTHENTICATED, "wrong token")) == {flying, waiting}
    assert {(c.code, c.message) for c in (flying, waiting)} == {
        (errors.UNAUTHENTICATED, "wrong token")
    }
    assert empty(table)
    ask(table)
    assert requests(table) == []


def test_pending_calls_are_bounded() -> None:
    table = client(pending_max=2)
    fly(table)
    ask(table)
    assert not table.submitted(call := ClientCall("m", b""))
    assert (call.code, call.ended) == (errors.RESOURCE_EXHAUSTED, True)
    assert len(table.in_flight) + len(table.waiting) == 2


def test_random_calls_end_once_and_leave_nothing(seed: int) -> None:
    rng, table, now, life = random.Random(seed), client(up=False), 0.0, 0
    calls: list[ClientCall] = []
    delivered: dict[int, int] = {}
    ends: dict[int, int] = {}

    def ended(those: list[ClientCall]) -> None:
        for call in those:
            assert call.ended
            ends[call.id] = ends.get(call.id, 0) + 1

    def flush() -> None:
        while sent := table.next_message():
            assert table.incarnation == life != 0
            assert {table.request(call, now).incarnation for call in sent} == {life}
            assert [call.id for call in sent] == sorted(call.id for call in sent)
            if rng.random() < 0.1:
                table.undelivered(sent)
                return
            for call in sent:
                delivered[call.id] = delivered.get(call.id, 0) + 1

    for _ in range(300):
        now += rng.random()
        match rng.randrange(9):
            case 0 | 1 | 2:
                call = ClientCall("m", b"12", (), rng.choice([inf, now + rng.random() * 5]))
                calls.append(call)
                if table.submitted(call) or rng.random() < 0.3:
                    flush()
            case 3:
                if not table.incarnation:
                    life += 1
                    table.server_up(life)
                    flush()
            case 4:
                ended(table.connection_lost())
            case 5 if calls:
                call = rng.choice(calls)
                was = call.ended
                table.cancelled(call)
                if not was:
                    ended([call])
            case 6:
                ended(table.ticked(now))
            case 7 if rng.random() < 0.2:
                table.server_leaving()
            case _ if delivered:
                answered = table.replied(Reply(rng.choice(list(delivered)), 0, "", b""), ())
                ended([answered] if answered else [])
    assert table.waiting_bytes == 2 * len(table.waiting)
    ended(table.failed(errors.CANCELLED, "closed"))
    assert table.waiting_bytes == 0
    assert ends == {call.id: 1 for call in calls}
    assert all(count == 1 for count in delivered.values())
    assert empty(table)


# -- the server's end ------------------------------------------------------------------------------


def taken(
    table: ServerCalls, peer: str = "a", id: int = 1, left_ms: int = 0, now: float = 0.0
) -> ServedCall:
    served = table.call_arrived(peer, Call(id, "m", LIFE, left_ms, b""), now)
    assert isinstance(served, ServedCall)
    return served


@pytest.mark.parametrize("incarnation", [0, 1, LIFE + 1])
def test_call_for_other_incarnation_is_refused(incarnation: int) -> None:
    table = ServerCalls(LIFE)
    answer = table.call_arrived("a", Call(5, "m", incarnation, 0, b""), 0.0)
    assert isinstance(answer, Reply)
    assert (answer.id, answer.code) == (5, errors.UNAVAILABLE)
    assert len(table) == 0


def test_call_is_wanted_until_deadline() -> None:
    served = taken(ServerCalls(LIFE), left_ms=500, now=10.0)
    assert served.is_wanted(10.4)
    assert not served.is_wanted(10.5)
    assert taken(ServerCalls(LIFE)).is_wanted(1e9)


def test_finished_call_is_forgotten() -> None:
    table = ServerCalls(LIFE)
    served = taken(table)
    assert len(table) == 1
    assert table.finished(served)
    assert len(table) == 0


def test_result_after_deadline_is_no_reply() -> None:
    """A function that checks `cancelled()` then returns early: its return value must not count as a
    result."""
    table = ServerCalls(LIFE)
    assert table.finished(taken(table, left_ms=500, now=10.0), 10.4)
    assert not table.finished(taken(table, left_ms=500, now=10.0), 10.5)
    assert len(table) == 0


def test_cancelled_call_counts_until_it_finishes() -> None:
    table = ServerCalls(LIFE, pending_max=1)
    served = taken(table)
    table.cancelled("a", 99)
    table.cancelled("b", 1)
    assert served.is_wanted(0.0)
    table.cancelled("a", 1)
    assert not served.is_wanted(0.0)
    assert isinstance(table.call_arrived("a", Call(2, "m", LIFE, 0, b""), 0.0), Reply)
    assert not table.finished(served)
    taken(table, id=2)


def test_calls_of_lost_peer_are_forgotten() -> None:
    table = ServerCalls(LIFE)
    gone, other = taken(table, "a"), taken(table, "b")
    table.peer_gone("a")
    table.peer_gone("never seen")
    assert not gone.is_wanted(0.0)
    assert other.is_wanted(0.0)
    assert not table.finished(gone)
    assert len(table) == 1


def test_calls_of_each_peer_are_bounded() -> None:
    table = ServerCalls(LIFE, pending_max=2)
    first = taken(table, "a", 1)
    taken(table, "a", 2)
    refused = table.call_arrived("a", Call(3, "m", LIFE, 0, b""), 0.0)
    assert isinstance(refused, Reply)
    assert (refused.id, refused.code) == (3, errors.RESOURCE_EXHAUSTED)
    taken(table, "b", 3)
    table.finished(first)
    taken(table, "a", 3)


def test_number_in_use_is_refused() -> None:
    table = ServerCalls(LIFE)
    taken(table)
    refused = table.call_arrived("a", Call(1, "m", LIFE, 0, b""), 0.0)
    assert isinstance(refused, Reply)
    assert (refused.code, table.repeated, len(table)) == (errors.INVALID_ARGUMENT, 1, 1)


def test_call_without_arguments_leaves_table() -> None:
    table = ServerCalls(LIFE)
    served = table.call_arrived("peer", Call(1, "m", LIFE, 0, b""), 0.0)
    assert isinstance(served, ServedCall)
    table.arguments_lost("peer", 1)
    table.arguments_lost("peer", 1)
    table.arguments_lost("other", 1)
    assert len(table) == 0
