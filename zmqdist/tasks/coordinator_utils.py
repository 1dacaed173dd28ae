"""TensorFlow's names for a coordinator's helpers: `start_server`, which serves one task of the cluster, and `RepeatedTimer`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqdist.scheduling.coordinator.watchdog import RepeatedTimer

if TYPE_CHECKING:
    from zmqdist.cluster.resolvers.base import ClusterResolver

log = logging.getLogger("zmqdist.coordinator")

__all__ = ["RepeatedTimer", "start_server"]


def start_server(cluster_resolver: ClusterResolver, protocol: str | None = None) -> None:
    """Serve as the worker or ps that a resolver names, until the server is stopped from elsewhere
    (`strategy.close(shutdown_cluster=True)`).

    Signals keep the program's handlers: Ctrl-C stops the server and raises KeyboardInterrupt here.

    Args:
      protocol: as for `zmqdist.Server`.

    Raises:
      ValueError: the task is neither a worker nor a ps.
      Any error of `Server`.
    """
    from zmqdist.tasks.server import Server  # imported here, because a coordinator's program does not need it

    job, index = cluster_resolver.task_type, cluster_resolver.task_id
    if job not in ("worker", "ps"):
        raise ValueError(f"Unexpected task_type to start a server: {job}; workers and ps have servers")
    with Server(cluster_resolver.cluster_spec(), job, index, protocol) as server:
        log.info("%s at %s", server.task, server.target)
        server.join()
