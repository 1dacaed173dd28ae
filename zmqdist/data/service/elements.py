"""Elements of a pipeline as one value of an RPC answer, and back: many at a time, by columns.

Form
    A structure (tuple, namedtuple, dict) whose leaves are columns. A column is a list, which no element has as structure:
        [SCALARS, array]         numpy scalars of one type: one array of one axis
        [ROWS, array]            arrays of one dtype and shape, each of at most ROW_BYTES_MAX: stacked on a new axis 0
        [TEXTS, kind, ...]       str (kind 1) or bytes (0) of which some are large: arrays of bytes
        [EACH, one, two, ...]    anything else, as it is: large arrays, str, bytes, what differs in dtype, shape or structure
    All columns have an entry for each element. What differs in structure is a column of structures, be it a part of the elements or
    all of them; no elements are an empty column.

Rules
    What arrives is what was sent, type for type: a numpy scalar stays one, an array without axes stays one, dtypes keep their byte
    order. Only a namedtuple becomes a generic one with the same name and fields, and an array in Fortran's order may become one in C's.

    A large array is not copied here, either way: it has a frame of its own. A small one is copied into its column, and out of it: so
    each array is private to whoever receives it, writable, and keeps no more memory than its own. (Views would save half a microsecond
    a row, and then one row in a shuffle buffer keeps a whole column.) A frozen array that is an entry of its own stays frozen.

    Any value gives elements or a WireError. They take about as much memory as the value, but an entry of one byte becomes an object of
    about 100 bytes.

Not here: bytes (wire/safe.py), and when a batch is full. The codec takes what weighs up to 7 MiB beside its large arrays, and a
thousand of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NoReturn

import numpy as np

from zmqdist.data.structure import LEAVES, UNKNOWN_SPEC, DatasetSpec, element, invalid, is_dataset
from zmqdist.errors import UnimplementedError, WireError
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.specs import TensorSpec

SCALARS, ROWS, EACH, TEXTS = range(4)

ROW_BYTES_MAX: Final = INLINE_BYTES_MAX
"""A larger array travels in a frame of its own: then nobody copies it on the way."""

_SCALAR_TYPES: Final = LEAVES - {np.ndarray, str, bytes}
_TIMES: Final = frozenset({np.datetime64, np.timedelta64})

_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")


# -- packing --------------------------------------------------------------------------------------------------------


def pack(elements: Sequence[Any]) -> Any:
    """Elements as one value that the safe codec takes. It refers to their large arrays, which must not change until it is encoded.

    Raises:
      UnimplementedError: a leaf is a dataset.
      InvalidArgumentError: a leaf is nothing that an element may hold.
    """
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
        if isinstance(first, tuple) and first and list(map(len, items)).count(len(first)) == len(items):
            return _like(first, map(_column, zip(*items, strict=True)))
    return [EACH, *map(_single, items)]


def _same_names(items: Sequence[dict[Any, Any]]) -> bool:
    """Whether their keys are the same strings in the same order. Other keys may be equal and of another type, as 1 and True."""
    keys = list(map(tuple, items))
    return set(map(type, chain.from_iterable(keys))) == {str} and keys.count(keys[0]) == len(keys)


def _like(form: Any, items: Iterable[Any]) -> Any:
    return form._make(items) if hasattr(form, "_fields") else tuple(items)


def _scalars(items: Sequence[Any]) -> Any:
    dtype = items[0].dtype
    if type(items[0]) not in _TIMES:
        return [SCALARS, np.fromiter(items, dtype, len(items))]
    if _alike(items, _dtype_of):  # they differ in their units, and numpy would make them alike
        return [SCALARS, np.array(items, dtype)]
    return [EACH, *items]


def _texts(cls: type, items: Sequence[Any]) -> Any:
    if max(map(len, items)) <= ROW_BYTES_MAX:
        return [EACH, *items]
    encoded = [item.encode("utf-8", "surrogatepass") for item in items] if cls is str else items
    return [TEXTS, int(cls is str), *(np.frombuffer(item, np.uint8) for item in encoded)]


def _arrays(items: Sequence[Any]) -> Any:
    first = items[0]
    dtype, shape, nbytes = first.dtype, first.shape, first.nbytes
    # An array without bytes would be sent for nothing, and received in any number. Fields may have gaps between them.
    fits = 0 < nbytes <= ROW_BYTES_MAX and not dtype.names and not dtype.hasobject
    if not (fits and _alike(items, _shape_of) and _alike(items, _dtype_of)):
        return [EACH, *map(_single, items)]
    column = np.empty((len(items), *shape), dtype)  # np.stack would give it the machine's byte order
    if shape:
        np.concatenate(items, out=column.reshape(-1, *shape[1:]))
    else:
        for place, item in enumerate(items):
            column[place] = item
    return [ROWS, column]


def _alike(items: Sequence[Any], value_of: Callable[[Any], Any]) -> bool:
    values = list(map(value_of, items))
    return values.count(values[0]) == len(values)


def _single(value: Any) -> Any:
    """A value as an entry of a column of its own kind."""
    if isinstance(value, dict):
        return {key: _single(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return _like(value, map(_single, value))
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return value  # also a row of an array of strings or of fields
    if is_dataset(value):
        raise UnimplementedError(
            "elements that hold datasets (of window) do not travel: put a batch or a flat_map behind them"
        )
    return element(value)


# -- unpacking ------------------------------------------------------------------------------------------------------


class _Malformed(Exception):
    pass


def unpack(value: Any, peer: str) -> list[Any]:
    """The elements in a value from `pack` that has travelled. Their arrays are private and writable, or frozen.

    Args:
      value: nobody else's; large arrays in it become those of the elements.
      peer: whom to blame in an error.

    Raises:
      WireError: nothing that `pack` makes.
    """
    try:
        return _entries(value)
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
        return [dict(zip(keys, row)) for row in rows]  # noqa: B905, they are as long, and this is the loop
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
            return [array[place, ...].copy() for place in range(len(array))]
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
    elif type(entry) not in LEAVES and not isinstance(entry, np.generic):
        _malformed(f"a {type(entry).__name__} where a leaf belongs")


def _malformed(why: str) -> NoReturn:
    raise _Malformed(why)


# -- what is known of elements ----------------------------------------------------------------------------------------

_OBJECT_BYTES: Final = 64
"""About what an object takes beside its content."""


INLINE_BYTES: Final = 4 << 20
ARRAYS_MAX: Final = 500
"""What a batch may hold beside its large arrays, and how many of those: well below what the codec takes."""


def fits(elements: Iterable[Any], bytes_max: int) -> int:
    """How many of these make a batch of about `bytes_max` bytes that the codec takes; at least one."""
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
    """Whether it is a numpy scalar of a plain type: of these there are never too many in a batch."""
    return type(value) in _SCALAR_TYPES


def _sizes(value: Any) -> list[int]:
    """Bytes of each leaf."""
    cls = type(value)
    if cls is np.ndarray:
        return [value.nbytes]
    if cls is str or cls is bytes:
        return [len(value)]
    if isinstance(value, (tuple, dict)):
        return [nbytes for item in (value.values() if isinstance(value, dict) else value) for nbytes in _sizes(item)]
    return [getattr(value, "nbytes", 0)]


def weigh(value: Any) -> int:
    """About how many bytes of memory an element takes."""
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
    """Check elements against what their pipeline is said to give: one, where all are alike, else each.

    Raises:
      InvalidArgumentError: another structure, dtype or shape; the message names the leaf.
    """
    if elements and spec is not UNKNOWN_SPEC:
        for value in elements[:1] if _all_alike(elements) else elements:
            _check(value, spec, "element")


def _all_alike(items: Sequence[Any]) -> bool:
    """Whether they have one structure, and in each place of it one dtype and shape."""
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
        return list(map(len, items)).count(len(first)) == len(items) and all(map(_all_alike, zip(*items, strict=True)))
    return (cls in _SCALAR_TYPES and cls not in _TIMES) or cls is str or cls is bytes


def _check(value: Any, spec: Any, place: str) -> None:
    if isinstance(spec, TensorSpec):
        if isinstance(value, (tuple, dict)) or is_dataset(value):
            raise invalid(f"{place}: expected {spec.dtype}, given {_description(value)}")
        problem = spec.problem(np.asarray(value))
        if problem is not None:
            raise invalid(f"{place}: {problem}")
    elif isinstance(spec, dict):
        if not isinstance(value, dict) or value.keys() != spec.keys():
            raise invalid(f"{place}: expected {_description(spec)}, given {_description(value)}")
        for key, part in spec.items():
            _check(value[key], part, f"{place}[{key!r}]")
    elif isinstance(spec, tuple):
        fields = getattr(spec, "_fields", ())
        if not isinstance(value, tuple) or len(value) != len(spec) or getattr(value, "_fields", ()) != fields:
            raise invalid(f"{place}: expected a {_description(spec)}, given {_description(value)}")
        for index, part in enumerate(spec):
            _check(value[index], part, f"{place}.{fields[index]}" if fields else f"{place}[{index}]")
    elif isinstance(spec, DatasetSpec) and not is_dataset(value):
        raise invalid(f"{place}: expected a dataset, given {_description(value)}")


def _description(value: Any) -> str:
    if isinstance(value, dict):
        return f"the keys {list(value)}"
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", ())
        return f"namedtuple of {', '.join(fields)}" if fields else f"tuple of {len(value)}"
    return "a dataset" if is_dataset(value) else type(value).__name__
