"""Arrays in shared memory: `zmqdist.empty`, `empty_like` and `freeze`. shm_pool.py describes how
the memory is shared."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import converted
from zmqdist.limits import SHM_DESCRIPTOR_BYTES_MIN
from zmqdist.specs import how_to_make_plain
from zmqdist.transport import shm_pool
from zmqdist.transport.shm_pool import this_pool
from zmqdist.wire import arrays as wire_arrays
from zmqdist.wire.arrays import bytes_of, is_fortran, is_frozen


def empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64) -> NDArray[Any]:
    """Return an uninitialized array, as `numpy.empty` does, but in shared memory, so that `freeze`
    needs no copy.

    >>> array = zd.empty((2, 3))
    >>> array[:] = 1
    >>> float(zd.freeze(array).sum())
    6.0

    Use it for a large array that you fill once and then freeze. The array occupies a file
    descriptor until it is collected.

    Args:
      shape: as in NumPy.
      dtype: any dtype except those that hold Python objects.

    Returns:
      A writable array of this process. An array below 1 MiB, or one for which there is no shared
      memory, is a plain NumPy array.

    Raises:
      InvalidArgumentError: the dtype holds Python objects.
      TypeError, ValueError, MemoryError: `numpy.empty` raises the same error.
    """
    return _empty(shape, converted("dtype", np.dtype, dtype), "C")


def empty_like(a: NDArray[Any]) -> NDArray[Any]:
    """Return an uninitialized array in shared memory, with the shape, dtype and memory order of
    `a`. Raises the errors of `freeze`.

    >>> zd.empty_like(np.zeros((2, 3), np.int32)).dtype
    dtype('int32')
    """
    _check_array("empty_like", a)
    return _empty(a.shape, a.dtype, _order(a))


def freeze(a: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the same content that no process can change any more; `a` itself stays
    writable.

    >>> frozen = zd.freeze(np.arange(3))
    >>> frozen.flags.writeable
    False

    Freeze an array that you send often, or to many processes of this host. The processes share the
    memory of the frozen array, so that sending the array costs the same whatever its size. The
    array is read-only in each process that receives it. Its memory is freed when no process refers
    to the array any more. An array below 1 MiB, or one for which there is no shared memory, is
    read-only but not shared.

    Args:
      a: an array. If `a` is a whole array from `empty`, its memory is frozen without a copy, and
        `a` itself becomes a private copy-on-write mapping of that memory. Any other array is copied
        once. A contiguous frozen array is returned as it is.

    Raises:
      TypeError: `a` is not an array, or is of a subclass of ndarray, whose mask, fields or rules
        would be lost.
      InvalidArgumentError: `a` holds Python objects.
    """
    _check_array("freeze", a)
    if is_frozen(a) and a.flags.forc:
        return a
    order = _order(a)
    source = np.frombuffer(bytes_of(a), np.uint8) if a.nbytes else np.empty(0, np.uint8)
    frozen_array: NDArray[Any] = np.ndarray(a.shape, a.dtype, _frozen_bytes(source), order=order)
    return frozen_array


def _order(a: NDArray[Any]) -> Literal["C", "F"]:
    return "F" if is_fortran(a) else "C"


def _frozen_bytes(source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    pool = this_pool() if source.nbytes >= SHM_DESCRIPTOR_BYTES_MIN else None
    if pool is not None:
        frozen = pool.freeze(shm_pool.address_of(source), source.nbytes) or pool.frozen_copy(source)
        if frozen is not None:
            return frozen.array()[: source.nbytes]
    return wire_arrays.frozen(source.copy())


def _empty(
    shape: int | tuple[int, ...], dtype: np.dtype[Any], order: Literal["C", "F"]
) -> NDArray[Any]:
    _check(dtype)
    count = converted("shape", _count, shape)
    pool = this_pool() if count * dtype.itemsize >= SHM_DESCRIPTOR_BYTES_MIN else None
    memory_of_its_own = None if pool is None else pool.user_array(count * dtype.itemsize)
    if memory_of_its_own is None:
        return np.empty(shape, dtype, order)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory_of_its_own, order=order)
    return array


def _count(shape: int | tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=object))


def _check_array(caller: str, a: Any) -> None:
    if type(a) not in (np.ndarray, np.memmap):
        hint = how_to_make_plain(a) if isinstance(a, np.ndarray) else "np.asarray makes one"
        raise TypeError(f"{caller}() takes a plain array, not {type(a).__name__}: {hint}")
    _check(a.dtype)


def _check(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise InvalidArgumentError(
            f"dtype {dtype} holds Python objects, whose bytes mean nothing in another process"
        )
