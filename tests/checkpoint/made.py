"""Variables for the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Ready:
    def __init__(self, value: Any = None) -> None:
        self._value = value

    def get_value(self) -> Any:
        return self._value


class LocalVariable:
    def __init__(self, value: Any, name: str) -> None:
        self.held = np.array(value)
        self.name = name
        self.shape = self.held.shape
        self.dtype = self.held.dtype
        self.slots: dict[str, NDArray[Any]] = {}

    def numpy(self) -> Any:
        return self.held

    def assign(self, value: Any) -> Any:
        self.held = np.array(value, self.dtype)
        return self

    def _start_saved(self) -> Any:
        return _Ready((1, self.held, self.slots))

    def _start_restore(self, value: Any, slots: Any) -> Any:
        self.held, self.slots = np.array(value), {k: np.array(v) for k, v in slots.items()}
        return _Ready()


class LocalSharded:
    def __init__(self, variables: list[LocalVariable], name: str) -> None:
        self.variables = variables
        self.name = name
        self.dtype = variables[0].dtype
        self.shape = (sum(v.shape[0] for v in variables), *variables[0].shape[1:])

    def numpy(self) -> Any:
        return np.concatenate([v.numpy() for v in self.variables])

    def assign(self, value: Any) -> Any:
        start = 0
        for each in self.variables:
            each.assign(value[start : start + each.shape[0]])
            start += each.shape[0]
        return self


def variable(value: Any, name: str = "v") -> Any:
    """A variable of this process."""
    return LocalVariable(value, name)


def sharded(whole: Any, shards: int, name: str = "v") -> Any:
    """One that is cut into so many shards."""
    pieces = np.array_split(np.asarray(whole), shards)
    return LocalSharded([LocalVariable(piece, f"{name}/part_{i}") for i, piece in enumerate(pieces)], name)


def slots_of(each: Any) -> dict[str, NDArray[Any]]:
    """The slots of an unsharded variable."""
    found: dict[str, NDArray[Any]] = each._start_saved().get_value()[2]
    return found


def set_slots(each: Any, **slots: Any) -> None:
    """Give a variable, or its only shard, these slots: `Adam__m` for "Adam/m"."""
    each._start_restore(each.numpy(), {name.replace("__", "/"): np.asarray(a) for name, a in slots.items()}).get_value()
