"""Schedules of collectives: which pieces of an array each member of a group sends to which members,
in which order. No I/O.

Rules
    A schedule is a generator that runs at one member. It yields Steps, and the caller passes the
    arrived pieces to its `send` method. A piece is an array that no member changes while it is in
    flight: a reduction (`fold`) returns a new array, and a member passes arrived pieces on
    unchanged.
    `pipelined` interleaves several schedules, so that some pieces are in flight while another piece
    is reduced. All members interleave the same schedules in the same way. So pieces from one member
    to another need no names: their order identifies them.

Theory of operation
    An all-reduce runs in a ring of n members. Each member sends 2 (n - 1) / n of the array, over
    one connection to its right neighbour. Chunk c of the array starts at rank c + 1, and each
    member on the way adds its own values: ((x[c+1] + x[c+2]) + ...) + x[c]. The reduced chunk
    arrives at rank c, and from there passes all members once more, unchanged. So every member has
    the same bits at the end, in whatever order pieces arrive. Arrays that are small enough to be
    reduced by one member are reduced in the order of the ranks (`folded`).

Not here: the agreement on an operation (agreement_machine.py), the transport of pieces
(collectives.py).
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
"""A function that combines an arrived piece with this member's chunk, and returns the piece to pass
on. The third argument says whether the reduction ends at this member.
"""
Keep: TypeAlias = Callable[[int, Array], object]
"""A function that is called with the rank of a piece of the result, and with the piece."""

OPS: Final = ("sum", "mean", "min", "max", "prod")
_FOLDS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}


# -- reducing --------------------------------------------------------------------------------------


def fold_of(op: str) -> np.ufunc:
    """Return NumPy's function for one of OPS. Raises InvalidArgumentError if there is no such
    op.
    """
    if op not in _FOLDS:
        raise InvalidArgumentError(f"no op {op!r}; there are {', '.join(OPS)}")
    return _FOLDS[op]


def reducible(array: Array, op: str) -> Array:
    """Return the array in the dtype in which it is reduced: float64 for the mean of whole numbers
    and bools, else its own dtype.

    A sum of int8 wraps round on overflow. A sum of bools is True if any of them is True, a product
    of bools if all of them are True.

    Raises:
      TypeError: the array has neither numbers nor bools.
    """
    if array.dtype.kind not in "biufc":
        raise TypeError(f"only numbers and bools can be reduced, not {array.dtype}")
    return array.astype(np.float64) if op == "mean" and array.dtype.kind in "biu" else array


def finished(total: Array, op: str, size: int) -> Array:
    """Return the result of a reduction from the total of all members' values. For a mean, this
    divides the array `total` in place."""
    if op == "mean":
        np.divide(total, size, out=total)
    return total


def folded(arrays: Sequence[Array], op: str) -> Array:
    """Return the reduction of the arrays, computed in their order, as a new array."""
    fold = fold_of(op)
    total = np.array(arrays[0])
    for array in arrays[1:]:
        fold(total, array, out=total)
    return finished(total, op, len(arrays))


def shares(count: int, size: int) -> list[slice]:
    """Split `count` items into `size` consecutive parts whose lengths differ by at most one. The
    longer parts are first."""
    rows, more = divmod(count, size)
    starts = [rank * rows + min(rank, more) for rank in range(size + 1)]
    return [slice(*pair) for pair in itertools.pairwise(starts)]


def packs(arrays: Sequence[Array | None], bytes_per_pack: int) -> list[list[int]]:
    """Group neighbouring arrays of one dtype into packs of about `bytes_per_pack` bytes. Return the
    indices of the arrays in each pack.

    Entries that are None are skipped. An array of `bytes_per_pack` bytes or more is reduced alone,
    so that it need not be copied.
    """
    groups: list[list[int]] = []
    left, dtype = 0, None
    for position, array in enumerate(arrays):
        if array is None:
            continue
        if groups and array.dtype == dtype and left > 0 and array.nbytes < bytes_per_pack:
            groups[-1].append(position)
            left -= array.nbytes
        else:
            groups.append([position])
            left, dtype = bytes_per_pack - array.nbytes, array.dtype
    return groups


# -- schedules -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """The next step of one member.

    Attributes:
      to: the rank to which the member sends `piece`, without waiting; None if it sends no piece.
      source: the rank from which the member then expects a piece; None if it expects no piece.
    """

    to: int | None
    piece: Any
    source: int | None


Schedule: TypeAlias = Generator[Step, Any, Any]


def reduce_ring(rank: int, size: int, chunks: Sequence[Array], fold: Fold) -> Schedule:
    """Reduce each chunk of all members' arrays. The generator at a member returns the reduced chunk
    of this member's rank. `chunks` are the chunks of this member's array, by rank.
    """
    piece = chunks[(rank - 1) % size]
    for step in range(1, size):
        arrived = yield Step((rank + 1) % size, piece, (rank - 1) % size)
        piece = fold(arrived, chunks[(rank - 1 - step) % size], step == size - 1)
    return piece


def gather_ring(rank: int, size: int, piece: Array, keep: Keep) -> Schedule:
    """Pass each member's piece around the ring to all members. `keep` is called with each piece
    that arrives."""
    for step in range(1, size):
        arrived = yield Step((rank + 1) % size, piece, (rank - 1) % size)
        keep((rank - step) % size, arrived)
        piece = arrived


def all_reduce_ring(
    rank: int, size: int, chunks: Sequence[Array], fold: Fold, keep: Keep
) -> Schedule:
    """Reduce all chunks, and pass the results to all members.

    The last result of `fold` is the reduced chunk of this member's rank. `keep` is called with the
    reduced chunks of the other ranks.
    """
    piece = yield from reduce_ring(rank, size, chunks, fold)
    yield from gather_ring(rank, size, piece, keep)


def broadcast_chain(rank: int, size: int, root: int, piece: Array | None, keep: Keep) -> Schedule:
    """Pass the root's piece to all members, along the chain of ranks."""
    position = (rank - root) % size
    if position:
        piece = yield Step(None, None, (rank - 1) % size)
        keep(root, piece)
    if position < size - 1:
        yield Step((rank + 1) % size, piece, None)


def gather_star(rank: int, size: int, root: int, piece: Array, keep: Keep) -> Schedule:
    """Send each member's piece to the root, where `keep` is called with each piece that arrives."""
    if rank != root:
        yield Step(root, piece, None)
        return
    for source in range(size):
        if source != root:
            keep(source, (yield Step(None, None, source)))


def exchange(rank: int, size: int, pieces: Sequence[Array], keep: Keep) -> Schedule:
    """Send piece i of each member to rank i. `keep` is called with each piece that arrives."""
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        keep(source, (yield Step(to, pieces[to], source)))


def pipelined(schedules: Iterator[Schedule], width: int) -> Schedule:
    """Interleave the steps of several schedules, of which `width` run at a time. Each Step that
    this generator yields either sends or receives.
    """
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
