"""A variable that is cut along its first axis into shards, each a variable of its own, wherever it lives.

Rules
    It can be used wherever a variable can: the same methods, the same value, the same errors, whatever the number of shards.
    What can be checked is checked before the first shard is told: a refused update has changed no shard.
    All shards that have to do with an operation are asked at once, and none that has not; only rows that are needed move.
    An operation on one shard is atomic; between shards there is no order, so a reader may see half of somebody's update.
    It is flattened as one leaf, and iterates over its shards.

Not here: how it is decided to cut a variable (partition.py), lookups that put rows together (embedding.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError, UnimplementedError
from zmqdist.futures import Future, Gathered
from zmqdist.indexed_slices import IndexedSlices
from zmqdist.training import embedding
from zmqdist.training.arithmetic import ArrayLike
from zmqdist.training.indexing import Rows, checked_numbers
from zmqdist.training.replicas import once_for_all
from zmqdist.training.row_gather import split_rows, start_read, start_rows
from zmqdist.variables.casts import cast


class ShardedVariable(ArrayLike):
    """A handle: it can be pickled, and then means the same shards.

    Attributes:
      name: of the whole.
      shape: of the whole.
      dtype: of each element.
    """

    def __init__(self, variables: Sequence[Any], name: str = "ShardedVariable") -> None:
        """Of variables that exist, in the order of their rows.

        Raises:
          TypeError: that is no list of variables, or an empty one.
          ValueError: they differ in dtype, or in shape beyond the first axis; or one is a shard of another already.
        """
        if (
            not isinstance(variables, list | tuple)
            or not variables
            or not all(isinstance(one, ArrayLike) and not isinstance(one, ShardedVariable) for one in variables)
        ):
            raise TypeError(f"variables should be a non-empty list of Variables, not {variables!r}")
        first = variables[0]
        for one in variables[1:]:
            if one.dtype != first.dtype:
                raise ValueError(
                    f"all shards must have the same dtype, {first.name!r} and {one.name!r} have {first.dtype}, {one.dtype}"
                )
        for one in variables:
            if not one.shape or one.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"all shards must have the same shapes except for the first axis, {first.name!r} and {one.name!r} have "
                    f"{first.shape}, {one.shape}"
                )
            container = getattr(one, "_sharded_container", None)
            if container is not None and container() is not None:
                raise ValueError(f"variable {one.name!r} is a shard of {container().name!r} already")
        self._set(tuple(variables), name)

    def _set(self, variables: tuple[Any, ...], name: str) -> None:
        self._variables = variables
        self.name = name
        self._offsets = tuple(accumulate((one.shape[0] for one in variables), initial=0))
        self.shape = (self._offsets[-1], *variables[0].shape[1:])
        self.dtype = variables[0].dtype
        for one in variables:
            one._sharded_container = weakref.ref(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._variables, self.name)

    def __repr__(self) -> str:
        shards = ", ".join(str(one.shape[0]) for one in self._variables)
        return f"<ShardedVariable {self.name!r} shape={self.shape} dtype={self.dtype} in shards of {shards} rows>"

    # -- what it is made of

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows."""
        return list(self._variables)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Shard i has the rows from offsets[i] up to offsets[i + 1]: one number more than there are shards."""
        return self._offsets

    def __iter__(self) -> Iterator[Any]:
        return iter(self._variables)

    def _nest_components(self) -> list[Any]:
        return self.variables

    @property
    def trainable(self) -> bool:
        """Whether an optimizer is to train it."""
        return bool(self._variables[0].trainable)

    @property
    def aggregation(self) -> Any:
        """How values of several replicas become one update."""
        return self._variables[0].aggregation

    @property
    def synchronization(self) -> Any:
        """As of its shards."""
        return self._variables[0].synchronization

    @property
    def version(self) -> tuple[int, ...]:
        """How many updates each shard has had."""
        return tuple(one.version for one in self._variables)

    # -- reading

    def numpy(self) -> NDArray[Any]:
        """The value of this moment, the rows of all shards one after the other. Raises PSUnavailableError: a shard is gone."""
        array: NDArray[Any] = self.start_read().get_value()
        return array

    def read_value(self) -> NDArray[Any]:
        """As `numpy()`."""
        return self.numpy()

    def value(self) -> NDArray[Any]:
        """As `numpy()`."""
        return self.numpy()

    def start_read(self) -> Gathered:
        """Ask all shards for their values."""
        return start_read(self._variables)

    def start_rows(self, rows: Rows) -> Gathered:
        """Ask the shards that have them for rows."""
        return start_rows(self._variables, self._offsets, rows)

    def embedding_lookup(self, ids: Any, max_norm: float | None = None) -> NDArray[Any]:
        """As `embedding.embedding_lookup` of this table."""
        return embedding.embedding_lookup(self, ids, max_norm)

    # -- updating

    def assign(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> ShardedVariable:
        """Set all rows. Returns itself, when all shards have answered; the last three arguments say nothing here.

        Args:
          value: of exactly the shape of the whole; whole numbers may become others, but not the other way round.

        Raises:
          InvalidArgumentError: shape or dtype do not fit; nothing was changed.
          PSUnavailableError: a shard is gone; others have the new value.
        """
        return self._update("assign", value)

    def assign_add(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> ShardedVariable:
        """Add to all rows; otherwise as `assign`."""
        return self._update("add", value)

    def assign_sub(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> ShardedVariable:
        """Subtract from all rows; otherwise as `assign`."""
        return self._update("sub", value)

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Add to rows; a row that is named twice gets both. Returns itself.

        Raises:
          TypeError: no IndexedSlices.
          InvalidArgumentError: a row that is not there, or rows that do not fit; nothing was changed.
          PSUnavailableError: a shard is gone; others have their part.
        """
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Subtract from rows, as `scatter_add`."""
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Multiply rows, as `scatter_add`."""
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Divide rows, as `scatter_add`."""
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Keep the smaller elements, as `scatter_add`."""
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Keep the larger elements, as `scatter_add`."""
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Set rows, as `scatter_add`; the last one wins of a row that is named twice."""
        return self._scatter("update", sparse_delta)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """As `scatter_update`: rows have one index each."""
        return self._scatter("update", sparse_delta)

    def apply(self, fn: Any, grad: Any, *, step: int | None = None) -> None:
        """Have an optimizer, or a function of the user's, change every shard where it lives, with its rows of a gradient.

        Args:
          fn: of `zd.optimizers`, or `fn(value, grad, slots, step)`; each shard has slots of its own.
          grad: of the shape of the whole, or IndexedSlices of it.
          step: which step of synchronous training this belongs to.

        Raises:
          InvalidArgumentError: the gradient does not fit; nothing was changed.
          PSUnavailableError: a shard is gone; others have their part.
          Exception: whatever `fn` raises; that shard is as it was.
        """
        self.start_apply(fn, grad, step).get_value()

    def start_apply(self, fn: Any, grad: Any, step: int | None) -> Future:
        """Begin what `apply` does."""

        def start(grad: Any) -> Gathered:
            shares = self.shares(grad)
            return Gathered(one.start_apply(fn, part, step) for one, part in zip(self._variables, shares, strict=True))

        return once_for_all(self, grad, start)

    def shares(self, grad: Any) -> list[Any]:
        """A gradient cut as the variable is. Every shard has a part, also of no rows: an optimizer counts steps, and synchronous training
        counts workers."""
        if not isinstance(grad, IndexedSlices):
            return list(self._cut(self._fitting(grad)))
        rows, values = self._fitting_rows(grad)
        split = {owner: (local, places) for owner, local, places in split_rows(self._offsets, rows)}
        nothing = (np.empty(0, np.int64), np.empty(0, np.intp))
        parts = [split.get(index, nothing) for index in range(len(self._variables))]
        return [IndexedSlices(values[places], local) for local, places in parts]

    def compare_and_set(self, value: Any, *, version: Any = None, expected: Any = None) -> NoReturn:
        """Not of several shards: they cannot be compared and set in one moment. Raises UnimplementedError."""
        raise UnimplementedError(
            f"variable {self.name!r} has {len(self._variables)} shards, which cannot be set in one moment: use compare_and_set "
            "of each of its .variables, or make it in one piece",
        )

    def _update(self, kind: str, value: Any) -> ShardedVariable:
        self.start_update(kind, value).get_value()
        return self

    def start_update(self, kind: str, value: Any) -> Future:
        """`kind` is "assign", "add" or "sub"."""

        def start(value: Any) -> Gathered:
            parts = self._cut(self._fitting(value))
            return Gathered(one.start_update(kind, part) for one, part in zip(self._variables, parts, strict=True))

        return once_for_all(self, value, start)

    def _scatter(self, kind: str, sparse_delta: IndexedSlices) -> ShardedVariable:
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(
                f"rows of variable {self.name!r} are changed by IndexedSlices, not by {type(sparse_delta).__name__}"
            )
        self.start_scatter(kind, sparse_delta.indices, sparse_delta.values).get_value()
        return self

    def start_scatter(self, kind: str, indices: Any, values: Any) -> Future:
        """`kind` is what comes behind "scatter_"."""

        def start(delta: IndexedSlices) -> Gathered:
            rows, values = self._fitting_rows(delta)
            return Gathered(
                self._variables[owner].start_scatter(kind, local, values[places])
                for owner, local, places in split_rows(self._offsets, rows)
            )

        return once_for_all(self, IndexedSlices(values, indices), start)

    # -- what fits

    def _fitting(self, value: Any) -> NDArray[Any]:
        array = cast(value, self.dtype, self.label)
        if array.shape != self.shape:
            raise InvalidArgumentError(
                f"variable {self.name!r} has shape {self.shape}: a value of shape {array.shape} does not fit",
            )
        return array

    def _fitting_rows(self, rows: IndexedSlices) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if rows.values.shape[1:] != self.shape[1:]:
            raise InvalidArgumentError(
                f"variable {self.name!r} has rows of shape {self.shape[1:]}: rows of shape {rows.values.shape[1:]} do not fit",
            )
        return checked_numbers(self.label, rows.indices, self.shape[0]), cast(rows.values, self.dtype, self.label)

    def _cut(self, value: NDArray[Any]) -> Iterator[NDArray[Any]]:
        return (value[low:high] for low, high in pairwise(self._offsets))


def _unpickled(variables: tuple[Any, ...], name: str) -> ShardedVariable:
    """In a process that has a handle of the same already, that one."""
    container = getattr(variables[0], "_sharded_container", None)
    known = None if container is None else container()
    if known is not None and list(map(id, known._variables)) == list(map(id, variables)):
        return known  # type: ignore[no-any-return]
    whole = ShardedVariable.__new__(ShardedVariable)
    whole._set(variables, name)
    return whole
