"""The base of resolvers for systems that number their processes: the rank of a process determines its task.

Rules
    Every process computes the same list of addresses: the hosts in order, and on each host one port for each of its processes, from
    `port_base` on. The jobs divide that list in the order of their names, and the rank is the position of a process in it.

    In a process that `zmqdist launch` started, the launcher has decided which tasks the cluster has and which task this process is. The
    ranks that the system gives to that process say nothing about the cluster, so the resolver does not read them, and returns the
    launcher's cluster.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.environment import CONFIG_ENV, TF_CONFIG_ENV, is_json
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.tf_config import TFConfigClusterResolver


class ResolverByRank(ClusterResolver):
    """A resolver whose constructor calls `_place`, unless `_launched` is set."""

    def __init__(self, port_base: int, rpc_layer: str | None) -> None:
        self._launched = _launched_cluster()
        self._port_base = port_base
        self._rpc_layer = rpc_layer
        self._rank = 0
        self._jobs: dict[str, int] = {}
        self._per_node: dict[str, int] = {}

    def _place(self, rank: int, jobs: Mapping[str, int], per_node: Mapping[str, int]) -> None:
        """Set the rank of this process, the number of tasks of each job, and the number of tasks on each host, in order. Checks nothing."""
        self._rank = rank
        self._jobs = dict(jobs)
        self._per_node = dict(per_node)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        if self._launched is not None:
            return self._launched.cluster_spec()
        addresses = [f"{host}:{self._port_base + index}" for host, index in self._places()]
        cluster: dict[str, list[str]] = {}
        first = 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = addresses[first : first + count]
            first += count
        return ClusterSpec(cluster)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the URL of that task, by default of this process's own task; "" if the task has no address."""
        own_job = task_type is None or task_type == self.task_type
        if self._launched is not None and own_job and self.task_type not in self.cluster_spec().jobs:
            return ""  # a program, or a worker of a file that has a count: no process connects to it
        return self._task_master(task_type, task_id, rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The job of this process. A value that was set takes precedence, and so does a `task_id` that was set alone."""
        return self._own_task()[0]

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; a value that was set takes precedence, as for `task_type`."""
        return self._own_task()[1]

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _own_task(self) -> tuple[str | None, int | None]:
        if (self._task_type, self._task_id) != (None, None):
            return self._task_type, self._task_id
        if self._launched is not None:
            return self._launched.task_type, self._launched.task_id
        first = 0
        for job, count in sorted(self._jobs.items()):
            if first <= self._rank < first + count:
                return job, self._rank - first
            first += count
        return None, None

    def _places(self) -> list[tuple[str, int]]:
        """Return (host, number on that host) of each task, by rank."""
        return [(host, index) for host, count in self._per_node.items() for index in range(count)]


def _launched_cluster() -> TFConfigClusterResolver | None:
    """Return a resolver of the cluster in which `zmqdist launch` started this process; None if it did not start it."""
    path = os.environ.get(CONFIG_ENV)
    if not path or is_json(path) or TF_CONFIG_ENV not in os.environ:
        return None
    from zmqdist.cluster import ClusterConfig  # YAML takes 20 ms to import

    config = ClusterConfig.from_environment()
    return None if config is None or config.runtime is None else TFConfigClusterResolver()
