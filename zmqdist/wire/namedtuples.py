"""Namedtuples that travel: the names that they may have, and the class of a received one.

The class of a received namedtuple is made here from its name and fields; the sender never chooses a class. Classes of zmqdist itself
that are registered with `known_namedtuple` are decoded as themselves.
"""

from __future__ import annotations

from collections import namedtuple
from functools import lru_cache
from keyword import iskeyword
from typing import Any, TypeVar

from zmqdist.limits import NAMEDTUPLE_FIELDS_MAX, NAMEDTUPLE_KINDS_KEPT_MAX


@lru_cache(maxsize=NAMEDTUPLE_KINDS_KEPT_MAX)
def is_valid_kind(name: str, fields: tuple[str, ...]) -> bool:
    """Return whether a namedtuple can have these names. `_0`, `_1`, ... are the names that namedtuple(rename=True) gives instead of
    bad ones.
    """
    if not isinstance(fields, tuple) or len(fields) > NAMEDTUPLE_FIELDS_MAX or len(set(fields)) != len(fields):
        return False
    if not _is_name(name):
        return False
    return all(field == f"_{i}" or (_is_name(field) and field[0] != "_") for i, field in enumerate(fields))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= 255 and name.isidentifier() and not iskeyword(name)


Kind = TypeVar("Kind", bound=type)

_known: dict[tuple[str, tuple[str, ...]], type] = {}


def known_namedtuple(cls: Kind) -> Kind:
    """Decorate a namedtuple of zmqdist, so that one with its name and fields is decoded as this class and not as a generic one."""
    _known[cls.__name__, cls._fields] = cls  # type: ignore[attr-defined]
    generic_namedtuple.cache_clear()
    return cls


@lru_cache(maxsize=NAMEDTUPLE_KINDS_KEPT_MAX)
def generic_namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return the namedtuple class of this name and these fields: the same one each time. Its objects can be pickled."""
    if (name, fields) in _known:
        return _known[name, fields]
    kind: Any = namedtuple(name, fields, rename=True, module=__name__)  # type: ignore[misc]
    kind.__reduce__ = _reduce_kind  # type: ignore[method-assign]
    return kind


def _reduce_kind(self: Any) -> tuple[Any, ...]:
    """Reduce an object to a call that makes its class, because a pickle could not find the class by its name."""
    return _make_kind, (type(self).__name__, self._fields, tuple(self))


def _make_kind(name: str, fields: tuple[str, ...], items: tuple[Any, ...]) -> Any:
    return generic_namedtuple(name, fields)._make(items)
