"""The seed of this process. A random operation that has no seed of its own derives its seed from the seed of this process.

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

It does not use the state of the module `random`, because this state belongs to the program.
"""

_lock = threading.Lock()
_seed: int | None = None
_operations: Iterator[int] = itertools.count()


def set_seed(seed: int | None) -> None:
    """Set the seed of this process, so that random operations that are defined after this call are repeatable.

    If the same program runs again with the same seed, its operations draw equal numbers, in every process. None restores the initial
    state, in which each run draws other numbers. The seed of an operation depends on the order in which operations are defined.
    """
    global _seed, _operations
    with _lock:
        _seed = None if seed is None else int(seed)
        _operations = itertools.count()


def is_seeded() -> bool:
    """Return whether this process has a seed, from which an operation that is defined now would derive its seed."""
    with _lock:
        return _seed is not None


def operation_seed(seed: int | None) -> tuple[int, int] | None:
    """Return the two numbers that seed an operation that is defined now. `seed` is the operation's own seed. Return None if neither the
    operation nor this process has a seed.
    """
    with _lock:
        if seed is not None:
            return (0 if _seed is None else _seed), int(seed)
        return None if _seed is None else (_seed, next(_operations))
