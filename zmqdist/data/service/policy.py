"""How the elements of a pipeline are divided among workers (`ShardingPolicy`) and shared between
trainers (`CrossTrainerCache`), and from which workers a reader reads (`target_workers` and tags).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from zmqdist.data.service import local_workers
from zmqdist.data.service.dispatcher.machine.records import Terms
from zmqdist.data.structure import invalid


class ShardingPolicy(IntEnum):
    """Which part of the data each worker computes.

    >>> policy = zd.data.service.ShardingPolicy.DYNAMIC
    >>> distributed = zd.data.service.distribute(policy, cluster)
    >>> print(*sorted(Dataset.range(3).apply(distributed)))
    0 1 2

    With OFF, every worker computes the whole dataset. With DYNAMIC, the dispatcher gives each
    position of the sources to one worker, first come, first served. All other policies are static:
    they give each worker a fixed shard, by the worker's index in the dispatcher's
    `worker_addresses`. FILE takes a shard of the files, and DATA a shard of the elements.
    FILE_OR_DATA takes a shard of the files if the pipeline reads files, otherwise of the elements.
    HINT takes the shard at the place of `shard(SHARD_HINT, SHARD_HINT)` in the pipeline. Without
    such a place, each worker computes the whole dataset.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5


STATIC = frozenset(
    {ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.FILE_OR_DATA, ShardingPolicy.HINT}
)

_POLICY_NAMES = {"parallel_epochs": ShardingPolicy.OFF, "distributed_epoch": ShardingPolicy.DYNAMIC}


def policy_of(processing_mode: Any) -> ShardingPolicy:
    """Return the policy for a `processing_mode`, which is a ShardingPolicy or a name. Raises
    ValueError for anything else, including a number.
    """
    if isinstance(processing_mode, ShardingPolicy):
        return processing_mode
    if isinstance(processing_mode, str) and processing_mode in _POLICY_NAMES:
        return _POLICY_NAMES[processing_mode]
    raise ValueError(
        'processing_mode should be a `zmqdist.data.service.ShardingPolicy`, `"parallel_epochs"`, '
        "or "
        f'`"distributed_epoch"`. Got {processing_mode!r}.'
    )


class CrossTrainerCache:
    """An argument of `distribute` for several trainers that read the same elements, so that each
    element is computed only once.

    >>> cache = zd.data.service.CrossTrainerCache(trainer_id="first")
    >>> endless = Dataset.range(3).repeat()
    >>> shared = zd.data.service.distribute(
    ...     "parallel_epochs", cluster, job_name="shared", cross_trainer_cache=cache
    ... )
    >>> len(list(endless.apply(shared).take(4)))
    4

    Use it when several trainers have the same expensive pipeline, as in a hyperparameter search.
    Each worker has a window of the latest elements, from which all trainers of a job read. No
    trainer gets an element twice, but a trainer that is too slow misses elements.

    Args:
      trainer_id: a name for this trainer, not empty.

    Raises:
      ValueError: the id is empty.
    """

    def __init__(self, trainer_id: str) -> None:
        if not trainer_id or not isinstance(trainer_id, str):
            raise ValueError(
                f"trainer_id is {trainer_id!r}: a cross-trainer cache requires a non-empty "
                f"trainer ID."
            )
        self.trainer_id = trainer_id


def check_shared(job_name: str | None, repetition: int, num_consumers: int) -> None:
    """Raise InvalidArgumentError if an iterator with these arguments cannot read from a
    cross-trainer cache."""
    if not job_name:
        raise invalid("Cross-trainer caching requires named jobs. Got empty `job_name`.")
    if repetition > 1:
        raise invalid(
            "Cross-trainer caching requires infinite datasets and disallows multiple repetitions "
            "of the same dataset. "
            f"Got repetition {repetition}."
        )
    if num_consumers:
        raise invalid(
            "Cross-trainer caching does not support coordinated reads. Got number of coordinated "
            "consumers: "
            f"{num_consumers}"
        )


COLOCATED: Final = "COLOCATED"

LOCAL_PROTOCOL: Final = "local"
"""The protocol within one process, which passes elements by reference."""

PROTOCOLS: Final = ("zmq", "tcp")
"""The names of the protocol between processes. All of them mean the same protocol."""


def target_of(terms: Terms, deployment_mode: str) -> str:
    """Return from which workers a reader reads: "ANY", "LOCAL" (only those of this process) or
    "AUTO". The target "AUTO" becomes "LOCAL" if the sharding is static and the deployment mode is
    COLOCATED. If the result is "AUTO", `reads_from` decides for each worker.

    Raises:
      InvalidArgumentError: the target is "LOCAL", but a coordinated read has to read from all
        workers.
    """
    policy, target = ShardingPolicy(terms.mode), terms.target_workers
    if target == "AUTO" and policy in STATIC and deployment_mode == COLOCATED:
        target = "LOCAL"
    if target == "LOCAL" and terms.coordinated:
        raise invalid(
            "Coordinated reads require non-local workers, because all consumers read from all "
            "workers, but `target_workers` is LOCAL"
        )
    return target


def check_local(terms: Terms, dispatcher: str, state: int) -> None:
    """Raise InvalidArgumentError if this process has no worker of the dispatcher. A reader with the
    target "LOCAL" needs such a worker.

    Args:
      state: the random number of the dispatcher's durable state. A worker whose tasks belong to
        this state is found even if the worker knows the dispatcher by another address.
    """
    policy = ShardingPolicy(terms.mode)
    if local_workers.has_worker_of(dispatcher, state):
        return
    if policy in STATIC:
        raise invalid(
            f"Static sharding policy <{policy.name}> requires local tf.data workers, but no local "
            f"worker is found. "
            "You need to run local workers in the processes that read"
        )
    raise invalid(
        f"Local reads require local tf.data workers, but no local worker is found: this process "
        f"has none of {dispatcher}"
    )


def reads_from(target: str, coordinated: bool, incarnation: int, tags: Sequence[str]) -> bool:
    """Return whether a reader reads from the worker with this incarnation and these tags. With the
    target "AUTO" it reads from each worker of its process, and from each worker of another process
    unless the tags contain COLOCATED.
    """
    if target == "ANY" or coordinated:
        return True
    here = local_workers.find(incarnation) is not None
    return here or (target == "AUTO" and COLOCATED not in map(str.upper, tags))
