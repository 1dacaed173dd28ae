"""Partitioners, which choose the number of shards of a variable. `partitioner(shape, dtype)`
returns a list with one number for each axis.

Rules
    Only axis 0 is split, so all numbers except the first are 1: [2, 1] means a matrix in two
    shards. For a scalar the list is empty. A variable never has more shards than rows, and always
    has at least one shard, even if it has no rows.
    A strategy accepts any callable with this signature, and calls it with `shape=` and `dtype=`.

Not here: which rows a shard has, and how a strategy checks the list (training/partition.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from zmqdist.field_types import checked

SHARD_BYTES_MIN = 256 << 10
"""The smallest number of bytes for which a shard is worth its cost. The message to another server
costs more than a smaller shard saves."""


class Partitioner:
    """The base class of all partitioners. A strategy calls its partitioner for each variable that
    is created in the strategy's scope, except scalars, per-worker variables and variables that are
    colocated with another variable.

    >>> class Halves(zd.partitioners.Partitioner):
    ...     def __call__(self, shape, dtype, axis=0):
    ...         return [2] + [1] * (len(shape) - 1)
    >>> Halves()((10, 4), np.float32)
    [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis.

        Args:
          shape: the shape of the whole variable.
          dtype: the dtype of the elements of the variable.
          axis: the axis to split. Only 0 is supported.

        Raises:
          NotImplementedError: this is the base class.
          ValueError: `axis` is not 0.
        """
        raise NotImplementedError


@checked
class FixedShardsPartitioner(Partitioner):
    """Splits every variable into the same number of shards. A variable with fewer rows is split
    into one shard for each row.

    >>> zd.partitioners.FixedShardsPartitioner(2)((10, 4), np.float32)
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        """Raises ValueError if `num_shards` is not positive."""
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        return _along_axis_0(shape, axis, self._num_shards)


@checked
class MinSizePartitioner(Partitioner):
    """Splits a variable into one shard for each `min_shard_bytes` bytes, but into at most
    `max_shards` shards.

    >>> zd.partitioners.MinSizePartitioner(1024, max_shards=4)((1000, 8), np.float32)
    [4, 1]

    The number of shards is rounded up, as in TensorFlow. A shard can therefore be smaller than
    `min_shard_bytes`.
    """

    def __init__(
        self,
        min_shard_bytes: int = SHARD_BYTES_MIN,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ) -> None:
        """Set the bounds on shards.

        Args:
          min_shard_bytes: the bytes of one shard.
          max_shards: the most shards of one variable. This is usually the number of parameter
            servers. With the default no variable is cut.
          bytes_per_string: the bytes to assume for an element whose dtype has no size.

        Raises:
          ValueError: an argument is not positive.
        """
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        total_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        return _along_axis_0(
            shape, axis, min(_ceil(total_bytes, self._min_shard_bytes), self._max_shards)
        )


@checked
class MaxSizePartitioner(Partitioner):
    """Splits a variable into as few shards of at most `max_shard_bytes` as possible. A row is never
    split, however large it is.

    >>> zd.partitioners.MaxSizePartitioner(16_000)((1000, 8), np.float32)
    [2, 1]
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        """Set the bounds on shards.

        Args:
          max_shard_bytes: the most bytes of one shard.
          max_shards: the most shards of one variable, even if shards then exceed `max_shard_bytes`.
            None means no bound.
          bytes_per_string: the bytes to assume for an element whose dtype has no size.

        Raises:
          ValueError: an argument is not positive.
        """
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        row_bytes = math.prod(shape[1:]) * _element_bytes(dtype, self._bytes_per_string)
        rows = shape[0] if shape else 1
        shards = _ceil(rows, max(1, self._max_shard_bytes // max(1, row_bytes)))
        return _along_axis_0(
            shape, axis, shards if self._max_shards is None else min(shards, self._max_shards)
        )


def _along_axis_0(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    if axis != 0:
        raise ValueError(f"variables are split along axis 0 only, not along axis {axis}")
    return [] if not len(shape) else [max(1, min(shards, int(shape[0]))), *[1] * (len(shape) - 1)]


def _element_bytes(dtype: DTypeLike, bytes_per_string: int) -> int:
    """Return the bytes of one element. If the dtype has no size, as for objects and for text of any
    length, this is `bytes_per_string`."""
    kind = np.dtype(dtype)
    return bytes_per_string if kind.hasobject or not kind.itemsize else kind.itemsize


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _positive(name: str, number: Any) -> int:
    if int(number) != number or number < 1:
        raise ValueError(f"{name} must be a positive whole number, not {number!r}")
    return int(number)


__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
__dir__ = __all__.copy  # dir() and completion show no other names
