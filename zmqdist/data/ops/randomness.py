"""Operators that draw random numbers: random, shuffle, rejection_resample and the selector of
sample_from_datasets. A seed has two parts, and the position in a sequence of draws is saved in a
small state.

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

    `rejection_resample` leaves out elements, so that the classes occur in given proportions: an
    element of class c is kept with a probability proportional to target[c] / initial[c], so that
    all elements of the class with the largest ratio are kept. Without an initial distribution, the
    counts of the classes so far are used instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count as counting
from operator import length_hint
from typing import Any, ClassVar

import numpy as np

from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, NumberedNode
from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.ops.windows import int_scalar
from zmqdist.data.structure import checked_int, invalid
from zmqdist.specs import TensorSpec

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
        # The generator is at the end of the block, so save where the block began.
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
        # With a seed of the user or the process, another program draws the same numbers. Without,
        # the entropy of the iterator, and the place in it, make the datasets differ.
        own = self.op.seed
        fresh = not self.fresh_option or getattr(self.op, self.fresh_option)
        entropy = context.entropy if fresh else [context.entropy[0], *context.entropy[2:]]
        base = [*entropy, self.dataset_index] if own is None else [own[0] & _BITS, own[1] & _BITS]
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


class _RandomNode(RandomNode):
    fresh_option = "rerandomize"

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.splits = context.next_splits()

    def run(self) -> Iterator[Any]:
        uniform = self.draws.uniform
        for _ in self.splits if self.splits is not None else counting():
            yield np.int64(uniform() * 2**32)


@operator("random", _RandomNode)
class Random(Op):
    """Yields random int64 numbers in [0, 2**32), without end."""

    result_spec = TensorSpec((), np.int64)
    result_count = INFINITE_CARDINALITY

    seed: tuple[int, int] | None
    rerandomize: bool = False

    def split_count(self) -> int:
        return INFINITE_CARDINALITY

    def stateful(self) -> bool:
        return self.seed is None


class _ShuffleNode(RandomNode):
    fresh_option = "reshuffle"
    element_fields = ("buffer",)
    buffer: list[Any]

    def run(self) -> Iterator[Any]:
        buffer, uniform = self.buffer, self.draws.uniform
        # `shuffle(UNKNOWN_CARDINALITY)` sets no bound, because the user wants the whole input in
        # the buffer, even if it fills the memory.
        size = sys.maxsize if self.op.size == UNKNOWN_CARDINALITY else self.op.size
        for x in self.source():
            buffer.append(x)
            if len(buffer) >= size:
                number = int(uniform() * size)
                x = buffer[number]
                # the last element fills the gap, because `pop(number)` would move all behind it
                buffer[number] = buffer[-1]
                buffer.pop()
                yield x
        while buffer:
            number = int(uniform() * len(buffer))
            x = buffer[number]
            buffer[number] = buffer[-1]
            buffer.pop()
            yield x


@operator("shuffle", _ShuffleNode)
class Shuffle(Op):
    """Yields random elements of a buffer of `size` elements. The next input element replaces each
    yielded element. If `size` is -2, the buffer holds all input elements before the first is
    yielded.
    """

    size: int
    seed: tuple[int, int] | None
    reshuffle: bool = True
    instead: ClassVar[str] = (
        ", or shuffle the file names or indices beforehand, and give them to from_tensor_slices"
    )

    @classmethod
    def checked(cls, size: Any) -> int:
        """Return the buffer size as an int. Raises InvalidArgumentError if it is neither positive
        nor -2, and TypeError if it is not an integer.
        """
        count = checked_int(size, "buffer_size")
        if count < 1 and count != UNKNOWN_CARDINALITY:
            raise invalid(
                f"buffer_size must be greater than zero or UNKNOWN_CARDINALITY, not {size}"
            )
        return count


class _ResampleNode(RandomNode):
    """Runs `rejection_resample`. `class_counts` counts the elements of each class so far."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.class_counts = [0] * len(self.op.target)

    def run(self) -> Iterator[Any]:
        fn, uniform = self.op.function.value, self.draws.uniform
        for x in self.source():
            kind = int_scalar(fn(*x) if type(x) is tuple else fn(x), "class_func")
            if not 0 <= kind < len(self.class_counts):
                raise invalid(
                    f"class_func returned {kind}, but target_dist has the classes 0 to "
                    f"{len(self.class_counts) - 1}"
                )
            self.class_counts[kind] += 1
            if uniform() < self._chance(kind):
                yield np.int64(kind), x

    def _chance(self, kind: int) -> float:
        target, initial = self.op.target, self.op.initial or self.class_counts
        ratios = [want / have for want, have in zip(target, initial, strict=True) if have]
        most = max(ratios)
        return target[kind] / initial[kind] / most if most and initial[kind] else 0.0

    def state(self) -> dict[str, Any]:
        return super().state() | {"seen": list(self.class_counts)}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.class_counts = list(state["seen"])


@operator("rejection_resample", _ResampleNode)
class RejectionResample(Op):
    """Yields (class, element) for some elements, and leaves out the other elements."""

    result_count = UNKNOWN_CARDINALITY

    function: PickledFunction
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: tuple[int, int] | None

    def stateful(self) -> bool:
        return self.seed is None

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return TensorSpec((), np.int64), inputs[0]


class _SelectorNode(RandomNode):
    """Runs a Selector: draws random indices by weight. If the node has an input, this input yields
    the weights for each draw."""

    fresh_option = "rerandomize"

    def run(self) -> Iterator[Any]:
        if not self.children:
            while True:
                yield self._draw(self.op.weights)
        for weights in self.source():
            yield self._draw(weights)

    def _draw(self, weights: Any) -> Any:
        bounds = np.cumsum(np.asarray(weights, dtype=np.float64))
        number = np.searchsorted(bounds, self.draws.uniform() * bounds[-1], side="right")
        return np.int64(min(number, len(bounds) - 1))


@operator("selector", _SelectorNode)
class Selector(Op):
    """Yields random indices by weight. `sample_from_datasets` is `choose_from_datasets` with a
    Selector as the first input."""

    result_spec = TensorSpec((), np.int64)

    weights: tuple[float, ...] | None
    seed: tuple[int, int] | None
    rerandomize: bool

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return inputs[0] if inputs else INFINITE_CARDINALITY

    def stateful(self) -> bool:
        return self.seed is None
