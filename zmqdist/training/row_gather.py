"""Reads rows of a table that is spread over several variables. The functions request rows from the
variables that hold them, and combine the replies.

Rules
    A request is sent only to variables that hold some of the rows, and asks for these rows only.
    All requests are sent before the first reply is awaited.
    The result has the rows in the requested order. A row that is requested twice occurs twice.
    The returned future waits for all replies, so that no request of the operation is in flight when
    an error is raised.

Not here: which rows a key of `variable[key]` selects (indexing.py), the operations that need the
rows (sharded.py, embedding.py).
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
from zmqdist.transport.shm_pool import memory_for


def start_read(variables: Sequence[Any]) -> Gathered:
    """Request all rows of all variables. Return a future of the rows, concatenated."""
    reads = (variable.start_read() for variable in variables)
    return Gathered(reads, lambda parts: _joined(parts, variables[0]))


def start_rows(variables: Sequence[Any], offsets: Sequence[int], rows: Rows) -> Gathered:
    """Request some rows of a table. Return a future of an array of these rows.

    Args:
      variables: the variables of the table. They have one dtype, and one shape except for axis 0.
      offsets: variable i has the rows from offsets[i] up to offsets[i + 1].
      rows: the numbers of the rows, which must be in bounds.
    """
    like = variables[0]
    if isinstance(rows, range):
        return Gathered(
            (
                variables[index].start_read()
                if part == range(variables[index].shape[0])
                else variables[index].start_rows(part)
                for index, part in split_range(offsets, rows)
            ),
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
    """Yield (index, rows) for each variable that holds some rows of an ascending range. The yielded
    rows are counted from the variable's first row."""
    for index, (low, high) in enumerate(pairwise(offsets)):
        first = rows.start + max(0, -(-(low - rows.start) // rows.step)) * rows.step
        part = range(first - low, min(high, rows.stop) - low, rows.step)
        if part:
            yield index, part


def split_rows(
    offsets: Sequence[int], rows: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.intp]]]:
    """Yield (index, rows, positions) for each variable that holds some of the rows. The yielded
    rows are counted from the variable's first row. `positions` are the positions of these rows in
    the argument `rows`, ascending."""
    owners = np.searchsorted(np.asarray(offsets), rows, side="right") - 1
    for owner in np.bincount(owners).nonzero()[0].tolist():
        positions = np.flatnonzero(owners == owner)
        yield owner, rows[positions] - offsets[owner], positions


def _joined(parts: list[NDArray[Any]], like: Any) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    result = _allocate(sum(map(len, parts)), like)
    if parts:
        np.concatenate(parts, out=result)
    return result


def _allocate(rows: int, like: Any) -> NDArray[Any]:
    """Return an uninitialized array for rows. `memory_for` reuses memory of earlier results,
    because large variables are read repeatedly and the first use of a new page is slow.
    """
    shape = (rows, *like.shape[1:])
    memory: NDArray[Any] = np.ndarray(
        shape, like.dtype, memory_for(math.prod(shape) * like.dtype.itemsize)
    )
    return memory
