"""Many small calls in few messages: counts, and what may not stand in such a message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.rpc.helpers import stranger_to, until
from tests.transport.helpers import Dialled
from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, INLINE_BYTES_MAX
from zmqdist.messages import Call, Calls, Replies, Reply
from zmqdist.rpc import ZmqClient, ZmqServer, payload

Serve = Callable[..., ZmqServer]
Connect = Callable[..., ZmqClient]


@pytest.mark.parametrize("inline", [frozenset({"echo"}), frozenset()], ids=["inline", "pool"])
def test_thousand_calls_take_few_messages(
    serve: Serve, connect: Connect, inline: frozenset[str]
) -> None:
    # else each reply may arrive before the next call is made, on a busy machine
    made = threading.Event()

    def echo(value: int) -> int:
        assert made.wait(30)
        return value

    server = serve(inline=inline, echo=echo)
    client = connect(server.address)
    there, back = server.snapshot().messages_received, client.snapshot().messages_received
    for _ in range(2):
        made.clear()
        outcomes = [client.echo(number) for number in range(500)]
        made.set()
        assert [outcome.get_value() for outcome in outcomes] == list(range(500))
    assert server.snapshot().messages_received - there < 20
    assert client.snapshot().messages_received - back < (200 if inline else 600)


def test_calls_without_reader_are_carried_out(serve: Serve, connect: Connect) -> None:
    hold = threading.Event()
    ran: list[int] = []
    client = connect(serve(hold=lambda: hold.wait(30), note=ran.append).address)
    client.hold()
    for number in range(100):
        client.note(number)
    until(lambda: len(ran) == 100)
    hold.set()


def test_calls_before_close_are_carried_out(serve: Serve, connect: Connect) -> None:
    hold = threading.Event()
    ran: list[int] = []
    server = serve(inline=frozenset({"note"}), hold=lambda: hold.wait(30), note=ran.append)
    client = connect(server.address)
    client.hold()
    client.note(1)
    client.close()
    client = connect(server.address)
    client.hold()
    client.note(2)
    until(lambda: sorted(ran) == [1, 2])
    hold.set()


def test_calls_of_message_have_separate_outcomes(serve: Serve, connect: Connect) -> None:
    def even(value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value

    client = connect(
        serve(
            inline=frozenset({"even"}), even=even, big=lambda: bytes(2 * INLINE_BYTES_MAX)
        ).address
    )
    outcomes = [client.even(number) for number in range(50)]
    absent, big = client.call("absent"), client.big()
    assert [outcome.is_ok() for outcome in outcomes] == [True, False] * 25
    assert "7 is odd" in outcomes[7].get_error()[1]
    assert "absent is not registered" in absent.get_error()[1]
    assert len(big.get_value()) == 2 * INLINE_BYTES_MAX


def bodies_of(stranger: Dialled, messages: list[Any], count: int) -> list[int]:
    """Sends these, and gives how many answers came in each message, until there are so many."""
    for message, frames in messages:
        assert stranger.send(message, frames)
    got: list[int] = []
    while sum(got) < count:
        message = stranger.expect("message", 20.0)[1]
        if isinstance(message, (Reply, Replies)):
            got.append(len(message.items) if isinstance(message, Replies) else 1)
    return got


def test_replies_of_turn_leave_together(serve: Serve) -> None:
    server = serve(inline=frozenset({"echo"}), echo=lambda value: value)
    small, _ = payload.pack((1,))
    fifth, _ = payload.pack((bytes(BATCH_BYTES_MAX // 5),))
    with stranger_to(server.address) as (stranger, life):
        full = Calls([Call(10_000 + n, "echo", life, 0, small) for n in range(BATCH_ITEMS_MAX)])
        large = Calls([Call(20_000 + n, "echo", life, 0, fifth) for n in range(6)])
        assert bodies_of(stranger, [(full, ())], BATCH_ITEMS_MAX) == [BATCH_ITEMS_MAX]
        assert bodies_of(stranger, [(large, ())], 6) == [5, 1]


def test_wrong_calls_in_message_are_dropped(serve: Serve) -> None:
    ran: list[int] = []
    server = serve(inline=frozenset({"note"}), note=ran.append)
    body, _ = payload.pack((1,))
    with stranger_to(server.address) as (stranger, life):
        one = Call(10_000, "note", life, 0, body)
        strange = [
            (Calls([one, one]), [b"frame"]),
            (Calls([one] * (BATCH_ITEMS_MAX + 1)), ()),
            (Replies([]), ()),
        ]
        bodies_of(stranger, [*strange, (Calls([one, one]), ())], 2)
    assert ran == [1, 1]
    assert server.snapshot().messages_dropped == {"not a message": 2, "not served here": 1}
