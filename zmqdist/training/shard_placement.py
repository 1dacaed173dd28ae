"""Decides which parameter server holds a variable.

Rules
    "round_robin" chooses the servers in turn. It counts every variable and every shard, scalars
    included, but not variables that are colocated with another variable.
    "least_bytes" chooses the server with the fewest bytes so far. If several servers have equally
    few, it chooses the first of them. A callable of the user may decide in place of these rules.
    Every placement is recorded in `log`, so that the user can find out why one server is slower
    than the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

log = logging.getLogger("zmqdist.training")

Rule = Callable[[str, tuple[int, ...], "np.dtype[Any]", Sequence[int]], int]
"""`rule(name, shape, dtype, loads)` returns the index of a parameter server. `loads` has the number
of bytes on each server."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One variable or shard, and the index `ps` of its parameter server."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    ps: int

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}, {self.bytes:,} bytes: ps:{self.ps}"


class ShardPlacement:
    """Places the variables of one strategy. Methods may be called from any thread.

    Attributes:
      count: number of variables and shards that the rule has placed.
    """

    def __init__(self, rule: str | Rule, servers: int) -> None:
        """Begin with no variables on the parameter servers. Raises ValueError for an unknown
        rule.
        """
        if not callable(rule) and rule not in ("round_robin", "least_bytes"):
            raise ValueError(
                f'placement is "round_robin", "least_bytes" or a callable, not {rule!r}'
            )
        self._rule = rule
        self._lock = threading.Lock()
        self._loads = [0] * servers
        self._log: list[Placed] = []
        self.count = 0

    def place(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        """Return the index of the server for a new variable. Raises ValueError if a callable rule
        returns no valid index."""
        with self._lock:
            index = self._choose(name, shape, dtype)
            self.count += 1
            return index

    def _choose(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
        if self._rule == "round_robin":
            return self.count % len(self._loads)
        if self._rule == "least_bytes":
            return self._loads.index(min(self._loads))
        assert callable(self._rule)
        index = self._rule(name, shape, dtype, tuple(self._loads))
        if not isinstance(index, int | np.integer) or not 0 <= index < len(self._loads):
            raise ValueError(
                f"placement returned {index!r} for {name!r}: wanted an index below "
                f"{len(self._loads)}"
            )
        return int(index)

    def placed(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], ps: int) -> None:
        """Record that a variable was made at `ps`."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        entry = Placed(name, shape, dtype.name, size, ps)
        with self._lock:
            self._loads[ps] += size
            self._log.append(entry)
        log.debug("placed %s", entry)

    @property
    def log(self) -> list[Placed]:
        """All variables and shards so far, in the order of creation."""
        with self._lock:
            return list(self._log)

    @property
    def loads(self) -> list[int]:
        """Number of bytes on each server."""
        with self._lock:
            return list(self._loads)
