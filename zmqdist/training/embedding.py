"""Rows of a table by their numbers, alone or several put together: what a model with embeddings looks up.

Rules
    A table is a variable, a sharded one, or a list of variables whose rows follow each other.
    Only the rows that are asked for move; where several are put together, each of them moves once, however often it is named.
    Ids come in *bags*, of which each gives one row: Sparse (the last axis is the bag), Ragged, or a list of lists.

Not here: who has which row (row_gather.py), gradients: those of a lookup are IndexedSlices of the rows that it took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqdist.data.composites import Ragged, Sparse
from zmqdist.training.arithmetic import ArrayLike
from zmqdist.training.indexing import checked_numbers
from zmqdist.training.row_gather import start_rows

COMBINERS = ("mean", "sqrtn", "sum")


class Bags(NamedTuple):
    """Ids in bags: `ids[i]` is in the bag with the number `bags[i]`, and counts `weights[i]` times (once where that is None)."""

    ids: NDArray[Any]
    bags: NDArray[np.int64]
    weights: NDArray[Any] | None
    shape: tuple[int, ...]
    """Of the bags: their numbers count through it."""


def embedding_lookup(params: Any, ids: Any, max_norm: float | None = None) -> NDArray[Any]:
    """Rows of a table, in the order asked for.

    Args:
      params: the table.
      ids: numbers of rows, an array of any shape.
      max_norm: rows that are longer than this (by the 2-norm) are shortened to it; None: not.

    Returns:
      An array of the shape of `ids` with the shape of a row behind it, the caller's own.

    Raises:
      InvalidArgumentError: an id that is no row.
      TypeError, ValueError: `params` is no table.
    """
    variables, offsets = _table(params)
    numbers = checked_numbers(_name(params, variables), ids, offsets[-1])
    rows = start_rows(variables, offsets, numbers.reshape(-1)).get_value()
    return _shortened(rows, max_norm).reshape(*numbers.shape, *variables[0].shape[1:])


def embedding_lookup_sparse(
    params: Any, sp_ids: Any, sp_weights: Any = None, combiner: str | None = None, max_norm: float | None = None
) -> NDArray[Any]:
    """One row for each bag of ids: the rows of its ids put together.

    Args:
      params: the table.
      sp_ids: the bags.
      sp_weights: how much each id counts, in the same form; None: all alike.
      combiner: "sum" of the rows, each times its weight; "mean" (the default): that divided by the sum of the weights; "sqrtn":
        divided by the root of the sum of their squares.
      max_norm: as in `embedding_lookup`, before they are put together.

    Returns:
      An array of the shape of the bags with the shape of a row behind it; zeros for an empty bag. Of a table of whole numbers it is
      float64.

    Raises:
      InvalidArgumentError: an id that is no row.
      TypeError: `params` is no table, or the ids are in no bags.
      ValueError: the weights have another form than the ids, or there is no such combiner.
    """
    return _combined(params, _bags(sp_ids, sp_weights), combiner or "mean", max_norm)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
) -> NDArray[Any]:
    """As `embedding_lookup_sparse`, of what is valid: ids below 0 are left out, and, but for a "sum", weights not above 0 too.

    Args:
      default_id: what an empty bag, or one of which nothing is left, holds instead; None: it gives zeros.
    """
    bags = _bags(sparse_ids, sparse_weights)
    valid = bags.ids >= 0
    if bags.weights is not None and combiner != "sum":
        valid &= bags.weights > 0
    bags = bags._replace(
        ids=bags.ids[valid], bags=bags.bags[valid], weights=None if bags.weights is None else bags.weights[valid]
    )
    if default_id is not None:
        bags = _filled(bags, default_id)
    return _combined(embedding_weights, bags, combiner, max_norm)


def _table(params: Any) -> tuple[Sequence[Any], Sequence[int]]:
    """The variables of a table, and where the rows of each begin."""
    if isinstance(params, ArrayLike):
        variables = getattr(params, "variables", None) or [params]
    elif isinstance(params, list | tuple) and params and all(isinstance(one, ArrayLike) for one in params):
        variables = [shard for one in params for shard in (getattr(one, "variables", None) or [one])]
    else:
        raise TypeError(f"a table is a Variable, a ShardedVariable or a list of them, not {params!r}")
    like = variables[0]
    if any(not one.shape or one.shape[1:] != like.shape[1:] or one.dtype != like.dtype for one in variables):
        shapes = ", ".join(f"{one.name!r} {one.dtype}{one.shape}" for one in variables)
        raise ValueError(f"the variables of a table need rows of one shape and dtype, not {shapes}")
    return variables, tuple(accumulate((one.shape[0] for one in variables), initial=0))


def _name(params: Any, variables: Sequence[Any]) -> str:
    if isinstance(params, ArrayLike):
        return params.label
    return f"the table of variables {', '.join(repr(one.name) for one in variables)}"


def _shortened(rows: NDArray[Any], max_norm: float | None) -> NDArray[Any]:
    if max_norm is None:
        return rows
    norms = np.sqrt(np.sum(np.square(rows), axis=tuple(range(1, rows.ndim)), keepdims=True))
    shortened: NDArray[Any] = (rows * (max_norm / np.maximum(norms, max_norm))).astype(rows.dtype, copy=False)
    return shortened


def _bags(ids: Any, weights: Any) -> Bags:
    if isinstance(ids, list | tuple) and not isinstance(ids, Sparse | Ragged):
        ids, weights = _ragged(ids), None if weights is None else _ragged(weights)
    if weights is not None and not _same_form(ids, weights):
        raise ValueError("weights need the form of the ids: one for each of them, in the same bags")
    bag_weights = None if weights is None else np.asarray(weights.values)
    numbers = np.asarray(ids.values) if isinstance(ids, Sparse | Ragged) else np.empty(0)
    if isinstance(ids, Ragged):
        splits = np.asarray(ids.row_splits, np.int64)
        return Bags(numbers, np.repeat(np.arange(len(splits) - 1), np.diff(splits)), bag_weights, (len(splits) - 1,))
    if isinstance(ids, Sparse) and len(ids.shape()) > 1:
        shape = ids.shape()[:-1]
        places = np.asarray(ids.indices, np.int64).reshape(-1, len(shape) + 1)
        return Bags(numbers, np.ravel_multi_index(tuple(places[:, :-1].T), shape).astype(np.int64), bag_weights, shape)
    raise TypeError(f"ids in bags are Sparse with at least two axes, Ragged, or a list of lists, not {ids!r}")


def _ragged(rows: Any) -> Ragged:
    arrays = [np.asarray(row) for row in rows]
    if any(array.ndim != 1 for array in arrays):
        raise TypeError(f"a list of bags has a list of ids for each, not {rows!r}")
    full = [array for array in arrays if array.size]
    values = np.concatenate(full) if full else np.empty(0, np.int64)
    return Ragged(values, np.array(list(accumulate((len(array) for array in arrays), initial=0)), np.int64))


def _same_form(ids: Any, weights: Any) -> bool:
    if type(ids) is not type(weights) or len(ids.values) != len(weights.values):
        return False
    if isinstance(ids, Ragged):
        return bool(np.array_equal(ids.row_splits, weights.row_splits))
    return np.array_equal(ids.indices, weights.indices) and np.array_equal(ids.dense_shape, weights.dense_shape)


def _filled(bags: Bags, default_id: int) -> Bags:
    """One id for each empty bag."""
    counts = np.bincount(bags.bags, minlength=math.prod(bags.shape))
    empty = np.flatnonzero(counts == 0)
    ids = np.concatenate([bags.ids.astype(np.int64), np.full(len(empty), default_id, np.int64)])
    weights = None if bags.weights is None else np.concatenate([bags.weights, np.ones(len(empty), bags.weights.dtype)])
    return Bags(ids, np.concatenate([bags.bags, empty]), weights, bags.shape)


def _combined(params: Any, bags: Bags, combiner: str, max_norm: float | None) -> NDArray[Any]:
    if combiner not in COMBINERS:
        raise ValueError(f"combiner must be one of {', '.join(COMBINERS)}, not {combiner!r}")
    ids, places = np.unique(bags.ids, return_inverse=True)
    rows = embedding_lookup(params, ids, max_norm)
    exact = np.result_type(rows.dtype, np.float32)  # halves are summed as floats
    weights = np.ones(len(bags.ids), exact) if bags.weights is None else bags.weights.astype(exact)
    along_rows = (-1, *[1] * (rows.ndim - 1))
    weighted = rows[places].astype(exact, copy=False) * weights.reshape(along_rows)
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
    kept = rows.dtype if rows.dtype.kind in "fc" else exact
    return result.reshape(*bags.shape, *rows.shape[1:]).astype(kept, copy=False)
