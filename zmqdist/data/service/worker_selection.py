"""The rules by which a reader chooses the workers from which it reads: `target_workers` and
tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zmqdist.data.service import local_workers
from zmqdist.data.service.dispatcher.machine.records import Terms
from zmqdist.data.service.policy import STATIC, ShardingPolicy
from zmqdist.data.structure import invalid

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
