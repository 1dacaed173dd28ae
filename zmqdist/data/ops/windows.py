"""window and group_by_window: elements grouped by position or by key.

A window is a dataset of elements that were collected before, so that reading the window does not
read from the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, make, operator
from zmqdist.data.iterators import Context, NumberedNode, OperatorNode, load_elements, save_elements
from zmqdist.data.ops.base import Op, PickledFunction, finite
from zmqdist.data.ops.combining import returned_dataset
from zmqdist.data.ops.sources import Elements
from zmqdist.data.structure import (
    UNKNOWN_SPEC,
    DatasetSpec,
    NoElements,
    checked_int,
    invalid,
    spec_of,
)
from zmqdist.random import in_function


def dataset_of_elements(elements: Sequence[Any], spec: Any = UNKNOWN_SPEC) -> DatasetLike:
    """Return a dataset of these elements. Its spec is `spec` or, without `spec`, the spec of the
    first element."""
    return make(Elements(tuple(elements), spec_of(elements[0]) if spec is UNKNOWN_SPEC else spec))


def _columns(elements: list[Any], spec: Any) -> Any:
    """Return the elements of a window, which have this spec, as `window` yields them: one dataset,
    or a structure with a dataset for each leaf.
    """
    first = elements[0]
    if not isinstance(first, (tuple, dict)):
        return dataset_of_elements(elements, spec)
    columns = list(zip(*map(nest.flatten, elements), strict=True))
    specs = [UNKNOWN_SPEC] * len(columns) if spec is UNKNOWN_SPEC else nest.flatten(spec)
    return nest.pack_sequence_as(first, list(map(dataset_of_elements, columns, specs)))


class _WindowNode(OperatorNode):
    """Runs `window`.

    Attributes:
      held: the elements from the start of the next window on.
      gap: the number of input elements to drop before the next window.
    """

    plain_fields = ("gap",)
    element_fields = ("buffer",)
    state_keys = {"buffer": "held"}
    buffer: list[Any]
    gap = 0

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.spec = dataset.inputs[0].declared_spec

    def run(self) -> Iterator[Any]:
        op = self.op
        span = (op.size - 1) * op.stride + 1
        for x in self.source():
            if self.gap:
                self.gap -= 1
                continue
            self.buffer.append(x)
            if len(self.buffer) == span:
                yield self._leave()
        while self.buffer:
            full = len(self.buffer) >= span
            window = self._leave()
            if full or not op.drop_remainder:
                yield window

    def _leave(self) -> Any:
        op = self.op
        window = self.buffer[: (op.size - 1) * op.stride + 1 : op.stride]
        self.gap = max(0, op.shift - len(self.buffer))
        self.buffer = self.buffer[op.shift :]
        return _columns(window, self.spec)


@operator("window", _WindowNode)
class Window(Op):
    """Yields windows of `size` elements, which are `stride` elements apart in the input. A new
    window starts every `shift` elements."""

    size: int
    shift: int
    stride: int = 1
    drop_remainder: bool = False

    @classmethod
    def build(cls, size: int, shift: int | None, stride: int, drop_remainder: bool) -> Window:
        """Check the arguments, and return the operator. Raises InvalidArgumentError if a number is
        not positive, and TypeError if it is not an integer.
        """
        arguments = {"size": size, "shift": size if shift is None else shift, "stride": stride}
        numbers = {
            argument: checked_int(number, argument) for argument, number in arguments.items()
        }
        for argument, number in numbers.items():
            if number < 1:
                raise invalid(f"Window {argument} must be greater than zero, not {number}")
        return cls(numbers["size"], numbers["shift"], numbers["stride"], bool(drop_remainder))

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        count = inputs[0]
        if not finite(count):
            return count
        if not self.drop_remainder:
            return -(-count // self.shift)
        span = (self.size - 1) * self.stride + 1
        return 0 if count < span else (count - span) // self.shift + 1

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return nest.map_structure(DatasetSpec, inputs[0])


class _GroupNode(NumberedNode):
    """Runs `group_by_window`.

    Attributes:
      groups: for each key, in the order in which the keys appeared, the elements that do not fill a
        window yet.
      inner: the node of the dataset that `reduce_func` returned and that is being read, or None.
      opened: the number of windows so far.
      made_of: the key and the elements of the window from which `inner` was created, for the state.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.groups: dict[int, list[Any]] = {}
        self.opened = 0
        self.inner: OperatorNode | None = None
        self.made_of: tuple[int, list[Any]] = (0, [])

    def run(self) -> Iterator[Any]:
        if self.inner is not None:
            yield from self._read()
        fn = self.op.key_function.value
        for x in self.source():
            key = int_scalar(fn(*x) if type(x) is tuple else fn(x), "key_func")
            group = self.groups.setdefault(key, [])
            group.append(x)
            if len(group) >= self._size(key):
                self._begin(key)
                yield from self._read()
        while self.groups:
            self._begin(min(self.groups))
            yield from self._read()

    def _size(self, key: int) -> int:
        size = self.op.size
        if size is None:
            size = int_scalar(self.op.size_function.value(np.int64(key)), "window_size_func")
        if size < 1:
            raise invalid(f"Window size must be greater than zero, not {size}")
        return int(size)

    def _begin(self, key: int) -> None:
        self.opened += 1
        self._open(key, self.groups.pop(key))

    def _open(self, key: int, elements: list[Any]) -> OperatorNode:
        self.made_of = key, elements
        self.inner = self.inner_context(self.opened).open(
            self.op.reduced(key, elements, self.dataset)
        )
        return self.inner

    def inner_nodes(self) -> list[Any]:
        return [] if self.inner is None else [self.inner]

    def _read(self) -> Iterator[Any]:
        assert self.inner is not None
        yield from self.inner.stream()
        self.inner.close()
        self.inner, self.made_of = None, (0, [])

    def state(self) -> dict[str, Any]:
        return {
            "opened": self.opened,
            "groups": [[key, save_elements(group)] for key, group in self.groups.items()],
            "made_of": [self.made_of[0], save_elements(self.made_of[1])],
            "inner": None if self.inner is None else self.inner.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.opened = state["opened"]
        self.groups = {key: load_elements(group) for key, group in state["groups"]}
        if self.inner is not None:
            self.inner.close()
            self.inner = None
        if state["inner"] is not None:
            key, elements = state["made_of"]
            self._open(key, load_elements(elements)).load_state_dict(state["inner"])


def int_scalar(value: Any, argument: str) -> int:
    """Return the result of a user function as an int. Raises ValueError if the result is not an
    integer scalar."""
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{argument}` must return a single int64, not {array.dtype} of shape {array.shape}"
        )
    return int(array)


@operator("group_by_window", _GroupNode)
class GroupByWindow(Op):
    """Collects the elements of each key in windows, calls a function that returns a dataset for
    each window, and yields the elements of these datasets.
    """

    result_spec = UNKNOWN_SPEC

    key_function: PickledFunction
    reduce_function: PickledFunction
    size: int | None = None
    size_function: PickledFunction | None = None

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return INFINITE_CARDINALITY if inputs[0] == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def infer(self, dataset: DatasetLike) -> Any:
        for x in dataset.inputs[0].probe():
            key = self.key_function.value(*x) if type(x) is tuple else self.key_function.value(x)
            try:
                return self.reduced(int_scalar(key, "key_func"), [x], dataset).element_spec
            except NoElements:
                # The function returns an empty dataset for a window of one element, so run the
                # operator with its real windows.
                return super().infer(dataset)
        return UNKNOWN_SPEC

    def reduced(self, key: int, elements: list[Any], dataset: DatasetLike) -> DatasetLike:
        """Return the dataset that `reduce_function` returns for a window of `elements` with this
        key. `dataset` is the dataset of this operator. Raises TypeError if the function returns no
        dataset.
        """
        window = dataset_of_elements(elements, dataset.inputs[0].declared_spec)
        with in_function():
            return returned_dataset(
                self.reduce_function.value(np.int64(key), window), "group_by_window"
            )
