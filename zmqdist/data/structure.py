"""Elements, which are the values in a pipeline, and the specs that describe them.

Rules
    An element is a structure of leaves. Tuples, namedtuples and dicts form the structure. An object
    of an attrs class or dataclass is converted to a namedtuple with the same name and fields, which
    is the same class in every process. None may stand in a structure, as a part without value. It
    is no leaf, and its spec is None. Everything else is a leaf: arrays, NumPy scalars, str, bytes, and
    datasets (of `window`). A list is data and is converted to an array. `element` converts the
    results of user functions and generators to this form, so that operators get no other values,
    and the safe codec accepts all elements.

    A spec has the same structure, with a `TensorSpec` or `DatasetSpec` in place of each leaf. The
    dtypes of str and bytes have no length.

    A str or bytes that ends in NUL is a valid element, but lists and batches of such values are
    refused, because an array would cut the NUL off. A list that mixes text with other values is
    refused too, because NumPy would convert all values to text.

    An operator that may yield the same element again (a cache, a source, a window) yields
    `read_only(element)`. The reader then cannot write to the element's arrays, and gets copies of
    the element's dicts. Every other element belongs to its reader alone.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import repeat
from operator import index, is_
from typing import Any, Final

import numpy as np

from zmqdist import nest
from zmqdist.data.composites import COMPOSITES, batched_spec, row_spec, spec_of_composite, stacked
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.specs import TensorSpec, plain_array
from zmqdist.wire import safe
from zmqdist.wire.namedtuples import generic_namedtuple

_SCALARS: tuple[Any, ...] = (
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
)
_SCALARS += (
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
    np.datetime64,
    np.timedelta64,
)

READY: Final[frozenset[type]] = frozenset({str, bytes, *_SCALARS})
"""Types whose values are leaves without conversion. `if type(x) not in READY: x = element(x)` saves
calls of `element`."""

LEAVES: Final[frozenset[type]] = frozenset({np.ndarray, *READY})
"""The types of leaves."""

_FROM_PYTHON: dict[type, Callable[[Any], Any]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN_SPEC"


UNKNOWN_SPEC: Final = _Unknown()
"""Stands for a spec that is unknown until an element is computed."""


@dataclass(frozen=True)
class DatasetSpec:
    """The spec of a leaf that is a dataset, with the spec of that dataset's elements."""

    element_spec: Any


class NoElements(FailedPreconditionError):
    """The spec of a dataset is unknown, because only its first element would show the spec, and the
    dataset is empty."""


def invalid(message: str) -> InvalidArgumentError:
    """Return the error for a user's mistake in a pipeline."""
    return InvalidArgumentError(message)


def checked_int(value: Any, argument: str) -> int:
    """Return `value` as an integer. Raises TypeError, which names the `argument`, if `value` is not
    an integer. A float such as 2.7 is not rounded.
    """
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"`{argument}` must be a whole number, not {value!r}") from None


def is_dataset(value: Any) -> bool:
    """Return whether `value` is a Dataset. Tests an attribute of its class, because the module that
    defines the class imports this one."""
    return hasattr(type(value), "element_spec")


def element(value: Any) -> Any:
    """Return `value` as an element.

    Raises:
      InvalidArgumentError: a leaf is not an array, number, str or bytes, nor a list that makes an
        array.
    """
    cls = type(value)
    if cls in LEAVES:
        if cls is np.ndarray and value.dtype.hasobject:
            raise invalid(f"an element holds an array of Python objects: {_NO_OBJECTS}")
        return value
    convert = _FROM_PYTHON.get(cls)
    if convert is not None:
        try:
            return convert(value)
        except OverflowError:
            raise invalid(f"an element holds {value!r}, which needs more than 64 bits") from None
    if isinstance(value, dict):
        return {key: None if item is None else element(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [None if item is None else element(item) for item in value]
        return cls(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, str):  # convert subclasses of str and bytes, such as np.str_
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    if is_dataset(value):
        return value
    if field_names(cls):
        return element(without_attrs(value))
    return _array(value)


_NO_OBJECTS: Final = "give it a numeric dtype, or one of text (astype(str))"


def field_names(cls: type) -> list[str]:
    """Return the names of the fields of an attrs class or dataclass whose objects are structures.
    Return no names for any other class, and for arrays and specs."""
    if hasattr(cls, "__array__") or cls in (TensorSpec, DatasetSpec):
        return []
    attributes = getattr(cls, "__attrs_attrs__", ()) or (fields(cls) if is_dataclass(cls) else ())
    return [attribute.name for attribute in attributes]


def without_attrs(structure: Any) -> Any:
    """Return a structure in which objects of attrs classes and dataclasses are replaced by
    namedtuples."""
    cls = type(structure)
    if names := field_names(cls):
        kind = generic_namedtuple(cls.__name__, tuple(name.lstrip("_") for name in names))
        return kind._make([without_attrs(getattr(structure, name)) for name in names])
    return map_items(without_attrs, structure)


def declared_spec(argument: str, spec: Any) -> Any:
    """Return the spec that a user passed as an argument, with namedtuples for objects of attrs
    classes. Raises TypeError, which names the argument, if a leaf is no spec.
    """

    def check(part: Any) -> Any:
        # None is the spec of None
        if not isinstance(part, (tuple, dict, TensorSpec, DatasetSpec, _Unknown, type(None))):
            raise TypeError(f"{argument} holds TensorSpecs in tuples and dicts, not {part!r}")
        return map_items(check, part)

    return None if spec is None else check(without_attrs(spec))


def map_items(change: Callable[[Any], Any], structure: Any) -> Any:
    """Return a tuple, namedtuple or dict with `change` applied to each item. Return any other value
    unchanged."""
    if isinstance(structure, tuple):
        items = map(change, structure)
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, dict):
        return {key: change(item) for key, item in structure.items()}
    return structure


def _array(value: Any) -> Any:
    arrays = isinstance(value, (list, np.ndarray, np.generic))
    if value is None or not (
        arrays or hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    ):
        raise invalid(
            f"an element holds {type(value).__name__}: arrays, numbers, str and bytes, in tuples "
            f"and dicts, are allowed"
            + (", and None beside them: did a function return nothing?" if value is None else "")
        )
    array = plain_array(value, "an element")
    if array.dtype.hasobject:
        raise invalid(f"an element holds {type(value).__name__} of Python objects: {_NO_OBJECTS}")
    if array.dtype.kind in "SU" and isinstance(value, list):
        _check_text(value, array.dtype.kind)
    return array


def _check_text(items: Any, kind: str) -> None:
    """Raise InvalidArgumentError if an item ends in NUL, or does not have NumPy's `kind` ("U" or
    "S") and would be converted to text."""
    for item in items:
        if isinstance(item, (list, tuple)):
            _check_text(item, kind)
            continue
        item_kind = (
            "U"
            if isinstance(item, str)
            else "S"
            if isinstance(item, bytes)
            else np.asarray(item).dtype.kind
        )
        if item_kind != kind:
            raise invalid(
                "an element holds a list of text and something else, which makes no array: return "
                "a tuple, whose parts may differ"
            )
        check_end(item)


def check_end(text: Any) -> None:
    """Raise InvalidArgumentError if str or bytes end in NUL, which an array would cut off."""
    if isinstance(text, (str, bytes)) and text[-1:] in ("\0", b"\0"):
        raise invalid(
            "text or bytes that end in NUL would lose it in an array: map them to another form "
            "before batching"
        )


def spec_of(value: Any) -> Any:
    """Return the spec of one element."""
    if is_dataset(value):
        return DatasetSpec(value.element_spec)
    if value is None:
        return None
    if type(value) in COMPOSITES:
        return spec_of_composite(value)
    if isinstance(value, (tuple, dict)):
        return map_items(spec_of, value)
    array = np.asarray(value)
    return TensorSpec(array.shape, plain_dtype(array.dtype))


def plain_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype without the length of its strings."""
    plain: np.dtype[Any] = np.dtype(dtype)
    return np.dtype(plain.kind) if plain.kind in "SU" else plain


def map_specs(change: Callable[[Any], Any], spec: Any) -> Any:
    """Return a spec with `change` applied to each TensorSpec and each composite. A DatasetSpec is
    left unchanged."""
    if type(spec) in COMPOSITES or isinstance(spec, TensorSpec):
        return change(spec)
    return map_items(partial(map_specs, change), spec)


def batched(spec: Any, size: int | None) -> Any:
    """Return the spec of a batch, which is `size` elements stacked on a new first axis."""

    def more(leaf: Any) -> Any:
        if type(leaf) in COMPOSITES:
            return batched_spec(leaf, size)
        return TensorSpec(None if leaf.shape is None else (size, *leaf.shape), leaf.dtype)

    return map_specs(more, spec)


def unbatched(spec: Any) -> Any:
    """Return the spec of the slices along axis 0 of an element whose spec is `spec`. Raises
    ValueError for a scalar."""

    def rows(leaf: Any) -> Any:
        if type(leaf) in COMPOSITES:
            return row_spec(leaf)
        if leaf.shape == ():
            raise ValueError("a scalar has no axis 0 to split along")
        return TensorSpec(None if leaf.shape is None else leaf.shape[1:], leaf.dtype)

    return map_specs(rows, spec)


def common_spec(first: Any, second: Any) -> Any:
    """Return the narrowest spec that the elements of two specs fit.

    Raises:
      TypeError: the specs differ in structure or dtype.
    """

    def common(a: Any, b: Any) -> Any:
        if isinstance(a, DatasetSpec) and isinstance(b, DatasetSpec):
            return DatasetSpec(common_spec(a.element_spec, b.element_spec))
        if a is None and b is None:
            return None
        if not (isinstance(a, TensorSpec) and isinstance(b, TensorSpec)) or a.dtype != b.dtype:
            raise TypeError(f"elements of different types: {a} and {b}")
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return TensorSpec(None, a.dtype)
        return TensorSpec(
            tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True)), a.dtype
        )

    try:
        return nest.map_structure(common, first, second)
    except ValueError as error:
        raise TypeError(f"elements of different structures: {error}") from None


def problem_of(value: Any, spec: Any) -> str | None:
    """Return the reason why an element does not fit `spec`, or None if it fits."""
    problem = _dict_problem(spec, value)
    if problem is not None:
        return problem
    try:
        nest.assert_same_structure(spec, value, check_types=False)
        pairs = list(zip(nest.flatten(spec), nest.flatten(value), strict=True))
    except (TypeError, ValueError) as error:
        return str(error)
    for leaf_spec, leaf in pairs:
        if leaf_spec is None or leaf is None:
            if leaf_spec is not leaf:
                return f"expected {leaf_spec or 'None'}, given {type(leaf).__name__}"
        elif isinstance(leaf_spec, DatasetSpec):
            if not is_dataset(leaf):
                return f"expected a dataset, given {type(leaf).__name__}"
        elif is_dataset(leaf):
            return "expected an array, given a dataset"
        else:
            problem = leaf_spec.problem(np.asarray(leaf))
            if problem is not None:
                return str(problem)
    return None


def _dict_problem(spec: Any, value: Any) -> str | None:
    """Return the reason why the keys of dicts in an element do not fit `spec`, or None if they fit.
    This is a check of its own, because `nest.map_structure` does not compare keys.
    """
    if isinstance(spec, dict) != isinstance(value, dict):
        return f"expected {type(spec).__name__}, given {type(value).__name__}"
    if isinstance(spec, dict):
        if spec.keys() != value.keys():
            return f"expected a dict of {sorted(map(str, spec))}, given one of {sorted(map(str, value))}"
        pairs = [(spec[key], value[key]) for key in spec]
    elif isinstance(spec, tuple) and isinstance(value, tuple):
        pairs = list(zip(spec, value, strict=False))
    else:
        return None
    return next(
        (problem for part, item in pairs if (problem := _dict_problem(part, item)) is not None),
        None,
    )


# -- batches ---------------------------------------------------------------------------------------


def stack(elements: Sequence[Any], join: Callable[[Sequence[Any]], Any] | None = None) -> Any:
    """Stack elements of one structure into one element, in which each leaf has a new axis 0.

    Args:
      join: a function that joins several leaves into one leaf. None means `stack_leaves`.

    Raises:
      InvalidArgumentError: the structures, dtypes or shapes differ.
    """
    first = elements[0]
    cls = type(first)
    if cls in LEAVES:
        return (join or stack_leaves)(elements)
    if cls in COMPOSITES:
        return stacked(elements)
    if first is None and not any(value is not None for value in elements):
        return None
    kind = tuple if isinstance(first, tuple) else dict if cls is dict else None
    if kind is None:
        raise invalid(f"cannot batch elements of type {cls.__name__}")
    if not all(issubclass(cls_of_element, kind) for cls_of_element in set(map(type, elements))):
        raise invalid(_DIFFERENT)
    if not all(map(len(first).__eq__, map(len, elements))):
        raise invalid(_DIFFERENT)
    if kind is tuple:
        columns = [stack(column, join) for column in zip(*elements, strict=True)]
        return cls(*columns) if hasattr(first, "_fields") else tuple(columns)
    try:
        columns = [[row[key] for row in elements] for key in first]
    except KeyError:
        raise invalid(_DIFFERENT) from None
    return {key: stack(column, join) for key, column in zip(first, columns, strict=True)}


_DIFFERENT: Final = "cannot batch elements of different structures"


def check_leaves(leaves: Sequence[Any]) -> None:
    """Raise InvalidArgumentError if a value in `leaves` is not a leaf, for example a tuple, which
    NumPy would convert to an array."""
    if not LEAVES.issuperset(map(type, leaves)):
        raise invalid(_DIFFERENT)


def stack_leaves(leaves: Sequence[Any]) -> Any:
    """Stack leaves of one dtype and shape on a new axis 0. Raises InvalidArgumentError if the
    dtypes or shapes differ."""
    first = leaves[0]
    cls = type(first)
    if cls is np.ndarray:
        shape, dtype = first.shape, first.dtype
        if all(
            type(leaf) is cls and leaf.shape == shape and leaf.dtype == dtype for leaf in leaves
        ):
            return stack_alike(leaves)
    elif len(set(map(type, leaves))) == 1 and cls not in (str, bytes):
        if cls not in (np.datetime64, np.timedelta64):
            return np.fromiter(leaves, np.dtype(cls), len(leaves))
        return np.array(leaves)
    check_leaves(leaves)
    return _stack_checked([np.asarray(leaf) for leaf in leaves], leaves)


def stack_alike(arrays: Sequence[Any]) -> Any:
    """Stack arrays of one dtype and shape on a new axis 0. Raises InvalidArgumentError if they have
    as many axes as NumPy allows."""
    first = arrays[0]
    try:
        batch = np.empty((len(arrays), *first.shape), first.dtype)
    except ValueError as error:
        raise invalid(
            f"cannot batch arrays of {first.ndim} dimensions, nor save or cache them: {error}"
        ) from None
    rows = arrays if first.shape else [array.reshape(1) for array in arrays]
    # Join in one call in C, because np.stack takes a Python step for each array. Join into memory
    # of the same dtype, because NumPy would convert it to the byte order of this host, and drop the
    # gaps between fields.
    np.concatenate(rows, out=batch.reshape(len(rows) * len(rows[0]), *first.shape[1:]))
    return batch


def _stack_checked(arrays: list[Any], leaves: Sequence[Any]) -> Any:
    """Stack leaves for which the fast paths do not work, such as strings, or scalars mixed with
    arrays of rank 0. Raises InvalidArgumentError if the shapes or dtypes differ, or if a string
    ends in NUL.
    """
    first = arrays[0]
    for array, leaf in zip(arrays, leaves, strict=True):
        if array.shape != first.shape:
            raise invalid(
                f"cannot batch shapes {first.shape} and {array.shape}: all must be alike, or use "
                f"padded_batch"
            )
        if plain_dtype(array.dtype) != plain_dtype(first.dtype):
            raise invalid(f"cannot batch {first.dtype} and {array.dtype}")
        check_end(leaf)
    return np.stack(arrays)


# -- elements in states and descriptions -----------------------------------------------------------


def to_json(value: Any) -> list[str]:
    """Return a value as text: the safe codec encodes the value, and the body and frames are written
    in base64."""
    body, frames = safe.encode(value)
    return [base64.b64encode(part).decode() for part in (body, *map(_flat, frames))]


def _flat(frame: Any) -> Any:
    return memoryview(frame).cast("B") if memoryview(frame).nbytes else b""


def from_json(parts: Sequence[str]) -> Any:
    """Return the value from the text that `to_json` returned. Raises WireError for other texts."""
    body, *frames = (base64.b64decode(part) for part in parts)
    return safe.decode(body, [bytearray(frame) for frame in frames], "a saved state")


def read_only(value: Any) -> Any:
    """Return a copy of an element in which arrays are read-only and dicts are copies. The arrays
    share memory with those of `value`.

    Returns `value` itself if it has only read-only leaves and no dicts.
    """
    cls = type(value)
    if cls is np.ndarray:
        if value.flags.writeable:
            value = value.view()
            value.setflags(write=False)
        return value
    if cls in READY:
        return value
    if isinstance(value, dict):  # always copy a dict, because no dict is read-only
        return {key: read_only(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [read_only(item) for item in value]
        if all(map(is_, items, value)):
            return value
        return tuple(items) if cls is tuple else cls(*items)
    return value


def copy_dicts(value: Any) -> Any:
    """Return a copy of an element with copies of its dicts. The leaves are shared with the
    element.
    """
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            if type(item) not in LEAVES:
                copy[key] = copy_dicts(item)
        return copy
    if isinstance(value, tuple):
        items = map(copy_dicts, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def leaves_of(structure: Any) -> Iterator[Any]:
    """Yield the leaves of an element or a spec. A Ragged or Sparse counts as one leaf, and None as
    none."""
    if type(structure) in COMPOSITES or not isinstance(structure, (tuple, dict)):
        if structure is not None:
            yield structure
    else:
        for part in structure.values() if isinstance(structure, dict) else structure:
            yield from leaves_of(part)


def length_of(value: Any) -> int:
    """Return the number of rows that `rows_of` yields: the length of all leaves along axis 0.

    Raises:
      ValueError: a leaf is a scalar, the leaves differ in length, or the element has no leaves.
    """
    shapes = [
        leaf.shape() if type(leaf) in COMPOSITES else np.shape(leaf) for leaf in leaves_of(value)
    ]
    if not shapes:
        raise ValueError("the structure has no leaves to slice")
    if not all(shapes):
        raise ValueError("a scalar has no axis 0 to slice along")
    lengths = {shape[0] for shape in shapes}
    if len(lengths) > 1:
        raise ValueError(f"the leaves differ in length along axis 0: {sorted(lengths)}")
    return int(lengths.pop())


def rows_of(value: Any) -> Any:
    """Return an iterator over the rows of an element, which are the slices of all its leaves along
    axis 0. The leaves have one length, as `length_of` checks.
    """
    if type(value) is np.ndarray:
        dtype = value.dtype
        if value.ndim > 1 or (dtype.type in READY and dtype.isnative):
            return iter(value)
        # text becomes str or bytes; items that are no plain scalars become arrays of rank 0, which
        # keep the whole dtype
        return (
            iter(value.tolist())
            if dtype.kind in "SU"
            else (value[row, ...] for row in range(len(value)))
        )
    if type(value) in COMPOSITES:
        return value.rows()
    if value is None or (isinstance(value, (dict, tuple)) and not value):
        return repeat(value)  # it has as many rows as the leaves beside it
    if isinstance(value, dict):
        keys = list(value)
        return (
            dict(zip(keys, row, strict=True))
            for row in zip(*(rows_of(value[key]) for key in keys), strict=False)
        )
    if isinstance(value, tuple):
        rows = zip(*map(rows_of, value), strict=False)
        return (type(value)(*row) for row in rows) if hasattr(value, "_fields") else rows
    return repeat(value, 0)
