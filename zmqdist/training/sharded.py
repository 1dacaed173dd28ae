"""A variable that is cut along its first axis into shards, each a variable of its own.

Rules
    A ShardedVariable has the methods, values and errors of a Variable, whatever the number of
    shards, with few exceptions: only its shards have `device`, `task`, `is_same` and
    `read_versioned`, `version` is a tuple, and `compare_and_set` raises UnimplementedError. All
    checks are made before the first message is sent, so that a refused update has changed no shard.
    `scatter_div` is an exception. An operation sends a request to each shard whose rows it reads or
    changes, and to no other shard. Only `apply` always sends one to each. The requests are in
    flight at the same time, and transfer only the rows that the operation needs.
    An operation is atomic on each shard. There is no order between shards, so a reader may see an
    update on some shards only. In a structure a ShardedVariable is one leaf. Iterating over it
    yields its shards.

Not here: the decision to cut a variable (partition.py), lookups that combine rows (embedding.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from zmqdist import task_context
from zmqdist.errors import InvalidArgumentError, UnimplementedError
from zmqdist.field_types import checked
from zmqdist.futures import Future, Gathered
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.specs import IndexedSlices
from zmqdist.training import embedding
from zmqdist.training.arithmetic import ArrayLike
from zmqdist.training.indexing import Rows, checked_numbers
from zmqdist.training.replicas import once_for_all
from zmqdist.training.row_gather import split_rows, start_read, start_rows
from zmqdist.variables.hosted_variable import cast


class ShardedVariable(ArrayLike):
    """A variable in shards. It pickles as a handle, so that its copy in another process has the
    same shards.

    >>> table = zd.ShardedVariable([zd.Variable([[1, 2]]), zd.Variable([[3, 4], [5, 6]])])
    >>> table.shape, table[2].tolist()
    ((3, 2), [5, 6])

    Attributes:
      name: name of the whole variable.
      shape: shape of the whole variable.
      dtype: dtype of the elements.
      offsets: shard i holds the rows from offsets[i] up to, but not including, offsets[i + 1].
        There is one more offset than shards.
      trainable, aggregation, synchronization: those of the first shard.
    """

    @checked
    def __init__(self, variables: Any, name: str = "ShardedVariable") -> None:
        """Combine existing variables, in the order of their rows.

        Raises:
          TypeError: `variables` is not a list of variables, or is empty.
          ValueError: the variables differ in dtype, or in shape beyond the first axis, or a
              variable is already a shard of another variable.
        """
        if (
            not isinstance(variables, list | tuple)
            or not variables
            or not all(
                isinstance(shard, ArrayLike) and not isinstance(shard, ShardedVariable)
                for shard in variables
            )
        ):
            raise TypeError(f"variables should be a non-empty list of Variables, not {variables!r}")
        first = variables[0]
        for shard in variables[1:]:
            if shard.dtype != first.dtype:
                raise ValueError(
                    f"all shards must have the same dtype, but {first.name!r} and {shard.name!r} "
                    f"have {first.dtype} and {shard.dtype}"
                )
        for shard in variables:
            if not shard.shape or shard.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"all shards must have the same shapes except for the first axis, but "
                    f"{first.name!r} and {shard.name!r} have "
                    f"{first.shape} and {shard.shape}"
                )
            container = getattr(shard, "_sharded_container", None)
            if container is not None and container() is not None:
                raise ValueError(
                    f"variable {shard.name!r} is a shard of {container().name!r} already"
                )
        self._set(tuple(variables), name)

    def _set(self, variables: tuple[Any, ...], name: str) -> None:
        self._variables = variables
        self.name = name
        self.offsets = tuple(accumulate((shard.shape[0] for shard in variables), initial=0))
        self.shape = (self.offsets[-1], *variables[0].shape[1:])
        first = variables[0]
        self.dtype, self.trainable = first.dtype, first.trainable
        self.aggregation, self.synchronization = first.aggregation, first.synchronization
        self.label = f"variable {name!r}"
        for shard in variables:
            shard._sharded_container = weakref.ref(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._variables, self.name)

    def __repr__(self) -> str:
        shards = ", ".join(str(shard.shape[0]) for shard in self._variables)
        return f"<ShardedVariable {self.name!r} shape={self.shape} dtype={self.dtype} in shards of {shards} rows>"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        yield "name", self.name
        yield "shape", self.shape
        yield "dtype", self.dtype
        for index, shard in enumerate(self._variables):
            where = getattr(shard, "task", None) or "this process"
            yield f"shard {index}", f"{shard.shape[0]:,} rows on {where}"

    # -- shards

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows."""
        return list(self._variables)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._variables)

    def _nest_components(self) -> list[Any]:
        return self.variables

    @property
    def version(self) -> tuple[int, ...]:
        """The version of each shard, as `Variable.version` describes it."""
        return tuple(shard.version for shard in self._variables)

    # -- reading

    def numpy(self) -> NDArray[Any]:
        """Return the current value: the rows of all shards in order. Blocks for one message to each
        shard. Raises PSUnavailableError if a shard is lost.

        >>> zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])]).numpy()
        array([1, 2, 3])
        """
        array: NDArray[Any] = self.start_read().get_value()
        return array

    read_value = numpy
    value = numpy

    def start_read(self) -> Gathered:
        """Request the values of all shards. Return a future of the whole value.

        >>> zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])]).start_read().get_value()
        array([1, 2, 3])
        """
        return start_read(self._variables)

    def start_rows(self, rows: Rows) -> Gathered:
        """Request rows from the shards that hold them. Return a future of an array of these rows.

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> table.start_rows(np.array([2, 0])).get_value()
        array([3, 1])
        """
        return start_rows(self._variables, self.offsets, rows)

    def embedding_lookup(self, ids: Any, max_norm: float | None = None) -> NDArray[Any]:
        """Look up rows of this table, as `embedding.embedding_lookup` does.

        >>> table = zd.ShardedVariable([zd.Variable([[1, 2]]), zd.Variable([[3, 4], [5, 6]])])
        >>> table.embedding_lookup([2, 0]).tolist()
        [[5, 6], [1, 2]]
        """
        return embedding.embedding_lookup(self, ids, max_norm)

    # -- updating

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> ShardedVariable:
        """Set all rows, and return this variable when all shards have replied. The arguments other
        than `value` have no effect, and exist because TensorFlow has them.

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> table.assign([7, 8, 9]).numpy()
        array([7, 8, 9])

        Args:
          value: an array of exactly the shape of the variable. Integers may become floats, but
            floats do not become integers.

        Raises:
          InvalidArgumentError: the shape or the dtype does not fit. No shard was changed.
          ValueError: there are several replicas, and the variable has no aggregation.
          PSUnavailableError: a shard is lost. The other shards have the new value.
        """
        return self._update("assign", value)

    def assign_add(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> ShardedVariable:
        """Add `value` to all rows. Everything else is as for `assign`.

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> table.assign_add([10, 10, 10]).numpy()
        array([11, 12, 13])
        """
        return self._update("add", value)

    def assign_sub(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> ShardedVariable:
        """Subtract `value` from all rows. Everything else is as for `assign`.

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> table.assign_sub([1, 1, 1]).numpy()
        array([0, 1, 2])
        """
        return self._update("sub", value)

    def apply(self, fn: Any, grad: Any, *, step: int | None = None) -> None:
        """Apply a gradient, with an optimizer or a function of the user. The server of each shard
        applies the gradient's rows for this shard. Blocks until all shards have replied.

        >>> table = zd.ShardedVariable([zd.Variable([1.0]), zd.Variable([2.0, 3.0])])
        >>> table.apply(zd.optimizers.SGD(0.5), np.ones(3))
        >>> table.numpy()
        array([0.5, 1.5, 2.5])

        Args:
          fn: an optimizer of `zmqdist.optimizers`, or `fn(value, grad, slots, step)`. Each shard
            has slots of its own.
          grad: an array of the shape of the variable, or IndexedSlices of its rows.
          step: in synchronous mode, the number of the step that the gradient belongs to.

        Raises:
          InvalidArgumentError: the shape or dtype of the gradient does not fit. No shard was
            changed.
          PSUnavailableError: a shard is lost. The other shards have been updated.
          UnknownError: `fn` has raised an error at a shard. That shard is unchanged.
          ValueError, ResourceExhaustedError: as for `Variable.apply`.
        """
        update = self.start_apply(fn, grad, step)
        if step is None:
            task_context.leave_in_flight(update)
        else:
            update.get_value()

    def start_apply(self, fn: Any, grad: Any, step: int | None) -> Future:
        """Send the requests of `apply`. Return a future that is done when all shards have replied.

        >>> table = zd.ShardedVariable([zd.Variable([1.0]), zd.Variable([2.0, 3.0])])
        >>> _ = table.start_apply(zd.optimizers.SGD(0.5), np.ones(3), None).get_value()
        >>> table.numpy()
        array([0.5, 1.5, 2.5])
        """

        def start(grad: Any) -> Gathered:
            shares = self.shares(grad)
            return Gathered(
                shard.start_apply(fn, part, step)
                for shard, part in zip(self._variables, shares, strict=True)
            )

        return once_for_all(self, grad, start)

    def shares(self, grad: Any) -> list[Any]:
        """Cut a gradient into one part for each shard. A shard gets a part even if the gradient has
        none of its rows, because optimizers count steps and synchronous training counts gradients.

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> len(table.shares(np.array([1, 1, 1])))
        2
        """
        if not isinstance(grad, IndexedSlices):
            return list(self._cut(self._fitting(grad)))
        rows, values = self._fitting_rows(grad)
        split = {
            owner: (local, positions) for owner, local, positions in split_rows(self.offsets, rows)
        }
        nothing = (np.empty(0, np.int64), np.empty(0, np.intp))
        parts = [split.get(index, nothing) for index in range(len(self._variables))]
        return [IndexedSlices(values[positions], local) for local, positions in parts]

    def compare_and_set(self, value: Any, *, version: Any = None, expected: Any = None) -> NoReturn:
        """Raise UnimplementedError, because several shards cannot be compared and set atomically.

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> table.variables[0].compare_and_set([5], expected=[1])  # one shard can
        True
        """
        raise UnimplementedError(
            f"variable {self.name!r} has {len(self._variables)} shards, which cannot be set "
            f"atomically: use compare_and_set "
            "of each of its .variables, or make the variable in one piece",
        )

    def _update(self, kind: str, value: Any) -> ShardedVariable:
        task_context.leave_in_flight(self.start_update(kind, value))
        return self

    def start_update(self, kind: str, value: Any) -> Future:
        """Start an update of all rows. Return a future that is done when all shards have replied.
        `kind` is "assign", "add" or "sub".

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> _ = table.start_update("add", [1, 1, 1]).get_value()
        >>> table.numpy()
        array([2, 3, 4])
        """

        def start(value: Any) -> Gathered:
            parts = self._cut(self._fitting(value))
            return Gathered(
                shard.start_update(kind, part)
                for shard, part in zip(self._variables, parts, strict=True)
            )

        return once_for_all(self, value, start)

    def _scatter(self, kind: str, sparse_delta: IndexedSlices) -> ShardedVariable:
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(
                f"rows of variable {self.name!r} are changed by IndexedSlices, not by "
                f"{type(sparse_delta).__name__}"
            )
        task_context.leave_in_flight(
            self.start_scatter(kind, sparse_delta.indices, sparse_delta.values)
        )
        return self

    def start_scatter(self, kind: str, indices: Any, values: Any) -> Future:
        """Start a scatter update. Return a future that is done when the shards have replied. `kind`
        is the part of the method's name after "scatter_".

        >>> table = zd.ShardedVariable([zd.Variable([1]), zd.Variable([2, 3])])
        >>> _ = table.start_scatter("add", np.array([2]), np.array([5])).get_value()
        >>> table.numpy()
        array([1, 2, 8])
        """

        def start(delta: IndexedSlices) -> Gathered:
            rows, values = self._fitting_rows(delta)
            return Gathered(
                self._variables[owner].start_scatter(kind, local, values[positions])
                for owner, local, positions in split_rows(self.offsets, rows)
            )

        return once_for_all(self, IndexedSlices(values, indices), start)

    # -- checks

    def _fitting(self, value: Any) -> NDArray[Any]:
        array = cast(value, self.dtype, self.label)
        if array.shape != self.shape:
            raise InvalidArgumentError(
                f"variable {self.name!r} has shape {self.shape}: a value of shape {array.shape} "
                f"does not fit",
            )
        return array

    def _fitting_rows(self, rows: IndexedSlices) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if rows.values.shape[1:] != self.shape[1:]:
            raise InvalidArgumentError(
                f"variable {self.name!r} has rows of shape {self.shape[1:]}: rows of shape "
                f"{rows.values.shape[1:]} do not fit",
            )
        return checked_numbers(self.label, rows.indices, self.shape[0]), cast(
            rows.values, self.dtype, self.label
        )

    def _cut(self, value: NDArray[Any]) -> Iterator[NDArray[Any]]:
        return (value[low:high] for low, high in pairwise(self.offsets))


def _unpickled(variables: tuple[Any, ...], name: str) -> ShardedVariable:
    """Return this process's ShardedVariable of these shards. Make it if the process does not have
    it."""
    container = getattr(variables[0], "_sharded_container", None)
    whole_variable = None if container is None else container()
    if whole_variable is not None and list(map(id, whole_variable._variables)) == list(
        map(id, variables)
    ):
        return whole_variable  # type: ignore[no-any-return]
    whole = ShardedVariable.__new__(ShardedVariable)
    whole._set(variables, name)
    return whole
