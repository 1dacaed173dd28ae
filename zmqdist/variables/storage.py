"""The memory of a hosted value.

Rules
    It is written in place, always: its pages are warm, and an update of a large value needs no second one. So whoever reads it whole
    sends or copies it before the lock is let go.
    A large value that is read again and again without a change gets a frozen copy, which costs its readers nothing.
    One thread at a time: the owner has a lock.

Not here: versions, what updates mean, whether their arguments are right (hosted_variable.py).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import ARENA_DESCRIPTOR_BYTES_MIN
from zmqdist.transport.arrays import freeze
from zmqdist.wire.arrays import is_frozen

Array = NDArray[Any]

SCATTERS: Final = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "update": None,
}
"""Sparse updates by name. A row that is named twice is updated twice, in order; the last one wins for "update"."""


FROZEN_FROM: Final = 3
"""The read without a change before it that freezes a large value: new memory costs as much as some copies into warm memory."""


class Storage:
    """One array in memory of its own.

    Attributes:
      value: the array, for the owner; `changed` is called after writing to it.
      shape, dtype, nbytes: of the array; they never change.
      row_bytes: of one row; of the whole for a scalar.
    """

    __slots__ = ("_frozen", "_marks", "_reads", "dtype", "nbytes", "row_bytes", "shape", "value")

    def __init__(self, value: Array) -> None:
        """Args: value: writable, contiguous, and nobody else has it."""
        self.shape = value.shape
        self.dtype = value.dtype
        self.nbytes = value.nbytes
        self.row_bytes = value.nbytes // max(1, value.shape[0]) if value.shape else value.nbytes
        self.value = value
        self._reads = 0
        self._frozen: Array | None = None
        self._marks: NDArray[np.int32] | None = None

    def read(self) -> Array:
        """The present value, to be sent or copied before anything is written. It may be frozen, and sending it cost nothing."""
        if self._frozen is not None:
            return self._frozen
        if self.nbytes >= ARENA_DESCRIPTOR_BYTES_MIN:
            self._reads += 1
            if self._reads >= FROZEN_FROM:
                self._frozen = freeze(self.value)
                return self._frozen
        return self.value

    def changed(self) -> None:
        """The value is about to be written to, or was."""
        self._reads = 0
        self._frozen = None

    def assign(self, value: Array) -> None:
        """A copy of another array. A frozen one is also what is read from now on."""
        np.copyto(self.value, value)
        self.changed()
        if self.nbytes >= ARENA_DESCRIPTOR_BYTES_MIN and is_frozen(value) and value.flags.c_contiguous:
            self._frozen = value

    def gather(self, indices: Array) -> Array:
        """Rows, in an array that the caller has alone."""
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        np.take(self.value, indices, axis=0, out=out, mode="clip")  # they are known to fit: so "clip" needs no buffer
        return out

    def run(self, rows: range) -> Array:
        """Rows that ascend, in an array that the caller has alone."""
        found: Array = self.value[rows.start : rows.stop : rows.step].copy()
        return found

    def scatter(self, op: str, indices: Array, rows: Array) -> None:
        """Update some rows; indices are right, and `rows` has the dtype and shape that belong to them."""
        self.changed()
        target = self.value
        ufunc = SCATTERS[op]
        if ufunc is None:
            target[indices] = rows
            return
        if op in ("add", "sub"):
            indices, rows = self.summed(indices, rows)
        elif not self._owned(indices)[1]:
            _at_each(ufunc, target, indices, rows)
            return
        touched = target[indices]
        _into(ufunc, touched, rows)
        target[indices] = touched

    def summed(self, indices: Array, rows: Array) -> tuple[Array, Array]:
        """The same update with each row named once: what belongs to the same one is added up."""
        owners, unique = self._owned(indices)
        if unique:
            return indices, rows
        is_owner = owners == np.arange(len(indices), dtype=np.int32)
        total = rows.copy()
        np.add.at(total, owners[~is_owner], rows[~is_owner])
        return indices[is_owner], total[is_owner]

    def _owned(self, indices: Array) -> tuple[Array, bool]:
        """For each index the last place in `indices` with the same one, and whether each has its own place.

        By marks at the rows, which need not be cleared: only those that were just written are read.
        """
        if self._marks is None:
            self._marks = np.empty(self.shape[0], np.int32)
        places = np.arange(len(indices), dtype=np.int32)
        self._marks[indices] = places
        owners = self._marks[indices]
        return owners, bool((owners == places).all())


def mean_of(total: Array, count: int, out: Array | None = None) -> Array:
    """A sum divided by how many it is of, in its own dtype: of whole numbers towards zero, as TensorFlow's mean of them is."""
    out = total.copy() if out is None else out
    if out is not total:
        np.copyto(out, total)
    _into(np.divide, out, np.asarray(count, total.dtype))
    return out


def _into(ufunc: Any, target: Array, rows: Array) -> None:
    """target = ufunc(target, rows); whole numbers are divided towards zero, as they are in TensorFlow."""
    if ufunc is np.divide and target.dtype.kind in "iu":
        quotient = np.floor_divide(target, rows)  # not by floats, which have no room for 64 bits
        quotient += ((target < 0) != (rows < 0)) & (quotient * rows != target)
        np.copyto(target, quotient)
    else:
        ufunc(target, rows, out=target)


def _at_each(ufunc: Any, target: Array, indices: Array, rows: Array) -> None:
    if ufunc is np.divide and target.dtype.kind in "iu":
        for index, row in zip(indices, rows, strict=True):
            _into(ufunc, target[index : index + 1], row)
    else:
        ufunc.at(target, indices, rows)
