"""Combines the values of several replicas into one value, such as their sum or mean. The names of
the operations are TensorFlow's."""

from __future__ import annotations

import enum
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from zmqdist.specs import IndexedSlices
from zmqdist.variables.hosted_variable import mean_of


class VariableAggregation(str, enum.Enum):
    """How a variable combines the values that several replicas assign to it into one value.

    >>> zd.tf.VariableAggregation.MEAN.name
    'MEAN'
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class VariableSynchronization(str, enum.Enum):
    """When copies of a variable are synchronized. zmqdist has one copy of each variable, so it
    stores this setting without any effect.

    >>> zd.tf.VariableSynchronization.AUTO.name
    'AUTO'
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


Mode = TypeVar("Mode", VariableAggregation, VariableSynchronization)


def member(cls: type[Mode], kind: str, value: Any) -> Mode:
    """Return the member of an enum for the argument `kind`, by default the first. Raises ValueError
    if there is none of this name."""
    if value is None:
        return next(iter(cls))
    if isinstance(value, cls):
        return value
    # accept a member of TensorFlow's enum, whose members have the same names
    name = getattr(value, "name", value)
    if isinstance(name, str) and name.upper() in cls.__members__:
        return cls[name.upper()]
    modes = ", ".join(repr(mode.value) for mode in cls)
    raise ValueError(f"invalid variable {kind} mode: {value!r}; wanted one of {modes}")


def aggregated(values: tuple[Any, ...], how: VariableAggregation, name: str) -> Any:
    """Return one value that combines the values of all replicas. Raises ValueError if `how` is
    NONE.

    For a sum, the IndexedSlices of all replicas are concatenated. For a mean their values are also
    divided by the number of replicas.
    """
    if how is VariableAggregation.NONE:
        raise ValueError(
            f"variable {name!r} is assigned in a replica context by {len(values)} replicas, and "
            f"has no aggregation: make it "
            'with aggregation="sum", "mean" or "only_first_replica"'
        )
    if how is VariableAggregation.ONLY_FIRST_REPLICA:
        return values[0]
    if any(isinstance(value, IndexedSlices) for value in values):
        rows = np.concatenate([value.values for value in values])
        if how is VariableAggregation.MEAN:
            rows = mean_of(rows, len(values))
        return IndexedSlices(
            rows, np.concatenate([value.indices for value in values]), values[0].dense_shape
        )
    total = reduce(np.add, values)
    return total if how is VariableAggregation.SUM else mean_of(np.asarray(total), len(values))
