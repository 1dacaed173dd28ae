"""Does the simulation of RPC find bugs? One bug is planted at a time; within SEEDS_MAX seeds the
simulation must report a broken promise.

A bug is a fault of the events and replies at the public methods of a machine: one is dropped,
doubled, delayed, altered or added. A row has the name of the bug, where it is planted, and the start
of the simulation's report; "" if a machine itself may raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.sim.simulations.rpc import simulate_rpc
from zmqdist.errors import InternalError
from zmqdist.limits import BULK_CHANNEL_WINDOW_BYTES
from zmqdist.rpc.admission_machine import FairAdmission
from zmqdist.rpc.batching_machine import Batches
from zmqdist.transport import bulk_machine
from zmqdist.transport.bulk_machine import Transfers, TransferState
from zmqdist.transport.calls_machine import ClientCalls, ServedCall, ServerCalls
from zmqdist.transport.pace import Pace
from zmqdist.transport.transfers import BulkChannel

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 300

Spoil = Callable[[Callable[..., Any]], Callable[..., Any]]
Plant = Callable[[pytest.MonkeyPatch], None]


def always(value: Any) -> Spoil:
    return lambda method: lambda self, *args: value


def with_bound(name: str) -> Spoil:
    """Return a constructor whose argument `name`, a bound, is so high that it has no effect."""

    def spoil(method: Any) -> Any:
        def spoiled(*args: Any, **kwargs: Any) -> None:
            given = inspect.signature(method).bind(*args, **kwargs)
            given.arguments[name] = 2**60
            method(*given.args, **given.kwargs)

        return spoiled

    return spoil


def first(hook: Callable[[Any], object]) -> Spoil:
    """Call `hook` with the machine before the method."""

    def spoil(method: Any) -> Any:
        def spoiled(self: Any, *args: Any) -> Any:
            hook(self)
            return method(self, *args)

        return spoiled

    return spoil


def keeping(name: str) -> Spoil:
    """A method that does not change the public attribute `name`."""

    def spoil(method: Any) -> Any:
        def spoiled(self: Any, *args: Any) -> Any:
            before = getattr(self, name)
            result = method(self, *args)
            setattr(self, name, before)
            return result

        return spoiled

    return spoil


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


def one_client_first(patch: pytest.MonkeyPatch) -> None:
    """Delay the calls of the other clients until one client has no ready calls."""
    ready, next_ = FairAdmission.ready, FairAdmission.next
    delayed: dict[FairAdmission, list[Any]] = {}

    def later(self: FairAdmission, client: Any, key: Any, item: Any) -> None:
        calls = delayed.setdefault(self, [client])
        if self.count and calls[0] is not client:
            calls.append((client, key, item))
        else:
            calls[0] = client
            ready(self, client, key, item)

    def spoiled(self: FairAdmission) -> Any:
        item = next_(self)
        if item is None and self in delayed:
            for call in delayed.pop(self)[1:]:
                ready(self, *call)
            item = next_(self)
        return item

    patch.setattr(FairAdmission, "ready", later)
    patch.setattr(FairAdmission, "next", spoiled)


def of_any_kind(arrived: Any) -> Any:
    return lambda self, call, kind, rows, now: arrived(self, call, "any", rows, now)


def second_first(ready: Any) -> Any:
    """Return a `ready` that exchanges a batch with the one after it."""
    delayed: list[Any] = []

    def spoiled(self: Any, now: float) -> Any:
        if delayed and delayed[0] is self:
            return delayed.pop(1) if len(delayed) > 1 else [delayed.clear(), ready(self, now)][1]
        batch = ready(self, now)
        if batch and self.deadline <= now and (after := ready(self, now)):
            delayed[:] = [self, batch]
            return after
        return batch

    return spoiled


def first_again(next_chunk: Any) -> Any:
    def spoiled(self: Transfers, now: float) -> Any:
        piece = next_chunk(self, now)
        if piece is not None and piece.transfer.state is TransferState.SENDING:
            id = piece.transfer.id
            self.turns = {id: self.turns.pop(id), **self.turns}
        return piece

    return spoiled


def without_its_first_byte(next_piece: Any) -> Any:
    def spoiled(self: Transfers, now: float) -> Any:
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


def on(owner: type, spoil: Spoil, *names: str) -> Plant:
    """Replace these methods."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for name in names:
            patch.setattr(owner, name, spoil(getattr(owner, name)))

    return plant


CALLS_ENDED = ("undelivered", "server_leaving", "connection_lost")

BUGS: list[tuple[str, Plant, str | tuple[str, ...]]] = [
    (
        "calls in flight are sent again",
        on(
            ClientCalls,
            first(lambda self: self.undelivered(list(self.in_flight.values()))),
            "connection_lost",
        ),
        "calls P2",
    ),
    (
        "what was not delivered is forgotten",
        on(
            ClientCalls,
            lambda _: lambda self, calls: [self.cancelled(call) for call in calls],
            "undelivered",
        ),
        "calls P",
    ),
    (
        "what was held back is forgotten",
        on(ClientCalls, first(lambda self: self.held_back.clear()), *CALLS_ENDED),
        "calls P",
    ),
    (
        "bytes of calls that ended still count",
        on(ClientCalls, keeping("eager_bytes"), "cancelled", "ticked"),
        "calls P",
    ),
    (
        "the window of arguments is ignored",
        on(ClientCalls, with_bound("eager_bytes_max"), "__init__"),
        "calls P9",
    ),
    (
        "calls leave newest first",
        on(
            ClientCalls,
            first(lambda self: setattr(self, "waiting", dict(reversed(self.waiting.items())))),
            "next_message",
        ),
        "calls P7",
    ),
    (
        "deadlines are ignored",
        on(ClientCalls, always([]), "ticked"),
        "a machine sets a deadline for the current time again and again",
    ),
    ("an answered call stays in the table", on(ClientCalls, answered_again, "replied"), ""),
    ("calls wait for company of nothing", on(ClientCalls, waiting_alone, "submitted"), "calls P8"),
    (
        "a server holds any number of calls",
        on(ServerCalls, with_bound("pending_max"), "__init__"),
        "calls P6",
    ),
    ("an answered call stays with the server", on(ServerCalls, always(True), "finished"), ""),
    ("a cancelled call is wanted", on(ServedCall, always(True), "is_wanted"), ("turns P1", "")),
    ("a client has turn after turn", one_client_first, "turns P2"),
    (
        "a client's arguments have no bound",
        on(FairAdmission, with_bound("client_bytes_max"), "__init__"),
        "turns P3",
    ),
    (
        "the arguments of all have no bound",
        on(FairAdmission, with_bound("all_bytes_max"), "__init__"),
        "turns P3",
    ),
    (
        "unasked arguments have no bound",
        on(FairAdmission, with_bound("client_unasked_max"), "__init__"),
        "turns P5",
    ),
    (
        "bytes of a client that has gone still count",
        on(FairAdmission, keeping("pulled"), "client_lost"),
        ("turns P", "calls P1"),
    ),
    (
        "calls that were dropped begin",
        on(FairAdmission, always(False), "dropped"),
        ("turns P", "calls P"),
    ),
    ("calls of different kinds run together", on(Batches, of_any_kind, "arrived"), "batching P1"),
    ("batches have no bound", on(Batches, with_bound("rows_max"), "__init__"), "batching P2"),
    (
        "batches wait on and on",
        on(Batches, with_bound("delay_s"), "__init__"),
        ("batching P", "calls P1"),
    ),
    (
        "a dropped call stays in its batch",
        on(Batches, always(None), "dropped"),
        ("batching P", "turns P", ""),
    ),
    (
        "a batch runs after the next one",
        on(Batches, second_first, "ready"),
        ("batching P4", "batching P1"),
    ),
    ("transfers do not take turns", on(Transfers, first_again, "next_chunk"), "bulk P3"),
    ("a byte of a chunk is lost", on(Transfers, without_its_first_byte, "next_chunk"), "bulk P1"),
    ("the last chunks are not acknowledged", on(Transfers, always(0), "idle_credit"), "bulk P5"),
    ("parts that are asked for are not sent", on(Transfers, always(None), "ask"), "calls P1"),
    ("chunks leave without a window", on(Pace, always(True), "fits"), ("bulk P2", "pace P3")),
    (
        "a slow link begins with the largest window",
        on(Pace, begins_with_the_largest, "__init__"),
        "pace P3",
    ),
    (
        "transfers of calls that are over go on",
        on(BulkChannel, always(False), "call_ended"),
        ("bulk P", ""),
    ),
    *(
        (
            f"a transfer cannot go from {before.name} to {after.name}",
            lambda patch, before=before, after=after: patch.setitem(
                bulk_machine.TRANSITIONS,
                before,
                bulk_machine.TRANSITIONS[before] - {after},
            ),
            "",
        )
        for before, after in (
            (TransferState.NEW, TransferState.HELD),
            (TransferState.HELD, TransferState.SENDING),
            (TransferState.HELD, TransferState.OVER),
            (TransferState.SENDING, TransferState.OVER),
            (TransferState.RECEIVING, TransferState.OVER),
        )
    ),
]


def first_complaint(seed: int) -> str | None:
    """Return the report of the simulation for a seed; "" if a machine itself raises."""
    try:
        simulate_rpc(seed)
    except AssertionError as error:
        return str(error)
    except (KeyError, AttributeError, InternalError):
        return ""
    return None


@pytest.mark.parametrize(("what", "plant", "said"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    what: str, plant: Plant, said: str | tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = next(
        (found for seed in range(SEEDS_MAX) if (found := first_complaint(seed)) is not None), None
    )
    assert found is not None, f"{SEEDS_MAX} seeds did not find that {what}"
    assert found.startswith(said), "the simulation reports another promise"
