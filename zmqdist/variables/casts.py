"""Conversion of users' values to arrays of the dtype of a variable."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError
from zmqdist.specs import TensorSpec, convert


def cast(value: Any, dtype: np.dtype[Any], subject: str) -> NDArray[Any]:
    """Return a user's value as an array of this dtype. The array may have any shape.

    Python numbers, and lists of them, are converted if the dtype can represent them. Arrays are cast by NumPy's "same_kind" rule, except
    that text is never truncated.

    Args:
      subject: the variable that the value is for, as error texts name it: "variable 'w'".

    Raises:
      InvalidArgumentError: the value cannot be converted to this dtype.
    """
    try:
        if not hasattr(value, "dtype"):
            return convert(value if not hasattr(value, "__array__") else np.asarray(value), TensorSpec(None, dtype))
        array = np.asarray(value)
        converted: NDArray[Any] = array.astype(dtype, casting="same_kind", copy=False)
    except (TypeError, ValueError, InvalidArgumentError):
        try:
            array_given = np.asarray(value)
            shown = f"{array_given.dtype} of shape {array_given.shape}"
        except ValueError:
            shown = "lists of unequal lengths"
        raise InvalidArgumentError(f"{subject} is of {dtype}, which cannot hold {shown}") from None
    if dtype.kind in "SU" and converted.itemsize < array.itemsize and not np.array_equal(converted, array):
        raise InvalidArgumentError(f"{subject} is of {dtype}: longer text, of {array.dtype}, would be cut off")
    return converted
