"""batch, unbatch and rebatch: operators that join several elements to one element, or split
elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from zmqdist.data.composites import COMPOSITES
from zmqdist.data.constants import UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.background import ParallelNode
from zmqdist.data.ops.base import Op, finite
from zmqdist.data.structure import (
    batched,
    checked_int,
    element,
    invalid,
    leaves_of,
    length_of,
    map_specs,
    rows_of,
    stack,
    unbatched,
)
from zmqdist.specs import TensorSpec


class _BatchesNode(OperatorNode):
    """Collects each `size` consecutive elements in `partial_batch`.

    After an error of the input, `partial_batch` has all elements before the failed element, so that
    only the failed element is lost.
    """

    element_fields = ("partial_batch",)
    state_keys = {"partial_batch": "held"}
    partial_batch: list[Any]

    def batches(self) -> Iterator[list[Any]]:
        """Yield lists of `size` elements, and a shorter last one unless the operator drops it."""
        size, source = self.op.size, self.source()
        while True:
            # If the input raises, no element is lost, because `extend` has added the elements
            # before the error to `partial_batch`.
            self.partial_batch.extend(islice(source, size - len(self.partial_batch)))
            batch = self.partial_batch
            if not batch or (len(batch) < size and self.op.drop_remainder):
                return
            # empty `partial_batch` before the yield, so that a batch that cannot be joined is not
            # joined again
            self.partial_batch = []
            yield batch


class GatheringNode(_BatchesNode):
    """Runs an operator that joins each `size` consecutive elements."""

    def join(self, elements: list[Any]) -> Any:
        """Join several elements to one element."""
        return stack(elements)

    def run(self) -> Iterator[Any]:
        return map(self.join, self.batches())


@dataclass(frozen=True)
class Gathering(Op):
    """Base class of the operators that join each `size` consecutive elements to one element."""

    size: int
    drop_remainder: bool = False

    @classmethod
    def checked(cls, size: Any) -> int:
        """Return the batch size as an int. Raises InvalidArgumentError if it is not positive, and
        TypeError if it is not an integer."""
        count = checked_int(size, "batch_size")
        if count < 1:
            raise invalid(f"batch_size must be greater than zero, not {size}")
        return count

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if not finite(inputs[0]):
            return inputs[0]
        return inputs[0] // self.size if self.drop_remainder else -(-inputs[0] // self.size)

    def per_split(self) -> Fraction | None:
        return Fraction(1, self.size)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return batched(inputs[0], self.size if self.drop_remainder else None)


class _ParallelBatchNode(ParallelNode, _BatchesNode):
    """Runs a parallel `batch`: has threads stack the batches."""

    def feed(self) -> Iterator[Any]:
        return self.batches()

    def function(self) -> Callable[[Any], Any]:
        return stack


@operator("batch", GatheringNode)
class BatchOp(Gathering):
    """Stacks elements of one shape, in `parallel` threads. With 0, the thread that reads the
    dataset stacks them."""

    parallel: int = 0
    deterministic: bool | None = None

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        parallel = self.parallel and not context.probing
        return _ParallelBatchNode(dataset, context) if parallel else GatheringNode(dataset, context)


class _UnbatchNode(OperatorNode):
    """Runs `unbatch`. `batch` has the batch whose rows are yielded, or nothing."""

    plain_fields: ClassVar[tuple[str, ...]] = ("position",)
    element_fields: ClassVar[tuple[str, ...]] = ("batch",)
    batch: list[Any]
    position = 0

    def run(self) -> Iterator[Any]:
        if self.batch:
            yield from self._rest()
        for batch in self.source():
            try:
                length_of(batch)
            except ValueError as error:
                raise invalid(f"cannot unbatch: {error}") from None
            self.batch, self.position = [batch], 0
            yield from self._rest()

    def _rest(self) -> Iterator[Any]:
        for row in islice(rows_of(self.batch[0]), self.position, None):
            self.position += 1
            yield element(row)
        self.batch = []


@operator("unbatch", _UnbatchNode)
class Unbatch(Op):
    """Splits elements along axis 0."""

    known: int | None = None
    """The number of rows in each input element; None if the spec does not determine it."""

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.known is None or inputs[0] == UNKNOWN_CARDINALITY:
            return UNKNOWN_CARDINALITY
        return inputs[0] * self.known if finite(inputs[0]) else inputs[0]

    def per_split(self) -> Fraction | None:
        return None if self.known is None else Fraction(self.known)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return unbatched(inputs[0])


def rows_in(spec: Any) -> int | None:
    """Return the length along axis 0 that a spec states for all leaves, or None if the length of a
    leaf is unknown. Raises ValueError for scalars and different lengths.
    """
    sizes: set[int | None] = set()
    for leaf in leaves_of(spec):
        if type(leaf) in COMPOSITES:
            sizes.add(None)
        if isinstance(leaf, TensorSpec) and leaf.shape is not None:
            if leaf.shape == ():
                raise ValueError("a scalar has no axis 0 to split along")
            sizes.add(leaf.shape[0])
    lengths = {size for size in sizes if size is not None}
    if len(lengths) > 1:
        raise ValueError(f"the leaves differ in length along axis 0: {sorted(lengths)}")
    return lengths.pop() if lengths and None not in sizes else None


class _RebatchNode(_UnbatchNode):
    """Runs `rebatch`: collects the rows of batches in `partial_batch`, and stacks them again.
    `turn` counts the yielded batches, to select the next size.
    """

    plain_fields = ("position", "turn")
    element_fields = ("batch", "partial_batch")
    state_keys = {"partial_batch": "held"}
    partial_batch: list[Any]
    turn = 0

    def run(self) -> Iterator[Any]:
        sizes = self.op.sizes
        rows = super().run()
        while True:
            size = sizes[self.turn % len(sizes)]
            self.partial_batch.extend(islice(rows, size - len(self.partial_batch)))
            batch = self.partial_batch
            if len(batch) < size:
                break
            self.partial_batch, self.turn = [], self.turn + 1
            yield stack(batch) if batch else self._no_rows()
        if batch and not self.op.drop_remainder:
            self.partial_batch = []
            yield stack(batch)

    def _no_rows(self) -> Any:
        """Return a batch of size 0. Axes of unknown size are empty, too."""

        def empty(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec) or leaf.shape is None:
                raise invalid(f"a batch of size 0 needs arrays whose rank is known, not {leaf}")
            return np.empty((0, *(size or 0 for size in leaf.shape[1:])), leaf.dtype)

        return map_specs(empty, self.dataset.inputs[0].element_spec)


@operator("rebatch", _RebatchNode)
class Rebatch(Op):
    """Stacks the rows of batches to batches of other sizes. The sizes are used in turn."""

    result_count = UNKNOWN_CARDINALITY

    sizes: tuple[int, ...]
    drop_remainder: bool = False

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        rows, size = rows_in(inputs[0]), self.sizes[0]
        fixed = len(set(self.sizes)) == 1 and (
            self.drop_remainder or (rows is not None and rows % size == 0)
        )
        return batched(unbatched(inputs[0]), size if fixed else None)
