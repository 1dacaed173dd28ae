"""`Op`: the description of an operator, and the facts that can be computed from it without running
the operator.

Rules
    An operator is a frozen dataclass of plain arguments, values and functions. Its inputs are in
    the Dataset, not in the operator. It computes the cardinality and spec of its elements from its
    arguments and from the cardinalities and specs of the inputs. Only `open` creates an object that
    runs.

    `describe` returns the arguments as JSON types. Plain arguments are unchanged, arrays and specs
    are encoded by the safe codec, and a function or any other object becomes an opaque pickle. A
    dispatcher reads such a description without unpickling anything, because a function is unpickled
    only when `PickledFunction.value` is first read.

    State that must outlive an iterator, such as a cache in memory, is in the Dataset's `memory`,
    not in the operator.
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
_NO_RATIO: Any = object()


class PickledFunction:
    """A user function, or another object that only pickle can encode. It is pickled when `blob` is
    first read, and unpickled when `value` is first read.
    """

    __slots__ = ("_blob", "_value")

    def __init__(self, value: Any = _UNSET, blob: bytes | None = None) -> None:
        self._value = value
        self._blob = blob

    @property
    def value(self) -> Any:
        """The function. If it is from a description, the first access unpickles it, which runs code
        that the sender of the description has chosen.
        """
        if self._value is _UNSET:
            from zmqdist.wire.trusted import unpack

            self._value = unpack(self._blob)  # type: ignore[arg-type]
        return self._value

    def marked(self, name: str) -> bool:
        """Return whether the function has an attribute with this name whose value is true. If the
        function is still pickled, return False and do not unpickle it.
        """
        return bool(getattr(self._value, name, False))

    @property
    def blob(self) -> bytes:
        """The pickle of the function. Raises InvalidArgumentError if an object in the function
        cannot be pickled."""
        if self._blob is None:
            from zmqdist.wire.trusted import pack_function

            self._blob = pack_function(self._value)
        return self._blob

    def wraps(self, value: Any) -> bool:
        """Return whether the wrapped function is the object `value`."""
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
    """The description of one operator. Subclasses are registered by `interfaces.operator`.

    Attributes:
      name: the name in the registry, in descriptions and in `explain`.
      node: the class that runs the operator.
      in_background: whether the operator reads its inputs in a thread.
      is_reader: whether the operator reads the files that its input names. FILE sharding looks for
        such operators.
      result_count: the cardinality of the operator's result, if it is always the same.
      result_spec: the spec of the operator's elements, if it is always the same.
      spec_field: the field that has the spec of the operator's elements, or None if only running
        the pipeline shows the spec.
      ratio: what `per_split` returns. Without it, the operator has no portions.
      instead: the end of the error text of `per_split`, which says what else the user can do; empty
        if there is no advice.
    """

    name: ClassVar[str]
    node: ClassVar[type[OperatorNode]]
    is_reader: ClassVar[bool] = False
    instead: ClassVar[str] = ""
    in_background: ClassVar[bool] = False
    result_count: ClassVar[int | None] = None
    result_spec: ClassVar[Any] = None
    spec_field: ClassVar[str] = ""
    ratio: ClassVar[Fraction | None] = _NO_RATIO

    @property
    def is_shared(self) -> bool:
        """Whether other programs take elements from this operator too, so that a pass may be empty
        although a later pass has elements."""
        return False

    def open(self, dataset: DatasetLike, context: Context) -> OperatorNode:
        """Return a node that runs this operator, which is the last operator of `dataset`."""
        return self.node(dataset, context)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        """Return the cardinality of the operator's result, where `inputs` are the cardinalities of
        its inputs. By default, return `result_count`, or the cardinality of the first input.
        """
        return inputs[0] if self.result_count is None else self.result_count

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        """Return the spec of the operator's elements, where `inputs` are the specs of its inputs.
        Return UNKNOWN_SPEC if only running the pipeline shows the spec. By default, return
        `result_spec`, the value of `spec_field`, or the spec of the first input.
        """
        if self.spec_field:
            spec = getattr(self, self.spec_field)
            return UNKNOWN_SPEC if spec is None else spec
        return inputs[0] if self.result_spec is None else self.result_spec

    def infer(self, dataset: DatasetLike) -> Any:
        """Compute the first element of `dataset`, whose last operator this is, and return the
        element's spec. Return UNKNOWN_SPEC if `dataset` is empty.
        """
        for first in dataset.probe():
            return spec_of(first)
        return UNKNOWN_SPEC

    def split_inputs(self, count: int) -> tuple[int, ...]:
        """Return the indices of the inputs that a data service splits among its workers. Each
        worker reads the other inputs whole."""
        return tuple(range(count))

    @property
    def repetitions(self) -> int:
        """How often the operator opens its inputs; INFINITE_CARDINALITY if it opens them again and
        again without end."""
        return 1

    def split_count(self) -> int:
        """Return the number of positions of a source. Raises UnimplementedError if the source
        cannot be split."""
        raise UnimplementedError(
            f"Splitting is not implemented for {self.one_line()}: it has no positions"
        )

    def per_split(self) -> Fraction | None:
        """Return how many elements the operator yields for each input element or, if it is a
        source, for each position. Return None if this number varies.

        Raises:
          UnimplementedError: the operator does not look at one element at a time, so the portions
            of the input would yield other elements than the whole input.
        """
        if self.ratio is not _NO_RATIO:
            return self.ratio
        raise UnimplementedError(
            f"{self.name}() does not look at one element at a time, so it cannot run on portions "
            f"of the data, as exactly-once"
            f" delivery and reading in order require: put it behind distribute(){self.instead}",
        )

    def stateful(self) -> bool:
        """Return whether the operator's elements depend on state outside its description, so that
        another process may compute other elements.
        """
        return False

    def describe(self) -> dict[str, Any]:
        """Return the operator's arguments as JSON types, by name."""
        return {
            field.name: _described(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    @classmethod
    def of(cls, described: dict[str, Any]) -> Op:
        """Return the operator that `describe` described."""
        return cls(**{name: _restored(value) for name, value in described.items()})

    def one_line(self) -> str:
        """Return one line for `explain`: the name, and the arguments that differ from their
        defaults."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Compare only plain values, because `!=` of an array returns no bool.
            if type(value) not in _PLAIN or value != field.default:
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
    except InvalidArgumentError:
        # Pickle what the safe codec refuses: other objects, and namedtuples of user classes with
        # methods.
        return {"pickle": base64.b64encode(PickledFunction(value).blob).decode()}


def _restored(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    if "pickle" in described:
        return PickledFunction(blob=base64.b64decode(described["pickle"]))
    return from_json(described["value"])


def finite(count: int) -> bool:
    """Return whether a cardinality is a number of elements, and neither infinite nor unknown."""
    return count >= 0


def all_of(counts: tuple[int, ...], combine: Callable[[list[int]], int]) -> int:
    """Return `combine` of the finite counts. Return UNKNOWN_CARDINALITY if a count is unknown, and
    INFINITE_CARDINALITY if all counts are infinite.
    """
    if UNKNOWN_CARDINALITY in counts:
        return UNKNOWN_CARDINALITY
    bounded = [count for count in counts if count != INFINITE_CARDINALITY]
    return combine(bounded) if bounded else INFINITE_CARDINALITY
