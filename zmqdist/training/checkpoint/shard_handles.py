"""The shards of a variable as a checkpoint handles them: rows that can be read and written, with the slots beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqdist.futures import Future
from zmqdist.training.checkpoint.parts import Part
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.variable import Variable
from zmqdist.variables.client import restore


def is_handle(value: Any) -> bool:
    """Whether `value` is a variable, sharded or not."""
    return isinstance(value, Variable | ShardedVariable)


@dataclass(frozen=True)
class Shard:
    """One shard of a variable.

    Attributes:
      start, stop: its rows of the whole. A scalar is one row.
    """

    variable: Variable
    start: int
    stop: int

    def read(self) -> Part:
        """Return value, slots and version of one moment. Raises PSUnavailableError."""
        storage = self.variable.storage
        version, value, slots, once = storage.saved().get_value()
        return Part(value, slots, version, (storage.ref.session, storage.ref.number), once)

    def start_writing(self, part: Part) -> Future:
        """Start to replace value and slots; the future's `get_value()` returns when they are replaced. It raises PSUnavailableError."""
        storage = self.variable.storage
        return storage.change(restore(storage.ref, part.value, part.slots))


def shards_of(variable: Variable | ShardedVariable) -> list[Shard]:
    """Return the shards, in the order of their rows."""
    shards = []
    start = 0
    for each in variable.variables if isinstance(variable, ShardedVariable) else [variable]:
        stop = start + (each.shape[0] if each.shape else 1)
        shards.append(Shard(each, start, stop))
        start = stop
    return shards
