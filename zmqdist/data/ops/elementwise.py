"""map, scan, enumerate, filter, take, skip, shard, take_while, unique, ignore_errors and options:
operators that look at one element at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from zmqdist import nest
from zmqdist.data.constants import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode, load_elements, save_elements
from zmqdist.data.ops.background import ParallelMapNode
from zmqdist.data.ops.base import Op, PickledFunction, finite
from zmqdist.data.ops.in_step import InStepOp, aligned_positions
from zmqdist.data.signatures import CheckedFunction
from zmqdist.data.structure import (
    READY,
    UNKNOWN_SPEC,
    element,
    invalid,
    problem_of,
    read_only,
    spec_of,
)
from zmqdist.errors import FailedPreconditionError
from zmqdist.specs import TensorSpec

_log = logging.getLogger(__name__)


class _MapNode(OperatorNode):
    def run(self) -> Iterator[Any]:
        fn = self.op.fitting().value
        for x in self.source():
            y = fn(*x) if type(x) is tuple else fn(x)
            yield y if type(y) in READY else element(y)


@operator("map", _MapNode)
class Map(Op):
    """Applies a function to each element, in `parallel` threads. With 0, the thread that reads the
    dataset calls the function."""

    spec_field = "output_signature"
    ratio = Fraction(1)

    function: PickledFunction
    output_signature: Any = None
    parallel: int = 0
    deterministic: bool | None = None

    def fitting(self) -> PickledFunction:
        """Return the function. If there is a signature, wrap the function, so that its results are
        checked and converted to it."""
        spec = self.output_signature
        return (
            self.function
            if spec is None
            else PickledFunction(CheckedFunction(self.function.value, spec, "map"))
        )

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        parallel = self.parallel and not context.probing
        return ParallelMapNode(dataset, context) if parallel else _MapNode(dataset, context)


class _ScanNode(OperatorNode):
    """Runs `scan`. The function gets the state read-only, and the reader gets the output read-only,
    because they may be the same array."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.carried = element(self.op.initial)
        self.spec = without_shapes(spec_of(self.carried))

    def run(self) -> Iterator[Any]:
        fn = self.op.function.value
        for x in self.source():
            result = fn(read_only(self.carried), x)
            if type(result) is not tuple or len(result) != 2:
                raise TypeError(
                    f"the function of scan must return (state, output), not {type(result).__name__}"
                )
            carried = element(result[0])
            check_state(carried, self.spec, "scan")
            out = element(result[1])
            # Assign the state only after all calls that may raise, so that an error leaves the
            # state unchanged.
            self.carried = carried
            yield out if type(out) in READY else read_only(out)

    def state(self) -> dict[str, Any]:
        return {"carried": save_elements([self.carried])}

    def load(self, state: dict[str, Any]) -> None:
        (self.carried,) = load_elements(state["carried"])


def check_state(value: Any, spec: Any, operator_name: str) -> None:
    """Raise TypeError if a new state differs from the first state in structure or dtype. Its shape
    may differ. `spec` is the spec of the first state, `without_shapes`."""
    problem = problem_of(value, spec)
    if problem is not None:
        raise TypeError(
            f"the state of {operator_name} must keep its structure and dtype: {problem}"
        )


def without_shapes(spec: Any) -> Any:
    """Return a spec in which arrays may have any shape."""
    return nest.map_structure(
        lambda leaf: TensorSpec(None, leaf.dtype) if isinstance(leaf, TensorSpec) else leaf, spec
    )


@operator("scan", _ScanNode)
class Scan(Op):
    """Applies a function to a state and each element. The function returns the next state and an
    output element."""

    result_spec = UNKNOWN_SPEC

    initial: Any
    function: PickledFunction


class _EnumerateNode(OperatorNode):
    plain_fields = ("position",)

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = self.op.start
        self.splits = context.next_splits() if context.in_step else None

    def run(self) -> Iterator[Any]:
        positions = None if self.splits is None else iter(self.splits)
        try:
            if positions is not None:
                for x in self.source():
                    yield np.int64(self.op.start + next(positions)), x
                return
            for x in self.source():
                position = np.int64(self.position)
                self.position += 1
                yield position, x
        except Exception:  # an element whose computation fails has a number, too
            self.position += 1
            if positions is not None:
                with contextlib.suppress(Exception):
                    next(positions)
            raise


@operator("enumerate", _EnumerateNode)
class Enumerate(InStepOp):
    """Yields (number, element)."""

    start: int = 0

    def in_step(self, dataset: DatasetLike) -> bool:
        # As in tf.data, each process numbers its own elements if the data has no end, unless the
        # position tells the number.
        return (
            dataset.cardinality() != INFINITE_CARDINALITY or aligned_positions(dataset) is not None
        )

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return TensorSpec((), np.int64), inputs[0]


@operator("options", OperatorNode)
class WithOptions(Op):
    """Yields the elements unchanged. `Tree.options` reads the options of this operator."""

    ratio = Fraction(1)

    options: Any


def truth(value: Any, operator_name: str) -> bool:
    """Return the result of a predicate as a bool. Raises TypeError if the result is not a single
    bool."""
    if value is True or value is False:
        return bool(value)
    if isinstance(value, np.bool_) or (
        isinstance(value, np.ndarray) and value.shape == () and value.dtype == bool
    ):
        return bool(value)
    raise TypeError(
        f"the function of {operator_name} must return a bool, not {type(value).__name__} "
        f"{value!r:.60}"
    )


# -- leaving out elements --------------------------------------------------------------------------


class _FilterNode(OperatorNode):
    def run(self) -> Iterator[Any]:
        fn = self.op.function.value
        for x in self.source():
            verdict = fn(*x) if type(x) is tuple else fn(x)
            # the two singletons first, because most functions return one of them
            if verdict is True or (verdict is not False and truth(verdict, "filter")):
                yield x


@operator("filter", _FilterNode)
class Filter(Op):
    """Keeps the elements for which the function returns True."""

    result_count = UNKNOWN_CARDINALITY
    ratio = None

    function: PickledFunction


class _CountingNode(OperatorNode):
    """A node whose whole state is one number, `position`."""

    plain_fields: ClassVar[tuple[str, ...]] = ("position",)
    position = 0


class _TakeNode(_CountingNode):
    """Runs `take`. `position` is the number of yielded elements.

    Attributes:
      end_checked: whether the node has checked, after its last element, whether it must read its
        input to the end. It must if the input is known to have at most `count` elements, because a
        cache in the input keeps its record only if the cache is read to its end.
    """

    end_checked = False

    def run(self) -> Iterator[Any]:
        count = self.op.count
        if count < 0:
            yield from self.source()
            return
        if self.position < count:
            for x in self.source():
                self.position += 1
                yield x
                if self.position >= count:
                    break
            else:
                return
        if not self.end_checked:
            self.end_checked = True
            if 0 <= self.dataset.inputs[0].cardinality() <= count:
                next(self.source(), None)


@operator("take", _TakeNode)
class Take(Op):
    """Keeps the first `count` elements, or all elements if `count` is negative."""

    count: int

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.count < 0 or inputs[0] == UNKNOWN_CARDINALITY:
            return inputs[0]
        return min(inputs[0], self.count) if finite(inputs[0]) else self.count


class _AssertNode(_CountingNode):
    """Runs `assert_cardinality`. `position` is the number of yielded elements, or -1 after the
    error at the end, which is raised once."""

    def run(self) -> Iterator[Any]:
        count = self.op.count
        for x in self.source():
            if self.position == count:
                raise FailedPreconditionError(f"the dataset has more than {count} elements")
            self.position += 1
            yield x
        number = self.position
        if number not in (count, -1):
            self.position = -1
            expected = "have no end" if count == INFINITE_CARDINALITY else f"have {count} elements"
            raise FailedPreconditionError(
                f"the dataset was expected to {expected}, but has {number}"
            )


@operator("assert_cardinality", _AssertNode)
class AssertCardinality(Op):
    """Yields the elements unchanged, and raises an error if there are not `count` elements."""

    count: int

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count


class _SkipNode(_CountingNode):
    def run(self) -> Iterator[Any]:
        count = self.op.count
        if count < 0:
            return
        source = self.source()
        while self.position < count:
            for _ in source:
                self.position += 1
                break
            else:
                return
        yield from source


@operator("skip", _SkipNode)
class Skip(Op):
    """Drops the first `count` elements, or all elements if `count` is negative."""

    count: int

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.count < 0:
            return 0
        return max(0, inputs[0] - self.count) if finite(inputs[0]) else inputs[0]


class _ShardNode(_CountingNode):
    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        # A data service puts the number of workers in place of the hint, before it opens the node.
        if self.op.count == SHARD_HINT:
            raise FailedPreconditionError(
                "`shard(SHARD_HINT, ...)` can only be used in a data service with"
                " `zmqdist.data.service.ShardingPolicy.HINT` processing mode.",
            )

    def run(self) -> Iterator[Any]:
        count, index = self.op.count, self.op.index
        for x in self.source():
            number = self.position
            # advance before the yield, because a state that is saved then contains the position
            self.position = (number + 1) % count
            if number == index:
                yield x


class _FullShardNode(_ShardNode):
    """Reads the first element of every shard before it yields the elements of its own shard, so
    that each shard notices if the input has elements, but fewer than there are shards.

    Attributes:
      first: the shard's own first element, until it is yielded.
      phase: 0 while the node reads the first element of every shard, 1 while it reads its own
        shard, 2 after it has raised the error.
    """

    plain_fields = ("position", "phase")
    element_fields = ("first",)
    state_keys = {"phase": "round"}
    first: list[Any]
    phase = 0

    def run(self) -> Iterator[Any]:
        count, index = self.op.count, self.op.index
        if self.phase == 0:
            for x in islice(self.source(), count - self.position):
                if self.position == index:
                    self.first = [x]
                self.position += 1
            if 0 < self.position < count:
                # Raise the error only once, so that an ignore_errors() after this operator reaches
                # the end.
                self.phase = 2
                raise invalid(
                    f"Could not apply sharding: the dataset only has {self.position} file(s) or "
                    f"element(s), which is not enough"
                    f" for the required {count} shards/workers. Split your files into more, "
                    f"smaller ones,"
                    " or use ShardingPolicy.DATA or DYNAMIC."
                )
            # the first element of every shard was read, so the shards begin anew behind them
            self.position, self.phase = 0, 1
        if self.phase == 1:
            if self.first:
                yield self.first.pop()
            yield from super().run()


@operator("shard", _ShardNode)
class ShardOp(Op):
    """Keeps every `count`-th element, beginning at position `index`. With `full`, which the
    sharding policies FILE and HINT set, iterating raises an error if the input has elements, but
    too few for all shards.
    """

    count: int
    index: int
    full: bool = False

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        return _FullShardNode(dataset, context) if self.full else _ShardNode(dataset, context)

    @classmethod
    def build(cls, count: int, index: int, full: bool = False) -> ShardOp:
        """Check the arguments, and return the operator. Raises InvalidArgumentError if `count` is
        neither positive nor SHARD_HINT, or if `index` is not in [0, count).
        """
        if count != SHARD_HINT:
            if count < 1:
                raise invalid(
                    f"Number of shards must be greater than zero (currently num_shards = {count})."
                )
            if not 0 <= index < count:
                raise invalid(
                    f"Index must be between 0 and {count - 1} (currently index = {index})."
                )
        return cls(count, index, full)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        if self.count == SHARD_HINT:
            return UNKNOWN_CARDINALITY
        return -((self.index - inputs[0]) // self.count) if finite(inputs[0]) else inputs[0]


@dataclass(frozen=True)
class CommonShard(ShardOp):
    """A shard of elements that are the same, in the same order, in all processes with the same
    `entropy`, which is two numbers."""

    entropy: tuple[int, int] = (0, 0)

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        return super().open(dataset, context.in_order(self.entropy))


class _TakeWhileNode(_CountingNode):
    """Runs `take_while`. `position` is 1 after the function has returned False, and 0 before."""

    def run(self) -> Iterator[Any]:
        fn = self.op.function.value
        if self.position:
            return
        for x in self.source():
            if not truth(fn(*x) if type(x) is tuple else fn(x), "take_while"):
                self.position = 1
                return
            yield x


@operator("take_while", _TakeWhileNode)
class TakeWhile(Op):
    """Keeps the elements before the first element for which the function returns False."""

    result_count = UNKNOWN_CARDINALITY

    function: PickledFunction


class _UniqueNode(OperatorNode):
    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.values: dict[Any, None] = {}

    def run(self) -> Iterator[Any]:
        for x in self.source():
            key = x.item() if hasattr(x, "item") and x.shape == () else x
            if not isinstance(key, (bool, int, float, complex, str, bytes)):
                raise TypeError(f"unique() takes scalars, not {type(x).__name__}")
            if key not in self.values:
                self.values[key] = None
                yield x

    def state(self) -> dict[str, Any]:
        return {"seen": save_elements(list(self.values))}

    def load(self, state: dict[str, Any]) -> None:
        self.values = dict.fromkeys(load_elements(state["seen"]))


@operator("unique", _UniqueNode)
class Unique(Op):
    """Keeps the first of equal scalars."""

    result_count = UNKNOWN_CARDINALITY


class _IgnoreErrorsNode(OperatorNode):
    def run(self) -> Iterator[Any]:
        child = self.children[0]
        while True:
            try:
                yield from child.stream()
                return
            except GeneratorExit:
                raise
            except Exception as error:
                child.restart()
                if self.op.log_warning:
                    _log.warning(
                        "ignore_errors() left out an element: %s: %s", type(error).__name__, error
                    )


@operator("ignore_errors", _IgnoreErrorsNode)
class IgnoreErrors(Op):
    """Leaves out elements whose computation raises an error."""

    result_count = UNKNOWN_CARDINALITY
    ratio = None

    log_warning: bool = False
