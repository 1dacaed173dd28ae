"""The seed of this process, from which everything random takes its own where it was given none.

Not here: how an operation makes its numbers from it (data/seeds.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from random import SystemRandom

__all__ = ["set_seed"]

chance = SystemRandom()
"""For pauses and the order of questions. Not the state of the module `random`, which belongs to the program, and to its seeds."""

_lock = threading.Lock()
_seed: int | None = None
_operations: Iterator[int] = itertools.count()


def set_seed(seed: int | None) -> None:
    """Make everything random that is defined from here on repeat itself, in the order in which it is defined.

    The same seed before the same program gives the same numbers, in every process. None: fresh numbers each time, as from the start.
    """
    global _seed, _operations
    with _lock:
        _seed = None if seed is None else int(seed)
        _operations = itertools.count()


def is_seeded() -> bool:
    """Whether what is defined now takes its numbers from a seed of this process."""
    with _lock:
        return _seed is not None


def operation_seed(seed: int | None) -> tuple[int, int] | None:
    """The two numbers that an operation defined now draws from, given its own seed; None where nobody set any."""
    with _lock:
        if seed is not None:
            return (0 if _seed is None else _seed), int(seed)
        return None if _seed is None else (_seed, next(_operations))
