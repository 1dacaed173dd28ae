"""`create_in_process_cluster`: starts the servers of a cluster, all of them in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist.field_types import checked
from zmqdist.testing.runner.ports import ReservedCluster, reserved

if TYPE_CHECKING:
    from zmqdist.tasks.server import Server


_running: dict[int, InProcessCluster] = {}
"""The running clusters, by `id`. These references keep the servers of the clusters running, because
a server stops when it is unreferenced."""


class InProcessCluster(ReservedCluster):
    """The result of `create_in_process_cluster`: a dict of jobs to addresses, with the servers at
    these addresses. A with-statement stops the servers.

    Attributes:
      servers: the started servers, one for each task, in the order of the dict.
    """

    __slots__ = ("_ports", "servers")

    def __init__(self, ports: ReservedCluster) -> None:
        super().__init__(ports)
        self._ports = ports
        self.servers: list[Server] = []

    def stop(self) -> None:
        """Stop the servers. A second call does nothing."""
        _running.pop(id(self), None)
        while self.servers:
            self.servers.pop().stop()

    def __enter__(self) -> InProcessCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@checked
def create_in_process_cluster(
    num_workers: int,
    num_ps: int,
    has_chief: bool = False,
    has_eval: bool = False,
    rpc_layer: str = "zmq",
) -> InProcessCluster:
    """Start a `zmqdist.Server` for each task of a cluster, in threads of this process.

    >>> with zd.testing.create_in_process_cluster(num_workers=2, num_ps=0) as spec:
    ...     print(list(spec), len(spec["worker"]))
    ['worker'] 2

    Args:
      rpc_layer: must be "zmq".

    Returns:
      The cluster as a dict of jobs to addresses. Its `stop()`, or a with-statement, stops the
      servers. Otherwise they run until the process ends, even if the dict is no longer referenced,
      because the caller may have kept the addresses only.

    Raises:
      ValueError: `rpc_layer` is not "zmq", or a number of tasks is below 0.
      OSError: no port is free, or the process has no file descriptor left; each reserved port needs
        one.
    """
    if rpc_layer != "zmq":
        raise ValueError(
            f"rpc_layer must be 'zmq', not {rpc_layer!r}: write rpc_layer=\"zmq\", or leave it out"
        )
    from zmqdist.tasks.server import Server

    cluster = InProcessCluster(
        reserved(
            {
                "chief": int(has_chief),
                "worker": num_workers,
                "ps": num_ps,
                "evaluator": int(has_eval),
            }
        )
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
