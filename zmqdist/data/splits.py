"""How a pipeline is dealt out: the sources of a tree, and which of their positions is next.

Theory
    A split is one position of one source, a number. Whoever deals (a dispatcher) holds a `SplitProvider` for each source and needs the
    description of the tree only. Whoever runs the pipeline opens it with `open_split`, and each source asks for its positions.

    Sources are numbered in the order in which they stand in the tree, a dataset that is used twice twice. Not dealt out, but whole at
    everyone who runs it: the selector of choose and sample, the counter of enumerate, what a function returns (flat_map, interleave,
    the windows of group_by_window).

    A `repeat` opens the sources below it again: repetition 1, 2, ... A provider that is asked for a later repetition starts over; for an
    earlier one it has nothing, so that the short side of a zip goes on while the long one is still in the pass before.

    A portion is a run of positions of one repetition of the only source. Pipelines over portions, one after the other, give what one
    over the whole gives, if each operator looks at one element at a time (`Op.per_split`); one that joins a fixed number, as batch, if a
    fixed number comes of each position and a portion is a multiple of the grain.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import lcm
from typing import Any, NamedTuple, TypeVar

from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.iterators import Context, DatasetIterator
from zmqdist.data.ops.base import finite
from zmqdist.data.tree import Tree
from zmqdist.errors import FailedPreconditionError, UnimplementedError

T = TypeVar("T", bound=Tree)


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


def split_cardinalities(dataset: Tree) -> list[int]:
    """How many splits there are of each source, as metadata tell it: those that are dealt out as in `split_providers`, and those that
    everybody has whole, the selector of choose and sample and the counter of enumerate, each behind what it belongs to.

    Raises:
      UnimplementedError: as `split_providers`.
    """
    if not dataset.inputs:
        return [dataset.op.split_count()]
    split_inputs = dataset.op.split_inputs(len(dataset.inputs))
    found = [count for number in split_inputs for count in split_cardinalities(dataset.inputs[number])]
    found += [each.cardinality() for number, each in enumerate(dataset.inputs) if number not in split_inputs]
    if dataset.op.name == "enumerate":
        found.append(INFINITE_CARDINALITY)
    return [SplitProvider(count, dataset.op.repetitions).cardinality() for count in found]


def open_split(
    dataset: Tree, next_position: Callable[[int, int], int | None], sources: int | None = None
) -> DatasetIterator:
    """An iterator over what the sources get: `ask(source, repetition)` is the next position of a source, None at its end.

    A source asks when it is about to make an element of the position, so that what was not asked for can go to another. Only prefetch and
    parallel operators run ahead of their reader.

    Such an iterator cannot tell its state: the place is known to whoever deals. See `open_stream`.

    Args:
      sources: how many sources whoever deals knows of; None: it is known to be right.

    Raises:
      FailedPreconditionError: the dataset has another number of sources. Reading raises what `ask` raises, and asks again the next time.
    """
    if sources is not None and sources != (have := len(split_providers(dataset))):
        raise FailedPreconditionError(f"Attempted to feed {sources} split providers into a dataset with {have} sources")

    def positions(source: int, repetition: int, taken: int) -> Iterator[int]:
        return iter(
            partial(next_position, source, repetition), None
        )  # no generator: that would end with the first error of `ask`

    return DatasetIterator(dataset, Context(dataset.options(), splits=positions))


def open_stream(dataset: Tree, next_positions: Callable[[int, int, int], Sequence[int]]) -> DatasetIterator:
    """As `open_split`, for somebody who can be asked again: this iterator tells its state, and goes on from it.

    Args:
      ask: `ask(source, repetition, taken)` gives some positions of a source, those behind the first `taken` that this reader has
        had in this repetition; none at its end. Asked twice for the same, it gives the same.
    """

    def positions(source: int, repetition: int, taken: int) -> Iterator[int]:
        while portion := next_positions(source, repetition, taken):
            taken += len(portion)
            yield from portion

    return DatasetIterator(dataset, Context(dataset.options(), splits=positions, resumable=True))


def repeatable(dataset: T, seed: int = 0) -> T:
    """The dataset with the same elements in the same order wherever it is run: what nobody gave a seed has one that is derived from
    `seed`, and parallel operators keep their order. What functions do at random stays at random.
    """
    numbers = itertools.count()

    def change(one: Tree) -> Tree:
        op, number = one.op, next(numbers)
        fields: dict[str, Any] = {}
        own = {field.name for field in dataclasses.fields(op)}
        if "seed" in own and op.seed is None:  # type: ignore[attr-defined]
            fields["seed"] = (seed, number)
        if "deterministic" in own:
            fields["deterministic"] = True
        return type(one)(dataclasses.replace(op, **fields), one.inputs) if fields else one

    return dataset.rewrite(change)


# -- portions -------------------------------------------------------------------------------------------------------


class PortionRules(NamedTuple):
    """How a dataset can be cut into portions.

    Attributes:
      positions: how many there are in one repetition; INFINITE_CARDINALITY without end.
      repetitions: how many there are; INFINITE_CARDINALITY without end.
      grain: the length of a portion, in positions, is a multiple of this; that of the last one of a repetition need not.
    """

    positions: int
    repetitions: int
    grain: int


def portion_rules(dataset: Tree) -> PortionRules:
    """How the dataset can be cut into portions. Runs nothing and unpickles nothing.

    Raises:
      UnimplementedError: it cannot; the message names the operator, and says what to do.
    """
    chain = [dataset]
    while chain[-1].inputs:
        if len(chain[-1].inputs) > 1:
            chain[-1].op.per_split()
            raise _unfit(chain[-1], "has several sources")
        chain.append(chain[-1].inputs[0])
    rules = PortionRules(chain[-1].op.split_count(), 1, 1)
    made: Fraction | None = Fraction(1)  # of one position; None where that varies
    for each in reversed(chain):
        gives = each.op.per_split()
        if made is None and gives is not None and gives.denominator > 1:
            raise _unfit(each, "joins elements, of which not every position gives the same number")
        made = None if made is None or gives is None else made * gives
        grain = 1 if made is None else made.denominator
        if rules.repetitions not in (0, 1) and finite(rules.positions) and rules.positions % grain:
            raise _unfit(each, "joins the end of a repetition and the beginning of the next: put it below repeat()")
        times = SplitProvider(rules.repetitions, each.op.repetitions).cardinality()
        rules = PortionRules(rules.positions, times, lcm(rules.grain, grain))
    return rules


def _unfit(dataset: Tree, why: str) -> UnimplementedError:
    return UnimplementedError(
        f"{dataset.op.name}() {why}; portions of the data, which exactly-once delivery and reading in order need, do not allow"
        " this: put it behind distribute()",
    )


def portion_pipeline(dataset: T) -> T:
    """What is run over each portion, by `open_split`: the dataset, repeatable, without its repeats, since a portion is of one repetition,
    and with readers that read one file after the other, so that what comes of one position stays together.

    Raises:
      UnimplementedError: as `portion_rules`.
    """
    portion_rules(dataset)

    def change(one: Tree) -> Tree:
        if one.op.name == "repeat":
            return one.inputs[0]
        if one.op.is_reader and getattr(one.op, "parallel", False):
            return type(one)(dataclasses.replace(one.op, parallel=0), one.inputs)  # type: ignore[call-arg]
        return one

    return repeatable(dataset.rewrite(change))
