"""The shards of a variable in the form in which a checkpoint reads and writes them. A shard is some
rows of the value, with the same rows of the optimizers' slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqdist.futures import Future
from zmqdist.training.checkpoint.parts import Part
from zmqdist.training.sharded import ShardedVariable
from zmqdist.training.variable import Variable
from zmqdist.variables.client import restore


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
    for each in variable.variables if isinstance(variable, ShardedVariable) else [variable]:
        stop = start + (each.shape[0] if each.shape else 1)
        shards.append(Shard(each, start, stop))
        start = stop
    return shards
