"""How a group of tasks reduces, gathers and spreads arrays: what each member sends to whom, in which order. No I/O.

Rules
    A schedule is a generator that runs on one member: it yields Steps and is given what has arrived. A piece is an array that nobody
    changes while it is on its way: results of `fold` are new, and what has arrived is sent on as it is.
    `pipelined` runs several schedules by turns, so that while one piece is reduced others are on the way. All members run the same
    schedules in the same turns: so pieces from one member to another need no names, their order says what they are.

Theory of operation
    A ring moves 2 (n - 1) / n of the array for each member and uses one connection from each to its right neighbour, whatever n is. Chunk
    c of the array starts at rank c + 1 and is folded by each member on its way: ((x[c+1] + x[c+2]) + ...) + x[c]. It arrives at rank c, and
    from there goes round once more as it is. So every member ends with the same bits, whatever came first. What is small enough to be
    reduced at one place is folded in the order of the ranks (`folded`).

Not here: who agrees on what is done (rounds.py), how pieces travel (collectives.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError

Array: TypeAlias = NDArray[Any]
Fold: TypeAlias = Callable[[Array, Array, bool], Array]
"""(what has arrived, the own chunk, whether this is the end of the reduction) -> what goes on."""
Keep: TypeAlias = Callable[[int, Array], object]
"""Told of a piece that belongs to the result, and of whose rank it is."""

OPS: Final = ("sum", "mean", "min", "max", "prod")
_FOLDS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}


# -- reducing ---------------------------------------------------------------------------------------------------------


def fold_of(op: str) -> np.ufunc:
    """The function of two arrays for one of OPS. Raises InvalidArgumentError: none of them."""
    if op not in _FOLDS:
        raise InvalidArgumentError(f"op {op!r}: there are {', '.join(OPS)}")
    return _FOLDS[op]


def reducible(array: Array, op: str) -> Array:
    """The array as it goes into the reduction: numbers and bools; for the mean of whole numbers and bools as float64.

    The dtype stays otherwise: a sum of int8 wraps round, of bools it is "any", their product "all".

    Raises:
      TypeError: neither numbers nor bools.
    """
    if array.dtype.kind not in "biufc":
        raise TypeError(f"numbers and bools are reduced, not {array.dtype}")
    return array.astype(np.float64) if op == "mean" and array.dtype.kind in "biu" else array


def finished(total: Array, op: str, size: int) -> Array:
    """What the members get of the folded value; changes `total` where that is a mean."""
    if op == "mean":
        np.divide(total, size, out=total)
    return total


def folded(arrays: Sequence[Array], op: str) -> Array:
    """All of them reduced in this order, as a new array."""
    fold = fold_of(op)
    total = np.array(arrays[0])
    for array in arrays[1:]:
        fold(total, array, out=total)
    return finished(total, op, len(arrays))


def shares(count: int, size: int) -> list[slice]:
    """`count` items in `size` parts one after the other that differ by one item at most, the larger ones first."""
    each, more = divmod(count, size)
    starts = [rank * each + min(rank, more) for rank in range(size + 1)]
    return [slice(*pair) for pair in itertools.pairwise(starts)]


def packs(arrays: Sequence[Array | None], bytes_per_pack: int) -> list[list[int]]:
    """Places of arrays that are reduced together: neighbours of one dtype, until they have so many bytes. Places of None are left out.

    What has so many by itself stays alone, so that it need not be copied.
    """
    made: list[list[int]] = []
    left, dtype = 0, None
    for place, array in enumerate(arrays):
        if array is None:
            continue
        if made and array.dtype == dtype and left > 0 and array.nbytes < bytes_per_pack:
            made[-1].append(place)
            left -= array.nbytes
        else:
            made.append([place])
            left, dtype = bytes_per_pack - array.nbytes, array.dtype
    return made


# -- schedules --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What one member does next.

    Attributes:
      to: the rank that `piece` is sent to, without waiting; None for nobody.
      source: the rank that a piece is then expected from; None for nobody.
    """

    to: int | None
    piece: Any
    source: int | None


Schedule: TypeAlias = Generator[Step, Any, Any]


def reduce_ring(rank: int, size: int, chunks: Sequence[Array], fold: Fold) -> Schedule:
    """Chunk `rank` of all members reduced; a generator's return value. `chunks` are the own ones of all ranks."""
    piece = chunks[(rank - 1) % size]
    for step in range(1, size):
        arrived = yield Step((rank + 1) % size, piece, (rank - 1) % size)
        piece = fold(arrived, chunks[(rank - 1 - step) % size], step == size - 1)
    return piece


def gather_ring(rank: int, size: int, piece: Array, keep: Keep) -> Schedule:
    """Everybody's piece at everybody; the own one is not kept here."""
    for step in range(1, size):
        arrived = yield Step((rank + 1) % size, piece, (rank - 1) % size)
        keep((rank - step) % size, arrived)
        piece = arrived


def all_reduce_ring(rank: int, size: int, chunks: Sequence[Array], fold: Fold, keep: Keep) -> Schedule:
    """All chunks reduced at everybody; `fold` sees to the own one when the reduction ends."""
    piece = yield from reduce_ring(rank, size, chunks, fold)
    yield from gather_ring(rank, size, piece, keep)


def broadcast_chain(rank: int, size: int, root: int, piece: Array | None, keep: Keep) -> Schedule:
    """The root's piece at everybody, handed on from each to the next rank."""
    place = (rank - root) % size
    if place:
        piece = yield Step(None, None, (rank - 1) % size)
        keep(root, piece)
    if place < size - 1:
        yield Step((rank + 1) % size, piece, None)


def gather_star(rank: int, size: int, root: int, piece: Array, keep: Keep) -> Schedule:
    """Everybody's piece at the root; its own is not kept here."""
    if rank != root:
        yield Step(root, piece, None)
        return
    for source in range(size):
        if source != root:
            keep(source, (yield Step(None, None, source)))


def exchange(rank: int, size: int, pieces: Sequence[Array], keep: Keep) -> Schedule:
    """Piece i of everybody at rank i; the own one is not kept here."""
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        keep(source, (yield Step(to, pieces[to], source)))


def pipelined(schedules: Iterator[Schedule], width: int) -> Schedule:
    """Steps of several schedules by turns, `width` of them at a time: Steps that either send or receive."""
    running: deque[tuple[Schedule, int | None]] = deque()

    def ahead(schedule: Schedule, arrived: Any) -> Schedule:
        try:
            step = schedule.send(arrived)
        except StopIteration:
            return
        running.append((schedule, step.source))
        if step.to is not None:
            yield Step(step.to, step.piece, None)

    while True:
        while len(running) < width and (schedule := next(schedules, None)) is not None:
            yield from ahead(schedule, None)
        if not running:
            return
        schedule, source = running.popleft()
        arrived = None if source is None else (yield Step(None, None, source))
        yield from ahead(schedule, arrived)
