"""Arrays as bytes: a description (dtype, shape, order) and one buffer.

Rules
    A dtype travels as plain data, never as a pickle: NumPy's string ("<f4", ">M8[ns]"), the name of
    one of ml_dtypes' dtypes ("bfloat16"), or, if it has fields, a list of them with their offsets.
    The string of a long double also has the number of bits of its mantissa, because "<f16" may mean
    different numbers on two hosts.

    A dtype can travel only if the bytes of a value describe the value completely: bool, numbers,
    fixed-length strings, times, raw and structured data, also as records (`np.record`). Dtypes that
    hold pointers (object, NumPy's variable-length strings) cannot travel, nor can dtypes with
    `metadata`, or numbers with fields, because the description would lose a part of them.

    A received description is checked completely before memory is touched. A wrong description
    raises `BadArray`, which the caller turns into an error that names the peer. Sizes are Python's
    integers, so no product overflows.

Not here: the peer, and the transport of the buffer.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import ARRAY_BYTES_MAX, DEPTH_MAX, NDIM_MAX

DTypeJson: TypeAlias = "str | list[Any]"
"""A dtype as plain data, from `dtype_to_json`."""

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""A buffer with the bytes of an array. Any object with the buffer protocol works."""


class FrozenMemory:
    """The base class of objects that own frozen memory. Such an object is the last in the chain of
    bases of a frozen array. *Invariant*: no process writes to the memory.
    """

    __slots__ = ()


def is_frozen(array: NDArray[Any]) -> bool:
    """Return whether an array shows frozen memory. Such an array travels as a frozen array, which
    is read-only at the receiver."""
    if array.flags.writeable:
        return False
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, FrozenMemory)


class _Shown:
    """An object that shows the memory of an array to NumPy as read-only memory, or as writable
    memory. `memory` refers to it."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: NDArray[np.uint8], read_only: bool) -> None:
        self.__array_interface__ = memory.__array_interface__ | {
            "data": (memory.__array_interface__["data"][0], read_only)
        }
        self.memory = memory


class _FrozenCopy(_Shown, FrozenMemory):
    """The owner of frozen memory that only this process maps."""

    __slots__ = ()


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return a frozen array over the memory of `array`. The array must be contiguous, and no other
    object may refer to its memory."""
    if array.nbytes == 0 or is_frozen(array):
        array.flags.writeable = False
        return array
    memory = np.asarray(_FrozenCopy(np.frombuffer(bytes_of(array), np.uint8), True))
    frozen_array: NDArray[Any] = np.ndarray(
        array.shape, array.dtype, memory, order="F" if is_fortran(array) else "C"
    )
    return frozen_array


def writable_alias(data: memoryview) -> NDArray[np.uint8]:
    """Return read-only bytes as an array that is marked as writable, so that its pickle describes a
    writable array. Never write to this array.
    """
    return np.asarray(_Shown(np.frombuffer(data, np.uint8), False))


class BadArray(ValueError):
    """The error for a description that fits no array, and for an array that cannot be described;
    the text says why."""


_INT = frozenset({int})
_PLAIN = re.compile(
    r"\|b1|[|<>][iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)|\|[SV]\d{1,10}|[<>]U\d{1,10}"
    r"|[<>][mM]8(\[\d{0,10}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_LONG = re.compile(r"[<>][fc]\d{1,2}/\d{1,4}")
_ML = re.compile(r"(bfloat|float|int|uint|complex|bcomplex)\d{1,3}(_[a-z0-9]+)?")


# -- dtypes ----------------------------------------------------------------------------------------


def dtype_to_json(dtype: np.dtype[Any]) -> DTypeJson:
    """Return a dtype as plain data.

    Raises:
      BadArray: the dtype holds pointers, or something that its description would lose, or belongs
        to a package that zmqdist does not know.
    """
    described = _KNOWN_DTYPES.get(dtype) if dtype.metadata is None else None
    return described if described is not None else _any_to_json(dtype)


def _any_to_json(dtype: np.dtype[Any]) -> DTypeJson:
    if dtype.hasobject or dtype.kind in "OT":
        raise BadArray(
            f"dtype {dtype} holds Python objects or pointers, whose bytes mean nothing in another "
            f"process: "
            "astype(str) makes text of it, astype(float) numbers; send a DataFrame column by column"
        )
    if dtype.metadata is not None:
        raise BadArray(
            f"dtype {dtype} has metadata, which would be lost: view the array as a dtype without it"
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["array", dtype_to_json(base), list(shape)]
    if dtype.names is not None and dtype.type in _STRUCTURED:
        fields = [[name, *_field_to_json(dtype.fields[name])] for name in dtype.names]  # type: ignore[index]
        return [_STRUCTURED[dtype.type], fields, dtype.itemsize, dtype.isalignedstruct]
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes" and _ML.fullmatch(dtype.name):
        return str(dtype.name)
    if dtype.char in "gG":
        return f"{dtype.str}/{_long_bits()}"
    if (
        _PLAIN.fullmatch(dtype.str)
        and dtype.isbuiltin != 2
        and dtype.names is None
        and dtype.type is not np.record
    ):
        return str(dtype.str)
    raise BadArray(f"dtype {dtype} is not one that zmqdist knows")


_STRUCTURED: dict[type, str] = {np.void: "fields", np.record: "record"}
"""What the description of a dtype with fields begins with, by the type of its scalars."""


def _field_to_json(field: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype, offset, *title = field
    if title and not isinstance(title[0], str):
        raise BadArray(f"the title {title[0]!r} of a field is not a str")
    return (dtype_to_json(dtype), offset, title[0] if title else None)


@lru_cache(maxsize=1)
def _long_bits() -> int:
    return int(np.finfo(np.longdouble).nmant)


def dtype_from_json(described: Any) -> np.dtype[Any]:
    """Return the dtype that `dtype_to_json` described.

    Raises:
      BadArray: `described` is no result of `dtype_to_json`, or this host lacks the dtype: ml_dtypes
        is not installed, or long doubles have another form here.
    """
    dtype = _KNOWN_NAMES.get(described) if type(described) is str else None
    return dtype if dtype is not None else _any_from_json(described, DEPTH_MAX)


def _any_from_json(described: Any, depth_left: int) -> np.dtype[Any]:
    if depth_left == 0:
        raise BadArray(f"a dtype nested deeper than {DEPTH_MAX}")
    try:
        match described:
            case str():
                return _named_dtype(described)
            case ["array", base, [*shape]]:
                return np.dtype((_any_from_json(base, depth_left - 1), _checked_shape(shape)))
            case ["fields" | "record" as kind, [*fields], int(itemsize), bool(aligned)]:
                plain = _fields_from_json(fields, itemsize, aligned, depth_left - 1)
                return plain if kind == "fields" else np.dtype((np.record, plain))
    except BadArray:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # NumPy's own checks raise these errors
        raise BadArray(f"no such dtype: {error}") from None
    raise BadArray("no such dtype")


@lru_cache(maxsize=256)
def _named_dtype(name: str) -> np.dtype[Any]:
    if _PLAIN.fullmatch(name):
        return np.dtype(name)
    if _LONG.fullmatch(name):
        code, _, bits = name.partition("/")
        dtype = np.dtype(code[0] + ("g" if code[1] == "f" else "G"))
        if dtype.str != code or int(bits) != _long_bits():
            raise BadArray(
                f"a long double {name}, which this host does not have (it has "
                f"{dtype_to_json(dtype)})"
            )
        return dtype
    if _ML.fullmatch(name):
        try:
            scalar_type = getattr(importlib.import_module("ml_dtypes"), name, None)
        except ImportError:
            raise BadArray(f"an array of {name}: install ml_dtypes here to receive it") from None
        if not (isinstance(scalar_type, type) and issubclass(scalar_type, np.generic)):
            raise BadArray(f"no such dtype: {name}")
        return np.dtype(scalar_type)
    raise BadArray(f"no such dtype: {name[:40]!r}")


def _fields_from_json(
    fields: list[Any], itemsize: int, aligned: bool, depth_left: int
) -> np.dtype[Any]:
    names, formats, offsets, titles = [], [], [], []
    for field in fields:
        match field:
            case [str(name), described, int(offset), str() | None as title]:
                names.append(name)
                formats.append(_any_from_json(described, depth_left))
                offsets.append(offset)
                titles.append(title)
            case _:
                raise BadArray("no such field in a dtype")
    if not 0 <= itemsize <= ARRAY_BYTES_MAX:
        raise BadArray(f"a dtype of {itemsize} bytes: wanted 0 to {ARRAY_BYTES_MAX}")
    spec: dict[str, Any] = {
        "names": names,
        "formats": formats,
        "offsets": offsets,
        "itemsize": itemsize,
    }
    if any(title is not None for title in titles):
        spec["titles"] = titles
    dtype = np.dtype(spec, align=aligned)  # type: ignore[call-overload]
    if dtype.itemsize != itemsize:
        raise BadArray(f"a dtype of {dtype.itemsize} bytes whose description says {itemsize}")
    return dtype  # type: ignore[no-any-return]


_KNOWN_DTYPES = {dtype: dtype.str for dtype in map(np.dtype, ["?", *"bhilqBHILQefdFD"])}
_KNOWN_NAMES = {described: dtype for dtype, described in _KNOWN_DTYPES.items()}


# -- arrays ----------------------------------------------------------------------------------------


def is_fortran(array: NDArray[Any]) -> bool:
    """Return whether the bytes of an array travel in Fortran order (first index fastest). Other
    arrays travel in C order."""
    return array.flags.fnc


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array, in the order that `is_fortran` decides.

    For a contiguous array the result is the array's own memory, which shows later changes of the
    array. For any other array the result is a copy.
    """
    if array.nbytes == 0:
        return memoryview(b"")
    if array.flags.c_contiguous and array.dtype in _KNOWN_DTYPES:
        return memoryview(array).cast("B")  # type: ignore[arg-type]
    flat = np.ascontiguousarray(array.T if is_fortran(array) else array).reshape(-1)
    return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]


def rebuild(dtype: np.dtype[Any], shape: Any, fortran: bool, buffer: Any) -> NDArray[Any]:
    """Return an array over `buffer`, without a copy. The array is writable if the buffer is
    writable.

    Args:
      shape: list of sizes, as received.

    Raises:
      BadArray: no array has such a shape, or an array of this shape needs more or fewer bytes than
        the buffer has.
    """
    have = memoryview(buffer).nbytes
    array: NDArray[Any]
    try:
        array = np.ndarray(tuple(shape), dtype, buffer, order="F" if fortran else "C")
        if array.nbytes == have > 0 and _INT.issuperset(map(type, shape)):
            return array
    except (ValueError, TypeError, OverflowError):
        pass  # the checks below find out what is wrong
    sizes = _checked_shape(shape)
    count = 1
    for size in sizes:
        count *= size
    if max(count * dtype.itemsize, count) > ARRAY_BYTES_MAX:
        raise BadArray(
            f"an array of shape {_cut(sizes)} and dtype {dtype} is larger than {ARRAY_BYTES_MAX} "
            f"bytes"
        )
    if count * dtype.itemsize != have:
        raise BadArray(
            f"shape {_cut(sizes)} of {dtype} needs {count * dtype.itemsize} bytes, and {have} "
            f"arrived"
        )
    try:
        array = np.ndarray(sizes, dtype, buffer, order="F" if fortran else "C")
    except (ValueError, TypeError, OverflowError) as error:
        # with a size of 0 the checks above pass, but NumPy bounds the product of the other sizes
        raise BadArray(f"no array has shape {_cut(sizes)} and dtype {dtype}: {error}") from None
    return array


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (list, tuple)) or len(shape) > NDIM_MAX:
        raise BadArray(f"a shape is a list of at most {NDIM_MAX} sizes")
    for size in shape:
        if type(size) is not int or not 0 <= size <= ARRAY_BYTES_MAX:
            raise BadArray(f"a shape has sizes from 0 to {ARRAY_BYTES_MAX}")
    return tuple(shape)


def _cut(sizes: tuple[int, ...]) -> str:
    return (
        str(sizes)
        if len(sizes) <= 8
        else f"({', '.join(map(str, sizes[:8]))}, ... {len(sizes)} in all)"
    )
