"""Helpers of a coordinator, under TensorFlow's names: `start_server`, which serves one task of a
cluster, and `RepeatedTimer`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqdist.scheduling.coordinator.watchdog import RepeatedTimer

if TYPE_CHECKING:
    from zmqdist.cluster.resolvers.base import ClusterResolver

log = logging.getLogger("zmqdist.coordinator")

__all__ = ["RepeatedTimer", "start_server"]


def start_server(cluster_resolver: ClusterResolver, protocol: str | None = None) -> None:
    """Serve the worker or ps that a resolver names. This blocks until another process stops the
    server (`strategy.close(shutdown_cluster=True)`).

    The program's signal handlers stay in place: Ctrl-C stops the server, and this function raises
    KeyboardInterrupt.

    Args:
      protocol: as for `zmqdist.Server`; by default the resolver's `rpc_layer`.

    Raises:
      ValueError: the task is neither a worker nor a ps.
      Any error that `Server` raises.
    """
    # imported here, because a coordinator's program does not need it
    from zmqdist.tasks.server import Server

    job, index = cluster_resolver.task_type, cluster_resolver.task_id
    if job not in ("worker", "ps"):
        raise ValueError(
            f"Unexpected task_type to start a server: {job}; workers and ps have servers"
        )
    with Server(
        cluster_resolver.cluster_spec(), job, index, protocol or cluster_resolver.rpc_layer
    ) as server:
        log.info("%s at %s", server.task, server.target)
        server.join()
