"""The base of all cluster resolvers: the cluster, this process's task, the master's URL, the accelerators.

Rules
    A resolver does not report changes: each call of `cluster_spec` looks the cluster up again. A user may set `task_type` and `task_id`;
    these values take precedence. An address becomes a URL with `<rpc_layer>://` in front, if there is an rpc_layer; an empty address
    stays "".

A resolver that a user writes must have `cluster_spec` and `master`, and need not call `__init__` of this class.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping
from typing import Any

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers import devices
from zmqdist.cluster.rules import validate_cluster_spec
from zmqdist.errors import ConfigError


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return an address as a URL: `"zmq://ps0:2222"` for `"ps0:2222"`.

    An empty address, a URL, or an address without an rpc_layer is returned unchanged.
    """
    return f"{rpc_layer}://{address}" if address and rpc_layer and "://" not in address else address


class ClusterResolver(abc.ABC):
    """The base class of all resolvers."""

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster as it is now."""

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the URL of a task, or of the cluster's master if no task is named; "" if there is no server to connect to.

        Raises:
          ValueError: the cluster has no such task.
        """

    def _task_master(self, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
        """Return the URL of that task, by default of this process's own task; "" if the task is not known."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    @property
    def environment(self) -> str:
        """The kind of environment, as a word that the author of the resolver chose; "" for none."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The scheme of a master's URL, before `://`; None or "" for addresses without a scheme."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """Return how many accelerators of each type there are, as {"GPU": 4}; {} on a host with CPUs only.

        Args:
          task_type, task_id: if both are given, count only the accelerators of that task. Those of tasks other than this process's are not
            known: the result is {}.
          config_proto: if it has {"device_count": {"GPU": 2}}, that is returned, and the host is not examined.
        """
        if config_proto is not None and "device_count" in config_proto:
            return {kind: count for kind, count in config_proto["device_count"].items() if kind != "CPU" and count}
        wanted = set() if task_type is None or task_id is None else {f"job:{task_type}", f"task:{task_id}"}
        parts = [name.split("/") for name in self._device_names() if wanted <= set(name.split("/"))]
        found = Counter(each.split(":")[1] for name in parts for each in name if each.startswith("device:"))
        return {kind: count for kind, count in found.items() if kind != "CPU"}

    def validate(self) -> list[str]:
        """Return one sentence for each problem with the cluster and with this process's task in it; an empty list if there is none.

        Checks the names of jobs, that there is at most one chief and one evaluator, this task, and addresses; connects to no task. A chief
        or an evaluator may run beside the cluster, without an address.
        """
        try:
            spec = self.cluster_spec()
            me = self.task_type, self.task_id
        except (ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return [str(error.args[0]) if isinstance(error, KeyError) else str(error)]
        problems = []
        beside = me[0] == "chief" and "chief" not in spec.jobs  # a coordinator, which needs no address in the cluster
        try:
            validate_cluster_spec(spec, *((None, None) if beside else me))
        except ValueError as error:
            problems.append(str(error))
        if sum(map(spec.num_tasks, spec.jobs)) > 1 and None in me:
            problems.append("the cluster has several tasks, and nothing says which one this process is")
        return problems + spec.validate()

    def _device_names(self) -> list[str]:
        """Return the known devices, as `/job:worker/task:0/device:GPU:1`: the devices of this host, which belong to this task."""
        known = self.task_type is not None and self.task_id is not None
        own = f"/job:{self.task_type}/task:{self.task_id}" if known else ""
        return [f"{own}/device:GPU:{index}" for index in range(len(devices.gpus()))]
