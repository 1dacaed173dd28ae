"""`Part`: the data that a variable and a checkpoint exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True)
class Part:
    """Rows of a variable, with the rows of its slots. The code that has a Part owns the arrays, and
    no other code changes them.

    Attributes:
      slots: the slots of optimizers, by name.
      version: version of the variable at the moment when it was read.
      source: the identity of the variable: (number of its session, its number in the session). (0,
        0) means that the rows are not from a single variable.
      once: encoded keys of the updates that the value contains (variables/variable_host.py). The keys
        are valid for the variable `source` only.
    """

    value: NDArray[Any]
    slots: dict[str, NDArray[Any]] = field(default_factory=dict)
    version: int = 0
    source: tuple[int, int] = (0, 0)
    once: bytes = b""
