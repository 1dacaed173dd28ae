"""create_in_process_cluster: the servers of a cluster, all of them in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.testing.runner.ports import ReservedCluster, reserved

if TYPE_CHECKING:
    from zmqdist.tasks.server import Server


_running: dict[int, InProcessCluster] = {}
"""By identity: a server stops when nothing refers to it any more."""


class InProcessCluster(ReservedCluster):
    """What `create_in_process_cluster` gives: the dict of jobs to addresses, and the servers behind it. A context manager.

    Attributes:
      servers: one for each task, started, in the order of the dict.
    """

    __slots__ = ("_ports", "servers")

    def __init__(self, ports: ReservedCluster) -> None:
        super().__init__(ports)
        self._ports = ports
        self.servers: list[Server] = []

    def stop(self) -> None:
        """Stop the servers. Idempotent."""
        _running.pop(id(self), None)
        while self.servers:
            self.servers.pop().stop()

    def __enter__(self) -> InProcessCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def create_in_process_cluster(
    num_workers: int, num_ps: int, has_chief: bool = False, has_eval: bool = False, rpc_layer: str = "zmq"
) -> InProcessCluster:
    """A `zmqdist.Server` for each task of a cluster, in threads of this process.

    Args:
      rpc_layer: "zmq".

    Returns:
      The cluster as a dict; it has `stop()`, and stops with the with-statement. Else the servers run until the process ends, also when
      nothing refers to the dict any more: their addresses may be all that was kept of it.

    Raises:
      ValueError: another layer, or a number of tasks below 0.
    """
    if rpc_layer != "zmq":
        raise ValueError(f"rpc_layer is 'zmq' here, not {rpc_layer!r}")
    from zmqdist.tasks.server import Server

    cluster = InProcessCluster(
        reserved({"chief": int(has_chief), "worker": num_workers, "ps": num_ps, "evaluator": int(has_eval)})
    )
    try:
        for job, addresses in cluster.items():
            for index in range(len(addresses)):
                cluster.servers.append(Server(dict(cluster), job_name=job, task_index=index))
    except BaseException:
        cluster.stop()
        raise
    _running[id(cluster)] = cluster
    return cluster
