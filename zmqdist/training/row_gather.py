"""Rows of a table that is spread over several variables: which of them has which, asked at once and put together again.

Rules
    Only the variables that have some of the rows are asked, each for its own, all before the first is waited for.
    The answer has the rows in the order in which they were asked for, as often as they were.
    Whoever waits, waits for all: when an error is raised, nothing that was begun here is still on its way.

Not here: what a key of `variable[key]` selects (indexing.py), what is done with rows (sharded.py, embedding.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.futures import Gathered
from zmqdist.training.indexing import Rows
from zmqdist.transport.receive_buffers import memory_for


def start_read(variables: Sequence[Any]) -> Gathered:
    """Ask for all rows of all of them: their values, one after the other."""
    reads = (variable.start_read() for variable in variables)
    return Gathered(reads, lambda parts: _joined(parts, variables[0]))


def start_rows(variables: Sequence[Any], offsets: Sequence[int], rows: Rows) -> Gathered:
    """Ask for some rows.

    Args:
      variables: with as many axes as each other, and the same dtype and sizes beyond axis 0.
      offsets: variable i has the rows from offsets[i] up to offsets[i + 1].
      rows: numbers that are known to be in bounds.
    """
    like = variables[0]
    if isinstance(rows, range):
        return Gathered(
            (_start_range(variables[index], part) for index, part in split_range(offsets, rows)),
            lambda parts: _joined(parts, like),
        )
    split = list(split_rows(offsets, rows))

    def in_order(parts: list[NDArray[Any]]) -> NDArray[Any]:
        if len(parts) < 2:
            return _joined(parts, like)
        result = _allocate(len(rows), like)
        for part, (_, _, positions) in zip(parts, split, strict=True):
            result[positions] = part
        return result

    return Gathered((variables[index].start_rows(local) for index, local, _ in split), in_order)


def split_range(offsets: Sequence[int], rows: range) -> Iterator[tuple[int, range]]:
    """For each variable that has some of an ascending range: its number, and the rows as it counts them."""
    for index, (low, high) in enumerate(pairwise(offsets)):
        first = rows.start + max(0, -(-(low - rows.start) // rows.step)) * rows.step
        part = range(first - low, min(high, rows.stop) - low, rows.step)
        if part:
            yield index, part


def split_rows(
    offsets: Sequence[int], rows: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.intp]]]:
    """For each variable that has some of these rows: its number, the rows as it counts them, their places in `rows`, ascending."""
    owners = np.searchsorted(np.asarray(offsets), rows, side="right") - 1
    for owner in np.unique(owners).tolist():
        positions = np.flatnonzero(owners == owner)
        yield owner, rows[positions] - offsets[owner], positions


def _start_range(variable: Any, rows: range) -> Any:
    return variable.start_read() if rows == range(variable.shape[0]) else variable.start_rows(rows)


def _joined(parts: list[NDArray[Any]], like: Any) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    result = _allocate(sum(map(len, parts)), like)
    if parts:
        np.concatenate(parts, out=result)
    return result


def _allocate(rows: int, like: Any) -> NDArray[Any]:
    """Memory for rows, which is warm where such results were let go before: large variables are read again and again."""
    shape = (rows, *like.shape[1:])
    memory: NDArray[Any] = np.ndarray(shape, like.dtype, memory_for(math.prod(shape) * like.dtype.itemsize))
    return memory
