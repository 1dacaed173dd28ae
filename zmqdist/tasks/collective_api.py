"""Collectives as users call them, on structures and objects. This module checks dtypes and packs
arrays; collectives.py moves the arrays.

Rules
    All members of a group call the same operations in the same order. The leader compares their
    parts. If they differ, all members get an InvalidArgumentError, whose text says what each member
    did, and the group continues with the next operation.
    A member whose own arguments are invalid raises an error, and the other members get an error at
    once.
    Results have the same bits at every member. They are new arrays, which the caller owns, unless a
    docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import inf, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist import nest
from zmqdist.clock import seconds
from zmqdist.collectives import CommunicationOptions, ReduceOp, checked_options
from zmqdist.coordination.replies import Task
from zmqdist.errors import InvalidArgumentError, OpError
from zmqdist.field_types import checked, converted
from zmqdist.limits import COLLECTIVE_INLINE_BYTES_MAX, COLLECTIVE_TIMEOUT_S
from zmqdist.specs import IndexedSlices, TensorSpec, joined, plain_array
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks import ring_schedules
from zmqdist.tasks.collective_leader import RESULT
from zmqdist.tasks.collectives import Collectives, Group
from zmqdist.tasks.node import Node
from zmqdist.wire import trusted

_ATOMS = (bool, int, float, complex, str, bytes)
Array: TypeAlias = NDArray[Any]
Tasks: TypeAlias = "Sequence[str | Task] | Group | None"


class CollectiveMethods:
    """The methods of a Server for collectives. The Server sets the two attributes."""

    _node: Node
    _collectives: Collectives

    @checked
    def group(self, tasks: Tasks = None, name: str = "") -> Group:
        """Return the group of these tasks, for collectives.

        >>> task.all_reduce(np.arange(3), group=task.group(["localhost:0"], name="alone"))
        array([0, 1, 2])

        Args:
          tasks: the members in the order of their ranks; all members must pass the same list.
            `None` means all tasks of this task's job.
          name: operations of groups with different names are independent; by default the name is
            the list of tasks.

        Raises:
          InvalidArgumentError: a task is unknown or listed twice, this task is missing, or the name
            belongs to a group with other members.
        """
        if isinstance(tasks, Group):
            return tasks
        if tasks is None:
            job = self._node.me[0]
            members = [(job, index) for index in self._node.spec.task_indices(job)]
        elif isinstance(tasks, str):
            raise InvalidArgumentError(f"a group is a list of tasks, not the text {tasks!r}")
        else:
            names: list[Any] = converted("the tasks of a group", list, tasks)
            members = [self._node.task(task) for task in names]
        return self._collectives.group(members, name)

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        group: Tasks = None,
        timeout: float | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the values of all members, and return the result, which has the same bits at every
        member.

        >>> task.all_reduce(np.arange(3), "sum")
        array([0, 1, 2])

        All members of the group must call this method, which blocks until all have called it.

        Args:
          x: an array, a number, IndexedSlices, or a structure of them, with the same shapes and
            dtypes at all members. IndexedSlices may differ in the number of rows, and the result
            has the rows of all members.
          op: "sum", "mean", "min", "max", "prod", or a ReduceOp. The mean of whole numbers is a
            float64. IndexedSlices allow only sum and mean.
          group: tasks by rank, or the result of `group`; `None` means all tasks of this task's job.
          timeout: seconds to wait for the other members, and again for each piece of a large value.
            `None` means limits.COLLECTIVE_TIMEOUT_S, and math.inf means without a limit.
          options: CommunicationOptions with `bytes_per_pack`, and with `timeout_seconds`, which is
            used if `timeout` is None.

        Returns:
          A structure like `x`. Its arrays are new, and the caller owns them.

        Raises:
          InvalidArgumentError: the members' values or operations differ. All members raise this
            error, and the next collective works.
          DeadlineExceededError: members were absent; the text names them. An absent member raises
            this error at its next call.
          UnavailableError: a member has ended; the text names it.
          CancelledError: a member has cancelled its part, or this server was stopped.
          TypeError: `x` has values that are neither numbers nor bools.
          ValueError: there is no such op.
        """
        bytes_per_pack = COLLECTIVE_INLINE_BYTES_MAX
        if options is not None:
            checked_options(options)
            timeout = options.timeout_seconds if timeout is None else timeout
            bytes_per_pack = options.bytes_per_pack
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                op = ReduceOp.of(op).value
                leaves = nest.flatten(x)
                signature = f"all_reduce {op} of {_structure(x, _described_reduced)}"
                if bytes_per_pack not in (0, COLLECTIVE_INLINE_BYTES_MAX):
                    signature += f" in packs of {bytes_per_pack} bytes"
                dense = [
                    None if isinstance(leaf, IndexedSlices) else core.reducible(_array(leaf), op)
                    for leaf in leaves
                ]
                rows = [
                    core.reducible(leaf.values, op) if isinstance(leaf, IndexedSlices) else None
                    for leaf in leaves
                ]
                if any(isinstance(leaf, IndexedSlices) for leaf in leaves) and op not in (
                    "sum",
                    "mean",
                ):
                    raise InvalidArgumentError(
                        f"IndexedSlices are summed or averaged: there is no {op} of them"
                    )
            results: list[Any] = [None] * len(leaves)
            for pack in core.packs(dense, bytes_per_pack or COLLECTIVE_INLINE_BYTES_MAX):
                arrays = [array for position in pack if (array := dense[position]) is not None]
                total = operation.reduce(
                    signature,
                    arrays[0] if len(arrays) == 1 else np.concatenate([*map(np.ravel, arrays)]),
                    op,
                )
                start = 0
                for position, array in zip(pack, arrays, strict=True):
                    part = (
                        total
                        if len(arrays) == 1
                        else total[start : start + array.size].reshape(array.shape)
                    )
                    results[position] = part if len(arrays) == 1 else part.copy()
                    start += array.size
            # rows of different numbers cannot be packed with arrays of one shape
            for position, values in enumerate(rows):
                if values is not None:
                    results[position] = operation.rows(signature, values, leaves[position], op)
            return nest.pack_sequence_as(x, results) if nest.is_nested(x) else results[0]

    def reduce_scatter(
        self, x: Any, op: Any = "sum", group: Tasks = None, timeout: float | None = None
    ) -> NDArray[Any]:
        """Reduce the arrays of all members, and return this rank's part of the result: a range of
        rows of the first axis.

        >>> task.reduce_scatter(np.arange(4))
        array([0, 1, 2, 3])

        If the rows cannot be divided evenly, each of the first ranks gets one row more. `x` is one
        array. A scalar raises ValueError. The other arguments, and the errors, are those of
        `all_reduce`.
        """
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                op = ReduceOp.of(op).value
                array = core.reducible(_array(x), op)
                if not array.ndim:
                    raise ValueError("reduce_scatter splits the first axis: a scalar has none")
            rows = core.shares(len(array), operation.size)
            out = np.empty_like(array[rows[operation.rank]])

            def exchange(details: Any) -> tuple[Iterator[core.Schedule], Any]:
                parts = [array[part].ravel() for part in rows]
                return ring_schedules.reduce_scatter(
                    operation.rank, operation.size, parts, out.reshape(-1), op
                ), out

            result: Array = operation.do(
                f"reduce_scatter {op} of {_described(np.asarray(x))}",
                ("reduce_scatter", op, 0, None, operation.inline(array)),
                exchange,
            )

            return result

    def all_gather(
        self, x: Any, axis: int = 0, group: Tasks = None, timeout: float | None = None
    ) -> Any:
        """Concatenate the arrays of all members by rank, and return the result at every member.

        >>> task.all_gather(np.arange(2))
        array([0, 1])

        Args:
          x: an array or a structure of arrays. Members may differ only in the sizes along `axis`.
          axis: number of the axis, 0 or more.

        Raises:
          ValueError: `x` is a scalar, or has no such axis.
          TypeError: `x` has Python objects, or `axis` is not an integer.
          NotImplementedError: `x` has IndexedSlices.
          OpError: any error of `all_reduce`.
        """
        return self._gather("all_gather", x, axis, 0, group, timeout)

    def gather(
        self,
        x: Any,
        root: int = 0,
        axis: int = 0,
        group: Tasks = None,
        timeout: float | None = None,
    ) -> Any:
        """Concatenate as `all_gather` does, but return the result only at the member of rank
        `root`, and None at the other members.

        >>> task.gather(np.arange(2), root=0)
        array([0, 1])
        """
        return self._gather("gather", x, axis, root, group, timeout)

    def _gather(
        self, kind: str, x: Any, axis: int, root: int, group: Tasks, timeout: float | None
    ) -> Any:
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                operation.check_root(root)
                whole = _structure(x, lambda leaf: _described(_gatherable(leaf, axis), axis))
                signature = f"{kind} on axis {axis}{f' to rank {root}' if kind == 'gather' else ''} of {whole}"
                arrays = [_gatherable(leaf, axis) for leaf in nest.flatten(x)]
            results = []
            for array in arrays:
                parts = operation.gather(signature, kind, array, axis, root)
                results.append(None if parts is None else joined(parts, axis))
            if kind == "gather" and operation.rank != root:
                return None
            return nest.pack_sequence_as(x, results) if nest.is_nested(x) else results[0]

    def broadcast(
        self, x: Any = None, root: int = 0, group: Tasks = None, timeout: float | None = None
    ) -> Any:
        """Return the value of the member of rank `root` at every member.

        >>> task.broadcast(np.arange(2), root=0)
        array([0, 1])

        Args:
          x: at the root an array, or any structure that `send` takes. The root's result may share
            memory with `x`. The other members' values are ignored, but must be of these types, too.

        Raises:
          InvalidArgumentError: `root` is not a rank of the group.
          OpError: any error of `all_reduce`.
        """
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                operation.check_root(root)
                # None, numbers and text stay as they are
                leaves = [
                    leaf if leaf is None or isinstance(leaf, _ATOMS) else _array(leaf)
                    for leaf in nest.flatten(x)
                ]
                mine = nest.pack_sequence_as(x, leaves) if nest.is_nested(x) else leaves[0]
            return operation.broadcast(mine, root)

    def all_to_all(self, x: Any, group: Tasks = None, timeout: float | None = None) -> NDArray[Any]:
        """Send item i of the first axis of `x` to rank i, for each i. Item i of the result is the
        item that rank i has sent to this member.

        >>> task.all_to_all(np.array([[1, 2]]))
        array([[1, 2]])

        `x` must have one item for each member. Raises the errors of `all_reduce`.
        """
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                array = _array(x)
                if not array.ndim or len(array) != operation.size:
                    raise InvalidArgumentError(
                        f"all_to_all needs one item for each of the {operation.size} "
                        f"members, not shape {array.shape}"
                    )
            out = np.empty_like(array)

            def exchange(details: Any) -> tuple[Iterator[core.Schedule], Any]:
                parts, result = ([part.reshape(-1) for part in whole] for whole in (array, out))
                return ring_schedules.all_to_all(operation.rank, operation.size, parts, result), out

            result: Array = operation.do(
                f"all_to_all of {_described(array)}",
                ("all_to_all", "", 0, None, operation.inline(array)),
                exchange,
            )

            return result

    def broadcast_object(
        self, value: Any = None, root: int = 0, group: Tasks = None, timeout: float | None = None
    ) -> Any:
        """Return the object of the member of rank `root` at every member. The object must be
        picklable. The other arguments, and the errors, are those of `broadcast`.

        >>> task.broadcast_object({"rate": 0.1})
        {'rate': 0.1}
        """
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                operation.check_root(root)
                blob = _pickled(value) if operation.rank == root else None
            received = operation.broadcast(blob, root)
            return value if operation.rank == root else _unpickled(received)

    def all_gather_object(
        self, value: Any, group: Tasks = None, timeout: float | None = None
    ) -> list[Any]:
        """Return the objects of all members, by rank, at every member. Each object must be
        picklable. Raises the errors of `all_reduce`.

        >>> task.all_gather_object({"rank": 0})
        [{'rank': 0}]
        """
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                blob = _pickled(value)
            blobs = operation.gather("all_gather of objects", "all_gather", blob, 0, 0)
            assert blobs is not None
            return [*map(_unpickled, blobs)]

    @contextmanager
    def _operation(self, tasks: Tasks, timeout: float | None) -> Iterator[_Operation]:
        group = self.group(tasks)
        with self._node.own_wait, group.lock:
            operation = _Operation(group, self._collectives)
            with operation.preparing():
                limit_s = seconds(timeout)
            if timeout is not None:
                operation.timeout_s = inf if limit_s is None else limit_s
            yield operation


class _Operation:
    """One operation of a group, at one of the group's members."""

    def __init__(self, group: Group, collectives: Collectives) -> None:
        self._group = group
        self._collectives = collectives
        self.timeout_s: float = COLLECTIVE_TIMEOUT_S
        self.rank = group.rank
        self.size = group.size

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """If the with-block raises, report the error to the other members, because the arguments of
        this member are then invalid."""
        try:
            yield
        except Exception as error:
            text = f"{self._group.tasks[self.rank]} could not take part: {type(error).__name__}: {error}"
            # an error of another class has no code that could reach the other members
            failure = error if isinstance(error, OpError) else InvalidArgumentError(text)
            self._collectives.refuse(self._group, "nothing", failure)
            raise

    def check_root(self, root: int) -> None:
        if not (isinstance(root, (int, np.integer)) and 0 <= root < self.size):
            raise InvalidArgumentError(
                f"root is {root!r}, but the ranks of the group are 0 to {self.size - 1}"
            )

    def inline(self, array: Array) -> tuple[Array] | None:
        """Return the array in the form of a contribution that needs no exchange, or None if the
        array is too large for that."""
        small = array.nbytes <= COLLECTIVE_INLINE_BYTES_MAX or self.size == 1
        return (array,) if small else None

    def do(
        self,
        signature: str,
        contribution: tuple[Any, ...],
        exchange: Callable[[Any], tuple[Iterator[core.Schedule], Any]],
    ) -> Any:
        """Announce the operation, and return its result. If the leader replies that the members
        must exchange pieces, exchange the pieces.

        Args:
          contribution: kind, op, root, detail and inline value, the fields of
            collective_leader.Contribution.
          exchange: a function that makes the schedules and the arrays of the result from the
            details of all members by rank.
        """
        verdict = self._collectives.agree(self._group, signature, contribution, self.timeout_s)
        if verdict[0] == RESULT:
            return verdict[1]
        _, counter, name, details = verdict
        return self._collectives.exchange(
            self._group, counter, name, lambda: exchange(details), self.timeout_s
        )

    def reduce(self, signature: str, array: Array, op: str) -> Array:
        """Return the reduction of the arrays of all members, at every member."""
        out = np.empty_like(array)

        def exchange(details: Any) -> tuple[Iterator[core.Schedule], Any]:
            flat = array.reshape(-1)
            return ring_schedules.all_reduce(self.rank, self.size, flat, out.reshape(-1), op), out

        total: Array = self.do(signature, ("all_reduce", op, 0, None, self.inline(array)), exchange)
        return total

    def rows(self, signature: str, values: Array, slices: IndexedSlices, op: str) -> IndexedSlices:
        """Return the reduction of the members' IndexedSlices: IndexedSlices that have the rows of
        all members, by rank."""
        rows, indices = (
            self.gather(signature, "all_gather", part, 0, 0) for part in (values, slices.indices)
        )
        assert rows is not None
        assert indices is not None
        total = np.concatenate(rows)
        return IndexedSlices(
            core.finished(total, op, self.size), np.concatenate(indices), slices.dense_shape
        )

    def gather(
        self, signature: str, kind: str, array: Array, axis: int, root: int
    ) -> list[Array] | None:
        """Return the arrays of all members, by rank. If `kind` is "gather", only the root gets the
        arrays, and other members get None."""

        def exchange(details: Any) -> tuple[Iterator[core.Schedule], Any]:
            shapes = [(*array.shape[:axis], rows, *array.shape[axis + 1 :]) for rows in details]
            receives = kind == "all_gather" or self.rank == root
            # A member that receives no arrays needs their lengths, because all members must cut the
            # parts in the same way.
            parts = [
                np.empty(shape, array.dtype)
                if receives
                else np.broadcast_to(np.empty((), array.dtype), (prod(shape),))
                for shape in shapes
            ]
            parts[self.rank] = array
            flats = [part.reshape(-1) for part in parts]
            if kind == "all_gather":
                return ring_schedules.all_gather(self.rank, self.size, flats), parts
            return ring_schedules.gather(
                self.rank, self.size, root, flats
            ), parts if receives else None

        parts: list[Array] | None = self.do(
            signature, (kind, "", root, array.shape[axis], self.inline(array)), exchange
        )
        return parts

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the root's value; at the root this is `value` itself."""
        mine = self.rank == root
        leaves = nest.flatten(value) if mine else []
        arrays = [
            plain_array(leaf, "a collective") for leaf in leaves if isinstance(leaf, np.ndarray)
        ]
        small = sum(array.nbytes for array in arrays) <= COLLECTIVE_INLINE_BYTES_MAX
        specs = nest.map_structure(_spec, value) if mine and not small else None

        def exchange(details: Any) -> tuple[Iterator[core.Schedule], Any]:
            filled = value if mine else nest.map_structure(_allocated, details[root])
            parts = [
                leaf.reshape(-1) for leaf in nest.flatten(filled) if isinstance(leaf, np.ndarray)
            ]
            return chain.from_iterable(
                ring_schedules.broadcast(self.rank, self.size, root, part) for part in parts
            ), filled

        inline = (value,) if mine and small else None
        received = self.do(
            f"broadcast from rank {root}", ("broadcast", "", root, specs, inline), exchange
        )
        return value if mine else received


def _array(leaf: Any) -> Array:
    """Return a leaf as an array in C order, the order in which arrays travel. Raises TypeError if
    the leaf is no array of plain values."""
    array = np.asarray(plain_array(leaf, "a collective"), order="C")
    if array.dtype.hasobject:
        kind = (
            f"one of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        )
        raise TypeError(
            f"x is no array of numbers, but {kind}; send objects by broadcast_object and "
            f"all_gather_object"
        )
    return array


def _gatherable(leaf: Any, axis: int) -> Array:
    """Return a leaf as an array that has this axis. Raises ValueError if it has no such axis,
    TypeError for Python objects, and NotImplementedError for IndexedSlices.
    """
    if isinstance(leaf, IndexedSlices):
        raise NotImplementedError("IndexedSlices are reduced, not gathered")
    array = _array(leaf)
    if not isinstance(axis, (int, np.integer)):
        raise TypeError(f"an axis is a whole number, not {axis!r}")
    if not 0 <= axis < array.ndim:
        raise ValueError(f"an array of shape {array.shape} cannot be gathered on axis {axis}")
    return array


def _described(array: Array, axis: int | None = None) -> str:
    """Return dtype and shape of an array as a text for the signature. The text has `*` for the size
    along `axis`, in which members may differ.
    """
    sizes = ["*" if number == axis else str(size) for number, size in enumerate(array.shape)]
    return f"{array.dtype} ({', '.join(sizes)})"


def _described_reduced(leaf: Any) -> str:
    if isinstance(leaf, IndexedSlices):
        shape = "" if leaf.dense_shape is None else f" of an array {leaf.dense_shape}"
        return f"rows {_described(leaf.values, 0)}{shape}, indices {leaf.indices.dtype}"
    return _described(np.asarray(leaf))


def _structure(x: Any, describe: Callable[[Any], str]) -> str:
    return str(nest.map_structure(describe, x)) if nest.is_nested(x) else describe(x)


def _spec(leaf: Any) -> Any:
    return TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf


def _allocated(leaf: Any) -> Any:
    return np.empty(leaf.shape, leaf.dtype) if isinstance(leaf, TensorSpec) else leaf


def _pickled(value: Any) -> Array:
    """Return a pickled object as one array of bytes. The array has the number of the object's
    buffers, their sizes, and the buffers."""
    packed = trusted.pack(value)
    buffers = [packed] if isinstance(packed, bytes) else packed
    parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    head = np.array([len(parts), *(part.size for part in parts)], "<i8")
    return np.concatenate([head.view(np.uint8), *parts])


def _unpickled(blob: Array) -> Any:
    """Return the object that `_pickled` has packed. Its large arrays are views of `blob`."""
    count = int(blob[:8].view("<i8")[0])
    sizes = blob[8 : 8 + 8 * count].view("<i8")
    buffers, start = [], 8 + 8 * count
    for size in sizes:
        buffers.append(blob[start : start + int(size)].data)
        start += int(size)
    return trusted.unpack_parts(buffers)
