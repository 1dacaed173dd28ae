"""Static sharding: the pipeline for one worker of a fixed number of workers, with the operator
`shard` inserted at the place that the policy determines.

Theory
    The shards of all workers together have each element exactly once only if every worker counts
    the same elements in the same order. Therefore, below an inserted shard, missing seeds are
    derived from one number that the workers of an iteration share, and parallel operators yield
    elements in order, also in datasets that functions return. User functions are assumed to be
    repeatable.

    FILE  divides the file names, right before the reader that is nearest to the end of the
          pipeline. Shuffles of the names are moved after the shard, so that the assignment of files
          does not depend on them. A repeat of the names is moved after the shard too, so that a
          worker reads the same files in each epoch.
    DATA  divides the elements, at the end.
    HINT  divides where the user has put `shard(SHARD_HINT, SHARD_HINT)`.

    A function of flat_map or interleave may return a reader. To find out, the function is called
    for one element of its input. A dispatcher runs no user functions, so the worker inserts the
    shard.

Not here: the assignment of shards to workers (data/service/dispatcher/machine/worker_list.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from zmqdist.data.constants import INFINITE_CARDINALITY, SHARD_HINT, UNKNOWN_CARDINALITY
from zmqdist.data.ops.base import Op
from zmqdist.data.ops.combining import Interleave
from zmqdist.data.ops.elementwise import CommonShard, IgnoreErrors, ShardOp
from zmqdist.data.tree import Tree
from zmqdist.errors import NotFoundError, UnimplementedError

T = TypeVar("T", bound=Tree)

Put = Callable[[Tree], Tree]
"""A function that returns a dataset with a shard appended."""

_AT_THE_END = frozenset({"prefetch", "options"})
"""Operators at the end of the pipeline before which DATA inserts the shard."""

_OF_NAMES = frozenset({"shuffle", "repeat", "prefetch", "options"})
"""Operators on file names before which FILE inserts the shard, so that they run between the shard
and the reader."""


class Unshardable(NotFoundError):
    """A branch of the pipeline has no reader whose files the policy FILE could divide."""


def shard_for_worker(
    dataset: Tree, policy: str, num_workers: int, index: int, seed: int = 0
) -> Tree:
    """Return the pipeline that one worker runs under a static policy. Under any other policy,
    return the dataset unchanged.

    Args:
      policy: the name of the ShardingPolicy: "FILE", "DATA", "FILE_OR_DATA", "HINT".
      index: the index of the worker, in [0, num_workers).
      seed: a number that the workers of one iteration share, and that differs between iterations.

    Raises:
      ValueError: there is no such policy.
      NotFoundError: the policy is FILE, and a branch of the pipeline has no reader.
      InvalidArgumentError: `index` is not in [0, num_workers), or, while iterating under FILE or
        HINT, the input of the shard has files or elements, but fewer than there are workers.
      Exception: any error of a function of flat_map or interleave.
    """

    def put(below: Tree, full: bool = True) -> Tree:
        return common_shard(unread(below), num_workers, index, (seed, 0), full)

    if policy in ("FILE", "FILE_OR_DATA"):
        try:
            return _by_file(dataset, put)
        except Unshardable:
            if policy == "FILE":
                raise
    # With DATA a shard may be empty. With FILE and HINT, the operator `shard` raises an error if
    # its input has elements for some shards only.
    if policy in ("DATA", "FILE_OR_DATA"):
        return _by_element(dataset, lambda below: put(below, full=False))
    if policy == "HINT":
        return dataset.rewrite(
            lambda node: (
                put(node.inputs[0])
                if isinstance(node.op, ShardOp) and node.op.count == SHARD_HINT
                else node
            )
        )
    if policy not in ("OFF", "DYNAMIC"):
        raise ValueError(
            f"{policy!r} is no sharding policy: use the name of a "
            f"zmqdist.data.service.ShardingPolicy"
        )
    return dataset


def unread(dataset: T) -> T:
    """Return a copy of a dataset that no iterator has read: the order of a shuffle depends on the
    earlier passes over the same object."""
    return dataset.rewrite(lambda node: type(node)(node.op, node.inputs))


def common_shard(
    dataset: T, count: int, index: int, entropy: tuple[int, int], full: bool = False
) -> T:
    """Return every `count`-th element of a dataset, from `index` on, for one of several processes
    that divide the elements among themselves.

    Args:
      entropy: two numbers that the processes have in common, so that all of them count the same
        elements in the same order. The operators without a seed derive theirs from the numbers;
        those that draw the same numbers in each pass leave out the second one.
      full: as for ShardOp.

    Raises InvalidArgumentError if `index` is not in [0, count).
    """
    ShardOp.build(count, index)
    return type(dataset)(CommonShard(count, index, full, entropy), (dataset,))


def distributed_cardinality(count: int, policy: str, coordinated: bool) -> int:
    """Return the number of elements that a reader of the data service gets: 0, INFINITE_CARDINALITY
    or, in most cases, UNKNOWN_CARDINALITY.

    The number is also unknown for an infinite dataset with a shard of files, or with a shard in the
    middle. A worker may then yield no elements, for example if a later batch drops its remainder.
    """
    if coordinated:
        return INFINITE_CARDINALITY
    if count == 0 or (count == INFINITE_CARDINALITY and policy in ("OFF", "DYNAMIC", "DATA")):
        return count
    return UNKNOWN_CARDINALITY


def _then(op: Op, below: Tree) -> Tree:
    return type(below)(op, (below,))


def _by_element(dataset: Tree, put: Put) -> Tree:
    if dataset.op.name in _AT_THE_END:
        return _then(dataset.op, _by_element(dataset.inputs[0], put))
    return put(dataset)


def _by_file(dataset: Tree, put: Put) -> Tree:
    """Return the dataset with a shard in each branch, before the reader of this branch that is
    nearest to the end of the pipeline."""
    rewritten: dict[int, Tree] = {}

    def visit(tree: Tree) -> Tree:
        if id(tree) not in rewritten:
            if _reads_files(tree):
                rewritten[id(tree)] = _then(tree.op, _names(tree.inputs[0], put))
            else:
                branches = _branches(tree)
                inputs = [
                    visit(tree_input) if number in branches else tree_input
                    for number, tree_input in enumerate(tree.inputs)
                ]
                rewritten[id(tree)] = type(tree)(tree.op, inputs)
        return rewritten[id(tree)]

    return visit(dataset)


def _branches(dataset: Tree) -> tuple[int, ...]:
    """Return the numbers of those inputs of `dataset` that have to be sharded. Raises Unshardable
    if there are no such inputs."""
    if dataset.inputs:
        try:
            return dataset.op.split_inputs(len(dataset.inputs))
        except UnimplementedError as error:
            # Some operators cannot be split. For example, a snapshot must store all elements,
            # because later iterators read them all.
            raise _unshardable(dataset) from error
    raise _unshardable(dataset)


def _unshardable(dataset: Tree) -> Unshardable:
    return Unshardable(
        f"Found an unshardable source dataset: {dataset.op.one_line()}. ShardingPolicy.FILE "
        f"divides files, and no reader of files"
        " stands between this and the end of the pipeline; use DATA or DYNAMIC.",
    )


def _names(names: Tree, put: Put) -> Tree:
    """Return the dataset of file names with a shard inserted, and with the shuffles of the names
    after the shard."""
    if names.op.name in _OF_NAMES:
        return _then(names.op, _names(names.inputs[0], put))
    shuffles = [node.op for node in names.walk() if node.op.name == "shuffle"]
    sharded = put(_without_shuffles(names))
    for op in shuffles:
        sharded = _then(op, sharded)
    return sharded


def _without_shuffles(dataset: Tree) -> Tree:
    return dataset.rewrite(lambda node: node.inputs[0] if node.op.name == "shuffle" else node)


def _reads_files(dataset: Any) -> bool:
    """Return whether the input of this dataset's operator consists of file names. This is so for a
    reader, and for an `interleave` or `flat_map` whose function returns, for the first element, a
    dataset with a reader.
    """
    op = dataset.op
    if isinstance(op, Interleave):
        # One element decides, whichever it is. So leave out the shuffles, because each would fill
        # its buffer before it returns an element.
        names = _then(IgnoreErrors(), _without_shuffles(dataset.inputs[0]))
        return any(
            _reads_files(node) for x in islice(names.probe(), 1) for node in op.dataset_of(x).walk()
        )
    return bool(op.is_reader)


__all__ = ["Unshardable", "common_shard", "distributed_cardinality", "shard_for_worker", "unread"]
