"""Some rows of a larger array, such as the gradient of an embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.field_types import converted
from zmqdist.specs import plain_array


@dataclass(frozen=True, slots=True, eq=False)
class IndexedSlices:
    """Some rows of a larger array: `values[i]` belongs to row `indices[i]`. If an index occurs
    several times, its rows are added up.

    >>> slices = zd.IndexedSlices(np.ones((2, 2)), np.array([1, 1]), dense_shape=(3, 2))
    >>> slices.to_dense().tolist()
    [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]

    Attributes:
      values: the rows, shape (n, ...).
      indices: n integers.
      dense_shape: the shape of the larger array. None means that it is not known.
    """

    values: NDArray[Any]
    indices: NDArray[Any]
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the number of indices differs from the number of rows, an index is
        not an integer, or an array is of a subclass of ndarray."""
        values, indices = plain_array(self.values, "values"), plain_array(self.indices, "indices")
        if (
            values.ndim < 1
            or indices.shape != values.shape[:1]
            or (indices.dtype.kind not in "iu" and indices.size)
        ):
            raise ValueError(
                f"values of shape {values.shape} need indices of shape {values.shape[:1]}, whole "
                f"numbers, not {indices!r}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if self.dense_shape is not None:
            object.__setattr__(
                self,
                "dense_shape",
                converted("dense_shape", lambda shape: tuple(map(int, shape)), self.dense_shape),
            )

    def to_dense(self) -> NDArray[Any]:
        """Return a new array of the shape `dense_shape`, with the rows of each index added up.
        Raises ValueError if `dense_shape` is None.

        >>> zd.IndexedSlices(np.array([5]), np.array([1]), dense_shape=(3,)).to_dense().tolist()
        [0, 5, 0]
        """
        if self.dense_shape is None:
            raise ValueError("a dense_shape is needed to make the whole array")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense
