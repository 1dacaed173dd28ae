"""Namedtuples that travel: the names that are permitted, and the class of a received namedtuple.

This module makes the class from the name and the fields, so that the sender never chooses a class.
A namedtuple of zmqdist itself that is registered with `known_namedtuple` arrives with its own
class.
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from keyword import iskeyword
from typing import Any, TypeVar

from zmqdist.limits import NAMEDTUPLE_FIELDS_MAX, NAMEDTUPLE_KINDS_KEPT_MAX


@lru_cache(maxsize=NAMEDTUPLE_KINDS_KEPT_MAX)
def is_valid_kind(name: str, fields: tuple[str, ...]) -> bool:
    """Return whether a namedtuple can have this name and these names of fields. `_0`, `_1`, ... are
    permitted, because namedtuple(rename=True) puts them in place of invalid names.
    """
    if (
        not isinstance(fields, tuple)
        or len(fields) > NAMEDTUPLE_FIELDS_MAX
        or len(set(fields)) != len(fields)
    ):
        return False
    if not _is_name(name):
        return False
    return all(
        field == f"_{i}" or (_is_name(field) and field[0] != "_") for i, field in enumerate(fields)
    )


def _is_name(name: Any) -> bool:
    return (
        isinstance(name, str) and len(name) <= 255 and name.isidentifier() and not iskeyword(name)
    )


Kind = TypeVar("Kind", bound=type)

_registered: dict[tuple[str, tuple[str, ...]], type] = {}


def known_namedtuple(cls: Kind) -> Kind:
    """Decorate a namedtuple class of zmqdist, so that a received namedtuple with the same name and
    fields has this class and not a generic class.
    """
    _registered[cls.__name__, cls._fields] = cls  # type: ignore[attr-defined]
    generic_namedtuple.cache_clear()
    return cls


@lru_cache(maxsize=NAMEDTUPLE_KINDS_KEPT_MAX)
def generic_namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return a namedtuple class with this name and these fields: the class that `known_namedtuple`
    has registered, or a generic class. A class that was used recently is not made anew. Objects of
    the class can be pickled.
    """
    if (name, fields) in _registered:
        return _registered[name, fields]
    kind: Any = namedtuple(name, fields, rename=True, module=__name__)  # type: ignore[misc]
    kind.__reduce__ = _reduce_kind  # type: ignore[method-assign]
    return kind


def _reduce_kind(self: Any) -> tuple[Any, ...]:
    """Return a function and arguments that make an equal object. pickle needs them, because it
    could not find the class by its name."""
    return _make_kind, (type(self).__name__, self._fields, tuple(self))


def _make_kind(name: str, fields: tuple[str, ...], items: tuple[Any, ...]) -> Any:
    return generic_namedtuple(name, fields)._make(items)
