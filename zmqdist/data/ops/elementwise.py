"""map, scan, enumerate and options: operators that yield one element for each input element."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode, load_elements, save_elements
from zmqdist.data.ops.background import ParallelMapNode
from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.ops.in_step import InStepOp, aligned_positions
from zmqdist.data.signatures import CheckedFunction
from zmqdist.data.structure import READY, UNKNOWN_SPEC, element, problem_of, read_only, spec_of
from zmqdist.specs import TensorSpec


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

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return UNKNOWN_SPEC if self.output_signature is None else self.output_signature


class _ScanNode(OperatorNode):
    """Runs `scan`. The function gets the state read-only, and the reader gets the output read-only,
    because they may be the same array."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.carried = element(self.op.initial)
        self.spec = spec_of(self.carried)

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
    """Raise TypeError if a new state differs from the first state in structure, dtype or shape."""
    problem = problem_of(value, spec)
    if problem is not None:
        raise TypeError(
            f"the state of {operator_name} must keep its structure, dtype and shape: {problem}"
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
