"""The seed of this process, from which every random operation without a seed of its own derives its seed.

Not here: how an operation draws numbers from its seed (data/seeds.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from random import SystemRandom

__all__ = ["set_seed"]

chance = SystemRandom()
"""A source of random numbers for pauses and for the order of requests.

It does not use the state of the module `random`, which belongs to the program and its seeds.
"""

_lock = threading.Lock()
_seed: int | None = None
_operations: Iterator[int] = itertools.count()


def set_seed(seed: int | None) -> None:
    """Make random operations that are defined from now on repeatable, in the order of their definition.

    The same program with the same seed gets the same numbers, in every process. None restores the initial state, in which each run gets
    other numbers.
    """
    global _seed, _operations
    with _lock:
        _seed = None if seed is None else int(seed)
        _operations = itertools.count()


def is_seeded() -> bool:
    """Return whether an operation that is defined now derives its numbers from the seed of this process."""
    with _lock:
        return _seed is not None


def operation_seed(seed: int | None) -> tuple[int, int] | None:
    """Return the two numbers that seed an operation defined now. `seed` is its own seed. None if neither it nor the process has a seed."""
    with _lock:
        if seed is not None:
            return (0 if _seed is None else _seed), int(seed)
        return None if _seed is None else (_seed, next(_operations))
