"""What the modules of a pipeline know of each other, so that each imports only modules below it; and the registry of operators.

Rules
    Iterators and operators use datasets by `DatasetLike` alone. Where they make one (a window, the file of an interleave, a dataset in a
    saved state) they call `make` or `deserialize`, which look up the two things that stand above them: the operator's class by its
    name, entered by `@operator`, and the class that users hold, entered by `@dataset_class`. Both are entered before any dataset exists,
    because whoever imports `Dataset` imports every operator.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from zmqdist.data.structure import invalid
from zmqdist.errors import OpError

FORMAT_VERSION = 1

OPERATORS: dict[str, Any] = {}
"""Every operator's class by its name."""

ELSEWHERE = {"distribute": "zmqdist.data.service.source", "parquet": "zmqdist.data.ops.parquet"}
"""Operators that `Dataset` has no method for, with the module that enters each: imported when a description first names one."""

C = TypeVar("C", bound=type)

_classes: dict[str, Any] = {}


class Memory:
    """What the iterators of one dataset object share: how many there were, and what an operator keeps from one to the next."""

    __slots__ = ("_numbers", "values")

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.values: dict[str, Any] = {}

    def number(self) -> int:
        """The number of the iterator that is being opened."""
        return next(self._numbers)


class DatasetLike(Protocol):
    """What iterators and operators use of a dataset; tree.py says what each member is."""

    @property
    def op(self) -> Any: ...

    @property
    def inputs(self) -> Sequence[DatasetLike]: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def element_spec(self) -> Any: ...

    @property
    def known_spec(self) -> Any: ...

    def cardinality(self) -> int: ...

    def fingerprint(self) -> str: ...

    def probe(self) -> Iterator[Any]: ...

    def walk(self) -> Sequence[DatasetLike]: ...

    def __iter__(self) -> Any: ...


def operator(name: str, node: type) -> Callable[[C], C]:
    """Enter an operator's class into the registry, with the class that runs it."""

    def enter(cls: C) -> C:
        assert name not in OPERATORS
        cls.name, cls.node = name, node  # type: ignore[attr-defined]
        OPERATORS[name] = cls
        return cls

    return enter


def operator_of(name: str) -> Any:
    """The class of the operator with this name; None where there is none."""
    if name in ELSEWHERE and name not in OPERATORS:
        importlib.import_module(ELSEWHERE[name])
    return OPERATORS.get(name)


def dataset_class(cls: C) -> C:
    """Enter the class of which `make` makes datasets."""
    _classes["dataset"] = cls
    return cls


def make(op: Any, inputs: Sequence[DatasetLike] = ()) -> DatasetLike:
    """The dataset of an operator, of the class that users know."""
    made: DatasetLike = _classes["dataset"](op, inputs)
    return made


def deserialize(text: str) -> Any:
    """The dataset that `serialize` described; `zmqdist.data.dataset.deserialize` says more."""
    try:
        described = json.loads(text)
        if described["version"] != FORMAT_VERSION:
            raise invalid(f"a dataset of format {described['version']}, this is format {FORMAT_VERSION}")
        made: list[Any] = []
        for node in described["nodes"]:
            op = operator_of(node["op"])
            if op is None:
                raise invalid(f"a dataset with the operator {node['op']!r}, which this version does not have")
            made.append(make(op.of(node["args"]), [made[number] for number in node["inputs"]]))
        return made[-1]
    except OpError:
        raise
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise invalid(f"not the description of a dataset: {error}") from error
