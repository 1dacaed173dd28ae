"""Small things around a coordinator's program, under TensorFlow's names: being a task of its cluster, and doing something at intervals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqdist.scheduling.coordinator.watchdog import RepeatedTimer

if TYPE_CHECKING:
    from zmqdist.cluster.resolvers.base import ClusterResolver

log = logging.getLogger("zmqdist.coordinator")

__all__ = ["RepeatedTimer", "start_server"]


def start_server(cluster_resolver: ClusterResolver, protocol: str | None = None) -> None:
    """Be the worker or ps that a resolver says; returns when it was stopped from elsewhere (`strategy.close(shutdown_cluster=True)`).

    Signals do what they do in the program: Ctrl-C raises KeyboardInterrupt here, when the server has been stopped.

    Args:
      protocol: as for `zmqdist.Server`.

    Raises:
      ValueError: the task is neither a worker nor a ps.
      What `Server` raises.
    """
    from zmqdist.tasks.server import Server  # programs that coordinate do not need it

    job, index = cluster_resolver.task_type, cluster_resolver.task_id
    if job not in ("worker", "ps"):
        raise ValueError(f"Unexpected task_type to start a server: {job}; workers and ps have servers")
    with Server(cluster_resolver.cluster_spec(), job, index, protocol) as server:
        log.info("%s at %s", server.task, server.target)
        server.join()
