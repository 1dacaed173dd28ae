"""Schedules of collectives against a simple reference; the pieces of different members arrive in
any order."""

# ruff: noqa: B023 (the functions that are made in loops are used up in the same turn)

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks import ring_schedules
from zmqdist.tasks.collectives_machine import OPS, Schedule

Array = NDArray[Any]
REDUCED = ["float16", "float32", "float64", "int32", "int64", "bool", "complex64", "complex128"]
REDUCED += ["uint8", "int8", "uint16", "int16", "uint32", "uint64"]


class Stuck(AssertionError):
    """No member can continue, and not all have ended."""


def run(schedules: list[Schedule], chance: random.Random, lose: int = -1) -> None:
    """Run all members, one step of a random member at a time.

    Pieces between two members keep their order. From the `lose`-th piece on, no piece of its sender
    arrives.
    """
    lanes: dict[tuple[int, int], deque[Array]] = {}
    waiting: dict[int, int | None] = {}
    running = dict(enumerate(schedules))
    sent, dead = 0, -1
    while running:
        ready = [
            rank
            for rank in running
            if waiting.get(rank) is None or lanes.get((waiting[rank] or 0, rank))
        ]
        if not ready:
            raise Stuck(f"members {sorted(running)} wait for pieces that nobody sends")
        rank = chance.choice(ready)
        source = waiting.get(rank)
        arrived = None if source is None else lanes[source, rank].popleft()
        try:
            step = running[rank].send(arrived)
        except StopIteration:
            del running[rank]
            continue
        waiting[rank] = step.source
        if step.to is not None:
            dead = rank if sent == lose else dead
            if rank != dead:
                piece = step.piece.copy()
                piece.flags.writeable = False  # no member may change a piece that has arrived
                lanes.setdefault((rank, step.to), deque()).append(piece)
            sent += 1
    assert not any(lanes.values()), "pieces that no member has received"


def all_ranks(
    size: int, make: Callable[[int], Iterator[Schedule]], chance: random.Random, lose: int = -1
) -> None:
    width = chance.randint(1, 4)
    run([core.pipelined(make(rank), width) for rank in range(size)], chance, lose)


def values(chance: random.Random, dtype: str, shape: tuple[int, ...]) -> Array:
    numbers = np.random.default_rng(chance.randrange(2**32))
    found = numbers.integers(0, 2 if dtype == "bool" else 5, shape)
    return np.asarray(
        found + 1j * numbers.integers(0, 5, shape) if dtype.startswith("complex") else found
    ).astype(dtype)


def reference(arrays: list[Array], op: str) -> Array:
    """Reduce the values of one member after the other, in float64 if the result has this dtype."""
    if op == "mean":
        kind = arrays[0].dtype.kind
        dtype = np.float64 if kind in "biu" else arrays[0].dtype
        return np.asarray(sum(array.astype(dtype) for array in arrays) / len(arrays)).astype(dtype)
    total = arrays[0].copy()
    for array in arrays[1:]:
        pairs = {
            "sum": total + array,
            "prod": total * array,
            "min": np.minimum(total, array),
            "max": np.maximum(total, array),
        }
        total = np.asarray(pairs[op])
    return total


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_schedules, "COLLECTIVE_PIECE_BYTES", 24)


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce_has_equal_bits_everywhere(op: str, dtype: str) -> None:
    chance = random.Random(f"{op} {dtype}")
    for size in range(1, 10):
        length = chance.choice([0, 1, size - 1, size, 3 * size + 2, 50])
        arrays = [core.reducible(values(chance, dtype, (length,)), op) for _ in range(size)]
        outs = [array.copy() for array in arrays]
        if size > 1:
            all_ranks(
                size,
                lambda rank: ring_schedules.all_reduce(rank, size, arrays[rank], outs[rank], op),
                chance,
            )
        else:
            outs = [core.folded(arrays, op)]
        wanted = reference(arrays, op)
        for out in outs:
            assert (out.dtype, out.tobytes()) == (wanted.dtype, outs[0].tobytes())
            np.testing.assert_allclose(out, wanted, rtol=1e-2 if dtype == "float16" else 1e-5)
        small = core.folded(arrays, op)
        assert (small.dtype, small.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(small, wanted, rtol=1e-2 if dtype == "float16" else 1e-5)


def test_order_of_arrival_changes_no_bit() -> None:
    numbers = np.random.default_rng(1)
    arrays = [numbers.standard_normal(101).astype(np.float32) * 10.0**rank for rank in range(5)]
    seen = set()
    for seed in range(30):
        outs = [array.copy() for array in arrays]
        all_ranks(
            5,
            lambda rank: ring_schedules.all_reduce(rank, 5, arrays[rank], outs[rank], "sum"),
            random.Random(seed),
        )
        seen |= {out.tobytes() for out in outs}
    assert len(seen) == 1


@pytest.mark.parametrize("size", range(2, 10))
def test_collectives_agree_with_reference(size: int) -> None:
    for seed in range(20):
        chance = random.Random(100 * size + seed)
        rows = chance.choice([0, 1, size, 3 * size + 1])
        inputs = [values(chance, "float64", (rows, 3)) for _ in range(size)]
        parts = core.shares(rows, size)
        outs = [np.empty((part.stop - part.start, 3)) for part in parts]
        all_ranks(
            size,
            lambda rank: ring_schedules.reduce_scatter(
                rank,
                size,
                [inputs[rank][part].ravel() for part in parts],
                outs[rank].reshape(-1),
                "mean",
            ),
            chance,
        )
        np.testing.assert_allclose(np.concatenate(outs), reference(inputs, "mean"))

        lengths = [chance.choice([0, 1, 7, 20]) for _ in range(size)]
        own = [values(chance, "int32", (length,)) for length in lengths]
        got = [
            [own[r].copy() if r == rank else np.empty(lengths[r], "int32") for r in range(size)]
            for rank in range(size)
        ]
        all_ranks(size, lambda rank: ring_schedules.all_gather(rank, size, got[rank]), chance)
        for each in got:
            np.testing.assert_array_equal(np.concatenate(each), np.concatenate(own))

        root = chance.randrange(size)
        got = [
            [own[r].copy() if r == rank else np.empty(lengths[r], "int32") for r in range(size)]
            for rank in range(size)
        ]
        all_ranks(size, lambda rank: ring_schedules.gather(rank, size, root, got[rank]), chance)
        np.testing.assert_array_equal(np.concatenate(got[root]), np.concatenate(own))

        flats = [
            own[root].copy() if rank == root else np.empty_like(own[root]) for rank in range(size)
        ]
        all_ranks(
            size, lambda rank: ring_schedules.broadcast(rank, size, root, flats[rank]), chance
        )
        assert all(np.array_equal(flat, own[root]) for flat in flats)

        squares = [values(chance, "int64", (size, 5)) for _ in range(size)]
        crossed = [np.empty_like(square) for square in squares]
        all_ranks(
            size,
            lambda rank: ring_schedules.all_to_all(
                rank, size, list(squares[rank]), list(crossed[rank])
            ),
            chance,
        )
        for rank in range(size):
            np.testing.assert_array_equal(crossed[rank], [square[rank] for square in squares])


def test_lost_piece_is_noticed() -> None:
    """The watch and the time-outs of the runtime then end the operation: no member uses another
    piece in place of the lost one."""
    for seed in range(40):
        chance = random.Random(seed)
        size = chance.randint(2, 5)
        arrays = [values(chance, "int64", (60,)) for _ in range(size)]
        outs = [array.copy() for array in arrays]
        with pytest.raises(Stuck):
            all_ranks(
                size,
                lambda rank: ring_schedules.all_reduce(rank, size, arrays[rank], outs[rank], "sum"),
                chance,
                lose=seed % 8,
            )


def test_shares_differ_by_one_at_most() -> None:
    for count in range(30):
        for size in range(1, 10):
            parts = [part.stop - part.start for part in core.shares(count, size)]
            assert sum(parts) == count
            assert max(parts) - min(parts) <= 1
            assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize("bytes_per_pack", [1, 4, 64, 10**6])
def test_packs_keep_order_and_dtypes(bytes_per_pack: int) -> None:
    arrays = [
        np.zeros(3),
        np.zeros(3),
        None,
        np.zeros(2, "int8"),
        np.zeros(100),
        np.zeros(1),
        np.zeros(()),
    ]
    made = core.packs(arrays, bytes_per_pack)
    assert [place for pack in made for place in pack] == [0, 1, 3, 4, 5, 6]
    assert all(len({arrays[place].dtype for place in pack}) == 1 for pack in made)  # type: ignore[union-attr]
    assert ([0, 1] in made) == (bytes_per_pack >= 64)


def test_irreducible_values_are_named() -> None:
    with pytest.raises(TypeError, match="numbers and bools can be reduced, not <U1"):
        core.reducible(np.array(["a"]), "sum")
    with pytest.raises(InvalidArgumentError, match="there are sum, mean"):
        core.fold_of("median")


# -- planted bugs ----------------------------------------------------------------------------------


def _reduce_in_the_wrong_order(rank: int, size: int, chunks: Any, fold: Any) -> Schedule:
    piece = chunks[(rank - 1) % size]
    for step in range(1, size):
        arrived = yield core.Step((rank + 1) % size, piece, (rank - 1) % size)
        piece = fold(arrived, chunks[(rank - step) % size], step == size - 1)
    return piece


def _gather_what_is_its_own(rank: int, size: int, piece: Array, keep: Any) -> Schedule:
    for step in range(1, size):
        keep((rank - step) % size, (yield core.Step((rank + 1) % size, piece, (rank - 1) % size)))


def _gather_a_step_too_few(rank: int, size: int, piece: Array, keep: Any) -> Schedule:
    for step in range(1, max(2, size - 1)):
        piece = yield core.Step((rank + 1) % size, piece, (rank - 1) % size)
        keep((rank - step) % size, piece)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("reduce_ring", _reduce_in_the_wrong_order),
        ("gather_ring", _gather_what_is_its_own),
        ("gather_ring", _gather_a_step_too_few),
    ],
)
def test_planted_bugs_are_found(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, name, bug)
    with pytest.raises((AssertionError, ValueError)):
        test_all_reduce_has_equal_bits_everywhere("sum", "float64")
