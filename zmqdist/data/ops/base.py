"""What an operator is.

Rules
    An operator is a frozen dataclass of plain arguments, values and functions; its inputs are those of the Dataset that holds it. It
    answers from its arguments and from what is told of its inputs: how many elements, of which form. Only `open` makes something
    that runs.

    Its arguments describe themselves in JSON (`describe`): plain ones as they are, arrays and specs by the safe codec, a
    function or any other object as an opaque pickle. A dispatcher reads such a description without unpickling anything: a function is
    unpickled where it is first called.

    What must outlive an iterator (the number of the next iterator, a cache in memory) lies in the Dataset's `memory`, not here.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.structure import UNKNOWN_SPEC, from_json, spec_of, to_json
from zmqdist.errors import InvalidArgumentError, UnimplementedError

_PLAIN = frozenset({type(None), bool, int, float, str})


_UNSET: Any = object()


class PickledFunction:
    """A function of the user, or another object that only pickle takes: pickled when somebody asks, unpickled when it is used."""

    __slots__ = ("_blob", "_value")

    def __init__(self, value: Any = _UNSET, blob: bytes | None = None) -> None:
        self._value = value
        self._blob = blob

    @property
    def value(self) -> Any:
        """The function; unpickles it at the first use after it came from a description. Runs the sender's code."""
        if self._value is _UNSET:
            from zmqdist.wire.trusted import unpack

            self._value = unpack(self._blob)  # type: ignore[arg-type]
        return self._value

    def marked(self, name: str) -> bool:
        """Whether the function has an attribute that is true. Unpickles nothing: one that nobody has used has no marks."""
        return bool(getattr(self._value, name, False))

    @property
    def blob(self) -> bytes:
        """Its pickle. Raises InvalidArgumentError where something in it has none."""
        if self._blob is None:
            from zmqdist.wire.trusted import pack_function

            self._blob = pack_function(self._value)
        return self._blob

    def wraps(self, value: Any) -> bool:
        """Whether it is this very object."""
        return self._value is value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PickledFunction):
            return NotImplemented
        return (self._value is not _UNSET and other.wraps(self._value)) or self.blob == other.blob

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if self._value is _UNSET:
            return "<function>"
        return str(getattr(self._value, "__name__", type(self._value).__name__))


@dataclasses.dataclass(frozen=True)
class Op:
    """One operator. Subclasses are registered by `interfaces.operator`.

    Attributes:
      name: in the table, in descriptions and in `explain`.
      node: what runs it.
      in_background: its inputs are read by a thread of its own.
      is_reader: it reads the files that its input names: what FILE sharding looks for.
      instead: what else can be done where it cannot run on portions: the rest of that error's sentence.
    """

    name: ClassVar[str]
    node: ClassVar[type[OperatorNode]]
    is_reader: ClassVar[bool] = False
    instead: ClassVar[str] = ""
    in_background: ClassVar[bool] = False

    @property
    def is_shared(self) -> bool:
        """Whether other programs take elements of it, so that a pass may be empty and the next one not."""
        return False

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        """Put it to work."""
        return self.node(dataset, context)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        """How many elements, given those of the inputs; this one keeps the input's number."""
        return inputs[0]

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        """The spec of its elements, or UNKNOWN_SPEC where only running tells; this one keeps the input's."""
        return inputs[0]

    def infer(self, dataset: DatasetLike) -> Any:
        """The spec of `dataset`, whose operator this is, by computing its first element; UNKNOWN_SPEC where there is none."""
        for first in dataset.probe():
            return spec_of(first)
        return UNKNOWN_SPEC

    def split_inputs(self, count: int) -> tuple[int, ...]:
        """Which of its inputs a data service deals out to its workers; the others each worker has whole."""
        return tuple(range(count))

    @property
    def repetitions(self) -> int:
        """How often it opens its inputs."""
        return 1

    def split_count(self) -> int:
        """Of a source: how many positions it is dealt out by. Raises UnimplementedError where it cannot be."""
        raise UnimplementedError(f"Splitting is not implemented for {self.one_line()}: it has no positions")

    def per_split(self) -> Fraction | None:
        """How many elements it makes of one of its input; None where that depends on the element. A source: of one position.

        Raises:
          UnimplementedError: it does not look at one element at a time, so that pieces of the input, one after the other, give something
            else than the whole.
        """
        raise UnimplementedError(
            f"{self.name}() does not look at one element at a time, so it cannot run on portions of the data, which exactly-once"
            f" delivery and reading in order need: put it behind distribute(){self.instead}",
        )

    def stateful(self) -> bool:
        """Whether what it gives depends on something that a description does not hold, so that each process has another."""
        return False

    def describe(self) -> dict[str, Any]:
        """Its arguments, JSON-able."""
        return {field.name: _described(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def of(cls, described: dict[str, Any]) -> Op:
        """The inverse of `describe`."""
        return cls(**{name: _restored(value) for name, value in described.items()})

    def one_line(self) -> str:
        """One line for `explain`: the name and the arguments that are not as usual."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) not in _PLAIN or value != field.default:  # an array has no truth to compare by
                text = repr(value)
                parts.append(f"{field.name}={text if len(text) <= 60 else type(value).__name__}")
        return f"{self.name}({', '.join(parts)})"


def _described(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, PickledFunction):
        return {"pickle": base64.b64encode(value.blob).decode()}
    try:
        return {"value": to_json(value)}
    except InvalidArgumentError:  # namedtuples of a user's class with methods, objects
        return {"pickle": base64.b64encode(PickledFunction(value).blob).decode()}


def _restored(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    if "pickle" in described:
        return PickledFunction(blob=base64.b64decode(described["pickle"]))
    return from_json(described["value"])


def finite(count: int) -> bool:
    """Whether a cardinality is a number of elements."""
    return count >= 0


def all_of(counts: tuple[int, ...], combine: Callable[[list[int]], int]) -> int:
    """`combine` of what is finite; UNKNOWN where any is, INFINITE where all are."""
    if UNKNOWN_CARDINALITY in counts:
        return UNKNOWN_CARDINALITY
    known = [count for count in counts if count != INFINITE_CARDINALITY]
    return combine(known) if known else INFINITE_CARDINALITY
