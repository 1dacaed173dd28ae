"""Structures made of list, tuple, namedtuple and dict, as in `tf.nest`.

Rules
    Every other object is a leaf, including arrays, str and None. The items of a dict are visited in
    the order of the sorted keys, so that the order of insertion has no effect. Objects of
    subclasses of the four classes are structures, too, and `pack_sequence_as` keeps their class.

Errors are as in TensorFlow. A structure of the wrong kind raises TypeError. A wrong number of
items, or wrong keys, raise ValueError. The text of the error names the place as Python code that
follows the name of the variable: `['a'][0].x`.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "assert_same_structure",
    "flatten",
    "is_nested",
    "map_structure",
    "pack_sequence_as",
]
__dir__ = __all__.copy  # dir() and completion show no other names


Structure: TypeAlias = Any
"""A nested structure of leaves, or a single leaf."""


def is_nested(structure: Structure) -> bool:
    """Return whether `structure` is a list, tuple, namedtuple or dict, even if it is empty.

    >>> zd.nest.is_nested((1, 2)), zd.nest.is_nested("text")
    (True, False)
    """
    return isinstance(structure, (list, tuple, dict))


def flatten(structure: Structure, expand_composites: bool = False) -> list[Any]:
    """Return the leaves of a structure from left to right. If `structure` is a single leaf, return
    a list with this leaf.

    >>> zd.nest.flatten({"b": 2, "a": (0, 1)})
    [0, 1, 2]

    Args:
      expand_composites: whether to replace a leaf that consists of several values by these values,
        for example a ShardedVariable by its shards.

    Raises:
      TypeError: a dict has keys that cannot be sorted.
    """
    if expand_composites:
        return [part for leaf in flatten(structure) for part in _components(leaf)]
    if not isinstance(structure, (list, tuple, dict)):
        return [structure]
    leaves: list[Any] = []
    for _, child in _children(structure, ""):
        if isinstance(child, (list, tuple, dict)):
            leaves += flatten(child)
        else:
            leaves.append(child)
    return leaves


def pack_sequence_as(structure: Structure, flat_sequence: Sequence[Any]) -> Structure:
    """Return a copy of `structure` whose leaves are the items of `flat_sequence`. This is the
    inverse of `flatten`. The leaves of `structure` are ignored.

    >>> zd.nest.pack_sequence_as({"a": (0, 0), "b": 0}, [1, 2, 3])
    {'a': (1, 2), 'b': 3}

    Raises:
      TypeError: `flat_sequence` is a leaf, or a dict in `structure` has keys that cannot be sorted.
      ValueError: the number of items of `flat_sequence` is not the number of leaves of `structure`.
    """
    if not is_nested(flat_sequence):
        raise TypeError(
            f"flat_sequence must be a list or tuple, not {type(flat_sequence).__name__}"
        )
    leaf_count = len(flatten(structure))
    if leaf_count != len(flat_sequence):
        raise ValueError(
            f"the structure has {leaf_count} leaves, flat_sequence has {len(flat_sequence)} items"
        )
    return _pack(structure, iter(flat_sequence))


def map_structure(
    func: Callable[..., Any], *structures: Structure, check_types: bool = True
) -> Structure:
    """Apply `func` to the corresponding leaves of all structures. Return the results in the form of
    the first structure.

    >>> zd.nest.map_structure(lambda x, y: x + y, {"a": (1, 2)}, {"a": (10, 20)})
    {'a': (11, 22)}

    Raises:
      TypeError, ValueError: the structures differ (`assert_same_structure`), no structure is given,
        or `func` is not callable.
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    if not structures:
        raise ValueError("at least one structure is needed")
    for structure in structures[1:]:
        assert_same_structure(structures[0], structure, check_types=check_types)
    leaves = map(flatten, structures)
    return _pack(structures[0], iter([func(*group) for group in zip(*leaves, strict=True)]))


def map_contents(func: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with each part replaced by `func(part)`, at any depth. Nothing is sorted or
    flattened, and no structure is too odd:

    parts are the items of lists, tuples, sets, deques and arrays of objects, the keys and items of
    dicts, and the fields of dataclasses and attrs classes. `func` gets `value` itself first, and
    the parts of each object that it returns unchanged. Objects without a changed part are not
    copied.

    Raises:
      ValueError: parts have changed in a value that contains itself.
    """
    outer: set[int] = set()
    cyclic = []

    def mapped(part: Any) -> Any:
        replaced = func(part)
        if replaced is not part or (parts := contents(part)) is None:
            return replaced
        if id(part) in outer:
            cyclic.append(part)
            return part
        outer.add(id(part))
        new = list(map(mapped, parts))
        outer.discard(id(part))
        return part if all(map(operator.is_, new, parts)) else _with_contents(part, new)

    result = mapped(value)
    if cyclic and result is not value:
        raise ValueError(
            f"a {type(cyclic[0]).__name__} contains itself, so its parts cannot be replaced"
        )
    return result


def contents(value: Any) -> list[Any] | None:
    """Return the parts of an object to which `map_contents` applies its function, or None if the
    object has no parts."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if type(value) is np.ndarray:
        return list(value.flat) if value.dtype == object else None
    names = _field_names(value)
    return [getattr(value, name) for name in names] if names else None


def as_numpy(value: Any) -> Any:
    """Return `value` with each part that has a method `numpy()`, at any depth, replaced by the
    result of this method."""

    def converted(part: Any) -> Any:
        numpy = None if isinstance(part, type) else getattr(part, "numpy", None)
        return numpy() if callable(numpy) else part

    return map_contents(converted, value)


def assert_same_structure(nest1: Structure, nest2: Structure, check_types: bool = True) -> None:
    """Check that two structures differ only in their leaves.

    >>> zd.nest.assert_same_structure({"a": 1}, {"a": "one"})

    Args:
      check_types: whether a different class, such as a list in place of a tuple, counts as a
        difference. Two namedtuple classes with equal names and fields count as equal, and so do two
        kinds of dict.

    Raises:
      TypeError: `check_types` is True, and the classes of two structures at the same place differ;
        or a dict has keys that cannot be sorted.
      ValueError: the numbers of items differ, one structure has a leaf where the other has a
        structure, or `check_types` is True and the keys of two dicts differ.
    """
    _compare(nest1, nest2, check_types, "")


def _components(leaf: Any) -> list[Any]:
    components = getattr(leaf, "_nest_components", None)
    return [leaf] if components is None else list(components())


def _children(structure: Structure, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(structure, dict):
        for key in _sorted_keys(structure, path):
            yield f"{path}[{key!r}]", structure[key]
    elif fields := _fields(structure):
        for field, child in zip(fields, structure, strict=True):
            yield f"{path}.{field}", child
    else:
        for index, child in enumerate(structure):
            yield f"{path}[{index}]", child


def _sorted_keys(structure: dict[Any, Any], path: str) -> list[Any]:
    try:
        return sorted(structure)
    except TypeError:
        raise TypeError(
            f"{_at(path)}: the keys of a dict must be sortable, these are not: {list(structure)}"
        ) from None


def _fields(structure: Structure) -> tuple[str, ...]:
    """Return the names of the fields of a namedtuple, or () for any other object."""
    return getattr(structure, "_fields", ()) if isinstance(structure, tuple) else ()


def _pack(structure: Structure, leaves: Iterator[Any]) -> Structure:
    if not is_nested(structure):
        return next(leaves)
    if isinstance(structure, dict):
        packed = {key: _pack(structure[key], leaves) for key in sorted(structure)}
        # A copy, and not a new dict, because a copy keeps the original's class, order of keys and
        # attributes, such as default_factory.
        result = copy.copy(structure)
        for key in structure:
            result[key] = packed[key]
        return result
    items = [_pack(child, leaves) for child in structure]
    if type(structure) is list:
        return items
    return structure._make(items) if _fields(structure) else type(structure)(items)


def _field_names(value: Any) -> list[str]:
    """Return the names of the fields that an object of a dataclass or an attrs class has."""
    cls = type(value)
    fields = (
        dataclasses.fields(cls)
        if dataclasses.is_dataclass(cls)
        else getattr(cls, "__attrs_attrs__", ())
    )
    return [field.name for field in fields if hasattr(value, field.name)]


def _with_contents(value: Any, parts: list[Any]) -> Any:
    """Return a copy of an object with other parts, which are in the order of `contents`."""
    cls: Any = type(value)
    if isinstance(value, dict):
        result = copy.copy(value)
        result.clear()
        for key, item in zip(parts[: len(value)], parts[len(value) :], strict=True):
            result[key] = item
        return result
    if _fields(value):
        return cls._make(parts)
    if isinstance(value, deque):
        return cls(parts, value.maxlen)
    if isinstance(value, (list, tuple, set, frozenset)):
        return cls(parts)
    if isinstance(value, np.ndarray):
        return np.fromiter(parts, object, len(parts)).reshape(value.shape)
    result = cls.__new__(cls)  # not by the constructor, whose parameters may not be the fields
    getattr(result, "__dict__", {}).update(getattr(value, "__dict__", {}))
    for name, part in zip(_field_names(value), parts, strict=True):
        object.__setattr__(result, name, part)  # the class may be frozen
    return result


def _compare(first: Structure, second: Structure, check_types: bool, path: str) -> None:
    if is_nested(first) != is_nested(second):
        raise ValueError(f"{_at(path)}: expected {_kind(first)}, given {_kind(second)}")
    if not is_nested(first):
        return
    if check_types:
        if not _same_type(first, second):
            raise TypeError(f"{_at(path)}: expected {_kind(first)}, given {_kind(second)}")
        if isinstance(first, dict) and first.keys() != second.keys():
            raise ValueError(f"{_at(path)}: expected the keys {list(first)}, given {list(second)}")
    if len(first) != len(second):
        raise ValueError(f"{_at(path)}: expected {len(first)} items, given {len(second)}")
    for (where, child), (_, second_child) in zip(
        _children(first, path), _children(second, path), strict=True
    ):
        _compare(child, second_child, check_types, where)


def _same_type(first: Structure, second: Structure) -> bool:
    if type(first) is type(second) or (isinstance(first, dict) and isinstance(second, dict)):
        return True
    fields = _fields(first)
    return (
        bool(fields) and fields == _fields(second) and type(first).__name__ == type(second).__name__
    )


def _kind(structure: Structure) -> str:
    if not is_nested(structure):
        return f"a leaf ({type(structure).__name__})"
    return f"a {type(structure).__name__} of {len(structure)}"


def _at(path: str) -> str:
    return path or "(top)"
