"""How many bytes of calls a client sends unasked, and which calls it holds back: P9 of
transport/calls_machine.py."""

from __future__ import annotations

import random

import pytest

from zmqdist import errors
from zmqdist.limits import CHUNK_BYTES, UNCOUNTED_BYTES_MAX
from zmqdist.messages import Reply
from zmqdist.transport.calls_machine import ClientCall, ClientCalls

HOME = "host:1"
LIFE = 77
KIB = 1024
assert UNCOUNTED_BYTES_MAX == KIB


def bounded() -> ClientCalls:
    table = ClientCalls(HOME, eager_bytes_max=100 * KIB)
    table.server_up(LIFE)
    return table


def sized(table: ClientCalls, body: int, *frames: int) -> ClientCall:
    call = ClientCall("m", bytes(body), [bytes(nbytes) for nbytes in frames])
    table.submitted(call)
    return call


def left(table: ClientCalls) -> list[list[ClientCall]]:
    """Return all messages that leave now."""
    messages = []
    while message := table.next_message():
        messages.append(message)
    return messages


def test_calls_beyond_window_wait_in_order() -> None:
    table = bounded()
    sent = [sized(table, 40 * KIB), sized(table, 10 * KIB, 40 * KIB)]
    held = [sized(table, 20 * KIB), sized(table, 2 * KIB)]
    assert left(table) == [sent[:1], sent[1:]]
    assert (table.eager_bytes, list(table.held_back.values()), table.waiting) == (
        90 * KIB,
        held,
        {},
    )
    assert all(table.is_unsent(call) for call in held)
    table.replied(Reply(1, 0, "", b""), ())
    assert left(table) == [held]
    assert (table.eager_bytes, table.held_back) == (72 * KIB, {})


@pytest.mark.parametrize("frames", [(), (24,)], ids=["a body", "frames"])
def test_small_calls_overtake_held_back_calls(frames: tuple[int, ...]) -> None:
    table = bounded()
    sent, held, small = (
        sized(table, 90 * KIB),
        sized(table, 20 * KIB),
        sized(table, KIB - 24, *frames),
    )
    assert left(table) in ([[sent, small]], [[sent], [small]])
    later = [sized(table, KIB), sized(table, 20 * KIB), sized(table, KIB)]
    assert left(table) == [[later[0], later[2]]]
    assert list(table.held_back.values()) == [held, later[1]]
    assert table.eager_bytes == 90 * KIB


def test_fitting_call_does_not_overtake() -> None:
    table = bounded()
    sent, held, fits = sized(table, 90 * KIB), sized(table, 20 * KIB), sized(table, 2 * KIB)
    assert left(table) == [[sent]]
    fits_too = sized(table, 2 * KIB)
    assert left(table) == []
    table.replied(Reply(sent.id, 0, "", b""), ())
    assert left(table) == [[held, fits, fits_too]]


def test_message_ends_when_window_is_full() -> None:
    table = bounded()
    first, second, third = (sized(table, 40 * KIB) for _ in range(3))
    assert left(table) == [[first, second]]
    table.cancelled(third)
    assert not table.held_back
    assert not table.is_unsent(third)


def test_oversized_call_leaves_alone() -> None:
    table = bounded()
    first, huge, small = sized(table, 2 * KIB), sized(table, 1000 * KIB), sized(table, 1)
    assert left(table) == [[first, small]]
    table.replied(Reply(first.id, 0, "", b""), ())
    assert left(table) == [[huge]]


@pytest.mark.parametrize(
    "how", ["the connection goes", "the server leaves", "it could not be sent"]
)
def test_held_back_calls_keep_order_without_server(how: str) -> None:
    table = bounded()
    first, held, small = sized(table, 90 * KIB), sized(table, 20 * KIB), sized(table, 1)
    messages = left(table)
    match how:
        case "the connection goes":
            table.connection_lost()
            again = [held]
        case "the server leaves":
            table.server_leaving()
            again = [held]
        case _:
            for message in messages:
                table.undelivered(message)
            again = [first, held, small]
    later = sized(table, 1)
    assert list(table.waiting.values()) == [*again, later]
    assert table.held_back == {}
    assert table.waiting_bytes == sum(len(call.body) for call in table.waiting.values())


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_respect_window_and_order(seed: int) -> None:
    rng = random.Random(seed)
    table = bounded()
    asked: list[ClientCall] = []
    sizes: dict[int, int] = {}
    sent: list[int] = []
    for _ in range(400):
        roll = rng.random()
        if roll < 0.5:
            asked.append(sized(table, rng.choice([1, KIB, KIB + 1, 30 * KIB, 70 * KIB, 200 * KIB])))
            sizes[asked[-1].id] = len(asked[-1].body)
        elif roll < 0.8 and table.in_flight:
            table.replied(Reply(rng.choice(list(table.in_flight)), 0, "", b""), ())
        elif roll < 0.9 and table.in_flight | table.held_back | table.waiting:
            tables = table.in_flight | table.held_back | table.waiting
            table.cancelled(tables[rng.choice(list(tables))])
        sent += [call.id for message in left(table) for call in message]
        counting = [sizes[id] for id in table.in_flight if sizes[id] > KIB]
        assert table.eager_bytes == sum(counting)
        assert sum(counting) <= 100 * KIB or len(counting) == 1
        assert not table.waiting
        assert all(sizes[id] > KIB for id in table.held_back)
        assert not table.held_back or counting
    for small in (True, False):
        order = [id for id in sent if (sizes[id] <= KIB) == small]
        assert order == sorted(order)


def test_large_parts_beyond_window_are_held() -> None:
    table = bounded()
    calls = [
        sized(table, 1, CHUNK_BYTES + 1),
        sized(table, 50 * KIB),
        sized(table, 1, CHUNK_BYTES + 1),
    ]
    sent = [call for message in left(table) for call in message]
    assert [table.request(call, 0.0).held for call in sent] == [True, False, True]
    assert sent == calls


def test_large_parts_within_window_are_not_held() -> None:
    table = ClientCalls(HOME, eager_bytes_max=CHUNK_BYTES + 100)
    table.server_up(LIFE)
    sized(table, 50, CHUNK_BYTES + 1)
    assert [table.request(call, 0.0).held for call in table.next_message()] == [False]
    assert table.eager_bytes == CHUNK_BYTES + 51


def test_unbounded_call_does_not_count() -> None:
    table = bounded()
    call = ClientCall("m", bytes(1000 * KIB))
    call.bounded = False
    table.submitted(call)
    assert table.next_message() == [call]
    assert (call.nbytes, table.eager_bytes) == (0, 0)


@pytest.mark.parametrize(
    "how", ["answered", "cancelled", "expired", "lost", "failed", "undelivered"]
)
def test_ended_call_does_not_count(how: str) -> None:
    table = bounded()
    call = ClientCall("m", bytes(4 * KIB), (), 5.0)
    table.submitted(call)
    assert table.next_message() == [call]
    assert table.eager_bytes == 4 * KIB
    match how:
        case "answered":
            table.replied(Reply(1, 0, "", b""), ())
        case "cancelled":
            table.cancelled(call)
        case "expired":
            table.ticked(6.0)
        case "lost":
            table.connection_lost()
        case "failed":
            table.failed(errors.CANCELLED, "closed")
        case "undelivered":
            table.undelivered([call])
    assert table.eager_bytes == 0
