"""The base class of variables. It adds operators, comparisons, conversions and indexing, so that a
variable can be used like its array.

Rules
    Every operator reads the value and returns an array, never a variable. `==` compares elements.
    To find out whether two handles refer to one variable, use `is`, or compare their hashes.
    Indexing transfers only the rows that the index selects. The caller owns the resulting array.
    `v[rows] = value` is the only operator that changes a variable. It sends one scatter update, so
    it can set whole rows only.

Not here: how a value is read and updated (variable.py, sharded.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import IndexedSlices
from zmqdist.training.indexing import Rows, checked_numbers, select
from zmqdist.variables.hosted_variable import cast

V = TypeVar("V", bound="ArrayLike")


class ArrayLike(NDArrayOperatorsMixin):
    """Base of Variable and ShardedVariable. A subclass provides `name`, `shape`, `dtype`, `numpy`,
    `start_rows` and `_scatter`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    label: str
    """The variable's name in error texts."""

    __hash__ = object.__hash__

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def numpy(self) -> NDArray[Any]:
        """Return the current value.

        >>> (zd.Variable([1.0, 2.0]) + 1).tolist()
        [2.0, 3.0]
        """
        raise NotImplementedError

    def start_rows(self, rows: Rows) -> Any:
        """Request the rows with these numbers. Return a future, whose `get_value()` returns an
        array of the rows in the order of `rows`.

        >>> zd.Variable([5, 6, 7]).start_rows([2, 0]).get_value()
        array([7, 5])
        """
        raise NotImplementedError

    def scatter_add(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Add the rows of `sparse_delta` to rows of the value. If a row is named twice, both rows
        are added. Raises the errors of `assign`, InvalidArgumentError if an index is out of range,
        and TypeError if `sparse_delta` is not IndexedSlices. If a shard is lost, the other shards
        have been updated.

        >>> rows = zd.IndexedSlices(np.array([10, 10]), np.array([1, 1]))
        >>> zd.Variable([1, 2, 3]).scatter_add(rows).numpy()
        array([ 1, 22,  3])
        """
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Subtract from rows of the value. Everything else is as for `scatter_add`.

        >>> rows = zd.IndexedSlices(np.array([2]), np.array([1]))
        >>> zd.Variable([1, 2, 3]).scatter_sub(rows).numpy()
        array([1, 0, 3])
        """
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Multiply rows of the value. Everything else is as for `scatter_add`.

        >>> rows = zd.IndexedSlices(np.array([5]), np.array([1]))
        >>> zd.Variable([1, 2, 3]).scatter_mul(rows).numpy()
        array([ 1, 10,  3])
        """
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Divide rows of the value. Integers cannot be divided by 0: shards without a 0 have been
        updated. Everything else is as for `scatter_add`.

        >>> rows = zd.IndexedSlices(np.array([4.0]), np.array([1]))
        >>> zd.Variable([1.0, 2.0]).scatter_div(rows).numpy()
        array([1. , 0.5])
        """
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Set rows to the elementwise minimum of old and new rows. Everything else is as for
        `scatter_add`.

        >>> rows = zd.IndexedSlices(np.array([3]), np.array([1]))
        >>> zd.Variable([5, 5]).scatter_min(rows).numpy()
        array([5, 3])
        """
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Set rows to the elementwise maximum of old and new rows. Everything else is as for
        `scatter_add`.

        >>> rows = zd.IndexedSlices(np.array([9]), np.array([1]))
        >>> zd.Variable([5, 5]).scatter_max(rows).numpy()
        array([5, 9])
        """
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self: V, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> V:
        """Replace rows of the value. If a row is named twice, the last replacement wins. Everything
        else is as for `scatter_add`.

        >>> rows = zd.IndexedSlices(np.array([7]), np.array([0]))
        >>> zd.Variable([5, 5]).scatter_update(rows).numpy()
        array([7, 5])
        """
        return self._scatter("update", sparse_delta)

    batch_scatter_update = scatter_update

    def _scatter(self: V, kind: str, sparse_delta: Any) -> V:
        """Change rows as `kind` says, and return this variable."""
        raise NotImplementedError

    def sparse_read(self, indices: Any, name: str | None = None) -> NDArray[Any]:
        """Return the rows `indices`, in this order. Only these rows are transferred.

        >>> zd.Variable([[1, 2], [3, 4], [5, 6]]).sparse_read([2, 0]).tolist()
        [[5, 6], [1, 2]]

        Args:
          indices: row numbers, from 0 on, in an array of any shape. In the result, this shape
            replaces the first axis of the variable.

        Raises:
          InvalidArgumentError: an index is out of range, or is not an integer.
          TypeError: the variable is a scalar.
        """
        numbers = checked_numbers(self.label, indices, len(self))
        rows: NDArray[Any] = self.start_rows(numbers.reshape(-1)).get_value()
        return rows.reshape(*numbers.shape, *self.shape[1:])

    def gather_nd(self, indices: Any, name: str | None = None) -> NDArray[Any]:
        """Return the slices at the given positions, as TensorFlow's `gather_nd`. Only rows that
        contain such a position are transferred.

        >>> zd.Variable([[1, 2], [3, 4]]).gather_nd([[0, 1], [1, 0]]).tolist()
        [2, 3]

        Args:
          indices: an array whose last axis holds the positions. The k numbers of a position, which
            count from 0, index the first k axes of the variable.

        Raises:
          InvalidArgumentError: a position is out of range, is not of integers, or has more numbers
            than the variable has axes.
        """
        positions = np.asarray(indices)
        if positions.ndim == 0 or not 1 <= positions.shape[-1] <= self.ndim:
            raise InvalidArgumentError(
                f"{self.label} of shape {self.shape}: indices of shape {positions.shape} are "
                f"not positions in it"
            )
        for axis in range(positions.shape[-1]):
            checked_numbers(self.label, positions[..., axis], self.shape[axis])
        items: NDArray[Any] = self[
            tuple(positions[..., axis] for axis in range(positions.shape[-1]))
        ]
        return items

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the value as an array. NumPy calls this method to convert a variable.

        Raises:
          ValueError: the value cannot be cast to `dtype` by NumPy's "same_kind" rule, such as
            floats to integers.
        """
        target_dtype = self.dtype if dtype is None else np.dtype(dtype)
        if not np.can_cast(self.dtype, target_dtype, "same_kind"):
            raise ValueError(
                f"variable {self.name!r} holds {self.dtype}, which is not of the kind of "
                f"{target_dtype}: use .numpy().astype(...)"
            )
        value = np.asarray(self.numpy(), target_dtype)
        return value.copy() if copy else value

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply an operator or a NumPy function to the value. NumPy calls this method."""
        if any(isinstance(target, ArrayLike) for target in kwargs.get("out", ())):
            raise TypeError(
                f"variable {self.name!r} is not changed by an operator such as +=: use "
                f"assign_add(value), assign_sub(value) or "
                "assign(value)"
            )
        arrays = [value.numpy() if isinstance(value, ArrayLike) else value for value in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Return the part of the value that `key` selects, as from an array. Only the rows that the
        key selects are transferred.

        Raises:
          IndexError, TypeError, ValueError: as for an array. TypeError is also raised when a
            variable is used as an index, and IndexError for True and False.
        """
        if not self.shape:
            return self.numpy()[key]
        rows, rest, _ = select(key, self.shape)
        if isinstance(rows, range) and rows == range(self.shape[0]):
            return self.numpy()[rest]
        return self.start_rows(rows).get_value()[rest]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set whole rows in one scatter update. If the key names a row twice, the last value is
        set.

        Raises:
          TypeError: the key selects parts of rows, or the variable is a scalar.
          IndexError, TypeError, ValueError: as for an array.
        """
        if not self.shape:
            raise TypeError(
                f"variable {self.name!r} is a scalar, which has no rows to set: use assign(value)"
            )
        rows, rest, whole_rows = select(key, self.shape)
        if not whole_rows:
            raise TypeError(
                f"only whole rows of variable {self.name!r} can be set, by an index of its first "
                f"axis, not by {key!r}"
            )
        numbers = np.asarray(rows, np.int64)
        block = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        block[rest] = cast(value, self.dtype, self.label)
        self.scatter_update(IndexedSlices(block, numbers))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar: it has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numpy())

    def __contains__(self, value: Any) -> bool:
        return value in self.numpy()

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __index__(self) -> int:
        return self.numpy().__index__()
