"""Elements of several arrays that are one thing: rows of different lengths, arrays that are mostly zero.

Both are namedtuples, so that they travel as any other element does, and come back as what they are (`wire.namedtuples.known_namedtuple`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec
from zmqdist.wire.namedtuples import known_namedtuple


@known_namedtuple
class Ragged(NamedTuple):
    """Rows of different lengths: row i is `values[row_splits[i] : row_splits[i + 1]]`."""

    values: Any
    row_splits: Any

    def shape(self) -> tuple[int | None, ...]:
        """How many rows, and of which length: it differs."""
        return (len(self.row_splits) - 1, None, *self.values.shape[1:])

    def rows(self) -> Iterator[Any]:
        """The rows, as views."""
        return (self.values[low:high] for low, high in pairwise(self.row_splits.tolist()))

    def to_list(self) -> list[Any]:
        """The rows, as nested lists."""
        return [row.tolist() for row in self.rows()]


@known_namedtuple
class Sparse(NamedTuple):
    """An array of shape `dense_shape` that is zero but for `values[i]` at `indices[i]`.

    Attributes:
      indices: int64 of shape (how many, rank), in the order of the array.
      values: of shape (how many,).
      dense_shape: int64 of shape (rank,).
    """

    indices: Any
    values: Any
    dense_shape: Any

    @classmethod
    def of(cls, array: Any) -> Sparse:
        """What of an array is not zero."""
        dense = np.asarray(array)
        coordinates = np.nonzero(dense)
        return cls(np.stack(coordinates, 1).astype(np.int64), dense[coordinates], np.array(dense.shape, np.int64))

    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return tuple(int(size) for size in self.dense_shape)

    def to_dense(self) -> Any:
        """The array."""
        dense = np.zeros(self.shape(), self.values.dtype)
        dense[tuple(self.indices.T)] = self.values
        return dense

    def rows(self) -> Iterator[Any]:
        """What lies along axis 0."""
        bounds = np.searchsorted(self.indices[:, 0], np.arange(self.dense_shape[0] + 1))
        for low, high in pairwise(bounds.tolist()):
            yield Sparse(self.indices[low:high, 1:], self.values[low:high], self.dense_shape[1:].copy())


Composite: TypeAlias = Ragged | Sparse

COMPOSITES = frozenset({Ragged, Sparse})


def stacked(elements: Sequence[Composite]) -> Composite:
    """Several as one with a new axis 0.

    Raises:
      InvalidArgumentError: they are ragged, or differ in shape or dtype.
    """
    if not all(isinstance(one, Sparse) for one in elements):
        raise InvalidArgumentError("cannot batch ragged elements: unbatch() takes them apart")
    shape, dtype = elements[0].dense_shape, elements[0].values.dtype  # type: ignore[union-attr]
    for one in elements:
        if not np.array_equal(one.dense_shape, shape) or one.values.dtype != dtype:  # type: ignore[union-attr]
            raise InvalidArgumentError("cannot batch sparse elements that differ in shape or dtype")
    numbers = np.repeat(np.arange(len(elements)), [len(one.values) for one in elements])
    coordinates = np.concatenate([one.indices for one in elements])  # type: ignore[union-attr]
    indices = np.concatenate([numbers[:, None], coordinates], axis=1)
    return Sparse(indices, np.concatenate([one.values for one in elements]), np.array([len(elements), *shape]))


def spec_of_composite(value: Composite) -> Composite:
    """The spec of one: how many values it has is known of none."""
    if isinstance(value, Ragged):
        values, splits = np.asarray(value.values), np.asarray(value.row_splits)
        return Ragged(TensorSpec((None, *values.shape[1:]), values.dtype), TensorSpec(splits.shape, splits.dtype))
    rank = len(value.dense_shape)
    return _sparse_spec(rank, np.asarray(value.values).dtype)


def batched_spec(spec: Composite) -> Composite:
    """The spec of a batch of such elements."""
    if isinstance(spec, Ragged):
        raise InvalidArgumentError("cannot batch ragged elements: unbatch() takes them apart")
    return _sparse_spec(spec.dense_shape.shape[0] + 1, spec.values.dtype)


def row_spec(spec: Composite) -> Any:
    """The spec of what lies along axis 0."""
    if isinstance(spec, Ragged):
        shape = spec.values.shape
        return TensorSpec(None if shape is None else (None, *shape[1:]), spec.values.dtype)
    return _sparse_spec(spec.dense_shape.shape[0] - 1, spec.values.dtype)


def _sparse_spec(rank: int, dtype: Any) -> Sparse:
    return Sparse(TensorSpec((None, rank), np.int64), TensorSpec((None,), dtype), TensorSpec((rank,), np.int64))
