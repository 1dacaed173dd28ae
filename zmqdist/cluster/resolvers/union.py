"""A resolver that combines several resolvers, for example when the ps run on one platform and the
workers on another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import ClusterResolver, master_url
from zmqdist.field_types import checked


@checked
class UnionResolver(ClusterResolver):
    """A resolver with the jobs of several resolvers. All other values are those of the first
    resolver, unless an argument overrides them.

    >>> workers = zd.resolvers.SimpleClusterResolver(zd.ClusterSpec({"worker": ["host1:5000"]}))
    >>> servers = zd.resolvers.SimpleClusterResolver(zd.ClusterSpec({"ps": ["host2:5000"]}))
    >>> sorted(zd.resolvers.UnionResolver(workers, servers).cluster_spec().jobs)
    ['ps', 'worker']

    If a job is in several resolvers and dense in all of them, its lists of tasks are concatenated.
    If the job is sparse in one of them, its tasks keep their indices.

    Raises:
      ValueError: no resolver is given, or a keyword is unknown.
      TypeError: an argument is not a resolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(f"unknown arguments: {', '.join(sorted(unknown))}")
        if not resolvers:
            raise ValueError("a union needs at least one resolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"a union is made of resolvers, and {resolver!r} is not a resolver")
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of all resolvers.

        >>> workers = zd.resolvers.SimpleClusterResolver(zd.ClusterSpec({"worker": ["host1:5000"]}))
        >>> zd.resolvers.UnionResolver(workers).cluster_spec().jobs
        ['worker']

        Raises:
          KeyError: a job is sparse in one resolver, and two resolvers have a task of this job with
            the same index.
        """
        tasks_by_job: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                tasks_by_job.setdefault(job, []).append(tasks or [])
        return ClusterSpec({job: _merged(job, parts) for job, parts in tasks_by_job.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task if both `task_type` and `task_id` are given, and otherwise the
        master of the first resolver.

        >>> workers = zd.resolvers.SimpleClusterResolver(zd.ClusterSpec({"worker": ["host1:5000"]}))
        >>> zd.resolvers.UnionResolver(workers).master("worker", 0, "zmq")
        'zmq://host1:5000'
        """
        rpc_layer = rpc_layer or self.rpc_layer
        if task_type is not None and task_id is not None:
            return master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    @property
    def environment(self) -> str:
        return self._resolvers[0].environment

    def _own_task_type(self) -> str | None:
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    def _own_task_id(self) -> int | None:
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    def _own_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Return the accelerators that the first resolver reports.

        >>> workers = zd.resolvers.SimpleClusterResolver(zd.ClusterSpec({"worker": ["host1:5000"]}))
        >>> zd.resolvers.UnionResolver(workers).num_accelerators()
        {}
        """
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    # the indices of sparse jobs have a meaning, those of dense jobs only count the tasks
    dense = [part for part in parts if isinstance(part, list)]
    if len(dense) == len(parts):
        return list(itertools.chain(*dense))
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(f"job {job!r} has the task indices {twice} from two resolvers")
        merged.update(tasks)
    return merged
