"""The seed of this process. A random operation that has no seed of its own derives its seed from
the seed of this process.

An operation in a dataset that a function returns gets no seed of its own, because its number would
depend on how often, and in which process, the function was called. It derives its numbers from the
entropy of the iterator that calls the function.

Not here: how an operation draws numbers from its seed (data/ops/randomness.py).
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from random import SystemRandom

from zmqdist.field_types import checked

__all__ = ["set_seed"]
__dir__ = __all__.copy  # dir() and completion show no other names


chance = SystemRandom()
"""A source of random numbers for pauses and for the order of requests.

It does not use the state of the module `random`, because this state belongs to the program.
"""

_lock = threading.Lock()
_seed: int | None = None
_operations: Iterator[int] = itertools.count()
_iterators: Iterator[int] = itertools.count()
_in_function: ContextVar[bool] = ContextVar("in_function", default=False)


@checked
def set_seed(seed: int | None) -> None:
    """Set the seed of this process, so that random operations that are defined after this call are
    repeatable.

    >>> zd.random.set_seed(7)
    >>> first = list(Dataset.range(10).shuffle(10))
    >>> zd.random.set_seed(7)
    >>> list(Dataset.range(10).shuffle(10)) == first
    True
    >>> zd.random.set_seed(None)

    If the same program runs again with the same seed, its operations draw equal numbers, in every
    process. None restores the initial state, in which each run draws other numbers. The seed of an
    operation depends on the order in which operations are defined.
    """
    global _seed, _operations, _iterators
    with _lock:
        _seed = None if seed is None else int(seed)
        _operations, _iterators = itertools.count(), itertools.count()


def iterator_entropy() -> list[int]:
    """Return two numbers, from which the operations without a seed derive theirs in an iterator
    that begins now."""
    with _lock:
        return (
            [secrets.randbits(64), secrets.randbits(64)]
            if _seed is None
            else [_seed & 2**64 - 1, next(_iterators)]
        )


@contextlib.contextmanager
def in_function() -> Iterator[None]:
    """Give no seed to the operations that a function defines that is called in this context."""
    token = _in_function.set(True)
    try:
        yield
    finally:
        _in_function.reset(token)


def operation_seed(seed: int | None) -> tuple[int, int] | None:
    """Return the two numbers that seed an operation that is defined now. `seed` is the operation's
    own seed. Return None if neither the operation nor this process has a seed, or if `in_function`
    is open.
    """
    with _lock:
        if seed is not None:
            return (0 if _seed is None else _seed), int(seed)
        return None if _seed is None or _in_function.get() else (_seed, next(_operations))
