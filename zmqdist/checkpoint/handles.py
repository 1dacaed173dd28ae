"""The shards of a variable, as a checkpoint sees them: rows that can be read and put back, with the slots beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqdist.checkpoint.parts import Part


def is_handle(value: Any) -> bool:
    """Whether it is a variable, of one shard or several."""
    return hasattr(value, "_start_saved") or (hasattr(value, "variables") and hasattr(value, "assign"))


@dataclass(frozen=True)
class Shard:
    """One shard of a variable, wherever it lives.

    Attributes:
      start, stop: its rows of the whole. A scalar is one row.
    """

    variable: Any
    start: int
    stop: int

    def read(self) -> Part:
        """Value, slots and version of one moment. Raises PSUnavailableError."""
        version, value, slots = self.variable._start_saved().get_value()
        return Part(value, slots, version)

    def start_writing(self, part: Part) -> Any:
        """Put a value and slots there; ended when `get_value()` of what this gives returns."""
        return self.variable._start_restore(part.value, part.slots)


def shards_of(variable: Any) -> list[Shard]:
    """The shards, in the order of their rows."""
    shards = []
    start = 0
    for each in getattr(variable, "variables", [variable]):
        stop = start + (each.shape[0] if each.shape else 1)
        shards.append(Shard(each, start, stop))
        start = stop
    return shards
