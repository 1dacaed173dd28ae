"""The rule for values that become arrays: all that an array is arrives, or the array is refused by
name.

`np.asarray` makes an array of nearly every value, and strips in silence what a plain array does not
have: a mask, the rules of a matrix, the unit of a quantity. Therefore subclasses of ndarray are
refused, with what to do instead. Only np.memmap becomes an array, because it is one whose memory is
a file. An object of another class becomes the array that its `__array__` makes.

Not here: the dtypes that can be sent (wire/arrays.py), and values that do not fit a dtype
(specs.py, variables/casts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError


def plain_array(value: Any, subject: str) -> NDArray[Any]:
    """Return a value as an array, without a copy if it is one. The elements of the array may be
    Python objects.

    Args:
      subject: what the value is for, as error texts name it: "variable 'w'".

    Raises:
      InvalidArgumentError: the value is of a subclass of ndarray, or a list that contains one or
        makes no array.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # for instance, lists of unequal lengths
        raise InvalidArgumentError(f"{subject}: not an array: {error}") from error
    loss = "" if array is value else what_is_lost(value)
    if loss:
        raise InvalidArgumentError(f"{subject}: {loss}")
    return array


def joined(arrays: Sequence[NDArray[Any]], axis: int = 0) -> NDArray[Any]:
    """Return arrays concatenated along an axis. If their dtypes are equal, the result has this
    dtype: NumPy alone would convert it to the byte order of this host, and drop the gaps between
    fields.
    """
    dtype = arrays[0].dtype
    same = all(array.dtype == dtype for array in arrays)
    result: NDArray[Any] = np.concatenate(arrays, axis, dtype=dtype if same else None)
    return result


def what_is_lost(value: Any) -> str:
    """Return what `np.asarray(value)` would strip, with what to do instead; "" if it strips
    nothing."""
    cls = type(value)
    if isinstance(value, np.ndarray) and cls not in (np.ndarray, np.memmap):
        return f"a {cls.__module__}.{cls.__qualname__} is more than a plain array: {how_to_make_plain(value)}"
    if cls in (list, tuple) and any(
        issubclass(kind, (np.ndarray, list, tuple)) for kind in set(map(type, value))
    ):
        return next(filter(None, map(what_is_lost, value)), "")
    return ""


def how_to_make_plain(array: NDArray[Any]) -> str:
    """Return what a user can write in place of an array of a subclass of ndarray."""
    if isinstance(array, np.ma.MaskedArray):
        return "array.filled(value) makes a plain array of it, or use array.data and array.mask as two arrays"
    return "np.asarray makes a plain array of it"
