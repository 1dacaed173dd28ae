"""The share of one worker among a fixed number: trees in which `shard` has been put where the policy wants it.

Theory
    The shards of all workers make the whole once only if every worker counts the same elements in the same order. So what stands below
    a shard that is put in here is made repeatable: seeds that nobody gave are derived from one number that the workers of an
    iteration have in common, and parallel operators keep their order. Functions of the user are taken to be repeatable.

    FILE  divides what names the files, right before the first reader as seen from the end of the pipeline. Shuffles of the names are moved
          behind the shard: whose file it is does not depend on them. A repeat of the names stays behind it, too: a worker has the same
          files in each epoch.
    DATA  divides the elements, at the end.
    HINT  divides where the user says.

    A reader may also be what a function of flat_map or interleave returns: to see that, the function is called for one element of its
    input. So the rewrite belongs to the worker; a dispatcher runs no functions of users.

Not here: which share a worker has (data/service/dispatcher/machine/worker_slots.py).
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
"""What puts a shard behind a dataset."""

_AT_THE_END = frozenset({"prefetch", "options"})
"""What DATA leaves behind the shard."""

_OF_NAMES = frozenset({"shuffle", "repeat", "prefetch", "options"})
"""What FILE leaves behind the shard, where it stands right before the reader."""


class Unshardable(NotFoundError):
    """There is no reader whose files could be divided."""


def shard_for_worker(dataset: Tree, policy: str, num_workers: int, index: int, seed: int = 0) -> Tree:
    """What one worker computes of a dataset under a static policy; the dataset itself under any other.

    Args:
      policy: the name of the ShardingPolicy: "FILE", "DATA", "FILE_OR_DATA", "HINT".
      index: of the worker, in [0, num_workers).
      seed: a number that all workers of one iteration have in common, and other iterations have not.

    Raises:
      ValueError: no such policy. InvalidArgumentError: no such worker.
      NotFoundError: FILE, and a branch of the pipeline has no reader. Whatever a function of flat_map or interleave raises.
        Reading raises InvalidArgumentError where there are fewer files than workers.
    """

    def put(below: Tree, full: bool = True) -> Tree:
        return _then(ShardOp.build(num_workers, index, full), repeatable(below, seed))

    if policy in ("FILE", "FILE_OR_DATA"):
        try:
            return _by_file(dataset, put)
        except Unshardable:
            if policy == "FILE":
                raise
    if policy in ("DATA", "FILE_OR_DATA"):
        return _by_element(dataset, lambda below: put(below, full=False))
    if policy == "HINT":
        return dataset.rewrite(lambda one: put(one.inputs[0]) if _is_hint(one) else one)
    if policy not in ("OFF", "DYNAMIC"):
        raise ValueError(f"{policy!r} is no sharding policy")
    return dataset


def distributed_cardinality(count: int, policy: str, coordinated: bool) -> int:
    """How many elements a reader of the data service gets of a dataset with so many, as far as that can be known without running it.

    A shard of files, or one in the middle, may leave nothing of an infinite dataset, as before a batch that drops its remainder.
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
    """The dataset with a shard before the first reader of each branch."""
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
    """The inputs that hold the data. Raises Unshardable where there are none."""
    if dataset.inputs:
        try:
            return dataset.op.split_inputs(len(dataset.inputs))
        except UnimplementedError as error:  # it keeps the whole, for all that read it
            raise _unshardable(dataset) from error
    raise _unshardable(dataset)


def _unshardable(dataset: Tree) -> Unshardable:
    return Unshardable(
        f"Found an unshardable source dataset: {dataset.op.one_line()}. ShardingPolicy.FILE divides files, and no reader of files"
        " stands between this and the end of the pipeline; use DATA or DYNAMIC.",
    )


def _names(names: Tree, put: Put) -> Tree:
    """The names of files with a shard behind them, and their shuffles behind that."""
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
    """Whether its input names files: it is a reader, or its function returns datasets that are made by one."""
    op = dataset.op
    if isinstance(op, Interleave):
        names = _then(IgnoreErrors(), _without_shuffles(dataset.inputs[0]))  # any will do: no reason to fill a buffer
        return any(_reads_files(each) for x in islice(names.probe(), 1) for each in op.dataset_of(x).walk())
    return bool(op.is_reader)


__all__ = ["Unshardable", "distributed_cardinality", "shard_for_worker"]
