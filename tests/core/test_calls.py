"""The call tables of both ends, held to their promises without a socket."""

from __future__ import annotations

import random
from math import inf

import pytest

from zmqdist import errors
from zmqdist.core.calls import ClientCall, ClientCalls, ServedCall, ServerCalls
from zmqdist.messages import Call, CancelCall, Reply

HOME = "host:1"
LIFE = 77


def client(up: bool = True, pending_max: int = 100) -> ClientCalls:
    table = ClientCalls(HOME, pending_max)
    if up:
        assert table.server_up(LIFE, 0.0) == []
    return table


def ask(table: ClientCalls, due: float = inf, now: float = 0.0) -> tuple[ClientCall, Call | None]:
    call = ClientCall("m", b"args", (), due)
    return call, table.asked(call, now)


def empty(table: ClientCalls) -> bool:
    return not table.in_flight and not table.waiting


# -- the client's end ------------------------------------------------------------------------------------------------


def test_a_call_to_a_known_server_is_sent_at_once_and_names_its_life() -> None:
    table = client()
    assert ask(table)[1] == Call(1, "m", LIFE, 0, b"args")
    assert ask(table)[1] == Call(2, "m", LIFE, 0, b"args")


@pytest.mark.parametrize(
    ("due", "now", "left_ms"),
    [(inf, 5.0, 0), (5.25, 5.0, 250), (5.0001, 5.0, 1), (5.0, 5.0, 1), (4.0, 5.0, 1)],
    ids=["no deadline", "a quarter second", "rounded up", "just due: not 0, which is for ever", "past"],
)
def test_a_call_tells_the_server_the_time_that_is_left(due: float, now: float, left_ms: int) -> None:
    assert ask(client(), due, now)[1] == Call(1, "m", LIFE, left_ms, b"args")


def test_an_answer_ends_its_call_with_what_it_brings() -> None:
    table = client()
    call, _ = ask(table)
    assert table.answered(Reply(1, 0, "", b"value"), ["frame"]) is call
    assert (call.ended, call.code, call.message, call.body, call.frames) == (True, 0, "", b"value", ["frame"])
    assert empty(table)


def test_an_answer_that_nobody_waits_for_is_nobodys() -> None:
    table = client()
    call, _ = ask(table)
    table.answered(Reply(1, 0, "", b"first"), ())
    assert table.answered(Reply(1, 3, "again", b"second"), ()) is None
    assert table.answered(Reply(9, 0, "", b""), ()) is None
    assert (call.code, call.body) == (0, b"first")


def test_calls_wait_for_a_server_and_are_sent_in_order_with_the_time_that_is_left_then() -> None:
    table = client(up=False)
    first, message = ask(table, due=10.0)
    assert message is None
    second, _ = ask(table)
    assert not first.ended
    assert table.server_up(LIFE, 8.0) == [
        (first, Call(1, "m", LIFE, 2000, b"args")),
        (second, Call(2, "m", LIFE, 0, b"args")),
    ]
    assert list(table.in_flight) == [1, 2]
    assert not table.waiting


def test_what_is_in_flight_when_the_connection_goes_is_unavailable_and_never_sent_again() -> None:
    table = client()
    call, _ = ask(table)
    assert table.connection_lost() == [call]
    assert (call.code, call.ended) == (errors.UNAVAILABLE, True)
    assert table.connection_lost() == []
    assert table.server_up(LIFE + 1, 1.0) == []


def test_a_server_that_is_leaving_answers_what_it_has_and_is_sent_nothing_new() -> None:
    table = client()
    old, _ = ask(table)
    table.server_leaving()
    new, message = ask(table)
    assert message is None
    assert table.answered(Reply(old.id, 0, "", b"value"), ()) is old
    assert table.connection_lost() == []
    assert table.server_up(LIFE + 1, 0.0) == [(new, Call(2, "m", LIFE + 1, 0, b"args"))]


def test_a_call_made_while_the_server_is_away_waits_for_its_next_life() -> None:
    table = client()
    table.connection_lost()
    call, message = ask(table)
    assert message is None
    assert table.connection_lost() == []
    assert table.server_up(LIFE + 1, 0.0) == [(call, Call(1, "m", LIFE + 1, 0, b"args"))]


def test_a_message_that_could_not_be_sent_waits_instead() -> None:
    table = client()
    call, _ = ask(table)
    table.undelivered(call)
    assert table.connection_lost() == []
    assert table.server_up(LIFE + 1, 0.0) == [(call, Call(1, "m", LIFE + 1, 0, b"args"))]


def test_a_deadline_ends_calls_in_flight_and_waiting_alike() -> None:
    table = client()
    flying, _ = ask(table, due=2.0)
    table.undelivered(waiting := ask(table, due=1.0)[0])
    later, _ = ask(table, due=9.0)
    forever, _ = ask(table)
    assert table.deadline == 1.0
    assert table.ticked(0.999) == []
    assert table.ticked(1.0) == [waiting]
    assert "waited for a server at host:1" in waiting.message
    assert table.deadline == 2.0
    assert table.ticked(5.0) == [flying]
    assert "waited for an answer" in flying.message
    assert flying.code == waiting.code == errors.DEADLINE_EXCEEDED
    table.answered(Reply(later.id, 0, "", b""), ())
    assert table.ticked(9.0) == []
    assert table.deadline == inf
    assert list(table.in_flight) == [forever.id]


def test_cancelling_tells_the_server_only_of_a_call_that_it_has() -> None:
    table = client()
    flying, _ = ask(table)
    table.undelivered(waiting := ask(table)[0])
    assert table.cancelled(waiting) is None
    assert table.cancelled(flying) == CancelCall(flying.id)
    assert table.cancelled(flying) is None
    assert flying.code == waiting.code == errors.CANCELLED
    assert empty(table)


def test_a_refusal_ends_every_call_with_its_error() -> None:
    table = client()
    flying, _ = ask(table)
    table.undelivered(waiting := ask(table)[0])
    assert set(table.failed(errors.UNAUTHENTICATED, "wrong token")) == {flying, waiting}
    assert {(c.code, c.message) for c in (flying, waiting)} == {(errors.UNAUTHENTICATED, "wrong token")}
    assert empty(table)
    assert ask(table)[1] is None


def test_more_calls_than_the_bound_are_refused_here() -> None:
    table = client(pending_max=2)
    ask(table)
    table.undelivered(ask(table)[0])
    call, message = ask(table)
    assert (message, call.code, call.ended) == (None, errors.RESOURCE_EXHAUSTED, True)
    assert len(table.in_flight) + len(table.waiting) == 2


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_a_call_ends_once_is_sent_once_and_leaves_nothing(seed: int) -> None:
    rng, table, now, life = random.Random(seed), client(up=False), 0.0, 0
    calls: list[ClientCall] = []
    delivered: dict[int, int] = {}
    ends: dict[int, int] = {}

    def ended(those: list[ClientCall]) -> None:
        for call in those:
            assert call.ended
            ends[call.id] = ends.get(call.id, 0) + 1

    def sent(call: ClientCall, message: Call) -> None:
        assert message.incarnation == life
        assert table.incarnation == life != 0
        if rng.random() < 0.1:
            table.undelivered(call)
        else:
            delivered[call.id] = delivered.get(call.id, 0) + 1

    for _ in range(300):
        now += rng.random()
        match rng.randrange(9):
            case 0 | 1 | 2:
                call = ClientCall("m", b"", (), rng.choice([inf, now + rng.random() * 5]))
                message = table.asked(call, now)
                calls.append(call)
                if message is not None:
                    sent(call, message)
            case 3:
                if not table.incarnation:
                    life += 1
                    for call, message in table.server_up(life, now):
                        sent(call, message)
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
                answered = table.answered(Reply(rng.choice(list(delivered)), 0, "", b""), ())
                ended([answered] if answered else [])
    ended(table.failed(errors.CANCELLED, "closed"))
    assert ends == {call.id: 1 for call in calls}
    assert all(count == 1 for count in delivered.values())
    assert empty(table)


# -- the server's end ------------------------------------------------------------------------------------------------


def taken(table: ServerCalls, peer: str = "a", id: int = 1, left_ms: int = 0, now: float = 0.0) -> ServedCall:
    served = table.called(peer, Call(id, "m", LIFE, left_ms, b""), now)
    assert isinstance(served, ServedCall)
    return served


@pytest.mark.parametrize("incarnation", [0, 1, LIFE + 1])
def test_a_call_of_another_life_is_refused(incarnation: int) -> None:
    table = ServerCalls(LIFE)
    answer = table.called("a", Call(5, "m", incarnation, 0, b""), 0.0)
    assert isinstance(answer, Reply)
    assert (answer.id, answer.code) == (5, errors.UNAVAILABLE)
    assert len(table) == 0


def test_a_call_is_wanted_until_its_time_has_passed() -> None:
    served = taken(ServerCalls(LIFE), left_ms=500, now=10.0)
    assert served.wanted(10.4)
    assert not served.wanted(10.5)
    assert taken(ServerCalls(LIFE)).wanted(1e9)


def test_a_finished_call_is_answered_and_forgotten() -> None:
    table = ServerCalls(LIFE)
    served = taken(table)
    assert len(table) == 1
    assert table.finished(served)
    assert len(table) == 0


def test_a_cancelled_call_is_unwanted_and_unanswered_and_counts_until_it_has_finished() -> None:
    table = ServerCalls(LIFE, pending_max=1)
    served = taken(table)
    table.cancelled("a", 99)
    table.cancelled("b", 1)
    assert served.wanted(0.0)
    table.cancelled("a", 1)
    assert not served.wanted(0.0)
    assert isinstance(table.called("a", Call(2, "m", LIFE, 0, b""), 0.0), Reply)
    assert not table.finished(served)
    taken(table, id=2)


def test_the_calls_of_a_peer_that_has_gone_are_forgotten() -> None:
    table = ServerCalls(LIFE)
    gone, other = taken(table, "a"), taken(table, "b")
    table.peer_gone("a")
    table.peer_gone("never seen")
    assert not gone.wanted(0.0)
    assert other.wanted(0.0)
    assert not table.finished(gone)
    assert len(table) == 1


def test_a_peer_has_at_most_so_many_calls_and_others_are_not_touched_by_that() -> None:
    table = ServerCalls(LIFE, pending_max=2)
    first = taken(table, "a", 1)
    taken(table, "a", 2)
    refused = table.called("a", Call(3, "m", LIFE, 0, b""), 0.0)
    assert isinstance(refused, Reply)
    assert (refused.id, refused.code) == (3, errors.RESOURCE_EXHAUSTED)
    taken(table, "b", 3)
    table.finished(first)
    taken(table, "a", 3)


def test_a_number_in_use_is_refused_and_counted() -> None:
    table = ServerCalls(LIFE)
    taken(table)
    refused = table.called("a", Call(1, "m", LIFE, 0, b""), 0.0)
    assert isinstance(refused, Reply)
    assert (refused.code, table.repeated, len(table)) == (errors.INVALID_ARGUMENT, 1, 1)
