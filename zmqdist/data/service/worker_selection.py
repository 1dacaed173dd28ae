"""Which of the workers a reader reads from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zmqdist.data.service import local_workers
from zmqdist.data.service.dispatcher.machine.records import Terms
from zmqdist.data.service.policy import STATIC, ShardingPolicy
from zmqdist.data.structure import invalid

COLOCATED: Final = "COLOCATED"

LOCAL_PROTOCOL: Final = "local"
"""Elements go from hand to hand in one process."""

PROTOCOLS: Final = ("zmq", "tcp")
"""Names of the one protocol between processes."""


def target_of(terms: Terms, deployment_mode: str) -> str:
    """Resolve "AUTO" as far as can be done without seeing the workers.

    Raises:
      InvalidArgumentError: only workers of this process are wanted, and they cannot be wanted.
    """
    policy, target = ShardingPolicy(terms.mode), terms.target_workers
    if target == "AUTO" and policy in STATIC and deployment_mode == COLOCATED:
        target = "LOCAL"
    if target == "LOCAL" and terms.coordinated:
        raise invalid(
            "Coordinated reads require non-local workers, but `target_workers` is LOCAL: all consumers read from all workers"
        )
    return target


def check_local(terms: Terms, dispatcher: str, state: int) -> None:
    """Raises InvalidArgumentError: this process has no worker of this dispatcher, whose state has this number."""
    policy = ShardingPolicy(terms.mode)
    if local_workers.has_worker_of(dispatcher, state):
        return
    if policy in STATIC:
        raise invalid(
            f"Static sharding policy <{policy.name}> requires local tf.data workers, but no local worker is found. "
            "You need to run local workers in the processes that read"
        )
    raise invalid(
        f"Local reads require local tf.data workers, but no local worker is found: this process has none of {dispatcher}"
    )


def reads_from(target: str, coordinated: bool, incarnation: int, tags: Sequence[str]) -> bool:
    """Whether a reader with this target reads from the worker with this life and these tags."""
    if target == "ANY" or coordinated:
        return True
    here = local_workers.find(incarnation) is not None
    return here or (target == "AUTO" and COLOCATED not in map(str.upper, tags))
