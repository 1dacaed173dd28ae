"""How the elements of a pipeline are divided among workers (`ShardingPolicy`), and shared between
trainers (`CrossTrainerCache`)."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

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
