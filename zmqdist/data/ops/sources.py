"""Sources: numbers, arrays, generators, objects with items by position, and lists of files.

Rules
    An `Indexed` source returns the element at any position, so that it can be split by positions.
    `random` can be split too. It has positions without end, and each process makes its own next
    draw for a position that it gets. A generator cannot be split.

    `from_tensors`, `from_tensor_slices` and `from_source` do not copy arrays, and yield read-only
    views of the caller's memory. The items of a user's generator are yielded as they are, and can
    be written to.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import length_hint
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.data import structure
from zmqdist.data.composites import COMPOSITES, sliced
from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.base import Op, PickledFunction
from zmqdist.data.signatures import as_spec
from zmqdist.data.structure import UNKNOWN_SPEC, element, invalid, read_only, spec_of
from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import converted
from zmqdist.specs import TensorSpec

_CHUNK = 1024
"""The largest number of numbers or views that a source creates at a time."""


@dataclass(frozen=True)
class Indexed(Op):
    """Base class of the sources whose elements have the positions 0, 1, ... count - 1."""

    ratio = Fraction(1)

    def count(self) -> int:
        """Return the number of positions; INFINITE_CARDINALITY if there is no end."""
        raise NotImplementedError

    def at(self, position: int) -> Any:
        """Return the element at a position."""
        raise NotImplementedError

    def chunk(self, start: int) -> Sequence[Any]:
        """Return some elements, from position `start` on: as many as are cheap to create at once,
        but at least one, unless `start` is the end.
        """
        return (self.at(start),)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count()

    def split_count(self) -> int:
        return self.count()


class _IndexedNode(OperatorNode):
    """Reads an Indexed source in chunks.

    Attributes:
      position: the position after the current chunk.
      chunk: the elements of the current chunk that are not yielded yet. *Invariant*: the next
        element has position `position - length_hint(chunk)`.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = 0
        self.chunk: Iterator[Any] = iter(())
        self.splits = context.next_splits()

    def run(self) -> Iterator[Any]:
        if self.splits is not None:
            for position in self.splits:
                yield self.op.at(position)
            return
        op, stop = self.op, self.op.count()
        yield from self.chunk
        while self.position != stop:
            # advance before reading, so that only one item is lost if reading it raises
            self.position += 1
            chunk = op.chunk(self.position - 1)
            self.position += len(chunk) - 1
            self.chunk = iter(chunk)
            yield from self.chunk

    def state(self) -> dict[str, Any]:
        if self.splits is not None:
            return self.splits.state()
        return {"position": self.position - length_hint(self.chunk)}

    def load(self, state: dict[str, Any]) -> None:
        if self.splits is not None:
            self.splits.load(state)
        else:
            self.position, self.chunk = state["position"], iter(())


@operator("range", _IndexedNode)
class Range(Indexed):
    """Yields the numbers of Python's range, in any numeric dtype."""

    start: int | float
    stop: int | float
    step: int | float
    dtype: str

    @classmethod
    def build(cls, start: int | float, stop: int | float, step: int | float, dtype: Any) -> Range:
        """Check the arguments, and return the operator. Raises InvalidArgumentError for a step of
        0, and for numbers that the dtype cannot represent.
        """
        if step == 0:
            raise invalid("step must not be zero")
        if not all(
            isinstance(number, int) or math.isfinite(number) for number in (start, stop, step)
        ):
            raise invalid(
                f"start, stop and step of a range must be finite, not {start}, {stop}, {step}"
            )
        numpy_dtype = converted("output_type", np.dtype, dtype)
        op = cls(start, stop, step, numpy_dtype.str)
        if numpy_dtype.kind in "iu" and op.count():
            bounds = np.iinfo(numpy_dtype.str)
            for end in op.ends():
                if not bounds.min <= int(end) <= bounds.max:
                    raise invalid(
                        f"range({start}, {stop}, {step}) holds {end}, which {numpy_dtype} cannot "
                        f"hold"
                    )
        return op

    def ends(self) -> tuple[int | float, int | float]:
        """Return the first and the last number of the range."""
        return self.start, self.start + (self.count() - 1) * self.step

    def count(self) -> int:
        if all(isinstance(number, int) for number in (self.start, self.stop, self.step)):
            return max(0, -((self.start - self.stop) // self.step))  # type: ignore[return-value]
        return max(0, int(np.ceil((self.stop - self.start) / self.step)))

    def at(self, position: int) -> Any:
        return np.dtype(self.dtype).type(self.start + position * self.step)

    def chunk(self, start: int) -> Sequence[Any]:
        stop = min(start + _CHUNK, self.count())
        if max(map(abs, (*self.ends(), self.step))) >= 2**62:
            # compute with Python's int, because int64 could overflow
            return list(map(self.at, range(start, stop)))
        return list((self.start + np.arange(start, stop) * self.step).astype(self.dtype))

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return TensorSpec((), self.dtype)


@operator("counter", _IndexedNode)
class Counter(Indexed):
    """Yields start, start + step, ... without end."""

    start: int | float
    step: int | float
    dtype: str

    def count(self) -> int:
        return INFINITE_CARDINALITY

    def at(self, position: int) -> Any:
        return np.dtype(self.dtype).type(self.start + position * self.step)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return TensorSpec((), self.dtype)


@operator("from_tensors", _IndexedNode)
class Tensors(Indexed):
    """A source of one element."""

    value: Any

    def __post_init__(self) -> None:
        # Make the value read-only here, so that it is read-only after deserialization too.
        object.__setattr__(self, "value", read_only(self.value))

    @classmethod
    def build(cls, value: Any) -> Tensors:
        return cls(element(value))

    def count(self) -> int:
        return 1

    def at(self, position: int) -> Any:
        return read_only(self.value)

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return spec_of(self.value)


@operator("from_tensor_slices", _IndexedNode)
class Slices(Indexed):
    """Yields the slices of every leaf along axis 0."""

    value: Any

    def __post_init__(self) -> None:
        # Make the value read-only here, so that it is read-only after deserialization too.
        object.__setattr__(self, "value", read_only(self.value))

    @classmethod
    def build(cls, value: Any) -> Slices:
        """Check the argument, and return the operator. Raises ValueError for scalars, and leaves of
        different lengths."""
        converted = element(value)
        structure.length_of(converted)
        return cls(converted)

    def count(self) -> int:
        return structure.length_of(self.value)

    def at(self, position: int) -> Any:
        return next(self._rows(position, 1))

    def chunk(self, start: int) -> Sequence[Any]:
        return list(self._rows(start, _CHUNK))

    def _rows(self, start: int, count: int) -> Any:
        return structure.rows_of(_slice(self.value, start, start + count))

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return structure.unbatched(spec_of(self.value))


def _slice(value: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` to `stop` of each leaf of an element."""
    if value is None or (isinstance(value, (tuple, dict)) and type(value) not in COMPOSITES):
        return structure.map_items(lambda item: _slice(item, start, stop), value)
    return sliced(value, start, stop)


@operator("elements", _IndexedNode)
class Elements(Indexed):
    """Yields elements that an operator has collected. A dataset with this operator is a window of
    `window` or `group_by_window`."""

    spec_field = "spec"

    elements: tuple[Any, ...]
    spec: Any

    def count(self) -> int:
        return len(self.elements)

    def at(self, position: int) -> Any:
        return read_only(self.elements[position])

    def chunk(self, start: int) -> Sequence[Any]:
        return list(map(read_only, self.elements[start : start + _CHUNK]))


def _fitting(item: Any, spec: Any, origin: str) -> Any:
    try:
        return as_spec(item, spec)
    except InvalidArgumentError as error:
        raise invalid(
            f"{origin} returned a value that does not fit its output_signature: {error.message}"
        ) from None


@operator("from_source", _IndexedNode)
class Source(Indexed):
    """Yields the items of an object with a length and an item at each position: a torch or Hugging
    Face dataset, a Grain source, a list."""

    spec_field = "output_signature"

    source: PickledFunction
    length: int
    output_signature: Any = None

    def count(self) -> int:
        return self.length

    def at(self, position: int) -> Any:
        item, spec = self.source.value[position], self.output_signature
        return read_only(element(item) if spec is None else _fitting(item, spec, "the source"))


_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""The names of the methods by which iterators save and restore their position, in Grain and in
stateful loaders for torch."""


class _GeneratorNode(OperatorNode):
    """Reads the iterator that a user's function returns.

    A state is the number of items that were read, and the iterator's own state if the iterator has
    a state that the safe codec accepts. A load calls the function again and restores the iterator's
    own state. If the iterator has no own state, the load skips the items that were read.
    """

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.read = 0
        self.iterator_state: Any = None
        self._items: Iterator[Any] | None = None
        self.at_end = False

    def _opened(self) -> Iterator[Any]:
        if self._items is None:
            # Pass the arguments read-only, because every iterator passes the same objects.
            self._items = iter(self.op.function.value(*map(read_only, self.op.args)))
            _, set_state = _state_methods(self._items)
            if self.iterator_state is not None and set_state is not None:
                set_state(structure.from_json(self.iterator_state))
            else:
                for _ in range(self.read):
                    next(self._items, None)
        return self._items

    def run(self) -> Iterator[Any]:
        spec = self.op.spec
        if self.at_end:
            return
        for item in self._opened():
            self.read += 1
            x = (
                element(item)
                if spec is UNKNOWN_SPEC or spec is None
                else _fitting(item, spec, "the generator")
            )
            yield read_only(x) if self.op.kept else x
        # do not call the user's iterator again, because it may not stay at its end
        self.at_end = True

    def close(self) -> None:
        super().close()
        close = getattr(self._items, "close", None)
        self._items = None
        if close is None:
            return
        try:
            close()
        except ValueError as error:
            if str(error) != "generator already executing":
                raise
            # Another thread is running the generator, so this thread cannot close it. The generator
            # ends when that thread drops it.

    def state(self) -> dict[str, Any]:
        get_state, _ = _state_methods(self._items)
        if get_state is not None:
            # If the safe codec refuses this state, only the number of items is saved, and a load
            # advances a new iterator by that number.
            with contextlib.suppress(InvalidArgumentError):
                self.iterator_state = structure.to_json(get_state())
        return {"read": self.read, "ended": self.at_end, "place": self.iterator_state}

    def load(self, state: dict[str, Any]) -> None:
        self._items = None
        self.read, self.at_end, self.iterator_state = (
            state["read"],
            state["ended"],
            state.get("place"),
        )


def _state_methods(items: Any) -> tuple[Any, Any]:
    """Return the methods of an iterator that save and restore its position, or (None, None)."""
    for get_state, set_state in _STATE_METHODS:
        if hasattr(items, get_state) and hasattr(items, set_state):
            return getattr(items, get_state), getattr(items, set_state)
    return None, None


@operator("from_generator", _GeneratorNode)
class Generator(Op):
    """Yields the items that a user's function yields. Each iterator calls the function."""

    spec_field = "spec"
    result_count = UNKNOWN_CARDINALITY

    function: PickledFunction
    args: tuple[Any, ...]
    spec: Any = field(default=None)
    kept: bool = False
    """Whether the items belong to an object that keeps them, as with `from_source`. Then they are
    yielded read-only."""


def files_matching(patterns: Any) -> list[str]:
    """Return the sorted paths of the files and folders that match any of the patterns.

    Raises:
      InvalidArgumentError: no file or folder matches.
    """
    many = [patterns] if isinstance(patterns, (str, bytes, os.PathLike)) else np.ravel(patterns)
    texts = [converted("file_pattern", os.fsdecode, pattern) for pattern in many]
    paths = sorted({path for text in texts for path in glob.glob(text)})
    if not paths:
        raise invalid(f"no files match {', '.join(texts)}")
    return paths


def spec_from(types: Any, shapes: Any) -> Any:
    """Return the spec for the arguments `output_types` and `output_shapes` of `from_generator`: a
    structure of dtypes, and shapes in the same structure. A shape of None is unknown.
    """
    dtypes = nest.flatten(types)
    if isinstance(types, (tuple, dict)) and shapes is not None:
        is_dict = isinstance(shapes, dict)
        parts = [shapes[key] for key in sorted(shapes)] if is_dict else shapes
    else:
        parts = [shapes] * len(dtypes)
    specs = [TensorSpec(shape, dtype) for shape, dtype in zip(parts, dtypes, strict=True)]
    return nest.pack_sequence_as(types, specs)
