"""Lookups of rows in a table, for models with embeddings. A lookup returns single rows, or combines
several rows into one row.

Rules
    A table is a Variable, a ShardedVariable, or a list of them. In a list, row numbers continue
    from one variable to the next. Only the requested rows are transferred. A lookup that combines
    rows transfers each row once, however often its id occurs. A lookup that combines rows takes ids
    in *bags*, and returns one row for each bag. Bags are Sparse (each vector along the last axis is
    a bag), Ragged, or a list of lists.
    The gradient of a lookup is an IndexedSlices of the rows that it has read.

Not here: which variable holds which row (row_gather.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqdist.data.composites import Ragged, Sparse
from zmqdist.field_types import check_type, checked, converted
from zmqdist.training.arithmetic import ArrayLike
from zmqdist.training.indexing import checked_numbers
from zmqdist.training.row_gather import start_rows

COMBINERS = ("mean", "sqrtn", "sum")


class Bags(NamedTuple):
    """Ids in bags: `ids[i]` is in bag number `bags[i]` and has weight `weights[i]`. If `weights` is
    None, all weights are 1."""

    ids: NDArray[Any]
    bags: NDArray[np.int64]
    weights: NDArray[Any] | None
    shape: tuple[int, ...]
    """Shape of the array of bags. The numbers of the bags count the elements of this array in C
    order."""


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> NDArray[Any]:
    """Return rows of a table, in the requested order.

    Args:
      params: the table.
      ids: numbers of rows, an array of any shape.
      max_norm: rows with a larger 2-norm are scaled down to this norm. None means that no row is
        scaled.

    Returns:
      An array with the shape of `ids` followed by the shape of a row. The caller owns the array.

    Raises:
      InvalidArgumentError: an id is out of range, or is not an integer.
      TypeError, ValueError: `params` is not a table.
    """
    variables, offsets = _table(params)
    numbers = checked_numbers(_name(params, variables), ids, offsets[-1])
    rows = start_rows(variables, offsets, numbers.reshape(-1)).get_value()
    return _shortened(rows, max_norm).reshape(*numbers.shape, *variables[0].shape[1:])


@checked
def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiner: str | None = None,
    max_norm: float | None = None,
) -> NDArray[Any]:
    """For each bag, return one row that combines the rows of the bag's ids.

    >>> table = zd.Variable(np.arange(6.0).reshape(3, 2))
    >>> zd.parameter_server.embedding_lookup_sparse(table, [[0, 2], [1]]).tolist()
    [[2.0, 3.0], [2.0, 3.0]]

    Args:
      params: the table.
      sp_ids: the bags.
      sp_weights: the weight of each id, in the form of `sp_ids`. None means that all weights are 1.
      combiner: how the rows of a bag are combined. "sum" adds the rows, each times its weight.
        "mean", the default, divides this sum by the sum of the weights. "sqrtn" divides this sum by
        the square root of the sum of the squared weights.
      max_norm: as for `embedding_lookup`. Each row is scaled before rows are combined.

    Returns:
      An array with the shape of the bags followed by the shape of a row. The row of an empty bag is
      zeros. For a table of integers the array is float64, or float32 if the integers have at most
      16 bits.

    Raises:
      InvalidArgumentError: an id is out of range, or is not an integer.
      TypeError: `params` is not a table, or the ids are not in bags.
      ValueError: the weights have another form than the ids, `combiner` is unknown, or the
        variables of a list have different rows.
    """
    return _combined(params, _bags(sp_ids, sp_weights), combiner or "mean", max_norm)


@checked
def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
) -> NDArray[Any]:
    """Remove invalid ids, and return one row for each bag as `embedding_lookup_sparse` does. An id
    below 0 is invalid. If the combiner is not "sum", an id whose weight is not above 0 is invalid
    too.

    >>> table = zd.Variable(np.arange(6.0).reshape(3, 2))
    >>> zd.parameter_server.safe_embedding_lookup_sparse(table, [[1, -1], []]).tolist()
    [[2.0, 3.0], [0.0, 0.0]]

    Args:
      default_id: the id that is put, with weight 1, into each bag without valid ids. None means
        that the row of such a bag is zeros.
    """
    bags = _bags(sparse_ids, sparse_weights)
    valid = bags.ids >= 0
    if bags.weights is not None and combiner != "sum":
        valid &= bags.weights > 0
    bags = bags._replace(
        ids=bags.ids[valid],
        bags=bags.bags[valid],
        weights=None if bags.weights is None else bags.weights[valid],
    )
    if default_id is not None:
        bags = _filled(bags, default_id)
    return _combined(embedding_weights, bags, combiner, max_norm)


def _table(params: Any) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the variables of a table, with shards as variables, and the offsets of their rows:
    variable i begins at row offsets[i]."""
    if isinstance(params, ArrayLike):
        variables = getattr(params, "variables", None) or [params]
    elif (
        isinstance(params, list | tuple)
        and params
        and all(isinstance(variable, ArrayLike) for variable in params)
    ):
        variables = [
            shard
            for variable in params
            for shard in (getattr(variable, "variables", None) or [variable])
        ]
    else:
        raise TypeError(
            f"a table is a Variable, a ShardedVariable or a list of them, not {params!r}"
        )
    like = variables[0]
    if any(
        not variable.shape or variable.shape[1:] != like.shape[1:] or variable.dtype != like.dtype
        for variable in variables
    ):
        shapes = ", ".join(
            f"{variable.name!r} {variable.dtype}{variable.shape}" for variable in variables
        )
        raise ValueError(f"the variables of a table need rows of one shape and dtype, not {shapes}")
    return variables, tuple(accumulate((variable.shape[0] for variable in variables), initial=0))


def _name(params: Any, variables: Sequence[Any]) -> str:
    if isinstance(params, ArrayLike):
        return params.label
    return f"the table of variables {', '.join(repr(variable.name) for variable in variables)}"


def _shortened(rows: NDArray[Any], max_norm: float | None) -> NDArray[Any]:
    if max_norm is None:
        return rows
    norms = np.sqrt(np.sum(np.square(rows), axis=tuple(range(1, rows.ndim)), keepdims=True))
    shortened: NDArray[Any] = (rows * (max_norm / np.maximum(norms, max_norm))).astype(
        rows.dtype, copy=False
    )
    return shortened


def _bags(ids: Any, weights: Any) -> Bags:
    if isinstance(ids, list | tuple) and not isinstance(ids, Sparse | Ragged):
        ids, weights = (
            _ragged(ids),
            None if weights is None else converted("weights", _ragged, weights),
        )
    if weights is not None and not _same_form(ids, weights):
        raise ValueError(
            "weights must have the form of the ids: one weight for each id, in the same bags"
        )
    bag_weights = None if weights is None else np.asarray(weights.values)
    numbers = np.asarray(ids.values) if isinstance(ids, Sparse | Ragged) else np.empty(0)
    if isinstance(ids, Ragged):
        splits = np.asarray(ids.row_splits, np.int64)
        return Bags(
            numbers,
            np.repeat(np.arange(len(splits) - 1), np.diff(splits)),
            bag_weights,
            (len(splits) - 1,),
        )
    if isinstance(ids, Sparse) and len(ids.shape()) > 1:
        shape = ids.shape()[:-1]
        positions = np.asarray(ids.indices, np.int64).reshape(-1, len(shape) + 1)
        return Bags(
            numbers,
            np.ravel_multi_index(tuple(positions[:, :-1].T), shape).astype(np.int64),
            bag_weights,
            shape,
        )
    raise TypeError(
        f"ids in bags are Sparse with at least two axes, Ragged, or a list of lists, not {ids!r}"
    )


def _ragged(rows: Any) -> Ragged:
    arrays = [np.asarray(row) for row in rows]
    if any(array.ndim != 1 for array in arrays):
        raise TypeError(f"a list of bags must have a list of ids for each bag, not {rows!r}")
    full = [array for array in arrays if array.size]
    values = np.concatenate(full) if full else np.empty(0, np.int64)
    return Ragged(
        values, np.array(list(accumulate((len(array) for array in arrays), initial=0)), np.int64)
    )


def _same_form(ids: Any, weights: Any) -> bool:
    if type(ids) is not type(weights) or len(ids.values) != len(weights.values):
        return False
    if isinstance(ids, Ragged):
        return bool(np.array_equal(ids.row_splits, weights.row_splits))
    return np.array_equal(ids.indices, weights.indices) and np.array_equal(
        ids.dense_shape, weights.dense_shape
    )


def _filled(bags: Bags, default_id: int) -> Bags:
    """Return the bags with `default_id` added to each empty bag."""
    counts = np.bincount(bags.bags, minlength=math.prod(bags.shape))
    empty = np.flatnonzero(counts == 0)
    ids = np.concatenate([bags.ids.astype(np.int64), np.full(len(empty), default_id, np.int64)])
    weights = (
        None
        if bags.weights is None
        else np.concatenate([bags.weights, np.ones(len(empty), bags.weights.dtype)])
    )
    return Bags(ids, np.concatenate([bags.bags, empty]), weights, bags.shape)


def _combined(params: Any, bags: Bags, combiner: str, max_norm: float | None) -> NDArray[Any]:
    if combiner not in COMBINERS:
        raise ValueError(f"combiner must be one of {', '.join(COMBINERS)}, not {combiner!r}")
    check_type("max_norm", max_norm, float | None, "a number or None")
    # each row is moved and shortened once, however many bags name it
    ids, positions = np.unique(bags.ids, return_inverse=True)
    rows = embedding_lookup(params, ids, max_norm)
    # sum float16 values as float32, which is more exact
    exact = np.result_type(rows.dtype, np.float32)
    weights = np.ones(len(bags.ids), exact) if bags.weights is None else bags.weights.astype(exact)
    along_rows = (-1, *[1] * (rows.ndim - 1))
    weighted = rows[positions].astype(exact, copy=False) * weights.reshape(along_rows)
    order = np.argsort(bags.bags, kind="stable")
    numbers, starts = np.unique(bags.bags[order], return_index=True)
    result = np.zeros((math.prod(bags.shape), *rows.shape[1:]), exact)
    if len(numbers):
        total = np.add.reduceat(weighted[order], starts, axis=0)
        if combiner != "sum":
            share = weights[order] if combiner == "mean" else np.square(weights[order])
            divisor = np.add.reduceat(share, starts)
            divisor = (divisor if combiner == "mean" else np.sqrt(divisor)).reshape(along_rows)
            total = np.divide(total, divisor, out=np.zeros_like(total), where=divisor != 0)
        result[numbers] = total
    result_dtype = rows.dtype if rows.dtype.kind in "fc" else exact
    return result.reshape(*bags.shape, *rows.shape[1:]).astype(result_dtype, copy=False)
