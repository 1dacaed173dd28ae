"""Random numbers for operators: seeds with two parts, and a sequence of draws whose position can be
saved in a small state.

Rules
    The field `seed` of an operator is a pair of numbers from `operation_seed` (random.py), or None
    if neither the user nor the process has set a seed. Pass number n over a dataset object
    (`Context.begin_pass`) draws numbers with the seed (pair, n), so that two passes draw different
    numbers, and another run of the program draws the same numbers again. If the user wants equal
    draws, n is 0 for all passes. If the field is None, the entropy of the iterator and the place of
    the dataset in it take the place of the pair. If the user also wants equal draws, the dataset
    object keeps the entropy of its first iterator for all others.

    A state has the entropy of the iterator and the number of the pass, so that the passes after a
    load draw the same numbers, too.

    Numbers are drawn in blocks of 1,024, because drawing single numbers takes twenty times as long.
    A state contains the generator's state before the current block, and how many numbers of the
    block were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any, ClassVar

import numpy as np

from zmqdist.data.interfaces import DatasetLike
from zmqdist.data.iterators import Context, NumberedNode

_DRAWS = 1024
_BITS = 2**64 - 1


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
        """The function that returns the next number. `load` replaces this function, so read the
        attribute again after `load`."""
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


class RandomNode(NumberedNode):
    """The node of an operator that draws random numbers.

    Attributes:
      fresh_option: the field of the operator that says whether each pass over the dataset object
        draws other numbers. Each pass does if there is no such field.
    """

    fresh_option: ClassVar[str] = ""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        own = self.op.seed
        fresh = not self.fresh_option or getattr(self.op, self.fresh_option)
        entropy = context.entropy if fresh else [context.entropy[0], *context.entropy[2:]]
        base = [*entropy, self.place] if own is None else [own[0] & _BITS, own[1] & _BITS]
        seed = [*base, self.number if fresh else 0]
        self._seed: list[int] = seed if fresh else dataset.memory.values.setdefault("seed", seed)
        self.draws = Draws(self._seed)

    def state(self) -> dict[str, Any]:
        return super().state() | {"seed": self._seed, "draws": self.draws.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._seed = state["seed"]
        if "seed" in self.dataset.memory.values:
            self.dataset.memory.values["seed"] = self._seed
        self.draws.load(state["draws"])
