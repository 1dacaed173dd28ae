"""The base class of resolvers for systems that give each process a number, its rank. The rank of a
process determines its task.

Rules
    Every process computes the same list of addresses. The list goes through the hosts in order, and
    has an address for each process of a host, with ports from `port_base` on. The first job in the
    order of names gets the first addresses, the next job the following ones, and so on. The rank of
    a process is the position of its address in the list.

    In a process that `zmqdist launch` has started, the resolver describes the launcher's cluster
    (tf_config.py) and does not read ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

from zmqdist.addresses import PORT_MAX
from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.tf_config import has_no_address, launched_cluster
from zmqdist.field_types import checked

T = TypeVar("T")


def value_of(variable: str, parse: Callable[[str], T]) -> T:
    """Return the parsed value of an environment variable. Raises RuntimeError if `parse` raises
    ValueError."""
    text = os.environ[variable]
    try:
        return parse(text)
    except ValueError as error:
        problem = f" must be a number, not {text!r}" if parse is int else f": {error}"
        raise RuntimeError(f"{variable}{problem}") from None


@checked
class ResolverByRank(ClusterResolver):
    """A resolver for processes with ranks. The constructor of a subclass calls `_set_tasks`, except
    in a process of `zmqdist launch`."""

    def __init__(self, port_base: int, rpc_layer: str | None) -> None:
        self._launched = launched_cluster()
        self._port_base = port_base
        self._rpc_layer = rpc_layer
        self._rank = 0
        self._jobs: dict[str, int] = {}
        self._per_node: dict[str, int] = {}

    def _set_tasks(self, rank: int, jobs: Mapping[str, int], per_node: Mapping[str, int]) -> None:
        """Set the rank of this process, the number of tasks of each job, and the number of tasks on
        each host. The hosts are in the order in which ranks fill them. Only the ports are checked.
        """
        last = self._port_base + max(per_node.values(), default=1) - 1
        if not 1 <= self._port_base <= last <= PORT_MAX:
            raise ValueError(
                f"port_base is {self._port_base}, and the tasks of a host have the ports up to "
                f"{last}: wants 1 to {PORT_MAX} for "
                "all of them"
            )
        self._rank = rank
        self._jobs = dict(jobs)
        self._per_node = dict(per_node)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of the ranks, or in a process of `zmqdist launch` the cluster of the
        launcher.

        >>> import os, unittest.mock
        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        >>> with unittest.mock.patch.dict(os.environ, torchrun):  # torchrun sets these
        ...     jobs = {"worker": 1}
        ...     resolver = zd.resolvers.RankClusterResolver(jobs, hosts=["a"], port_base=8888)
        ...     print(resolver.cluster_spec().as_dict())
        {'chief': ['a:8888'], 'worker': ['a:8889']}
        """
        if self._launched is not None:
            return self._launched.cluster_spec()
        addresses = (f"{host}:{self._port_base + index}" for host, index in self._positions())
        return ClusterSpec(
            {job: list(islice(addresses, count)) for job, count in sorted(self._jobs.items())}
        )

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task, by default of the task of this process. "" means that this task
        is unknown or has no address.

        >>> import os, unittest.mock
        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        >>> with unittest.mock.patch.dict(os.environ, torchrun):  # torchrun sets these
        ...     jobs = {"worker": 1}
        ...     resolver = zd.resolvers.RankClusterResolver(jobs, hosts=["a"], port_base=8888)
        ...     print(resolver.master("worker", 0))
        zmq://a:8889
        """
        if self._launched is not None and has_no_address(self, task_type):
            return ""
        return self._task_master(task_type, task_id, rpc_layer)

    def _own_task_type(self) -> str | None:
        """The job of this process, or the value that a user has set. It is None if a user has set
        only `task_id`."""
        return self._own_task()[0]

    def _own_task_id(self) -> int | None:
        """The index of this process in its job, or the value that a user has set. It is None if a
        user has set only `task_type`."""
        return self._own_task()[1]

    def _own_task(self) -> tuple[str | None, int | None]:
        # If a user has set one of the two, the other one of the rank would name a wrong task.
        if (self._task_type, self._task_id) != (None, None):
            return self._task_type, self._task_id
        if self._launched is not None:
            return self._launched.task_type, self._launched.task_id
        index = self._rank
        for job, count in sorted(self._jobs.items()):
            if 0 <= index < count:
                return job, index
            index -= count
        return None, None

    def _jobs_text(self) -> str:
        return ", ".join(f"{job}: {count}" for job, count in sorted(self._jobs.items()))

    def _positions(self) -> list[tuple[str, int]]:
        """Return for each rank the host of the task, and the number of the task among the tasks of
        this host, from 0."""
        return [(host, index) for host, count in self._per_node.items() for index in range(count)]
