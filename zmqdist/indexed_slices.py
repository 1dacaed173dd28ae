"""Rows of an array that has many more: gradients of an embedding, say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class IndexedSlices:
    """Some rows of a larger array: `values[i]` belongs to row `indices[i]`. A row that is named twice counts twice.

    Attributes:
      values: the rows.
      indices: whole numbers, one for each row.
      dense_shape: of the larger array; None where nobody needs to know.
    """

    values: NDArray[Any]
    indices: NDArray[Any]
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: there are not as many indices as rows, or an index is no whole number."""
        values, indices = np.asarray(self.values), np.asarray(self.indices)
        if values.ndim < 1 or indices.shape != values.shape[:1] or (indices.dtype.kind not in "iu" and indices.size):
            raise ValueError(f"values of shape {values.shape} need {values.shape[:1]} whole numbers, not {indices!r}")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if self.dense_shape is not None:
            object.__setattr__(self, "dense_shape", tuple(int(size) for size in self.dense_shape))

    def to_dense(self) -> NDArray[Any]:
        """The larger array: the sum of the rows that are named for each of its own. Raises ValueError without a dense_shape."""
        if self.dense_shape is None:
            raise ValueError("a dense_shape is needed to make the whole array")
        dense = np.zeros(self.dense_shape, self.values.dtype)
        np.add.at(dense, self.indices, self.values)
        return dense
