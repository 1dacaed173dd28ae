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

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import inf, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist import nest
from zmqdist.clock import seconds
from zmqdist.collectives import ReduceOp
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import CancelledError, InvalidArgumentError, OpError
from zmqdist.field_types import converted
from zmqdist.limits import COLLECTIVE_INLINE_BYTES_MAX, COLLECTIVE_TIMEOUT_S
from zmqdist.specs import IndexedSlices, TensorSpec, joined, plain_array
from zmqdist.tasks import collectives_machine as core
from zmqdist.tasks import ring_schedules
from zmqdist.tasks.collective_leader import RESULT
from zmqdist.tasks.collectives import Collectives, GroupMembers
from zmqdist.tasks.node import Node
from zmqdist.wire import trusted

_ATOMS = (bool, int, float, complex, str, bytes)
Array: TypeAlias = NDArray[Any]
Tasks: TypeAlias = "Sequence[str | Task] | Group | None"


class Group:
    """A group of tasks that do collectives together, as one of its members sees it. `Server.group`
    makes it.

    Attributes:
      name: name of the group. Operations of groups with different names are independent, even if
        the groups have the same tasks.
      tasks: the names of the members by rank, such as "worker:0". The first member is the leader,
        which compares the members' parts.
      rank: rank of this task.
    """

    def __init__(self, members: GroupMembers, collectives: Collectives) -> None:
        self._members = members
        self._collectives = collectives
        self.name = members.name
        self.tasks = [*map(task_name, members.tasks)]
        self.rank = members.rank

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.tasks)

    def cancel(self, message: str = "cancelled by a member") -> None:
        """Cancel the group's next operation, which ends with CancelledError at all other members.
        The operation after that works again.

        A member that cannot take part calls this in place of the operation, so that the other
        members do not wait for it. This does not block.
        """
        with self._collectives.own_wait, self._members.lock:
            self._collectives.agree(
                self._members,
                "cancel",
                NOTHING,
                inf,
                CancelledError(f"{self.tasks[self.rank]}: {message}"),
            )

    def abort(self, code: int, message: str) -> None:
        """End the current operation at every member with this error, and end each later operation
        at once, until `reset`.

        Args:
          code: one of zmqdist.errors, such as UNAVAILABLE.

        Raises:
          UnavailableError: the group's leader cannot be reached.
        """
        with self._collectives.own_wait:
            self._collectives.abort(self._members, code, message)

    def reset(self) -> None:
        """End an abort, so that the next operation of every member works again. Only one member
        calls this, and only once. Raises the errors of `abort`.
        """
        with self._collectives.own_wait:
            self._collectives.reset(self._members)

    def __repr__(self) -> str:
        return f"<Group {self.name}, rank {self.rank} of {self.size}>"


NOTHING = ("cancel", "", 0, None, None)


class Operations:
    """The collectives of one task. Server documents the methods.

    Attributes:
      collectives: the object that runs the operations.
    """

    def __init__(self, node: Node, collectives: Collectives) -> None:
        self._node = node
        self.collectives = collectives
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()

    def group(self, tasks: Tasks = None, name: str = "") -> Group:
        if isinstance(tasks, Group):
            return tasks
        if tasks is None:
            job = self._node.me[0]
            members = [(job, index) for index in self._node.spec.task_indices(job)]
        elif isinstance(tasks, str):
            raise InvalidArgumentError(f"a group is a list of tasks, not the text {tasks!r}")
        else:
            each: list[Any] = converted("the tasks of a group", list, tasks)
            members = [self._node.task(task) for task in each]
        name = name or ",".join(map(task_name, members))
        with self._lock:
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = Group(
                    GroupMembers(name, members, self._node.me), self.collectives
                )
        if list(group._members.tasks) != members:
            raise InvalidArgumentError(f"group {name!r} has the members {', '.join(group.tasks)}")
        return group

    # -- reducing ----------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: str,
        group: Tasks,
        timeout: float | None,
        bytes_per_pack: int = COLLECTIVE_INLINE_BYTES_MAX,
    ) -> Any:
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
                arrays = [array for place in pack if (array := dense[place]) is not None]
                total = operation.reduce(
                    signature,
                    arrays[0] if len(arrays) == 1 else np.concatenate([*map(np.ravel, arrays)]),
                    op,
                )
                start = 0
                for place, array in zip(pack, arrays, strict=True):
                    part = (
                        total
                        if len(arrays) == 1
                        else total[start : start + array.size].reshape(array.shape)
                    )
                    results[place] = part if len(arrays) == 1 else part.copy()
                    start += array.size
            for place, values in enumerate(rows):
                if values is not None:
                    results[place] = operation.rows(signature, values, leaves[place], op)
            return nest.pack_sequence_as(x, results) if nest.is_nested(x) else results[0]

    def reduce_scatter(self, x: Any, op: str, group: Tasks, timeout: float | None) -> Array:
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

    # -- moving ------------------------------------------------------------------------------------

    def gather(
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

    def broadcast(self, x: Any, root: int, group: Tasks, timeout: float | None) -> Any:
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

    def all_to_all(self, x: Any, group: Tasks, timeout: float | None) -> Array:
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

    # -- objects -----------------------------------------------------------------------------------

    def broadcast_object(self, value: Any, root: int, group: Tasks, timeout: float | None) -> Any:
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                operation.check_root(root)
                blob = _pickled(value) if operation.rank == root else None
            got = operation.broadcast(blob, root)
            return value if operation.rank == root else _unpickled(got)

    def all_gather_object(self, value: Any, group: Tasks, timeout: float | None) -> list[Any]:
        with self._operation(group, timeout) as operation:
            with operation.preparing():
                blob = _pickled(value)
            blobs = operation.gather("all_gather of objects", "all_gather", blob, 0, 0)
            assert blobs is not None
            return [*map(_unpickled, blobs)]

    @contextmanager
    def _operation(self, group: Tasks, timeout: float | None) -> Iterator[_Operation]:
        found = self.group(group)
        with self._node.own_wait, found._members.lock:
            operation = _Operation(found._members, self.collectives)
            with operation.preparing():
                limit_s = seconds(timeout)
            if timeout is not None:
                operation.timeout_s = inf if limit_s is None else limit_s
            yield operation


class _Operation:
    """One operation of a group, at one of the group's members."""

    def __init__(self, members: GroupMembers, collectives: Collectives) -> None:
        self._members = members
        self._collectives = collectives
        self.timeout_s: float = COLLECTIVE_TIMEOUT_S
        self.rank = members.rank
        self.size = members.size

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """If the with-block raises, report the error to the other members, because the arguments of
        this member are then invalid."""
        try:
            yield
        except Exception as error:
            text = f"{task_name(self._members.tasks[self.rank])} could not take part: {type(error).__name__}: {error}"
            failure = error if isinstance(error, OpError) else InvalidArgumentError(text)
            self._collectives.agree(self._members, "nothing", NOTHING, inf, failure)
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
        verdict = self._collectives.agree(self._members, signature, contribution, self.timeout_s)
        if verdict[0] == RESULT:
            return verdict[1]
        _, counter, name, details = verdict
        return self._collectives.exchange(
            self._members, counter, name, lambda: exchange(details), self.timeout_s
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
            wanted = kind == "all_gather" or self.rank == root
            # A member that receives no arrays needs their lengths, because all members must cut the
            # parts in the same way.
            parts = [
                np.empty(shape, array.dtype)
                if wanted
                else np.broadcast_to(np.empty((), array.dtype), (prod(shape),))
                for shape in shapes
            ]
            parts[self.rank] = array
            flats = [part.reshape(-1) for part in parts]
            if kind == "all_gather":
                return ring_schedules.all_gather(self.rank, self.size, flats), parts
            return ring_schedules.gather(
                self.rank, self.size, root, flats
            ), parts if wanted else None

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
        got = self.do(
            f"broadcast from rank {root}", ("broadcast", "", root, specs, inline), exchange
        )
        return value if mine else got


def _array(leaf: Any) -> Array:
    """Return a leaf as an array in C order, the order in which arrays travel. Raises TypeError if
    the leaf is no array of plain values."""
    array = np.asarray(plain_array(leaf, "a collective"), order="C")
    if array.dtype.hasobject:
        given = (
            f"one of dtype {array.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        )
        raise TypeError(
            f"x is no array of numbers, but {given}; send objects by broadcast_object and "
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
    sizes = ["*" if place == axis else str(size) for place, size in enumerate(array.shape)]
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
