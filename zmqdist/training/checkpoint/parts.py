"""The data that a variable and a checkpoint exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Part:
    """Rows of a variable, with the slots beside them. The holder owns the arrays, and nothing else changes them.

    Attributes:
      slots: of optimizers, by name.
      version: of the variable at the moment when it was read.
      source: identifies the variable: (number of its session, its number there); (0, 0) for no variable, or several.
      once: encoded keys of the updates that the value contains (variables/update_keys.py); they mean something for `source` only.
    """

    value: NDArray[Any]
    slots: dict[str, NDArray[Any]] = field(default_factory=dict)
    version: int = 0
    source: tuple[int, int] = (0, 0)
    once: bytes = b""
