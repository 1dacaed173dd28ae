"""A cluster that the program itself knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import ClusterResolver, master_url


class SimpleClusterResolver(ClusterResolver):
    """Answers with what it was given.

    Args:
      master: the address that `master()` gives where no task is named.
      num_accelerators: what `num_accelerators` gives, for whichever task.

    Raises:
      TypeError: `cluster_spec` is no ClusterSpec (a dict is none), or `master` no text.
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
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, not {master!r}")
        self._spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The one that was given."""
        return self._spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The URL of that task where both are given, else of the master; the own task does not matter."""
        named = task_type is not None and task_id is not None
        address = self._spec.task_address(task_type, task_id) if named else self._master  # type: ignore[arg-type]
        return master_url(address, rpc_layer or self._rpc_layer)

    @property
    def environment(self) -> str:
        return self._environment

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """What was given, whatever is asked."""
        return dict(self._num_accelerators)
