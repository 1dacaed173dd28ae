"""A resolver for a cluster that the program itself knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import ClusterResolver, master_url
from zmqdist.field_types import checked


@checked
class SimpleClusterResolver(ClusterResolver):
    """A resolver whose methods return the arguments of its constructor.

    >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
    >>> zd.resolvers.SimpleClusterResolver(spec, rpc_layer="zmq").master("worker", 0)
    'zmq://host1:5000'

    Args:
      master: the address that the method `master` returns if no task is named.
      num_accelerators: the result of the method `num_accelerators`, for any task.

    Raises:
      TypeError: `cluster_spec` is not a ClusterSpec (a dict is not accepted), or `master` is not
        text.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec, not {cluster_spec!r}")
        self._spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the argument `cluster_spec`.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> zd.resolvers.SimpleClusterResolver(spec).cluster_spec().jobs
        ['worker']
        """
        return self._spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task if both `task_type` and `task_id` are given, and otherwise the
        URL of the argument `master`.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> zd.resolvers.SimpleClusterResolver(spec).master("worker", 0, "zmq")
        'zmq://host1:5000'
        """
        named = task_type is not None and task_id is not None
        address = self._spec.task_address(task_type, task_id) if named else self._master  # type: ignore[arg-type]
        return master_url(address, rpc_layer or self._rpc_layer)

    @property
    def environment(self) -> str:
        return self._environment

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Return a copy of the argument `num_accelerators`, for any task.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> zd.resolvers.SimpleClusterResolver(spec, num_accelerators={"GPU": 2}).num_accelerators()
        {'GPU': 2}
        """
        return dict(self._num_accelerators)
