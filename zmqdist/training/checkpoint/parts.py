"""What travels between a variable and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Part:
    """Rows of a variable, with what lies beside them. The arrays belong to whoever has it, and are not changed.

    Attributes:
      slots: of optimizers, by name.
      version: of the variable at the moment when this was read.
      source: of which variable: the number of its session, and its own there; (0, 0) for no variable, or more than one.
      once: which updates that one has, for itself alone (variables/update_keys.py).
    """

    value: NDArray[Any]
    slots: dict[str, NDArray[Any]] = field(default_factory=dict)
    version: int = 0
    source: tuple[int, int] = (0, 0)
    once: bytes = b""
