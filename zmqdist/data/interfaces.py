"""The interfaces between the modules of a pipeline, and the registry of operators. The interfaces
allow each module to import only modules below it.

Rules
    Iterators and operators see datasets only as `DatasetLike`. To create a dataset, for example for
    a window or from a saved state, they call `make` or `deserialize`. These two functions look up
    classes that are defined in modules above: the classes of operators by name, which `@operator`
    registers, and the class `Dataset`, which `@dataset_class` registers. They are registered before
    the first dataset exists, because importing `Dataset` imports every operator except those in
    OPERATOR_MODULES, which `operator_of` imports.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from zmqdist.data.structure import invalid
from zmqdist.errors import OpError

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # Python 3.10 has none

    def dataclass_transform(**_: Any) -> Callable[[C], C]:
        return lambda decorator: decorator


FORMAT_VERSION = 1

OPERATORS: dict[str, Any] = {}
"""The class of each operator, by its name."""

OPERATOR_MODULES = {
    "csv_rows": "zmqdist.data.ops.csv_rows",
    "distribute": "zmqdist.data.service.source",
    "parquet": "zmqdist.data.ops.parquet",
}
"""The modules that register the operators that no method of `Dataset` creates, by the operator's
name. Such a module is imported when a description names its operator."""

C = TypeVar("C", bound=type)

_classes: dict[str, Any] = {}


_lock = threading.Lock()


class Memory:
    """The state that the iterators of one dataset object share: the number of its passes so far,
    and the values that operators store for later iterators.
    """

    __slots__ = ("__weakref__", "_next", "values")

    def __init__(self) -> None:
        self._next = 0
        self.values: dict[str, Any] = {}

    def begin_pass(self, number: int = -1) -> int:
        """Return the number of the pass that begins: `number`, or the next number if it is
        negative."""
        with _lock:
            number = self._next if number < 0 else number
            self._next = max(self._next, number + 1)
        return number

    def continue_at(self, number: int) -> None:
        """Go back, or ahead: the next pass has this number."""
        self._next = number


class DatasetLike(Protocol):
    """The members of a dataset that iterators and operators use. The class Tree (tree.py) describes
    them."""

    op: Any
    memory: Memory

    @property
    def inputs(self) -> Sequence[DatasetLike]: ...

    @property
    def element_spec(self) -> Any: ...

    @property
    def known_spec(self) -> Any: ...

    @property
    def declared_spec(self) -> Any: ...

    def cardinality(self) -> int: ...

    def fingerprint(self) -> str: ...

    def probe(self) -> Iterator[Any]: ...

    def walk(self) -> Sequence[DatasetLike]: ...

    def __iter__(self) -> Any: ...


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def operator(name: str, node: type) -> Callable[[C], C]:
    """Return a decorator that makes the class of an operator a frozen dataclass, and registers it
    under `name`. `node` is the class of the nodes that run the operator."""

    def enter(cls: C) -> C:
        assert name not in OPERATORS
        cls.name, cls.node = name, node  # type: ignore[attr-defined]
        OPERATORS[name] = dataclasses.dataclass(frozen=True)(cls)
        return cls

    return enter


def operator_of(name: str) -> Any:
    """Return the class of the operator with this name, or None if there is no such operator."""
    if name in OPERATOR_MODULES and name not in OPERATORS:
        importlib.import_module(OPERATOR_MODULES[name])
    return OPERATORS.get(name)


def dataset_class(cls: C) -> C:
    """Register the class whose instances `make` returns. Use this as a decorator."""
    _classes["dataset"] = cls
    return cls


def make(op: Any, inputs: Sequence[DatasetLike] = ()) -> DatasetLike:
    """Return a dataset with the operator `op`. Its class is the one that `dataset_class` has
    registered, which is `Dataset`."""
    dataset: DatasetLike = _classes["dataset"](op, inputs)
    return dataset


def deserialize(text: str) -> Any:
    """Return the dataset that `serialize` described. `zmqdist.data.dataset.deserialize` has the
    details."""
    try:
        described = json.loads(text)
        if described["version"] != FORMAT_VERSION:
            raise invalid(
                f"the dataset has format {described['version']}, but this version reads format "
                f"{FORMAT_VERSION}"
            )
        datasets: list[Any] = []
        for node in described["nodes"]:
            op = operator_of(node["op"])
            if op is None:
                raise invalid(
                    f"the dataset has the operator {node['op']!r}, which this version does not have"
                )
            datasets.append(
                make(op.of(node["args"]), [datasets[number] for number in node["inputs"]])
            )
        return datasets[-1]
    except OpError:
        raise
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise invalid(f"not the description of a dataset: {error}") from error
