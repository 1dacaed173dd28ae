"""Random numbers for operators: seeds with two parts, and a sequence of draws whose position can be saved in a small state.

Rules
    The field `seed` of an operator is a pair of numbers from `operation_seed` (random.py), or None if neither the user nor the process has
    set a seed. Iterator number n over a dataset object draws numbers with the seed (pair, n), so that two iterators draw different
    numbers, and another run of the program draws the same numbers again. If the user wants equal draws, n is 0 for all iterators. If the
    field is None, fresh entropy takes the place of the seed.

    Numbers are drawn in blocks of 1,024, because drawing single numbers takes twenty times as long. A state contains the generator's state
    before the current block, and how many numbers of the block were used.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any

import numpy as np

from zmqdist.data.interfaces import DatasetLike

_DRAWS = 1024
_BITS = 2**64 - 1


def iterator_seed(seed: tuple[int, int] | None, number: int) -> list[int]:
    """Return the seed with which iterator `number` draws, where `seed` is the operator's seed. Return fresh entropy if `seed` is None."""
    if seed is None:
        return [secrets.randbits(64), secrets.randbits(64)]
    return [seed[0] & _BITS, seed[1] & _BITS, number]


def epoch_seed(dataset: DatasetLike, number: int, seed: tuple[int, int] | None, fresh: bool) -> list[int]:
    """Return the seed of iterator `number` over a dataset object. With `fresh` each iterator gets another seed. Without `fresh` all
    iterators over the object get one seed.
    """
    if fresh:
        return iterator_seed(seed, number)
    shared: list[int] = dataset.memory.values.setdefault("seed", iterator_seed(seed, 0))
    return shared


class Draws:
    """A sequence of uniform random numbers in [0, 1) whose position can be saved."""

    __slots__ = ("_bits", "_generator", "_left", "_start", "_stream")

    def __init__(self, seed: list[int]) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed))
        self._generator = np.random.Generator(self._bits)
        self._start: Any = self._bits.state
        self._left: Iterator[float] = iter([])
        self._stream = self._draw()

    def _draw(self) -> Iterator[float]:
        while True:
            yield from self._left
            self._start = self._bits.state
            self._left = iter(self._generator.random(_DRAWS).tolist())

    @property
    def uniform(self) -> Callable[[], float]:
        """The function that returns the next number. `load` replaces this function, so read the attribute again after `load`."""
        return self._stream.__next__

    def state(self) -> dict[str, Any]:
        """Return the position in the sequence, as JSON types, for `load`."""
        left = length_hint(self._left)
        if not left:
            return {"bits": self._bits.state, "used": 0}
        return {"bits": self._start, "used": _DRAWS - left}

    def load(self, state: dict[str, Any]) -> None:
        """Continue the sequence from a position that `state` returned."""
        self._bits.state = state["bits"]
        self._left = iter([])
        self._stream = self._draw()
        for _ in range(state["used"]):
            next(self._stream)
