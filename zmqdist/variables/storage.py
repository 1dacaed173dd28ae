"""The memory of a hosted array: who reads it keeps what was read, whatever is written afterwards.

Rules
    What `read` gave out is never written again. So a dense update goes into other memory when somebody may have read the present one, and a
    sparse one begins with a copy; both write in place when nobody has.
    Large values are read as frozen memory: the reader's process maps it, and no byte is copied however large it is.
    One thread at a time: the owner has a lock.

Not here: versions, what updates mean, whether their arguments are right (hosted.py).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import ARENA_DESCRIPTOR_BYTES_MIN
from zmqdist.net.arrays import empty, freeze
from zmqdist.optimizers import summed_rows
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


class Storage:
    """One array in memory of its own.

    Attributes:
      shape, dtype, nbytes: of the array; they never change.
      row_bytes: of one row; of the whole for a scalar.
    """

    __slots__ = ("_marks", "_read", "_value", "dtype", "nbytes", "row_bytes", "shape")

    def __init__(self, value: Array) -> None:
        """Args: value: nobody else has it, or it is frozen."""
        self.shape = value.shape
        self.dtype = value.dtype
        self.nbytes = value.nbytes
        self.row_bytes = value.nbytes // max(1, value.shape[0]) if value.shape else value.nbytes
        self._value = value
        self._read = is_frozen(value)
        self._marks: NDArray[np.int32] | None = None

    @property
    def value(self) -> Array:
        """The present value, for the owner, who does not write to it."""
        return self._value

    def read(self) -> Array:
        """The present value, for anybody and for ever."""
        self._read = True
        if self.nbytes >= ARENA_DESCRIPTOR_BYTES_MIN:
            self._value = freeze(self._value)
        return self._value

    def other(self) -> Array:
        """Where the next value may be computed: the present memory if nobody has read it, else other memory."""
        return self._fresh() if self._read else self._value

    def put(self, value: Array) -> None:
        """Have a value that nobody else has (`other` gave it), or that is frozen."""
        self._value = value
        self._read = is_frozen(value)

    def writable(self) -> Array:
        """The present value in memory that may be written to: copied if somebody has read it."""
        if self._read:
            copy = self._fresh()
            np.copyto(copy, self._value)
            self.put(copy)
        return self._value

    def assign(self, value: Array) -> None:
        """A copy of another array; a frozen one is taken as it is."""
        if is_frozen(value) and value.flags.c_contiguous:
            self.put(value)
            return
        target = self.other()
        np.copyto(target, value)
        self.put(target)

    def gather(self, indices: Array) -> Array:
        """Rows, in an array that the caller has alone."""
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        np.take(self._value, indices, axis=0, out=out, mode="clip")  # they are known to fit: so "clip" needs no buffer
        return out

    def scatter(self, op: str, indices: Array, rows: Array) -> None:
        """Update some rows; indices are right, and `rows` has the dtype and shape that belong to them."""
        target = self.writable()
        ufunc = SCATTERS[op]
        if ufunc is None:
            target[indices] = rows
            return
        if not self.unique(indices):
            if op not in ("add", "sub"):
                _at_each(ufunc, target, indices, rows)
                return
            indices, rows = summed_rows(indices, rows)
        touched = target[indices]
        _into(ufunc, touched, rows)
        target[indices] = touched

    def unique(self, indices: Array) -> bool:
        """Whether no row is named twice. One pass, by marks that need not be cleared: each index must find its own one again."""
        if len(indices) < 2:
            return True
        if self._marks is None:
            self._marks = np.empty(self.shape[0], np.int32)
        numbers = np.arange(len(indices), dtype=np.int32)
        self._marks[indices] = numbers
        return bool((self._marks[indices] == numbers).all())

    def _fresh(self) -> Array:
        return empty(self.shape, self.dtype)


def _into(ufunc: Any, target: Array, rows: Array) -> None:
    """target = ufunc(target, rows); whole numbers are divided towards zero, as they are in TensorFlow."""
    if ufunc is np.divide and target.dtype.kind in "iu":
        np.copyto(target, np.trunc(np.true_divide(target, rows)), casting="unsafe")
    else:
        ufunc(target, rows, out=target)


def _at_each(ufunc: Any, target: Array, indices: Array, rows: Array) -> None:
    if ufunc is np.divide and target.dtype.kind in "iu":
        for index, row in zip(indices, rows, strict=True):
            _into(ufunc, target[index : index + 1], row)
    else:
        ufunc.at(target, indices, rows)
