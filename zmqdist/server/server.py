"""`zmqdist.Server`: one task of one job of a cluster."""

from __future__ import annotations

from zmqdist.cluster.defs import ClusterDef
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.net.credentials import Credentials
from zmqdist.server.node import Node


class Server:
    """One task of a cluster. (A skeleton: the rules of its arguments, and its parts, come next.)"""

    def __init__(
        self,
        cluster: ClusterSpec | ClusterDef | dict[str, list[str]],
        job_name: str,
        task_index: int,
        start: bool = True,
    ) -> None:
        spec = ClusterSpec(cluster)
        self._node = Node(spec, (job_name, task_index), spec.task_address(job_name, task_index), Credentials())
        if start:
            self.start()

    def start(self) -> None:
        """Serve in the background."""
        self._node.serve()

    def stop(self, grace: float | None = None) -> None:
        """End it, and free the port."""
        self._node.close(grace or 0.0)
