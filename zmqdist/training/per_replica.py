"""PerReplica values, which differ between the replicas of a worker, and the functions that split
and combine them.

Not here: running a function in each replica (replicas.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.collectives import ReduceOp
from zmqdist.specs import joined, plain_array


class PerReplica:
    """One value for each replica of a worker.

    >>> zd.parameter_server.PerReplica((1, 2)).values
    (1, 2)

    Attributes:
      values: tuple of the values, in the order of the replicas.
    """

    __slots__ = ("values",)

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(repr, self.values))})"

    def __eq__(self, other: object) -> bool:
        return self.values == other.values if isinstance(other, PerReplica) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def select(structure: Any, replica: int) -> Any:
    """Return the structure with each PerReplica replaced by its value for `replica`."""
    return nest.map_contents(
        lambda part: part.values[replica] if isinstance(part, PerReplica) else part, structure
    )


def regroup(results: Sequence[Any]) -> Any:
    """Combine the structures that the replicas returned into one structure, in which each leaf is a
    PerReplica. A leaf that is None in all replicas stays None.

    Raises:
      TypeError, ValueError: the structures differ in form.
    """
    if len(results) == 1:
        return results[0]

    def grouped(*leaves: Any) -> Any:
        return None if all(leaf is None for leaf in leaves) else PerReplica(leaves)

    return nest.map_structure(grouped, *results)


def reduce_replicas(
    reduce_op: Any, value: Any, axis: int | Sequence[int] | None, replicas: int = 1
) -> Any:
    """Return the sum or mean of the replicas' values, leaf by leaf. With `axis`, also reduce each
    value along these axes.

    Args:
      replicas: number of replicas. If there are several replicas, the sum of a value that is not a
        PerReplica is refused, because such a value is the same in all replicas. Only the sum of 0
        is not refused.

    Raises:
      ValueError: `reduce_op` is unknown, or the sum is refused.
    """
    op = ReduceOp.of(reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f'reduce_op of a strategy is "SUM" or "MEAN", not {op.name!r}')
    axes = tuple(axis) if isinstance(axis, Sequence) else axis

    def reduced(leaf: Any) -> Any:
        if leaf is None:
            return None
        values = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
        is_shared = len(values) == 1 and replicas > 1
        if is_shared and op is ReduceOp.SUM and (np.ndim(leaf) or np.any(np.asarray(leaf))):
            raise ValueError(
                f"{leaf!r} is the same in all {replicas} replicas: its sum means nothing; reduce "
                f"what `run` returned"
            )
        if axes is None:
            return values[0] if len(values) == 1 else _summed(values, op, len(values))
        parts = [plain_array(item, "the value of a replica") for item in values]
        count = sum(_count(part, axes) for part in parts)
        return _summed([part.sum(axis=axes) for part in parts], op, count)

    return nest.map_structure(reduced, value)


def _count(array: np.ndarray[Any, Any], axes: int | tuple[int, ...]) -> int:
    named = (axes,) if isinstance(axes, int) else axes
    return int(np.prod([array.shape[axis] for axis in named], dtype=np.int64))


def _summed(values: Sequence[Any], op: ReduceOp, count: int) -> Any:
    total = reduce(np.add, values)
    return total if op is ReduceOp.SUM else np.divide(total, count)


def gather_replicas(value: Any, axis: int) -> Any:
    """Return the replicas' arrays concatenated along `axis`, leaf by leaf. A leaf that is not a
    PerReplica is returned unchanged."""

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        return joined([plain_array(item, "the value of a replica") for item in leaf.values], axis)

    return nest.map_contents(gathered, value)
