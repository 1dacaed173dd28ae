"""Conversion of users' values to arrays of the dtype of a variable."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError
from zmqdist.plain_arrays import what_is_lost
from zmqdist.specs import TensorSpec, convert


def cast(value: Any, dtype: np.dtype[Any], subject: str) -> NDArray[Any]:
    """Return a user's value as an array of this dtype. The array may have any shape.

    Python numbers, and lists of them, are converted if the dtype can represent them. Arrays are
    cast by NumPy's "same_kind" rule, except that whole numbers do not wrap round, text is never
    truncated, and times keep their units: only floats are rounded.

    Args:
      subject: the variable that the value is for, as error texts name it: "variable 'w'".

    Raises:
      InvalidArgumentError: the value cannot be converted to this dtype.
    """
    loss = what_is_lost(value)
    if loss:
        raise InvalidArgumentError(f"{subject}: {loss}")
    try:
        if not hasattr(value, "dtype"):
            return convert(
                value if not hasattr(value, "__array__") else np.asarray(value),
                TensorSpec(None, dtype),
            )
        array = np.asarray(value)
        if dtype.kind in "SUV" and array.dtype.kind not in ("V" if dtype.kind == "V" else "SU"):
            raise TypeError  # NumPy would write the numbers as text or raw bytes
        converted: NDArray[Any] = array.astype(dtype, casting="same_kind", copy=False)
    except (TypeError, ValueError, OverflowError, InvalidArgumentError):
        try:
            array_given = np.asarray(value)
            shown = f"{array_given.dtype} of shape {array_given.shape}"
        except ValueError:
            shown = "lists of unequal lengths"
        raise InvalidArgumentError(f"{subject} is of {dtype}, which cannot hold {shown}") from None
    if converted is not array and dtype.kind in "iuSUmM":
        changed = (converted if dtype.kind in "iu" else converted.astype(array.dtype)) != array
        lost = array[changed & (array == array)].tolist()  # NaT differs from itself
        if lost:
            text = f"{subject} is of {dtype}, which cannot hold {lost[0]!r:.60}: convert the array yourself"
            raise InvalidArgumentError(text)
    return converted
