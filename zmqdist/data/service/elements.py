"""Pack many elements of a pipeline, column by column, into one value for an RPC reply, and unpack
the elements again.

Form
    The value is a structure (tuple, namedtuple, dict) whose leaves are columns. A column is a list.
    The structure of an element never contains a list, so `unpack` recognizes the columns. A column
    is one of:
        [SCALARS, array]         NumPy scalars of one type, as one array of rank 1
        [ROWS, array]            arrays of one dtype and shape, of at most ROW_BYTES_MAX each, stacked on a new axis 0
        [TEXTS, kind, ...]       str (kind 1) or bytes (kind 0) of which some are large, as arrays of bytes
        [EACH, one, two, ...]    everything else, unchanged: large arrays, str, bytes, and entries that differ in dtype, shape or structure
    Each column has an entry for each element. If the elements differ in the structure of one part,
    such as the value of a key, a single EACH column has this part of every element. If they differ
    in their outermost structure, the value is an EACH column of whole elements. Without elements
    the value is an empty column.

Rules
    Elements arrive with the types with which they were sent. NumPy scalars stay scalars, arrays of
    rank 0 stay arrays, and dtypes keep their byte order. There are two exceptions: a namedtuple
    becomes an instance of a new class with the same name and fields, and an array in Fortran order
    may arrive in C order.

    A large array is sent in a frame of its own, and this module never copies it. A small array is
    copied into its column by the sender and out of the column by the receiver, so that the receiver
    owns each array, may write to it, and keeps no other memory alive with it. Views would save half
    a microsecond per row, but one row in a shuffle buffer would then keep a whole column in memory.
    A frozen array in an EACH column stays frozen.

    For any value, `unpack` either returns elements or raises WireError. The elements take about as
    much memory as the value, except that an entry of one byte becomes an object of about 100 bytes.

The safe codec has no bound for the bytes and the number of the arrays, texts and bytes of a batch,
but one for the rest, which `fits` does not let several elements reach: the structure, its keys, and
scalars.

Not here: the encoding into bytes (wire/safe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NoReturn

import numpy as np

from zmqdist.data.structure import (
    LEAVES,
    UNKNOWN_SPEC,
    DatasetSpec,
    element,
    invalid,
    is_dataset,
    stack_alike,
)
from zmqdist.errors import UnimplementedError, WireError
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.specs import TensorSpec

SCALARS, ROWS, EACH, TEXTS = range(4)

ROW_BYTES_MAX: Final = INLINE_BYTES_MAX
"""An array of more bytes than this is sent in a frame of its own, so that it is not copied."""

_ROW_AXES_MAX: Final = 32
"""An array with so many axes is sent by itself, because NumPy 1 has no array with one more."""

_SCALAR_TYPES: Final = LEAVES - {np.ndarray, str, bytes}
_NONE: Final = type(None)
_TIMES: Final = frozenset({np.datetime64, np.timedelta64})

_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")


# -- packing ---------------------------------------------------------------------------------------


def pack(elements: Sequence[Any]) -> Any:
    """Return elements as one value for the safe codec. The value refers to the elements' large
    arrays, which must not change before the value is encoded.

    Raises:
      UnimplementedError: a leaf is a dataset.
      InvalidArgumentError: a leaf has a type that elements may not hold.
    """
    if _NONE in set(map(type, elements)):
        element(None)  # raises: None may only be a component
    return _column(elements) if elements else [EACH]


def _column(items: Sequence[Any]) -> Any:
    first = items[0]
    cls = type(first)
    if len(set(map(type, items))) == 1:
        if cls in _SCALAR_TYPES:
            return _scalars(items)
        if cls is np.ndarray:
            return _arrays(items)
        if cls is str or cls is bytes:
            return _texts(cls, items)
        if cls is dict and first and _same_names(items):
            columns = zip(*map(dict.values, items), strict=True)
            return dict(zip(first, map(_column, columns), strict=True))
        if (
            isinstance(first, tuple)
            and first
            and list(map(len, items)).count(len(first)) == len(items)
        ):
            return _like(first, map(_column, zip(*items, strict=True)))
    return [EACH, *map(_single, items)]


def _same_names(items: Sequence[dict[Any, Any]]) -> bool:
    """Return whether all dicts have the same strings as keys, in the same order. Return False if a
    key is not a string, because keys such as 1 and True compare equal although they differ.
    """
    keys = list(map(tuple, items))
    return set(map(type, chain.from_iterable(keys))) == {str} and keys.count(keys[0]) == len(keys)


def _like(form: Any, items: Iterable[Any]) -> Any:
    return form._make(items) if hasattr(form, "_fields") else tuple(items)


def _scalars(items: Sequence[Any]) -> Any:
    dtype = items[0].dtype
    if type(items[0]) not in _TIMES:
        return [SCALARS, np.fromiter(items, dtype, len(items))]
    # Entries of different units form an EACH column, because NumPy would convert them to one unit.
    if _alike(items, _dtype_of):
        return [SCALARS, np.array(items, dtype)]
    return [EACH, *items]


def _texts(cls: type, items: Sequence[Any]) -> Any:
    if max(map(len, items)) <= ROW_BYTES_MAX:
        return [EACH, *items]
    encoded = [item.encode("utf-8", "surrogatepass") for item in items] if cls is str else items
    return [TEXTS, int(cls is str), *(np.frombuffer(item, np.uint8) for item in encoded)]


def _arrays(items: Sequence[Any]) -> Any:
    first = items[0]
    if len(items) == 1:
        # for example a wide element, which is a batch: a column would only be copied
        return [EACH, element(first)]
    dtype, shape, nbytes = first.dtype, first.shape, first.nbytes
    # Send empty arrays one by one, because a received column of no bytes could claim any number of
    # rows. Send arrays of structured dtypes one by one too, because their fields may have gaps, and
    # arrays that have no room for another axis.
    fits = (
        0 < nbytes <= ROW_BYTES_MAX
        and not dtype.names
        and not dtype.hasobject
        and len(shape) < _ROW_AXES_MAX
    )
    if not (fits and _alike(items, _shape_of) and _alike(items, _dtype_of)):
        return [EACH, *map(_single, items)]
    return [ROWS, stack_alike(items)]


def _alike(items: Sequence[Any], value_of: Callable[[Any], Any]) -> bool:
    values = list(map(value_of, items))
    return values.count(values[0]) == len(values)


def _single(value: Any) -> Any:
    """Return an element, or a part of one, as an entry of an EACH column. Raises UnimplementedError
    if it contains a dataset."""
    if isinstance(value, dict):
        return {key: _single(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return _like(value, map(_single, value))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        # a scalar, for example an item of an array of strings or of a structured dtype
        return value
    if is_dataset(value):
        raise UnimplementedError(
            "elements that hold datasets (of window) cannot be sent to a reader: apply batch() or "
            "flat_map() to them"
        )
    return None if value is None else element(value)


# -- unpacking -------------------------------------------------------------------------------------


class _Malformed(Exception):
    pass


def unpack(value: Any, peer: str) -> list[Any]:
    """Return the elements that the sender's `pack` put into `value`. The caller owns the elements'
    arrays. They are writable unless they were sent frozen.

    Args:
      value: the caller must not use it afterwards, because the elements take over its large arrays.
      peer: the sender, for error texts.

    Raises:
      WireError: `value` is not a value that `pack` returns.
    """
    try:
        entries = _entries(value)
        if _NONE in set(map(type, entries)):
            _malformed("None where an element belongs")
        return entries
    except _Malformed as error:
        raise WireError(peer, f"not elements of a pipeline: {error}") from None
    except RecursionError:
        raise WireError(peer, "not elements of a pipeline: they are nested too deeply") from None


def _entries(form: Any) -> list[Any]:
    cls = type(form)
    if cls is list:
        return _entries_of_column(form)
    if (cls is not dict and not isinstance(form, tuple)) or not form:
        _malformed(f"a {cls.__name__} where a column belongs")
    columns = list(map(_entries, form.values() if cls is dict else form))
    if len(set(map(len, columns))) != 1:
        _malformed("columns of different lengths")
    rows = zip(*columns, strict=True)
    if cls is dict:
        keys = list(form)
        return [dict(zip(keys, row)) for row in rows]  # noqa: B905, equal lengths, and this loop is hot
    return list(map(cls._make, rows) if hasattr(form, "_fields") else rows)


def _entries_of_column(column: list[Any]) -> list[Any]:
    kind = column[0] if column and type(column[0]) is int else None
    if kind == EACH:
        entries = column[1:]
        if not LEAVES.issuperset(map(type, entries)):
            for entry in entries:
                _check_entry(entry)
        return entries
    if kind == TEXTS and len(column) > 2 and column[1] in (0, 1):
        return [_text(column[1], array) for array in column[2:]]
    if kind in (SCALARS, ROWS) and len(column) == 2 and type(column[1]) is np.ndarray:
        array = column[1]
        if kind == SCALARS:
            if array.ndim == 1 and array.dtype.type in _SCALAR_TYPES and array.dtype.isnative:
                return list(array)
        elif array.ndim > 1 and array.nbytes >= len(array):
            return list(map(np.ndarray.copy, array))
        elif array.ndim == 1 and array.itemsize:
            return [array[row, ...].copy() for row in range(len(array))]
    return _malformed("no such column")


def _text(kind: int, array: Any) -> str | bytes:
    if type(array) is not np.ndarray or array.dtype != np.uint8 or array.ndim != 1:
        _malformed("a text that is no array of bytes")
    try:
        return array.tobytes().decode("utf-8", "surrogatepass") if kind else array.tobytes()
    except UnicodeDecodeError as error:
        _malformed(str(error))


def _check_entry(entry: Any) -> None:
    if isinstance(entry, (tuple, dict)):
        for item in entry.values() if isinstance(entry, dict) else entry:
            _check_entry(item)
    elif entry is not None and type(entry) not in LEAVES and not isinstance(entry, np.generic):
        _malformed(f"a {type(entry).__name__} where a leaf belongs")


def _malformed(why: str) -> NoReturn:
    raise _Malformed(why)


# -- sizes and specs of elements -------------------------------------------------------------------

_OBJECT_BYTES: Final = 64
"""The approximate bytes that an object takes in addition to its content."""


INLINE_BYTES: Final = 4 << 20
ARRAYS_MAX: Final = 500
"""The largest number of bytes of a batch of several elements without its large arrays, and the
largest number of its large arrays. More of them have no frames of their own, and are copied."""


def fits(elements: Iterable[Any], bytes_max: int) -> int:
    """Return how many of the elements form a batch of about `bytes_max` bytes that the safe codec
    accepts. The result is at least 1."""
    inline = large = arrays = count = 0
    for value in elements:
        for nbytes in _sizes(value):
            if nbytes > ROW_BYTES_MAX:
                large += nbytes
                arrays += 1
            else:
                inline += nbytes + _OBJECT_BYTES
        if count and (inline > INLINE_BYTES or arrays > ARRAYS_MAX or inline + large > bytes_max):
            return count
        count += 1
    return max(1, count)


def is_scalar(value: Any) -> bool:
    """Return whether `value` is a NumPy scalar of a plain type. Such elements are so small that a
    batch needs no bound on its bytes."""
    return type(value) in _SCALAR_TYPES


def _sizes(value: Any) -> list[int]:
    """Return the size of each leaf in bytes."""
    cls = type(value)
    if cls is np.ndarray:
        return [value.nbytes]
    if cls is str or cls is bytes:
        return [len(value)]
    if isinstance(value, (tuple, dict)):
        return [
            nbytes
            for item in (value.values() if isinstance(value, dict) else value)
            for nbytes in _sizes(item)
        ]
    return [getattr(value, "nbytes", 0)]


def weigh(value: Any) -> int:
    """Return about how many bytes of memory an element takes."""
    cls = type(value)
    if cls in _SCALAR_TYPES:
        return _OBJECT_BYTES
    if cls is np.ndarray:
        return int(value.nbytes) + 2 * _OBJECT_BYTES
    if cls is str or cls is bytes:
        return int(value.__sizeof__())
    if isinstance(value, tuple):
        return sum(map(weigh, value)) + _OBJECT_BYTES
    if isinstance(value, dict):
        return sum(map(weigh, value.values())) + 4 * _OBJECT_BYTES
    return getattr(value, "nbytes", 0) + _OBJECT_BYTES


def check_spec(elements: Sequence[Any], spec: Any) -> None:
    """Check elements against the spec of their pipeline. Check only the first element if all
    elements are alike, otherwise each element.

    Raises:
      InvalidArgumentError: an element has another structure, dtype or shape. The error text names
        the leaf.
    """
    if elements and spec is not UNKNOWN_SPEC:
        for value in elements[:1] if _all_alike(elements) else elements:
            _check(value, spec, "element")


def _all_alike(items: Sequence[Any]) -> bool:
    """Return whether all elements have the same structure, and the same dtype and shape at each
    leaf."""
    first = items[0]
    cls = type(first)
    if len(set(map(type, items))) > 1:
        return False
    if cls is np.ndarray:
        return _alike(items, _shape_of) and _alike(items, _dtype_of)
    if cls is dict and first:
        return list(map(tuple, items)).count(tuple(first)) == len(items) and all(
            map(_all_alike, zip(*map(dict.values, items), strict=True))
        )
    if isinstance(first, tuple) and first:
        return list(map(len, items)).count(len(first)) == len(items) and all(
            map(_all_alike, zip(*items, strict=True))
        )
    return (cls in _SCALAR_TYPES and cls not in _TIMES) or cls in (str, bytes, _NONE)


def _check(value: Any, spec: Any, path: str) -> None:
    if isinstance(spec, TensorSpec):
        if isinstance(value, (tuple, dict)) or is_dataset(value):
            raise invalid(f"{path}: expected {spec.dtype}, given {_description(value)}")
        problem = spec.problem(np.asarray(value))
        if problem is not None:
            raise invalid(f"{path}: {problem}")
    elif isinstance(spec, dict):
        if not isinstance(value, dict) or value.keys() != spec.keys():
            raise invalid(f"{path}: expected {_description(spec)}, given {_description(value)}")
        for key, part in spec.items():
            _check(value[key], part, f"{path}[{key!r}]")
    elif isinstance(spec, tuple):
        fields = getattr(spec, "_fields", ())
        if (
            not isinstance(value, tuple)
            or len(value) != len(spec)
            or getattr(value, "_fields", ()) != fields
        ):
            raise invalid(f"{path}: expected a {_description(spec)}, given {_description(value)}")
        for index, part in enumerate(spec):
            _check(value[index], part, f"{path}.{fields[index]}" if fields else f"{path}[{index}]")
    elif spec is None and value is not None:
        raise invalid(f"{path}: expected None, given {_description(value)}")
    elif isinstance(spec, DatasetSpec) and not is_dataset(value):
        raise invalid(f"{path}: expected a dataset, given {_description(value)}")


def _description(value: Any) -> str:
    if isinstance(value, dict):
        return f"the keys {list(value)}"
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", ())
        return f"namedtuple of {', '.join(fields)}" if fields else f"tuple of {len(value)}"
    return "a dataset" if is_dataset(value) else type(value).__name__
