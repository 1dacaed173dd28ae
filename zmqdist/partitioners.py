"""Into how many shards a variable is cut: `partitioner(shape, dtype)` gives a list with one number for each axis.

Rules
    Only axis 0 is ever cut, so all numbers but the first are 1: [2, 1] is a matrix in two shards. A scalar gives [].
    There are never more shards than rows, and there is always one: also of a variable without rows.
    A strategy accepts any callable with this signature; it calls it by `shape=` and `dtype=`.

Not here: which rows a shard has, and what a strategy says of a bad answer (training/partition.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

SHARD_BYTES_MIN = 256 << 10
"""Bytes: a smaller shard costs more by its message than it saves by being elsewhere."""


class Partitioner:
    """What all of them are: a strategy calls one for each variable that is made in its scope."""

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """How many shards along each axis.

        Args:
          shape: of the whole variable.
          dtype: of its elements.
          axis: the one that is cut; there are only shards along axis 0.

        Raises:
          NotImplementedError: this is the base class.
          ValueError: another axis than 0.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """Always the same number of shards."""

    def __init__(self, num_shards: int) -> None:
        """Raises ValueError: `num_shards` is not positive."""
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        return _along_axis_0(shape, axis, self._num_shards)


class MinSizePartitioner(Partitioner):
    """As many shards as can be of `min_shard_bytes`, at most `max_shards`.

    Sizes are rounded to whole rows in favour of more shards, so a shard can be a little smaller than that.
    """

    def __init__(self, min_shard_bytes: int = SHARD_BYTES_MIN, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        """What a shard should have.

        Args:
          min_shard_bytes: of one shard.
          max_shards: of one variable; usually the number of parameter servers.
          bytes_per_string: what an element counts whose dtype does not say its size.

        Raises:
          ValueError: one of them is not positive.
        """
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        total_bytes = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        return _along_axis_0(shape, axis, min(_ceil(total_bytes, self._min_shard_bytes), self._max_shards))


class MaxSizePartitioner(Partitioner):
    """As few shards as there can be with at most `max_shard_bytes` each. A row is never cut, however large it is."""

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        """What a shard may have.

        Args:
          max_shard_bytes: of one shard.
          max_shards: of one variable, also where its shards become larger by that; None for any number.
          bytes_per_string: what an element counts whose dtype does not say its size.

        Raises:
          ValueError: one of them is not positive.
        """
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        row_bytes = math.prod(shape[1:]) * _element_bytes(dtype, self._bytes_per_string)
        rows = shape[0] if shape else 1
        shards = _ceil(rows, max(1, self._max_shard_bytes // max(1, row_bytes)))
        return _along_axis_0(shape, axis, shards if self._max_shards is None else min(shards, self._max_shards))


def _along_axis_0(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    if axis != 0:
        raise ValueError(f"variables are cut along axis 0 only, not along axis {axis}")
    if not len(shape):
        return []
    return [max(1, min(shards, int(shape[0]))), *[1] * (len(shape) - 1)]


def _element_bytes(dtype: DTypeLike, bytes_per_string: int) -> int:
    """Objects (text of any length) and text without a length have no size of their own."""
    kind = np.dtype(dtype)
    return bytes_per_string if kind.hasobject or not kind.itemsize else kind.itemsize


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _positive(name: str, number: Any) -> int:
    if int(number) != number or number < 1:
        raise ValueError(f"{name} must be a positive whole number, not {number!r}")
    return int(number)


__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
