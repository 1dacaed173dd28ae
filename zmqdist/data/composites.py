"""Elements made of several arrays: `Ragged` for rows of different lengths, and `Sparse` for arrays
that are mostly zero.

Both classes are registered namedtuples, so that their values are encoded like any other element and
decoded to the same class (`wire.namedtuples.known_namedtuple`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, joined, plain_array
from zmqdist.wire.namedtuples import known_namedtuple


@known_namedtuple
class Ragged(NamedTuple):
    """Rows of different lengths: row i is `values[row_splits[i] : row_splits[i + 1]]`.

    >>> zd.data.Ragged(np.array([1, 2, 3]), np.array([0, 1, 3])).to_list()
    [[1], [2, 3]]

    Attributes:
      values: the rows, joined along axis 0: an array, or a Ragged whose rows are the items of these
        rows.
      row_splits: integers of shape (number of rows + 1,).
    """

    values: Any
    row_splits: Any

    def shape(self) -> tuple[int | None, ...]:
        """Return (number of rows, None, ...). The second size is None because the rows differ in
        length.

        >>> zd.data.Ragged(np.array([1, 2, 3]), np.array([0, 1, 3])).shape()
        (2, None)
        """
        values = self.values
        inner = values.shape() if isinstance(values, Ragged) else values.shape
        return (len(self.row_splits) - 1, None, *inner[1:])

    def rows(self) -> Iterator[Any]:
        """Return an iterator over the rows, which are views of `values`.

        >>> print(*zd.data.Ragged(np.array([1, 2, 3]), np.array([0, 1, 3])).rows())
        [1] [2 3]
        """
        return (sliced(self.values, low, high) for low, high in pairwise(self.row_splits.tolist()))

    def to_list(self) -> list[Any]:
        """Return the rows as nested lists.

        >>> zd.data.Ragged(np.array([1, 2, 3]), np.array([0, 0, 3])).to_list()
        [[], [1, 2, 3]]
        """
        return [row.to_list() if isinstance(row, Ragged) else row.tolist() for row in self.rows()]


@known_namedtuple
class Sparse(NamedTuple):
    """An array of shape `dense_shape` that is zero except for `values[i]` at `indices[i]`.

    >>> zd.data.Sparse(np.array([[0, 1]]), np.array([5]), np.array([2, 2])).to_dense().tolist()
    [[0, 5], [0, 0]]

    Attributes:
      indices: int64 of shape (number of values, rank), in row-major order.
      values: the values, of shape (number of values,).
      dense_shape: int64 of shape (rank,).
    """

    indices: Any
    values: Any
    dense_shape: Any

    @classmethod
    def of(cls, array: Any) -> Sparse:
        """Return an array as a Sparse with the array's non-zero values.

        >>> zd.data.Sparse.of(np.eye(2)).indices.tolist()
        [[0, 0], [1, 1]]
        """
        dense = plain_array(array, "Sparse.of")
        coordinates = np.nonzero(dense)
        return cls(
            np.stack(coordinates, 1).astype(np.int64),
            dense[coordinates],
            np.array(dense.shape, np.int64),
        )

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the dense array.

        >>> zd.data.Sparse.of(np.eye(3)).shape()
        (3, 3)
        """
        return tuple(int(size) for size in self.dense_shape)

    def to_dense(self) -> Any:
        """Return the dense array.

        >>> zd.data.Sparse.of(np.eye(2)).to_dense().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        dense = np.zeros(self.shape(), self.values.dtype)
        dense[tuple(self.indices.T)] = self.values
        return dense

    def rows(self) -> Iterator[Any]:
        """Yield the slices along axis 0, each as a Sparse.

        >>> [row.values.tolist() for row in zd.data.Sparse.of(np.array([[0, 2], [3, 4]])).rows()]
        [[2], [3, 4]]
        """
        bounds = np.searchsorted(self.indices[:, 0], np.arange(self.dense_shape[0] + 1))
        for low, high in pairwise(bounds.tolist()):
            yield Sparse(
                self.indices[low:high, 1:], self.values[low:high], self.dense_shape[1:].copy()
            )


Composite: TypeAlias = Ragged | Sparse

COMPOSITES = frozenset({Ragged, Sparse})


def sliced(value: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` to `stop` of an array or a composite."""
    if isinstance(value, Ragged):
        splits = value.row_splits[start : stop + 1]
        return Ragged(sliced(value.values, splits[0], splits[-1]), splits - splits[0])
    if isinstance(value, Sparse):
        low, high = np.searchsorted(value.indices[:, 0], (start, stop)).tolist()
        indices, shape = value.indices[low:high].copy(), value.dense_shape.copy()
        indices[:, 0] -= start
        shape[0] = min(stop, shape[0]) - start
        return Sparse(indices, value.values[low:high], shape)
    return value[start:stop]


def _joined(parts: Sequence[Any]) -> Any:
    """Join arrays, or Raggeds, along axis 0. Raises InvalidArgumentError if they differ in dtype,
    in rank or in the shape of their rows."""
    first = parts[0]
    if not isinstance(first, Ragged):
        kinds = {
            type(part) if isinstance(part, Ragged) else (part.dtype, part.shape[1:])
            for part in parts
        }
        if len(kinds) > 1:
            raise InvalidArgumentError(
                "cannot batch ragged elements that differ in rank, dtype or the shape of rows"
            )
        return joined(parts)
    if not all(isinstance(part, Ragged) for part in parts):
        raise InvalidArgumentError("cannot batch ragged elements with others")
    lengths = np.concatenate([np.diff(part.row_splits) for part in parts])
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(first.row_splits.dtype)
    return Ragged(_joined([part.values for part in parts]), splits)


def stacked(elements: Sequence[Composite]) -> Composite:
    """Stack several composites to one composite with a new axis 0.

    Raises:
      InvalidArgumentError: the composites are of two classes, or differ in rank, dtype or the shape
        of rows.
    """
    if isinstance(elements[0], Ragged):
        rows = _joined(elements)
        counts = [0, *(len(composite.row_splits) - 1 for composite in elements)]  # type: ignore[union-attr]
        return Ragged(rows, np.cumsum(counts, dtype=rows.row_splits.dtype))
    if not all(isinstance(composite, Sparse) for composite in elements):
        raise InvalidArgumentError("cannot batch sparse elements with others")
    shape, dtype = elements[0].dense_shape, elements[0].values.dtype
    for composite in elements:
        if not np.array_equal(composite.dense_shape, shape) or composite.values.dtype != dtype:  # type: ignore[union-attr]
            raise InvalidArgumentError("cannot batch sparse elements that differ in shape or dtype")
    numbers = np.repeat(np.arange(len(elements)), [len(composite.values) for composite in elements])
    coordinates = np.concatenate([composite.indices for composite in elements])  # type: ignore[union-attr]
    indices = np.concatenate([numbers[:, None], coordinates], axis=1)
    return Sparse(
        indices,
        np.concatenate([composite.values for composite in elements]),
        np.array([len(elements), *shape]),
    )


def spec_of_composite(value: Composite) -> Composite:
    """Return the spec of a composite. The number of its values is not part of the spec."""
    if isinstance(value, Ragged):
        splits = np.asarray(value.row_splits)
        splits_spec = TensorSpec(splits.shape, splits.dtype)
        if isinstance(value.values, Ragged):
            return Ragged(_of_any_length(spec_of_composite(value.values)), splits_spec)
        values = np.asarray(value.values)
        return Ragged(TensorSpec((None, *values.shape[1:]), values.dtype), splits_spec)
    rank = len(value.dense_shape)
    return sparse_spec(rank, np.asarray(value.values).dtype)


def _of_any_length(spec: Any) -> Any:
    """Return the spec of a Ragged without its number of rows."""
    return Ragged(spec.values, TensorSpec((None,), spec.row_splits.dtype))


def batched_spec(spec: Composite, size: int | None) -> Composite:
    """Return the spec of a batch of `size` composites whose spec is `spec`."""
    if isinstance(spec, Ragged):
        splits = TensorSpec((None if size is None else size + 1,), spec.row_splits.dtype)
        return Ragged(_of_any_length(spec), splits)
    return sparse_spec(spec.dense_shape.shape[0] + 1, spec.values.dtype)


def row_spec(spec: Composite) -> Any:
    """Return the spec of the slices along axis 0 of a composite whose spec is `spec`."""
    if isinstance(spec, Ragged):
        if isinstance(spec.values, Ragged):
            return _of_any_length(spec.values)
        shape = spec.values.shape
        return TensorSpec(None if shape is None else (None, *shape[1:]), spec.values.dtype)
    return sparse_spec(spec.dense_shape.shape[0] - 1, spec.values.dtype)


def sparse_spec(rank: int, dtype: Any) -> Sparse:
    """Return the spec of a Sparse with so many axes."""
    return Sparse(
        TensorSpec((None, rank), np.int64),
        TensorSpec((None,), dtype),
        TensorSpec((rank,), np.int64),
    )
