"""Flattens the structure that a program saves into named leaves.

Rules
    A leaf is a variable, a NumPy array, or a number, bool, str or None. The structure consists of
    dicts, lists, tuples and `Checkpoint`s, nested in any way. The name of a leaf is the path to the
    leaf: `model/w` for {"model": {"w": ...}}. For an item of a list or tuple, the path has the
    item's own name if the item is a variable, and otherwise its position.

    A restore assigns variables, changes arrays in place, and replaces numbers in the dict, list or
    Checkpoint that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqdist.specs import what_is_lost
from zmqdist.training.checkpoint.shard_handles import is_handle
from zmqdist.wire.arrays import BadArray, dtype_to_json


@dataclass(frozen=True)
class Leaf:
    """A variable, an array or a plain value.

    Attributes:
      put: a function that replaces the leaf in the dict, list or Checkpoint that holds the leaf. It
        is None for a leaf in a tuple, and for a leaf that is the whole structure.
    """

    name: str
    value: Any
    put: Callable[[Any], None] | None = None

    @property
    def is_handle(self) -> bool:
        return is_handle(self.value)

    @property
    def is_array(self) -> bool:
        return isinstance(self.value, np.ndarray | np.generic)


class Container:
    """Base of `Checkpoint`: an object whose `_parts` are saved."""

    _source: Any

    def _parts(self) -> dict[str, Any]:
        raise NotImplementedError


def leaves(structure: Any) -> dict[str, Leaf]:
    """Return the leaves of a structure by name.

    Raises:
      TypeError: an item of the structure cannot be saved. The error text names the item.
      ValueError: two leaves have one name.
    """
    found: dict[str, Leaf] = {}
    for leaf in _walk(structure, "", None):
        if leaf.name in found:
            raise ValueError(
                f"two items to be saved are called {leaf.name!r}: pass them in a dict, each under "
                f"a key of its own"
            )
        found[leaf.name] = leaf
    return found


def containers(structure: Any, name: str = "") -> Iterator[tuple[str, Container]]:
    """Yield (name, Container) for each Container in a structure. The name of the structure itself
    is ""."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(structure, Container):
        yield name, structure
        children = structure._parts().items()
    elif isinstance(structure, dict):
        children = list(structure.items())
    elif isinstance(structure, list | tuple):
        children = enumerate(structure)
    for key, child in children:
        yield from containers(child, _join(name, key))


def _walk(value: Any, name: str, put: Callable[[Any], None] | None) -> Iterator[Leaf]:
    if isinstance(value, Container):
        for key, child in list(value._parts().items()):
            yield from _walk(child, _join(name, key), _setter(setattr, value, key))
    elif isinstance(value, dict):
        for key, child in list(value.items()):
            # iterate over a copy, because another thread may add to the dict
            if not isinstance(key, str | int):
                raise TypeError(
                    f"{name or '(top)'}: a dict to be saved has keys that are strings or whole "
                    f"numbers, not {key!r}"
                )
            yield from _walk(child, _join(name, key), _setter(_set_item, value, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            replace = _setter(_set_item, value, index) if isinstance(value, list) else None
            yield from _walk(child, _join(name, child.name if is_handle(child) else index), replace)
    elif is_handle(value):
        yield Leaf(name or value.name, value, put)
    elif not name:
        raise TypeError(
            f"only a variable, a dict, a list or a Checkpoint can be saved, not "
            f"{type(value).__name__}, as `variables`"
        )
    elif value is None or isinstance(value, bool | int | float | str):
        yield Leaf(name, value, put)
    elif isinstance(value, np.ndarray | np.generic):
        try:
            dtype_to_json(value.dtype)
        except BadArray as error:
            raise TypeError(f"{name}: {error}") from None
        if loss := what_is_lost(value):
            raise TypeError(f"{name}: {loss}")
        yield Leaf(name, value, put)
    else:
        raise TypeError(
            f"{name}: {type(value).__name__} cannot be saved; variables, arrays, numbers and "
            f"strings can, and dicts and lists "
            "of them (the slots of optimizers are saved with their variables)"
        )


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def _setter(
    set_it: Callable[[Any, Any, Any], None], container: Any, key: Any
) -> Callable[[Any], None]:
    return lambda new: set_it(container, key, new)


def _set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value
