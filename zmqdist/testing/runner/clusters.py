"""Addresses for the tasks of a test, which stay free until their tasks listen there, and clusters of
servers in the process of the test.

If a port were found free and then released, another test could bind it before the server of this
test listens. So each port stays bound by a socket that never listens. The kernel then assigns the
port to no process that asks for any free port. A listener with SO_REUSEADDR can still bind the
port, and ZeroMQ, asyncio and http.server set this option. The port is released when the dict that
names it and all runners made with that dict are garbage-collected.

Another program can still bind such a port if it names the port's number and sets SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from typing import TYPE_CHECKING

from zmqdist.field_types import checked

if TYPE_CHECKING:
    from zmqdist.tasks.server import Server


class ReservedCluster(dict[str, list[str]]):
    """A dict of jobs to addresses that keeps the ports reserved while it is referenced. It equals a
    plain dict with the same items, and its `copy()` is a plain dict."""

    __slots__ = ("__weakref__",)


def reserved(tasks: dict[str, int]) -> ReservedCluster:
    """Return a cluster on this host with the given number of tasks of each job. Jobs with 0 tasks
    are left out.

    Raises:
      ValueError: a number of tasks is below 0.
      OSError: no port is free, or the process has no file descriptor left; each reserved port needs
        one.
    """
    for job, count in tasks.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"a cluster has 0 or more tasks of {job}, not {count!r}")
    with contextlib.ExitStack() as ports:
        cluster = ReservedCluster(
            {job: [_reserve(ports) for _ in range(count)] for job, count in tasks.items() if count}
        )
        # runners refer to the dict, so the ports stay reserved as long as a runner needs them
        weakref.finalize(cluster, ports.pop_all().close)
    return cluster


@checked
def create_cluster_spec(
    has_chief: bool = False, num_workers: int = 1, num_ps: int = 0, has_eval: bool = False
) -> dict[str, list[str]]:
    """Return a cluster on this host, as a dict of jobs to addresses. Its ports stay reserved while
    the dict, or a runner made with it, is referenced.

    >>> spec = zd.testing.create_cluster_spec(num_workers=2, num_ps=1)
    >>> {job: len(addresses) for job, addresses in spec.items()}
    {'worker': 2, 'ps': 1}

    Raises:
      ValueError: a number of tasks is below 0.
      OSError: no port is free, or the process has no file descriptor left; each reserved port needs
        one.
    """
    return reserved(
        {"chief": int(has_chief), "worker": num_workers, "ps": num_ps, "evaluator": int(has_eval)},
    )


def _reserve(ports: contextlib.ExitStack) -> str:
    port = ports.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return f"localhost:{port.getsockname()[1]}"


# -- clusters in this process ----------------------------------------------------------------------

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
