"""The memory of a hosted variable's value.

Rules
    The value is changed in place, because its pages are mapped already and the update of a large
    value then needs no second array. Only a user's update function replaces the array. So a reader
    of the whole value sends or copies it before the reader releases the lock. When a large value is
    read repeatedly without a change, the Storage makes a frozen copy, which readers share without
    copying it again. A Storage has no lock. Its owner makes sure that only one thread at a time
    uses it.

Not here: versions, the meaning of updates, checks of their arguments (hosted_variable.py).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import SHM_DESCRIPTOR_BYTES_MIN
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
"""Sparse updates by name. A row that is named twice is updated twice, in order, so that "update"
sets it to the last value."""


FROZEN_FROM: Final = 3
"""Number of reads without a change after which a large value is frozen. It is above 1, because a
frozen copy needs new memory, which costs as much as a few copies into mapped memory.
"""


class Storage:
    """The value of one variable: an array in memory of its own.

    Attributes:
      value: the array. The Storage's owner may write to it, and then calls `changed`.
      shape, dtype, nbytes: attributes of the array, which never change.
      row_bytes: number of bytes of one row; a scalar is one row.
    """

    __slots__ = ("_frozen", "_marks", "_reads", "dtype", "nbytes", "row_bytes", "shape", "value")

    def __init__(self, value: Array) -> None:
        """Take ownership of `value`, which must be writable and contiguous, and to which no other
        code may refer."""
        self.shape = value.shape
        self.dtype = value.dtype
        self.nbytes = value.nbytes
        self.row_bytes = value.nbytes // max(1, value.shape[0]) if value.shape else value.nbytes
        self.value = value
        self._reads = 0
        self._frozen: Array | None = None
        self._marks: NDArray[np.int32] | None = None

    def read(self) -> Array:
        """Return the current value, or a frozen copy of it. The caller sends or copies the array
        before the next change. Sending a frozen copy needs no further copy.
        """
        if self._frozen is not None:
            return self._frozen
        if self.nbytes >= SHM_DESCRIPTOR_BYTES_MIN:
            self._reads += 1
            if self._reads >= FROZEN_FROM:
                self._frozen = freeze(self.value)
                return self._frozen
        return self.value

    def changed(self) -> None:
        """Record that the value is about to change or has changed, so the frozen copy is no longer
        valid."""
        self._reads = 0
        self._frozen = None

    def assign(self, value: Array) -> None:
        """Copy another array into the value. If that array is frozen, readers get it as the frozen
        copy."""
        np.copyto(self.value, value)
        self.changed()
        if (
            self.nbytes >= SHM_DESCRIPTOR_BYTES_MIN
            and is_frozen(value)
            and value.flags.c_contiguous
        ):
            self._frozen = value

    def gather(self, indices: Array) -> Array:
        """Return the rows of the value at `indices` as a new array."""
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        # With mode "clip" NumPy needs no buffer. No index is clipped, because all indices are in
        # bounds.
        np.take(self.value, indices, axis=0, out=out, mode="clip")
        return out

    def run(self, rows: range) -> Array:
        """Return an ascending range of rows of the value as a new array."""
        found: Array = self.value[rows.start : rows.stop : rows.step].copy()
        return found

    def scatter(self, op: str, indices: Array, rows: Array) -> None:
        """Apply a sparse update. `indices` are in bounds, and `rows` has the dtype of the value and
        the shape of its rows at `indices`."""
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
        """Return indices and rows for an equivalent "add" update with unique indices: the rows of a
        repeated index are added up."""
        owners, unique = self._owned(indices)
        if unique:
            return indices, rows
        is_owner = owners == np.arange(len(indices), dtype=np.int32)
        total = rows.copy()
        np.add.at(total, owners[~is_owner], rows[~is_owner])
        return indices[is_owner], total[is_owner]

    def _owned(self, indices: Array) -> tuple[Array, bool]:
        """Return, for each entry of `indices`, the position of the last entry with the same index,
        and whether all indices are unique.

        The method writes each position into a mark for the row, and reads the marks back. Old marks
        need not be cleared, because only marks that were just written are read.
        """
        if self._marks is None:
            self._marks = np.empty(self.shape[0], np.int32)
        places = np.arange(len(indices), dtype=np.int32)
        self._marks[indices] = places
        owners = self._marks[indices]
        return owners, bool((owners == places).all())


def mean_of(total: Array, count: int, out: Array | None = None) -> Array:
    """Return `total` divided by `count`, in the dtype of `total`. Quotients of integers are rounded
    towards zero, as in TensorFlow."""
    out = total.copy() if out is None else out
    if out is not total:
        np.copyto(out, total)
    _into(np.divide, out, np.asarray(count, total.dtype))
    return out


def _into(ufunc: Any, target: Array, rows: Array) -> None:
    """Compute target = ufunc(target, rows) in place. Quotients of integers are rounded towards
    zero, as in TensorFlow."""
    if ufunc is np.divide and target.dtype.kind in "iu":
        # divide as integers, because floats cannot hold all 64-bit integers
        quotient = np.floor_divide(target, rows)
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
