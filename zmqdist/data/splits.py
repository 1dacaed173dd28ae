"""Splits: the sources of a pipeline, and the positions of these sources that a process reads.

Theory
    A split is one position of one source. The process that gives out splits, such as a dispatcher,
    has a `SplitProvider` for each source, and needs only the description of the tree. A process
    that runs the pipeline opens it by `open_split`, and each source requests its positions.

    Sources are numbered in their order in the tree. Each source of a dataset that is used twice has
    two numbers. Some sources are not split, because every process that runs the pipeline reads them
    whole: the selector of sample, and sources in the datasets that a user function returns
    (flat_map, interleave, the windows of group_by_window). The sources below an operator that joins
    elements by their places, such as zip, count as one source (ops/in_step.py).

    A `repeat` opens the sources below it again, as repetition 1, 2, ... At a request for a later
    repetition, the provider begins again at the first position. For an earlier repetition it then
    has no positions left. Each source counts its own repetitions.

    A portion is a range of positions in one repetition of the only source, or of sources that are
    read in step. If each operator looks at one element at a time (`Op.per_split`), a pipeline that
    runs over one portion after the other yields the same elements as a pipeline that runs over all
    positions. An operator that joins a fixed number of elements, such as batch, may be used too if
    each position yields a fixed number of elements and the length of every portion is a multiple of
    the grain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import lcm
from typing import NamedTuple, TypeVar

from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.iterators import Context, DatasetIterator
from zmqdist.data.ops.base import finite
from zmqdist.data.ops.in_step import aligned_positions, reads_in_step
from zmqdist.data.tree import Tree
from zmqdist.errors import UnimplementedError

T = TypeVar("T", bound=Tree)


@dataclass
class SplitProvider:
    """Gives out the positions of one source, each position once per repetition.

    Attributes:
      count: the number of positions; INFINITE_CARDINALITY if there is no end.
      repetitions: the number of repetitions, which is the product of the counts of all `repeat`
        operators above the source; INFINITE_CARDINALITY if there is no end.
      repetition, position: the repetition and position to give out next.
    """

    count: int
    repetitions: int = 1
    repetition: int = 0
    position: int = 0

    def next(self, repetition: int) -> int | None:
        """Return the next position of a repetition, or None if the repetition has ended."""
        # This repetition has ended, because another process has begun a later repetition.
        if repetition < self.repetition:
            return None
        if repetition > self.repetition:
            self.repetition, self.position = repetition, 0
        if self.position == self.count:
            return None
        self.position += 1
        return self.position - 1

    def cardinality(self) -> int:
        """Return the number of splits in all repetitions."""
        if 0 in (self.count, self.repetitions):
            return 0
        if INFINITE_CARDINALITY in (self.count, self.repetitions):
            return INFINITE_CARDINALITY
        return self.count * self.repetitions


def split_providers(dataset: Tree) -> list[SplitProvider]:
    """Return a provider for each source, in the order of their numbers. No function is run or
    unpickled.

    Raises:
      UnimplementedError: a source cannot be split. The error text names the source.
    """
    repetitions = dataset.op.repetitions
    if not dataset.inputs:
        return [SplitProvider(dataset.op.split_count())]
    providers: list[SplitProvider] = []
    for number in dataset.op.split_inputs(len(dataset.inputs)):
        providers += split_providers(dataset.inputs[number])
    if reads_in_step(dataset):
        # If places are counted, each process finds out where they end: elements that fail have
        # places, too.
        return [
            SplitProvider(
                INFINITE_CARDINALITY if (count := aligned_positions(dataset)) is None else count
            )
        ]
    for provider in providers:
        provider.repetitions = SplitProvider(provider.repetitions, repetitions).cardinality()
    return providers


def open_split(
    dataset: Tree,
    next_position: Callable[[int, int], int | None],
    entropy: Sequence[int] = (0, 0),
    ordered: bool = True,
) -> DatasetIterator:
    """Open a dataset whose sources read only the positions that `next_position(source, repetition)`
    returns, until it returns None.

    A source requests a position just before it reads the element, so that positions that are not
    requested yet can be given to another process. Only prefetch and parallel operators read ahead.

    The iterator has no state, because the process that gives out the positions has the state.
    `open_stream` returns an iterator with a state.

    Args:
      entropy: two numbers that are the same in all processes that divide the positions, from which
        operators without a seed derive theirs, because some operators read the same elements in all
        processes (ops/in_step.py).
      ordered: whether parallel operators yield their elements in order, whatever the options are.

    Raises:
      Exception: while iterating, any error of `next_position`. When the iteration continues,
        `next_position` is called again.
    """

    def positions(source: int, repetition: int, start: int) -> Iterator[int]:
        # Do not use a generator here, because it would end with the first error of `next_position`.
        return iter(partial(next_position, source, repetition), None)

    # Count the passes from 0, because a process may open the dataset several times, for example for
    # each of its portions.
    context = Context(
        dataset.options(), splits=positions, entropy=entropy, inner=True, ordered=ordered
    )
    return DatasetIterator(dataset, context)


def open_stream(
    dataset: Tree,
    next_positions: Callable[[int, int, int], Sequence[int]],
    entropy: Sequence[int] = (0, 0),
) -> DatasetIterator:
    """Open a dataset as `open_split` does, but with positions that can be requested again, so that
    the iterator has a state.

    Args:
      next_positions: `next_positions(source, repetition, start)` returns some positions of a
        source, after the first `start` positions of this iterator in the repetition. An empty
        sequence ends the repetition. If it is called again with the same arguments, it must return
        the same positions.
      entropy: as for `open_split`.
    """

    def positions(source: int, repetition: int, start: int) -> Iterator[int]:
        while run := next_positions(source, repetition, start):
            start += len(run)
            yield from run

    context = Context(dataset.options(), splits=positions, resumable=True, entropy=entropy)
    return DatasetIterator(dataset, context)


# -- portions --------------------------------------------------------------------------------------


class PortionRules(NamedTuple):
    """How a dataset can be cut into portions.

    Attributes:
      positions: the number of positions in one repetition; INFINITE_CARDINALITY if there is no end.
      repetitions: the number of repetitions; INFINITE_CARDINALITY if there is no end.
      grain: the length of every portion is a multiple of this number of positions. The last portion
        of a repetition may be shorter.
    """

    positions: int
    repetitions: int
    grain: int


def portion_rules(dataset: Tree) -> PortionRules:
    """Return how the dataset can be cut into portions. No function is run or unpickled.

    Raises:
      UnimplementedError: the dataset cannot be cut into portions. The error text names the operator
        and says what to do.
    """
    chain = [dataset]
    while chain[-1].inputs and aligned_positions(chain[-1]) is None:
        if len(chain[-1].inputs) > 1:
            # `per_split` may raise an error that says more than the error below
            chain[-1].op.per_split()
            raise _unfit(chain[-1], "has several sources")
        chain.append(chain[-1].inputs[0])
    source = chain.pop()
    aligned = aligned_positions(source)
    rules = PortionRules(source.op.split_count() if aligned is None else aligned, 1, 1)
    # elements per position; None if the number varies
    ratio = source.op.per_split() if aligned is None else Fraction(1)
    for node in reversed(chain):
        gives = node.op.per_split()
        if ratio is None and gives is not None and gives.denominator > 1:
            raise _unfit(
                node, "joins elements, but not every position gives the same number of them"
            )
        ratio = None if ratio is None or gives is None else ratio * gives
        grain = 1 if ratio is None else ratio.denominator
        if rules.repetitions not in (0, 1) and finite(rules.positions) and rules.positions % grain:
            raise _unfit(
                node,
                "joins the end of a repetition with the beginning of the next: apply it before "
                "repeat()",
            )
        times = SplitProvider(rules.repetitions, node.op.repetitions).cardinality()
        rules = PortionRules(rules.positions, times, lcm(rules.grain, grain))
    return rules


def _unfit(dataset: Tree, why: str) -> UnimplementedError:
    return UnimplementedError(
        f"{dataset.op.name}() {why}; exactly-once delivery and reading in order run on portions "
        f"of the data, which do not allow"
        " this: put it behind distribute()",
    )


def portion_pipeline(dataset: T) -> T:
    """Return the pipeline that `open_split` runs over each portion.

    The pipeline is the dataset without its `repeat` operators, because a portion is in one
    repetition. Its sources read one file after another, so that the elements of one position stay
    together.

    Raises:
      UnimplementedError: as for `portion_rules`.
    """
    portion_rules(dataset)

    def change(node: Tree) -> Tree:
        if node.op.name == "repeat":
            return node.inputs[0]
        if node.op.is_reader and getattr(node.op, "parallel", False):
            return type(node)(dataclasses.replace(node.op, parallel=0), node.inputs)  # type: ignore[call-arg]
        return node

    return dataset.rewrite(change)
