"""How a pipeline is dealt out: the sources of a tree, and which of their positions is next.

Theory
    A split is one position of one source, a number. Whoever deals (a dispatcher) holds a `SplitProvider` for each source and needs the
    description of the tree only. Whoever runs the pipeline opens it with `open_split`, and each source asks for its positions.

    Sources are numbered in the order in which they stand in the tree, a dataset that is used twice twice. Not dealt out, but whole at
    everyone who runs it: the selector of choose and sample, the counter of enumerate, what a function returns (flat_map, interleave,
    the windows of group_by_window).

    A `repeat` opens the sources below it again: repetition 1, 2, ... A provider that is asked for a later repetition starts over; for an
    earlier one it has nothing, so that the short side of a zip goes on while the long one is still in the pass before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.iterators import Context, DatasetIterator

if TYPE_CHECKING:
    from zmqdist.data.tree import Tree


@dataclass
class SplitProvider:
    """The positions of one source, each given once a repetition.

    Attributes:
      count: how many there are; INFINITE_CARDINALITY without end.
      repetitions: how often they are given at most: the product of the repeats above the source.
      repetition, position: what comes next.
    """

    count: int
    repetitions: int = 1
    repetition: int = 0
    position: int = 0

    def next(self, repetition: int) -> int | None:
        """The next position of a repetition; None where it has no more, or is over."""
        if repetition < self.repetition:
            return None
        if repetition > self.repetition:
            self.repetition, self.position = repetition, 0
        if self.position == self.count:
            return None
        self.position += 1
        return self.position - 1

    def cardinality(self) -> int:
        """How many splits there will be in all repetitions."""
        if 0 in (self.count, self.repetitions):
            return 0
        if INFINITE_CARDINALITY in (self.count, self.repetitions):
            return INFINITE_CARDINALITY
        return self.count * self.repetitions


def split_providers(dataset: Tree) -> list[SplitProvider]:
    """A provider for each source, in the order of their numbers. Runs nothing and unpickles nothing.

    Raises:
      UnimplementedError: a source cannot be dealt out; the message names it.
    """
    repetitions = dataset.op.repetitions
    if not dataset.inputs:
        return [SplitProvider(dataset.op.split_count())]
    found: list[SplitProvider] = []
    for number in dataset.op.split_inputs(len(dataset.inputs)):
        found += split_providers(dataset.inputs[number])
    for each in found:
        each.repetitions = SplitProvider(each.repetitions, repetitions).cardinality()
    return found


def open_split(dataset: Tree, ask: Callable[[int, int], int | None]) -> DatasetIterator:
    """An iterator over what the sources get: `ask(source, repetition)` is the next position of a source, None at its end.

    Such an iterator cannot tell its state: the place is known to whoever deals. See `open_stream`.
    """

    def positions(source: int, repetition: int, taken: int) -> Iterator[int]:
        while (position := ask(source, repetition)) is not None:
            yield position

    return DatasetIterator.over(dataset, Context(dataset.options(), splits=positions))


def open_stream(dataset: Tree, ask: Callable[[int, int, int], Sequence[int]]) -> DatasetIterator:
    """As `open_split`, for somebody who can be asked again: this iterator tells its state, and goes on from it.

    Args:
      ask: `ask(source, repetition, taken)` gives some positions of a source, those behind the first `taken` that this reader has
        had in this repetition; none at its end. Asked twice for the same, it gives the same.
    """

    def positions(source: int, repetition: int, taken: int) -> Iterator[int]:
        while given := ask(source, repetition, taken):
            taken += len(given)
            yield from given

    return DatasetIterator.over(dataset, Context(dataset.options(), splits=positions, resumable=True))
