"""The base class of all cluster resolvers. A resolver finds the cluster, the task of this process,
the URL of the master and the accelerators.

Rules
    A resolver does not report changes of the cluster. Each call of `cluster_spec` looks the cluster
    up again.
    A user may set `task_type` and `task_id`. These values win over those that the resolver finds.
    If a resolver has an rpc_layer, an address becomes a URL with `<rpc_layer>://` in front. An
    empty address stays "".

A resolver that a user writes must define `cluster_spec` and `master`, and need not call `__init__`
of this class.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping
from typing import Any

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.job_roles import validate_cluster_spec
from zmqdist.cluster.resolvers import devices
from zmqdist.errors import ConfigError
from zmqdist.field_types import checked


def master_url(address: str, rpc_layer: str | None) -> str:
    """Return an address as a URL: `"zmq://ps0:2222"` for `"ps0:2222"`.

    An empty address and a URL are returned unchanged, and so is every address if `rpc_layer` is
    None or "".
    """
    return f"{rpc_layer}://{address}" if address and rpc_layer and "://" not in address else address


def check_rpc_layer(resolver: Any) -> None:
    """Raise ValueError if the program asks, by the `rpc_layer` of its resolver, for a protocol that
    zmqdist does not speak."""
    layer = getattr(resolver, "rpc_layer", None)
    if layer not in (None, "", "zmq"):
        raise ValueError(
            f"the resolver's rpc_layer is {layer!r}, and zmqdist speaks only zmq: write "
            f'rpc_layer="zmq", or leave it out '
            "of the resolver and of TF_CONFIG"
        )


@checked
class ClusterResolver(abc.ABC):
    """The base class of all resolvers.

    >>> class Fixed(zd.resolvers.ClusterResolver):
    ...     def cluster_spec(self):
    ...         return zd.ClusterSpec({"worker": ["host1:5000"]})
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return "zmq://host1:5000"
    >>> Fixed().cluster_spec().num_tasks("worker")
    1
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster as it is now.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> zd.resolvers.SimpleClusterResolver(spec).cluster_spec() == spec
        True
        """

    @abc.abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task, or of the cluster's master if no task is named. "" means that
        there is no server to connect to.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> zd.resolvers.SimpleClusterResolver(spec).master("worker", 0, "zmq")
        'zmq://host1:5000'

        Raises:
          ValueError: the cluster has no such task.
        """

    def _task_master(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str:
        """Return the URL of the task with this type and id, by default of the task of this process.
        "" means that no task is known."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return master_url(
            self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer
        )

    @property
    def environment(self) -> str:
        """The kind of environment in which this process runs, as a word that the author of the
        resolver has chosen, or ""."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process. None means that the job is not known."""
        return self._own_task_type()

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job. None means that the index is not known."""
        return self._own_task_id()

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The scheme of a master's URL, which stands before `://`. None or "" means that addresses
        get no scheme."""
        return self._own_rpc_layer()

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Return the number of accelerators of each type, as {"GPU": 4}. {} means that no
        accelerators are known.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> resolver = zd.resolvers.SimpleClusterResolver(spec, num_accelerators={"GPU": 2})
        >>> resolver.num_accelerators()
        {'GPU': 2}

        Args:
          task_type, task_id: if both are given, count only the accelerators of the task that they
            name. The result is {} unless this is the task of this process, because the accelerators
            of other tasks are not known.
          config_proto: if it has "device_count", such as {"GPU": 2}, return these counts, without
            CPUs, and do not look at the host.
        """
        if config_proto is not None and "device_count" in config_proto:
            return {
                kind: count
                for kind, count in config_proto["device_count"].items()
                if kind != "CPU" and count
            }
        labels = (
            set()
            if task_type is None or task_id is None
            else {f"job:{task_type}", f"task:{task_id}"}
        )
        parts = [name.split("/") for name in self._device_names() if labels <= set(name.split("/"))]
        counts = Counter(
            part.split(":")[1] for name in parts for part in name if part.startswith("device:")
        )
        return {kind: count for kind, count in counts.items() if kind != "CPU"}

    def validate(self) -> list[str]:
        """Return one sentence for each problem with the cluster and with the task of this process.
        An empty list means that there is no problem.

        >>> spec = zd.ClusterSpec({"worker": ["host1:5000"]})
        >>> zd.resolvers.SimpleClusterResolver(spec).validate()
        []

        This checks the names of jobs, that there is at most one chief and one evaluator, that the
        cluster has the task of this process, and the form of addresses. A chief or an evaluator
        need not be in the cluster, because it may run beside the cluster. This method connects to
        no task.
        """
        try:
            spec = self.cluster_spec()
            me = self.task_type, self.task_id
        except (ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return [str(error.args[0]) if isinstance(error, KeyError) else str(error)]
        problems = []
        # A chief that is not in the cluster is the program, which needs no address in the cluster.
        beside = me[0] == "chief" and "chief" not in spec.jobs
        try:
            validate_cluster_spec(spec, *((None, None) if beside else me))
        except ValueError as error:
            problems.append(str(error))
        if sum(map(spec.num_tasks, spec.jobs)) > 1 and None in me:
            problems.append(
                "the cluster has several tasks, and nothing says which one this process is"
            )
        return problems + spec.validate()

    # -- what the properties return, unless a program has set them; a resolver may override these ----

    def _own_task_type(self) -> str | None:
        return self._task_type

    def _own_task_id(self) -> int | None:
        return self._task_id

    def _own_rpc_layer(self) -> str | None:
        return self._rpc_layer

    def _device_names(self) -> list[str]:
        """Return the names of the known devices, as `/job:worker/task:0/device:GPU:1`. These are
        the GPUs that this process may use."""
        has_task = self.task_type is not None and self.task_id is not None
        own = f"/job:{self.task_type}/task:{self.task_id}" if has_task else ""
        return [f"{own}/device:GPU:{index}" for index in range(len(devices.gpus()))]
