"""Interprets the key of `variable[key]` as NumPy does, but without the array. `select` computes
which rows to request, and which key to apply to these rows when they have arrived.

Rules
    `value[key]` equals `value[rows][rest]`. `rows` is an ascending range, or an array of row
    numbers.
    For a slice, `rows` is a range of its rows in ascending order. If the slice has a negative step,
    `rest` reverses the rows. For a number, `rows` is a range of one row. For a mask, or for an
    array or list of numbers, `rows` has the row numbers in the order of the mask or array.
    If NumPy refuses a key, `select` raises the same class of error, before a row is transferred.
    `select` also refuses True and False, and a variable as an index, because the variable's value
    would have to be read first.

Not here: which shard has which row (row_gather.py).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError

Rows: TypeAlias = range | NDArray[np.int64]
"""Rows in the requested order: an ascending range, or row numbers from 0 on, with repetitions."""


class Selection(NamedTuple):
    """What a key selects from an array.

    Attributes:
      rows: the rows that hold the selected elements.
      rest: the key that selects these elements from `value[rows]`.
      whole_rows: whether the key selects whole rows only, so that `rest` only reorders the rows or
        picks a single row.
    """

    rows: Rows
    rest: tuple[Any, ...]
    whole_rows: bool


def select(key: Any, shape: Sequence[int]) -> Selection:
    """Return the rows that a key selects from an array of this shape, and the key for these rows.

    Raises:
      IndexError: an index is out of bounds, there are more indices than axes, or an item of the key
        is not an index.
      TypeError: a slice bound is not an integer, or a variable is used as an index or a bound.
      ValueError: a slice has step 0.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    for item in items:
        for part in (item.start, item.stop, item.step) if isinstance(item, slice) else (item,):
            if hasattr(part, "read_value"):
                raise TypeError(
                    f"a variable is not allowed as an index or as the bound of a slice: read it "
                    f"first, int(...): {part!r}"
                )
    items = _plain(items, shape)
    first = next(
        position for position, item in enumerate(items) if item is not None and item is not Ellipsis
    )
    before, after = items[:first], items[first + 1 :]
    rows, order = _first_axis(items[first], shape[0])
    whole_rows = all(item is Ellipsis for item in before) and all(
        item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in after
    )
    # the rows are in the order of the index already
    if whole_rows and isinstance(order, np.ndarray) and order.ndim == 1:
        # take all rows as they are, because they arrive in the order of the row numbers in the key
        order = slice(None)
    return Selection(rows, (*before, order, *after), whole_rows)


def _plain(items: list[Any], shape: Sequence[int]) -> list[Any]:
    """Return the items of a key, with masks replaced by row numbers, and with an index for each
    axis. Full slices take the place of an `...`, which then stands for no axis. It remains, because
    in NumPy it makes a result without axes an array instead of a scalar.
    """
    expanded: list[Any] = []
    for item in items:
        if isinstance(item, bool | np.bool_) or (
            isinstance(item, np.ndarray) and not item.ndim and item.dtype == bool
        ):
            raise IndexError("True and False are no indices of a variable: use a mask of its shape")
        if item is None or item is Ellipsis or isinstance(item, slice):
            expanded.append(item)
        elif isinstance(item, list):
            expanded.append(np.asarray(item) if item else np.empty(0, np.intp))
        elif isinstance(item, np.ndarray) and item.ndim:
            expanded.append(item)
        else:
            expanded.append(_number(item))
    axes = sum(_axes_of(item) for item in expanded)
    ellipses = sum(item is Ellipsis for item in expanded)
    if axes > len(shape):
        raise IndexError(
            f"too many indices: a variable of shape {tuple(shape)} has {len(shape)} axes, but "
            f"{axes} were indexed"
        )
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    filling = [slice(None)] * (len(shape) - axes)
    if ellipses:
        position = next(position for position, item in enumerate(expanded) if item is Ellipsis)
        expanded[position:position] = filling
    else:
        expanded += filling
    return _without_masks(expanded, shape)


def _without_masks(items: list[Any], shape: Sequence[int]) -> list[Any]:
    """Replace each mask by the positions of its true elements. As in NumPy, these are one array of
    numbers for each axis of the mask."""
    plain: list[Any] = []
    axis = 0
    for item in items:
        axes = _axes_of(item)
        if isinstance(item, np.ndarray) and item.dtype == bool:
            if item.shape != tuple(shape[axis : axis + axes]):
                raise IndexError(
                    f"a mask of shape {item.shape} does not fit axes of shape "
                    f"{tuple(shape[axis : axis + axes])}"
                )
            plain += item.nonzero()
        else:
            plain.append(item)
        axis += axes
    return plain


def _first_axis(item: Any, size: int) -> tuple[Rows, Any]:
    """Return the rows that `item`, the index of axis 0, selects, and the index to use for this axis
    within these rows."""
    if isinstance(item, slice):
        rows_range = range(*item.indices(size))
        if rows_range.step > 0:
            return rows_range, slice(None)
        return rows_range[::-1], slice(None, None, -1)
    if isinstance(item, int):
        row = in_bounds(np.array([item]), size)[0]
        return range(int(row), int(row) + 1), 0
    if item.dtype.kind not in "iu":
        raise IndexError(
            f"arrays used as indices must be of whole numbers or bool, not {item.dtype}"
        )
    rows = in_bounds(item.reshape(-1), size)
    return rows, np.arange(rows.size).reshape(item.shape)


def in_bounds(rows: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Convert row numbers as in NumPy, where negative numbers count from the end, to numbers from 0
    on. Raises IndexError for a row out of range."""
    outside = rows[(rows < -size) | (rows >= size)]
    if outside.size:
        raise IndexError(f"index {outside[0]} is out of bounds for axis 0 with size {size}")
    return np.where(rows < 0, rows + size, rows).astype(np.int64)


def checked_numbers(label: str, numbers: Any, size: int) -> NDArray[np.int64]:
    """Check an array of positions along an axis, which may have any shape. Return the positions as
    int64.

    Args:
      label: the variable's name in error texts.
      size: length of the axis.

    Raises:
      InvalidArgumentError: a position is not an integer, or is out of range. Negative numbers are
        out of range.
    """
    array = np.asarray(numbers)
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidArgumentError(f"{label}: indices are whole numbers, not {array.dtype}")
    outside = array[(array < 0) | (array >= size)]
    if outside.size:
        raise InvalidArgumentError(
            f"{label}: index {outside[0]} is out of range: the indices are 0 to {size - 1}"
        )
    return array.astype(np.int64, copy=False)


def _number(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise IndexError(
            f"only whole numbers, slices, '...', None, and arrays of whole numbers or "
            f"bool are indices, not {item!r}"
        ) from None


def _axes_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype == bool else 1
