"""The shards of a variable, as a checkpoint sees them: rows that can be read and put back, with the slots beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqdist.futures import Future
from zmqdist.training.checkpoint.parts import Part
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.variable import Variable
from zmqdist.variables.client import restore


def is_handle(value: Any) -> bool:
    """Whether it is a variable, of one shard or several."""
    return isinstance(value, Variable | ShardedVariable)


@dataclass(frozen=True)
class Shard:
    """One shard of a variable, wherever it lives.

    Attributes:
      start, stop: its rows of the whole. A scalar is one row.
    """

    variable: Variable
    start: int
    stop: int

    def read(self) -> Part:
        """Value, slots and version of one moment. Raises PSUnavailableError."""
        storage = self.variable.storage
        version, value, slots, once = storage.saved().get_value()
        return Part(value, slots, version, (storage.ref.session, storage.ref.number), once)

    def start_writing(self, part: Part) -> Future:
        """Put a value and slots there; done when `get_value()` of what this gives returns. Raises PSUnavailableError."""
        storage = self.variable.storage
        return storage.change(restore(storage.ref, part.value, part.slots))


def shards_of(variable: Variable | ShardedVariable) -> list[Shard]:
    """The shards, in the order of their rows."""
    shards = []
    start = 0
    for each in variable.variables if isinstance(variable, ShardedVariable) else [variable]:
        stop = start + (each.shape[0] if each.shape else 1)
        shards.append(Shard(each, start, stop))
        start = stop
    return shards
