"""Static sharding: the pipeline of one worker among a fixed number of workers, with `shard` inserted at the place that the policy
determines.

Theory
    Together, the shards of all workers hold each element once only if every worker counts the same elements in the same order. So the part
    of the pipeline below an inserted shard is made repeatable: missing seeds are derived from one number that the workers of an iteration
    share, and parallel operators keep their order. User functions are assumed to be repeatable.

    FILE  divides the file names, right before the first reader as seen from the end of the pipeline. Shuffles of the names are moved
          after the shard, so that the assignment of files does not depend on them. A repeat of the names stays after the shard, so
          that a worker reads the same files in each epoch.
    DATA  divides the elements, at the end.
    HINT  divides where the user has put `shard(SHARD_HINT, ...)`.

    A function of flat_map or interleave may return a reader. To find out, it is called for one element of its input. So the worker does
    the rewrite; a dispatcher runs no user functions.

Not here: the assignment of shards to workers (data/service/dispatcher/machine/worker_list.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from zmqdist.data.constants import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
from zmqdist.data.ops.base import Op
from zmqdist.data.ops.combining import Interleave
from zmqdist.data.ops.filtering import IgnoreErrors, ShardOp
from zmqdist.data.splits import repeatable
from zmqdist.data.tree import Tree
from zmqdist.errors import NotFoundError, UnimplementedError

Put = Callable[[Tree], Tree]
"""Appends a shard to a dataset."""

_AT_THE_END = frozenset({"prefetch", "options"})
"""Operators that DATA keeps after the shard, at the end of the pipeline."""

_OF_NAMES = frozenset({"shuffle", "repeat", "prefetch", "options"})
"""Operators that FILE keeps after the shard, between the shard and the reader."""


class Unshardable(NotFoundError):
    """There is no reader whose files could be divided."""


def shard_for_worker(dataset: Tree, policy: str, num_workers: int, index: int, seed: int = 0) -> Tree:
    """Return the pipeline that one worker runs under a static policy; under any other policy, the dataset itself.

    Args:
      policy: the name of the ShardingPolicy: "FILE", "DATA", "FILE_OR_DATA", "HINT".
      index: the worker, in [0, num_workers).
      seed: a number that the workers of one iteration share, and that differs between iterations.

    Raises:
      ValueError: there is no such policy. InvalidArgumentError: there is no such worker. NotFoundError: the policy is FILE, and a branch of
        the pipeline has no reader. Any error of a function of flat_map or interleave. While iterating, InvalidArgumentError: there are
        fewer files than workers.
    """

    def put(below: Tree, full: bool = True) -> Tree:
        return _then(ShardOp.build(num_workers, index, full), repeatable(below, seed))

    if policy in ("FILE", "FILE_OR_DATA"):
        try:
            return _by_file(dataset, put)
        except Unshardable:
            if policy == "FILE":
                raise
    # Not `full`, because a worker may be without elements, but not without files.
    if policy in ("DATA", "FILE_OR_DATA"):
        return _by_element(dataset, lambda below: put(below, full=False))
    if policy == "HINT":
        return dataset.rewrite(lambda one: put(one.inputs[0]) if _is_hint(one) else one)
    if policy not in ("OFF", "DYNAMIC"):
        raise ValueError(f"{policy!r} is no sharding policy: use the name of a zmqdist.data.service.ShardingPolicy")
    return dataset


def distributed_cardinality(count: int, policy: str, coordinated: bool) -> int:
    """Return the number of elements that a reader of the data service gets, as far as it is known without running the pipeline.

    A shard of files, or a shard in the middle, may leave no elements of an infinite dataset, for example before a batch that drops its
    remainder.
    """
    if coordinated:
        return INFINITE_CARDINALITY
    if count == 0 or (count == INFINITE_CARDINALITY and policy in ("OFF", "DYNAMIC", "DATA")):
        return count
    return UNKNOWN_CARDINALITY


def _then(op: Op, below: Tree) -> Tree:
    return type(below)(op, (below,))


def _is_hint(dataset: Tree) -> bool:
    return isinstance(dataset.op, ShardOp) and dataset.op.count == SHARD_HINT


def _by_element(dataset: Tree, put: Put) -> Tree:
    if dataset.op.name in _AT_THE_END:
        return _then(dataset.op, _by_element(dataset.inputs[0], put))
    return put(dataset)


def _by_file(dataset: Tree, put: Put) -> Tree:
    """Return the dataset with a shard before the first reader of each branch."""
    done: dict[int, Tree] = {}

    def visit(one: Tree) -> Tree:
        if id(one) not in done:
            if _reads_files(one):
                done[id(one)] = _then(one.op, _names(one.inputs[0], put))
            else:
                branches = _branches(one)
                inputs = [visit(each) if number in branches else each for number, each in enumerate(one.inputs)]
                done[id(one)] = type(one)(one.op, inputs)
        return done[id(one)]

    return visit(dataset)


def _branches(dataset: Tree) -> tuple[int, ...]:
    """Return the inputs that hold the data. Raises Unshardable if there are none."""
    if dataset.inputs:
        try:
            return dataset.op.split_inputs(len(dataset.inputs))
        except UnimplementedError as error:  # a snapshot, say, keeps all elements for every reader
            raise _unshardable(dataset) from error
    raise _unshardable(dataset)


def _unshardable(dataset: Tree) -> Unshardable:
    return Unshardable(
        f"Found an unshardable source dataset: {dataset.op.one_line()}. ShardingPolicy.FILE divides files, and no reader of files"
        " stands between this and the end of the pipeline; use DATA or DYNAMIC.",
    )


def _names(names: Tree, put: Put) -> Tree:
    """Return the file names with a shard, and with their shuffles after the shard."""
    if names.op.name in _OF_NAMES:
        return _then(names.op, _names(names.inputs[0], put))
    shuffles = [each.op for each in names.walk() if each.op.name == "shuffle"]
    sharded = put(_without_shuffles(names))
    for op in shuffles:
        sharded = _then(op, sharded)
    return sharded


def _without_shuffles(dataset: Tree) -> Tree:
    return dataset.rewrite(lambda one: one.inputs[0] if one.op.name == "shuffle" else one)


def _reads_files(dataset: Any) -> bool:
    """Return whether the input names files: the operator is a reader, or its function returns datasets that contain a reader."""
    op = dataset.op
    if isinstance(op, Interleave):
        # Leave out the shuffles, which would fill their buffers first: any element shows whether the function returns a reader.
        names = _then(IgnoreErrors(), _without_shuffles(dataset.inputs[0]))
        return any(_reads_files(each) for x in islice(names.probe(), 1) for each in op.dataset_of(x).walk())
    return bool(op.is_reader)


__all__ = ["Unshardable", "distributed_cardinality", "shard_for_worker"]
