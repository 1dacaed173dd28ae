"""Does the simulation of RPC find bugs? One bug is planted at a time; within SEEDS_MAX seeds the
simulation must report a broken promise.

A row has the name of the bug, the patch that plants it, and the start of the simulation's report;
"" if a machine itself may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.simulations.rpc import simulate_rpc
from zmqdist.limits import BULK_CHANNEL_WINDOW_BYTES
from zmqdist.rpc.admission_machine import FairAdmission
from zmqdist.rpc.batching_machine import Batches
from zmqdist.transport.bulk_machine import InboundTransfers, OutboundTransfers
from zmqdist.transport.calls_machine import ClientCalls, ServedCall, ServerCalls
from zmqdist.transport.pace import Pace
from zmqdist.transport.transfers import BulkChannel

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 300

Spoil = Callable[[Callable[..., Any]], Callable[..., Any]]


def always(value: Any) -> Spoil:
    return lambda method: lambda self, *args: value


def with_bound(name: str) -> Spoil:
    """Return a constructor that sets a bound so high that it has no effect."""

    def spoil(method: Any) -> Any:
        def spoiled(self: Any, *args: Any, **kwargs: Any) -> None:
            method(self, *args, **kwargs)
            setattr(self, name, 2**60)

        return spoiled

    return spoil


def sent_again(connection_lost: Any) -> Any:
    def spoiled(self: ClientCalls) -> Any:
        self.undelivered(list(self.in_flight.values()))
        return connection_lost(self)

    return spoiled


def lost_where_not_delivered(_: Any) -> Any:
    def spoiled(self: ClientCalls, calls: Any) -> None:
        for call in calls:
            del self.in_flight[call.id]
            self.eager_bytes -= call.nbytes

    return spoiled


def forgetting_what_is_held_back(wait_again: Any) -> Any:
    def spoiled(self: ClientCalls, unsent: Any) -> None:
        self.held_back.clear()
        wait_again(self, unsent)

    return spoiled


def bytes_are_kept(forget: Any) -> Any:
    def spoiled(self: ClientCalls, call: Any) -> Any:
        unasked = self.eager_bytes
        was_in_flight = forget(self, call)
        self.eager_bytes = unasked
        return was_in_flight

    return spoiled


def newest_first(next_message: Any) -> Any:
    def spoiled(self: ClientCalls) -> Any:
        self.waiting = dict(reversed(self.waiting.items()))
        return next_message(self)

    return spoiled


def waiting_alone(asked: Any) -> Any:
    def spoiled(self: ClientCalls, call: Any) -> bool:
        asked(self, call)
        return False

    return spoiled


def answered_again(answered: Any) -> Any:
    def spoiled(self: ClientCalls, reply: Any, frames: Any) -> Any:
        call = self.in_flight.get(reply.id)
        ended = answered(self, reply, frames)
        if ended is not None and reply.id % 5 == 0:
            self.in_flight[reply.id] = call
        return ended

    return spoiled


def same_client_again(next_turn: Any) -> Any:
    def spoiled(self: FairAdmission) -> Any:
        if self._in_turn:
            self._in_turn.move_to_end(next(reversed(self._in_turn)), last=False)
        return next_turn(self)

    return spoiled


def pulled_bytes_stay(gone: Any) -> Any:
    def spoiled(self: FairAdmission, client: Any) -> None:
        pulled = self.pulled
        gone(self, client)
        self.pulled = pulled

    return spoiled


def dropped_calls_begin(dropped: Any) -> Any:
    def spoiled(self: FairAdmission, client: Any, key: Any) -> bool:
        its = self._clients.get(client)
        if its is not None and key in its.ready:
            return False
        return bool(dropped(self, client, key))

    return spoiled


def of_any_kind(arrived: Any) -> Any:
    return lambda self, call, kind, rows, now: arrived(self, call, "any", rows, now)


def still_in_the_batch(dropped: Any) -> Any:
    def spoiled(self: Any, call: Any, batch: Any) -> None:
        if len(batch.calls) < 2:
            dropped(self, call, batch)

    return spoiled


def youngest_batch(ready: Any) -> Any:
    def spoiled(self: Any, now: float) -> Any:
        kept, self._closed = self._closed[:-1], self._closed[-1:]
        calls = ready(self, now)
        self._closed = kept + self._closed
        return calls

    return spoiled


def one_transfer_at_a_time(next_piece: Any) -> Any:
    def spoiled(self: OutboundTransfers, now: float) -> Any:
        piece = next_piece(self, now)
        if piece is not None and piece.id in self._queue:
            self._queue = {piece.id: self._queue.pop(piece.id), **self._queue}
        return piece

    return spoiled


def without_its_first_byte(next_piece: Any) -> Any:
    def spoiled(self: OutboundTransfers, now: float) -> Any:
        piece = next_piece(self, now)
        return (
            piece
            if piece is None or piece.nbytes < 50_000
            else piece._replace(nbytes=piece.nbytes - 1)
        )

    return spoiled


def begins_with_the_largest(init: Any) -> Any:
    return lambda self, *args, **kwargs: init(
        self, *args, **{**kwargs, "window_bytes": BULK_CHANNEL_WINDOW_BYTES}
    )


BUGS: list[tuple[str, type, str, Spoil, str | tuple[str, ...]]] = [
    ("calls in flight are sent again", ClientCalls, "connection_lost", sent_again, "calls P2"),
    (
        "what was not delivered is forgotten",
        ClientCalls,
        "undelivered",
        lost_where_not_delivered,
        "calls P",
    ),
    (
        "what was held back is forgotten",
        ClientCalls,
        "_requeue",
        forgetting_what_is_held_back,
        "calls P",
    ),
    ("bytes of calls that ended still count", ClientCalls, "_forget", bytes_are_kept, "calls P"),
    (
        "the window of arguments is ignored",
        ClientCalls,
        "__init__",
        with_bound("_eager_bytes_max"),
        "calls P9",
    ),
    ("calls leave newest first", ClientCalls, "next_message", newest_first, "calls P7"),
    (
        "deadlines are ignored",
        ClientCalls,
        "ticked",
        always([]),
        "a machine sets a deadline for the current time again and again",
    ),
    ("an answered call stays in the table", ClientCalls, "replied", answered_again, ""),
    ("calls wait for company of nothing", ClientCalls, "submitted", waiting_alone, "calls P8"),
    (
        "a server holds any number of calls",
        ServerCalls,
        "__init__",
        with_bound("_pending_max"),
        "calls P6",
    ),
    ("an answered call stays with the server", ServerCalls, "finished", always(True), ""),
    ("a cancelled call is wanted", ServedCall, "is_wanted", always(True), ("turns P1", "")),
    ("a client has turn after turn", FairAdmission, "next", same_client_again, "turns P2"),
    (
        "a client's arguments have no bound",
        FairAdmission,
        "__init__",
        with_bound("_client_bytes_max"),
        "turns P3",
    ),
    (
        "the arguments of all have no bound",
        FairAdmission,
        "__init__",
        with_bound("_all_bytes_max"),
        "turns P3",
    ),
    (
        "unasked arguments have no bound",
        FairAdmission,
        "__init__",
        with_bound("_client_unasked_max"),
        "turns P5",
    ),
    (
        "bytes of a client that has gone still count",
        FairAdmission,
        "client_lost",
        pulled_bytes_stay,
        ("turns P", "calls P1"),
    ),
    (
        "calls that were dropped begin",
        FairAdmission,
        "dropped",
        dropped_calls_begin,
        ("turns P", "calls P"),
    ),
    ("calls of different kinds run together", Batches, "arrived", of_any_kind, "batching P1"),
    ("batches have no bound", Batches, "__init__", with_bound("_rows_max"), "batching P2"),
    (
        "batches wait on and on",
        Batches,
        "__init__",
        with_bound("_delay_s"),
        ("batching P", "calls P1"),
    ),
    (
        "a dropped call stays in its batch",
        Batches,
        "dropped",
        still_in_the_batch,
        ("batching P", "turns P", ""),
    ),
    (
        "the youngest of full batches is next",
        Batches,
        "ready",
        youngest_batch,
        ("batching P4", "batching P1"),
    ),
    (
        "transfers do not take turns",
        OutboundTransfers,
        "next_chunk",
        one_transfer_at_a_time,
        "bulk P3",
    ),
    (
        "a byte of a chunk is lost",
        OutboundTransfers,
        "next_chunk",
        without_its_first_byte,
        "bulk P1",
    ),
    ("the last chunks are not acknowledged", InboundTransfers, "idle_credit", always(0), "bulk P5"),
    ("chunks leave without a window", Pace, "fits", always(True), ("bulk P2", "pace P3")),
    (
        "a slow link begins with the largest window",
        Pace,
        "__init__",
        begins_with_the_largest,
        "pace P3",
    ),
    (
        "transfers of calls that are over go on",
        BulkChannel,
        "call_ended",
        always(False),
        ("bulk P", ""),
    ),
]


def first_complaint(seed: int) -> str | None:
    """Return the report of the simulation for a seed; "" if a machine itself raises."""
    try:
        simulate_rpc(seed)
    except AssertionError as error:
        return str(error)
    except (KeyError, AttributeError):
        return ""
    return None


@pytest.mark.parametrize(
    ("what", "owner", "name", "spoil", "said"), BUGS, ids=[bug[0] for bug in BUGS]
)
def test_the_simulation_of_rpc_finds_that(
    what: str,
    owner: type,
    name: str,
    spoil: Spoil,
    said: str | tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, spoil(getattr(owner, name)))
    found = next(
        (found for seed in range(SEEDS_MAX) if (found := first_complaint(seed)) is not None), None
    )
    assert found is not None, f"{SEEDS_MAX} seeds did not find that {what}"
    assert found.startswith(said), "the simulation reports another promise"
