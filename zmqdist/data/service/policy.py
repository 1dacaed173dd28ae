"""How the elements of a pipeline are shared out among workers, and with whom they are shared."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from zmqdist.data.structure import invalid


class ShardingPolicy(IntEnum):
    """Which part of the data each worker computes.

    OFF: each worker the whole dataset. DYNAMIC: the dispatcher deals positions of the sources out, first come, first served, each once.
    FILE, DATA, FILE_OR_DATA, HINT: the worker's fixed share by its place in the dispatcher's `worker_addresses`: of the files, of the
    elements, of the files if there are such, where `shard(SHARD_HINT, SHARD_HINT)` stands.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5


STATIC = frozenset({ShardingPolicy.FILE, ShardingPolicy.DATA, ShardingPolicy.FILE_OR_DATA, ShardingPolicy.HINT})

_POLICY_NAMES = {"parallel_epochs": ShardingPolicy.OFF, "distributed_epoch": ShardingPolicy.DYNAMIC}


def policy_of(processing_mode: Any) -> ShardingPolicy:
    """The policy that a user names. Raises ValueError for anything else, numbers too."""
    if isinstance(processing_mode, ShardingPolicy):
        return processing_mode
    if isinstance(processing_mode, str) and processing_mode in _POLICY_NAMES:
        return _POLICY_NAMES[processing_mode]
    raise ValueError(
        'processing_mode should be a `zmqdist.data.service.ShardingPolicy`, `"parallel_epochs"`, or '
        f'`"distributed_epoch"`. Got {processing_mode!r}.'
    )


class CrossTrainerCache:
    """Trainers with the same job read the same elements, each worker keeping a window of the latest.

    Args:
      trainer_id: who reads: not empty. No trainer gets an element twice; one that is too slow misses some.

    Raises:
      ValueError: an empty id.
    """

    def __init__(self, trainer_id: str) -> None:
        if not trainer_id:
            raise ValueError("a cross-trainer cache requires a non-empty trainer ID.")
        self.trainer_id = str(trainer_id)


def check_shared(job_name: str | None, repetition: int, num_consumers: int) -> None:
    """Refuse an iterator that cannot read from a cross-trainer cache. Raises InvalidArgumentError."""
    if not job_name:
        raise invalid("Cross-trainer caching requires named jobs. Got empty `job_name`.")
    if repetition > 1:
        raise invalid(
            "Cross-trainer caching requires infinite datasets and disallows multiple repetitions of the same dataset. "
            f"Got repetition {repetition}."
        )
    if num_consumers:
        raise invalid(
            "Cross-trainer caching does not support coordinated reads. Got number of coordinated consumers: "
            f"{num_consumers}"
        )
