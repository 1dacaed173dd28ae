"""Chunks of large payloads: both machines held to their promises, alone and against each other over
a lossless queue."""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import pytest

from zmqdist.errors import InternalError
from zmqdist.limits import CHUNK_BYTES
from zmqdist.transport.bulk_machine import DONE, LATE, MORE, WRONG, Transfers, TransferState
from zmqdist.transport.pace import Pace

WINDOW, CHUNK = 8, 3


class Piece(NamedTuple):
    id: int
    part: int
    offset: int
    nbytes: int


def next_piece(out: Transfers, now: float = 0.0) -> Piece | None:
    """Return the chunk that leaves now."""
    chunk = out.next_chunk(now)
    return None if chunk is None else Piece(chunk.transfer.id, *chunk[1:])


def pieces(out: Transfers, now: float = 0.0) -> list[Piece]:
    """Return all chunks that may leave now."""
    return list(iter(lambda: next_piece(out, now), None))


def fixed(window: int, chunk: int) -> Pace:
    """A pace with a fixed window."""
    return Pace(window, chunk, window_bytes=window, chunk_min=chunk)


def sender(*transfers: tuple[int, list[int]], window: int = WINDOW) -> Transfers:
    out = Transfers(fixed(window, CHUNK))
    for id, sizes in transfers:
        out.send(id, sizes)
    return out


def receiver(id: int, sizes: list[int]) -> Transfers:
    into = Transfers()
    into.receive(id, sizes)
    return into


# -- the sender ------------------------------------------------------------------------------------


def test_chunks_are_parts_in_order() -> None:
    out = sender((1, [7, 0, 3, 1]), window=100)
    assert pieces(out) == [
        Piece(1, 0, 0, 3),
        Piece(1, 0, 3, 3),
        Piece(1, 0, 6, 1),
        Piece(1, 2, 0, 3),
        Piece(1, 3, 0, 1),
    ]
    assert len(out.tracked) == 0


def test_unacknowledged_bytes_stay_within_window() -> None:
    out = sender(*((id, [100]) for id in range(1, 20)))
    assert [piece.nbytes for piece in pieces(out)] == [3, 3]
    assert out.pace.unacknowledged == 6
    assert out.pace.acknowledged(3, 0.0)
    assert [piece.nbytes for piece in pieces(out)] == [3]
    assert pieces(out) == []


def test_transfers_take_turns() -> None:
    out = sender((1, [9]), (2, [4]), window=100)
    assert [piece.id for piece in pieces(out)] == [1, 2, 1, 2, 1]


def test_later_transfer_takes_turns_with_earlier() -> None:
    out = sender((1, [30]))
    assert len(pieces(out)) == 2
    out.send(2, [30])
    assert out.pace.acknowledged(6, 0.0)
    assert [piece.id for piece in pieces(out)] == [1, 2]


def test_ended_transfer_sends_no_chunk_but_counts_bytes() -> None:
    out = sender((1, [30]), (2, [30]))
    assert [piece.id for piece in pieces(out)] == [1, 2]
    assert out.end(1)
    assert not out.end(1)
    assert 1 not in out.tracked
    assert out.pace.acknowledged(6, 0.0)
    assert [piece.id for piece in pieces(out)] == [2, 2]


@pytest.mark.parametrize("nbytes", [4, 10**12, -1])
def test_acknowledgment_of_unsent_bytes_is_fault(nbytes: int) -> None:
    out = sender((1, [3]))
    pieces(out)
    assert not out.pace.acknowledged(nbytes, 0.0)
    out.send(2, [100])
    assert sum(piece.nbytes for piece in pieces(out)) <= WINDOW - 3


# -- the receiver ----------------------------------------------------------------------------------


def test_transfer_completes_with_last_byte() -> None:
    into = receiver(1, [0, 5, 0, 2])
    assert into.room_at(1, 1, 0) == 5
    assert into.arrived(1, 1, 0, 4) == MORE
    assert into.room_at(1, 1, 4) == 1
    assert into.arrived(1, 1, 4, 1) == MORE
    assert into.arrived(1, 3, 0, 2) == DONE
    assert len(into.tracked) == 0


@pytest.mark.parametrize(
    ("part", "offset", "nbytes"),
    [(0, 0, 3), (0, 2, 3), (0, 6, 3), (1, 0, 2), (0, 3, 8), (0, 3, 0), (2, 0, 1), (0, 2**60, 1)],
    ids=[
        "doubled",
        "overlaps",
        "a gap",
        "a part is missing",
        "too long",
        "empty",
        "no such part",
        "far outside",
    ],
)
def test_wrong_chunk_fails_transfer_once(part: int, offset: int, nbytes: int) -> None:
    into = receiver(1, [10, 2])
    into.receive(2, [4])
    assert into.arrived(1, 0, 0, 3) == MORE
    assert min(into.room_at(1, part, offset), nbytes) < max(nbytes, 1)
    assert into.arrived(1, part, offset, nbytes) == WRONG
    assert f"a chunk of {nbytes} bytes at {offset} of part {part}" in into.problem
    assert "at most 7 at 3 of part 0 belong" in into.problem
    assert into.arrived(1, 0, 3, 3) == LATE
    assert into.room_at(1, 0, 3) == 0
    assert into.arrived(2, 0, 0, 4) == DONE


@pytest.mark.parametrize("over", ["ended", "complete", "unknown"])
def test_ended_transfer_accepts_no_chunk(over: str) -> None:
    into = Transfers()
    if over != "unknown":
        into.receive(1, [6])
        assert into.arrived(1, 0, 0, 3) == MORE
    if over == "ended":
        assert into.end(1)
        assert not into.end(1)
    elif over == "complete":
        assert into.arrived(1, 0, 3, 3) == DONE
        assert not into.end(1)
    assert into.room_at(1, 0, 3) == 0
    assert into.arrived(1, 0, 3, 3) == LATE
    assert into.late == 1
    assert len(into.tracked) == 0


def test_chunks_are_acknowledged_at_once_or_in_pairs() -> None:
    into = receiver(1, [10 * CHUNK_BYTES])
    assert [
        into.credit_after(CHUNK_BYTES),
        into.credit_after(CHUNK_BYTES),
        into.credit_after(3),
    ] == [0, 2 * CHUNK_BYTES, 3]
    assert [into.credit_after(CHUNK_BYTES), into.credit_after(3), into.credit_after(0)] == [
        0,
        CHUNK_BYTES + 3,
        0,
    ]


def test_last_full_chunk_is_acknowledged_at_once() -> None:
    """An unacknowledged chunk counts as in flight, so the figures would show a chunk that never
    arrives."""
    into = receiver(1, [10 * CHUNK_BYTES])
    assert [into.credit_after(CHUNK_BYTES), into.idle_credit()] == [0, 0]
    into.end(1)
    assert [into.idle_credit(), into.idle_credit()] == [CHUNK_BYTES, 0]
    assert [into.credit_after(CHUNK_BYTES), into.idle_credit()] == [CHUNK_BYTES, 0], (
        "of a transfer that has ended"
    )


def test_narrowed_window_does_not_stop_transfer() -> None:
    pace = Pace(window_bytes=4 * CHUNK_BYTES)
    out, into = Transfers(pace), Transfers()
    out.send(1, [5 * CHUNK_BYTES])
    into.receive(1, [5 * CHUNK_BYTES])
    now, on_the_way = 0.0, pieces(out)
    while on_the_way:
        now += 3.0  # so that the window falls
        piece = on_the_way.pop(0)
        into.arrived(*piece)
        if credit := into.credit_after(piece.nbytes):
            assert out.pace.acknowledged(credit, now)
        on_the_way += pieces(out, now)
    assert len(into.tracked) == len(out.tracked) == 0
    assert pace.window_bytes < 4 * CHUNK_BYTES


# -- both ------------------------------------------------------------------------------------------


def test_random_histories_keep_promises(seed: int) -> None:
    """At random, transfers begin and are ended by either side, chunks are doubled, cut or invented,
    and the connection ends."""
    rng = random.Random(seed)
    planted = seed % 3 == 0
    for _ in range(4):
        _one_connection(rng, planted)


def _one_connection(rng: random.Random, planted: bool) -> None:
    chunk = rng.randrange(1, 20)
    window = chunk * 2 + rng.randrange(100)
    out, into = Transfers(fixed(window, chunk)), Transfers()
    wire: deque[Piece | tuple[int, list[int]]] = deque()
    back: deque[int] = deque()
    sent: dict[int, list[int]] = {}
    got: dict[int, int] = {}
    over: dict[int, str] = {}
    spoilt: set[int] = set()
    owed: dict[int, set[int]] = {}
    """For each transfer, the others whose turn is before its next one."""

    def begin() -> None:
        id = len(sent) + 1
        sizes = [rng.choice([0, rng.randrange(1, 200)]) for _ in range(rng.randrange(1, 4))]
        if any(sizes):
            sent[id] = sizes
            wire.append((id, sizes))
            out.send(id, sizes)

    def send() -> None:
        alive = {id for id in sent if id in out.tracked}
        piece = next_piece(out)
        if piece is None:
            return
        assert 0 < piece.nbytes <= chunk
        assert out.pace.unacknowledged <= window
        assert not owed.get(piece.id, set()) & alive
        for others in owed.values():
            others.discard(piece.id)
        owed[piece.id] = alive - {piece.id}
        if planted and rng.random() < 0.02:
            spoilt.add(piece.id)
            piece = piece._replace(offset=rng.choice([piece.offset + 1, 0, piece.offset + chunk]))
        wire.append(piece)

    def receive() -> None:
        if not wire:
            return
        head = wire.popleft()
        if not isinstance(head, Piece):
            into.receive(*head)
            got[head[0]] = 0
            return
        known = head.id in into.tracked
        room = into.room_at(head.id, head.part, head.offset)
        outcome = into.arrived(head.id, head.part, head.offset, head.nbytes)
        assert (outcome == LATE) == (not known)
        if outcome in (MORE, DONE):
            assert room >= head.nbytes
            got[head.id] += head.nbytes
        if outcome == DONE:
            assert got[head.id] == sum(sent[head.id])
            assert over.setdefault(head.id, "complete") == "complete"
        if outcome == WRONG:
            assert head.id in spoilt
            before = over.setdefault(head.id, "failed")
            # ended before its header arrived
            assert before == "failed" or (before == "ended" and head.id not in out.tracked)
        back.append(into.credit_after(head.nbytes))

    def take_credit() -> None:
        if back:
            assert out.pace.acknowledged(back.popleft(), 0.0)

    def end() -> None:
        if sent:
            id = rng.choice(list(sent))
            unfinished = out.end(id)
            if into.end(id) or unfinished:  # its header may still be in flight
                over.setdefault(id, "ended")

    steps = (
        [send] * 8
        + [receive] * 8
        + [take_credit] * 3
        + [begin]
        + ([end] if rng.random() < 0.5 else [])
    )
    for _ in range(rng.randrange(50, 1500)):
        rng.choice(steps)()
    if rng.random() < 0.2:
        # the connection ends: the lost chunks have completed no transfer that was not whole, as
        # asserted above
        return
    while wire or back or len(out.tracked):
        for step in (send, receive, take_credit):
            step()
    assert set(over) == set(sent)
    # the message by which the other side ends it is not simulated
    assert all(over[id] == "ended" for id in sent if id in into.tracked)
    assert out.pace.unacknowledged == 0
    assert len(out.tracked) == 0


def test_announced_bytes_count_until_transfer_ends() -> None:
    inbound = Transfers()
    inbound.receive(1, [10, 20])
    inbound.receive(2, [5])
    assert inbound.announced == 35
    inbound.arrived(2, 0, 0, 5)
    assert inbound.announced == 30
    inbound.arrived(1, 0, 3, 1)  # a gap
    assert inbound.announced == 0
    inbound.receive(3, [7])
    assert inbound.end(3)
    assert not inbound.end(3)
    assert inbound.announced == 0


def test_transfer_states() -> None:
    end = Transfers(fixed(WINDOW, CHUNK))
    arguments = end.send(1, [5, 0], ["handle"], held=True)
    assert arguments.state is TransferState.HELD
    assert end.sending
    assert pieces(end) == []
    end.ask(1)
    assert arguments.state is TransferState.SENDING
    assert pieces(end) == [Piece(1, 0, 0, 3), Piece(1, 0, 3, 2)]
    assert (arguments.state, end.sending) == (TransferState.LENT, False)
    assert end.receive(1, [4]) is arguments
    assert (arguments.state, end.announced) == (TransferState.RECEIVING, 4)
    assert end.arrived(1, 0, 0, 4) == DONE
    assert (arguments.state, end.announced) == (TransferState.LENT, 0)
    assert not end.end(1)
    assert arguments.state is TransferState.OVER
    assert not end.tracked


@pytest.mark.parametrize("held", [True, False], ids=["held back", "being sent"])
def test_parts_are_not_sent_after_reply(held: bool) -> None:
    end = Transfers(fixed(WINDOW, CHUNK))
    end.send(1, [50], held=held)
    end.receive(1, [4])
    end.ask(1)
    assert (pieces(end), end.sending) == ([], False)
    assert end.arrived(1, 0, 0, 4) == DONE
    assert not end.tracked


def test_unlisted_transition_is_internal_error() -> None:
    end = receiver(7, [4])
    with pytest.raises(InternalError, match="transfer 7 cannot go from RECEIVING to RECEIVING"):
        end.receive(7, [4])
