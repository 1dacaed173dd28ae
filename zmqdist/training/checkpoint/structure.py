"""Flattens the structure that a program saves into named leaves, and variables into shards.

Rules
    A leaf is a variable, a NumPy array, or a number, bool, str or None. Of an optimizer,
    `iterations` is saved. The structure consists of
    dicts, lists, tuples and `Checkpoint`s, nested in any way. The name of a leaf is the path to the
    leaf: `model/w` for {"model": {"w": ...}}. For an item of a list or tuple, the path has the
    item's own name if the item is a variable, and otherwise its position.

    A restore assigns variables, changes arrays in place, and replaces numbers in the dict, list or
    Checkpoint that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from zmqdist.futures import Future
from zmqdist.specs import what_is_lost
from zmqdist.training.checkpoint.manifest import Part
from zmqdist.training.optimizers import Optimizer
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.variable import Variable
from zmqdist.variables.client import restore
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
    """Base of `Checkpoint`: an object whose `_parts` are saved, and the items of the structure
    `_beside`."""

    _source: Any

    def _parts(self) -> dict[str, Any]:
        raise NotImplementedError

    def _beside(self) -> Any:
        raise NotImplementedError


def leaves(structure: Any) -> dict[str, Leaf]:
    """Return the leaves of a structure by name.

    Raises:
      TypeError: an item of the structure cannot be saved. The error text names the item.
      ValueError: two leaves have one name.
    """
    by_name: dict[str, Leaf] = {}
    for leaf in _walk(structure, "", None):
        if leaf.name in by_name:
            raise ValueError(
                f"two items to be saved are called {leaf.name!r}: pass them in a dict, each under "
                f"a key of its own"
            )
        by_name[leaf.name] = leaf
    return by_name


def containers(structure: Any, name: str = "") -> Iterator[tuple[str, Container]]:
    """Yield (name, Container) for each Container in a structure. The name of the structure itself
    is ""."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(structure, Container):
        yield name, structure
        yield from containers(structure._beside(), name)
        children = structure._parts().items()
    elif isinstance(structure, dict):
        children = list(structure.items())
    elif isinstance(structure, list | tuple):
        children = enumerate(structure)
    for key, child in children:
        yield from containers(child, _join(name, key))


def _walk(value: Any, name: str, put: Callable[[Any], None] | None) -> Iterator[Leaf]:
    if isinstance(value, Container):
        yield from _walk(value._beside(), name, None)
        for key, child in list(value._parts().items()):
            yield from _walk(child, _join(name, key), partial(setattr, value, key))
    elif isinstance(value, dict):
        for key, child in list(value.items()):
            # iterate over a copy, because another thread may add to the dict
            if not isinstance(key, str | int):
                raise TypeError(
                    f"{name or '(top)'}: a dict to be saved has keys that are strings or whole "
                    f"numbers, not {key!r}"
                )
            yield from _walk(child, _join(name, key), partial(setitem, value, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            replace = partial(setitem, value, index) if isinstance(value, list) else None
            yield from _walk(child, _join(name, child.name if is_handle(child) else index), replace)
    elif is_handle(value):
        yield Leaf(name or value.name, value, put)
    elif isinstance(value, Optimizer):
        yield Leaf(_join(name, "iterations"), value.iterations)
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


def is_handle(value: Any) -> bool:
    """Return whether `value` is a Variable or a ShardedVariable."""
    return isinstance(value, Variable | ShardedVariable)


@dataclass(frozen=True)
class Shard:
    """One shard of a variable.

    Attributes:
      start, stop: the first row of the shard, and the row after its last, counted in the whole
        variable. A scalar is one row.
    """

    variable: Variable
    start: int
    stop: int

    def read(self) -> Part:
        """Read and return value, slots and version atomically. Raises PSUnavailableError if the
        shard's parameter server is lost."""
        storage = self.variable.storage
        version, value, slots, once = storage.saved().get_value()
        return Part(value, slots, version, (storage.ref.session, storage.ref.number), once)

    def start_writing(self, part: Part) -> Future:
        """Start to replace the value and the slots. `get_value()` of the returned future returns
        when they are replaced, or raises PSUnavailableError if the shard's parameter server is
        lost.
        """
        storage = self.variable.storage
        return storage.change(restore(storage.ref, part.value, part.slots))


def shards_of(variable: Variable | ShardedVariable) -> list[Shard]:
    """Return the shards of a variable, in the order of their rows. A Variable is one shard."""
    shards = []
    start = 0
    for shard in variable.variables if isinstance(variable, ShardedVariable) else [variable]:
        stop = start + (shard.shape[0] if shard.shape else 1)
        shards.append(Shard(shard, start, stop))
        start = stop
    return shards
