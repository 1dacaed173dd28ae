"""Schedules for arrays that are too large for one member to reduce. They cut arrays into pieces,
and write results to given arrays.

Each function yields one schedule for each piece. All members cut their arrays in the same way. When
the schedules have ended, the result is complete, and includes this member's own values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import CHUNK_BYTES, COLLECTIVE_PIECE_BYTES
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks.collectives_machine import Schedule
from zmqdist.transport.shm_pool import this_pool

Array: TypeAlias = NDArray[Any]


def _cuts(parts: Sequence[Array]) -> Iterator[slice]:
    """Return slices that cut the largest part into pieces. For smaller parts, some of these slices
    are shorter or empty."""
    count = max(len(part) for part in parts)
    step = max(1, COLLECTIVE_PIECE_BYTES // max(1, parts[0].itemsize))
    return (slice(start, start + step) for start in range(0, count, step))


def _room(like: Array) -> Array:
    """Return an uninitialized array with the length and dtype of `like`. It is in shared memory, if
    there is room, so that it can be lent without a copy.
    """
    pool = this_pool() if like.nbytes > CHUNK_BYTES else None
    block = None if pool is None else pool.allocate(like.nbytes)
    return np.empty_like(like) if block is None else block.array().view(like.dtype)


def _into(parts: Sequence[Array], cut: slice) -> core.Keep:
    """Return a function that writes each piece that it gets into the part of the piece's rank."""

    def keep(source: int, arrived: Array) -> None:
        parts[source][cut] = arrived

    return keep


def all_reduce(rank: int, size: int, flat: Array, out: Array, op: str) -> Iterator[Schedule]:
    """Reduce the arrays `flat` of all members into `out`."""
    own, result = ([whole[part] for part in core.shares(len(flat), size)] for whole in (flat, out))
    ufunc = core.fold_of(op)
    for cut in _cuts(own):

        def fold(arrived: Array, chunk: Array, last: bool, cut: slice = cut) -> Array:
            piece: Array = ufunc(arrived, chunk, out=_room(chunk))
            if last:
                result[rank][cut] = core.finished(piece, op, size)
            return piece

        yield core.all_reduce_ring(
            rank, size, [chunk[cut] for chunk in own], fold, _into(result, cut)
        )


def reduce_scatter(
    rank: int, size: int, parts: Sequence[Array], out: Array, op: str
) -> Iterator[Schedule]:
    """Reduce part `rank` of all members' arrays into `out`."""
    ufunc = core.fold_of(op)
    for cut in _cuts(parts):

        def fold(arrived: Array, chunk: Array, last: bool, cut: slice = cut) -> Array:
            piece: Array = ufunc(arrived, chunk, out=out[cut] if last else _room(chunk))
            return core.finished(piece, op, size) if last else piece

        yield core.reduce_ring(rank, size, [part[cut] for part in parts], fold)


def all_gather(rank: int, size: int, parts: Sequence[Array]) -> Iterator[Schedule]:
    """Copy each member's own part to all members: the part of rank i becomes part i everywhere."""
    for cut in _cuts(parts):
        yield core.gather_ring(rank, size, parts[rank][cut], _into(parts, cut))


def gather(rank: int, size: int, root: int, parts: Sequence[Array]) -> Iterator[Schedule]:
    """Copy each member's own part to the root: the part of rank i becomes part i there. The other
    members need only their own part."""
    for cut in _cuts(parts):
        yield core.gather_star(rank, size, root, parts[rank][cut], _into(parts, cut))


def broadcast(rank: int, size: int, root: int, flat: Array) -> Iterator[Schedule]:
    """Copy the root's array into the array of every other member."""
    for cut in _cuts([flat]):

        def keep(source: int, arrived: Array, cut: slice = cut) -> None:
            flat[cut] = arrived

        yield core.broadcast_chain(rank, size, root, flat[cut], keep)


def all_to_all(
    rank: int, size: int, parts: Sequence[Array], out: Sequence[Array]
) -> Iterator[Schedule]:
    """Send part i to rank i, for all i. The part that arrives from rank i becomes part i of
    `out`.
    """
    np.copyto(out[rank], parts[rank])
    for cut in _cuts(parts):
        yield core.exchange(rank, size, [part[cut] for part in parts], _into(out, cut))
