"""The resolver that reads the cluster from an environment variable: TF_CONFIG, which TensorFlow's
platforms set, or ZMQDIST_CONFIG.

Rules
    TF_CONFIG is JSON: {"cluster": ..., "task": {"type": ..., "index": ...}, "rpc_layer": ...,
    "session_master": ...}. Every key may be absent. ZMQDIST_CONFIG is JSON of this form, or the
    path of a cluster file, which names no task. If both variables are set, only TF_CONFIG is read,
    because `zmqdist launch` sets both, and only TF_CONFIG has the task. If neither is set, the
    cluster is empty.

    Arguments and attributes of the resolver win over the variables. Each call of a method reads the
    environment again.

In a process that `zmqdist launch` has started, the launcher has decided which tasks the cluster has
and which task the process runs. The rank of the process, or the labels of its pod, do not describe
this cluster. All resolvers therefore describe the launcher's cluster (`launched_cluster`), unless
the caller has named another source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.environment import CONFIG_ENV, TF_CONFIG_ENV, is_json
from zmqdist.cluster.resolvers.base import ClusterResolver, master_url
from zmqdist.field_types import checked


@checked
class TFConfigClusterResolver(ClusterResolver):
    """A resolver of the cluster in TF_CONFIG or else in ZMQDIST_CONFIG. Each method and attribute
    reads the variable when it is used.

    >>> import json, os
    >>> spec, own = {"worker": ["host1:5000"]}, {"type": "worker", "index": 0}
    >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": spec, "task": own})
    >>> resolver = zd.resolvers.TFConfigClusterResolver()
    >>> resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    ({'worker': ['host1:5000']}, 'worker', 0)
    >>> del os.environ["TF_CONFIG"]

    Args:
      task_type, task_id, rpc_layer, environment: values that win over those in the variable.

    Every method and attribute can raise these errors, whose texts name the variable or the file.

    Raises:
      json.JSONDecodeError: the variable is not JSON. An empty TF_CONFIG is not JSON, either.
      ValueError, TypeError: the JSON does not describe a cluster, or an index is not a number.
      ConfigError: the variable names a cluster file that cannot be read or has a mistake.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the `cluster` of the variable, or an empty ClusterSpec if the variable has none.

        >>> import os
        >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["host1:5000"]}}'
        >>> zd.resolvers.TFConfigClusterResolver().cluster_spec().as_dict()
        {'worker': ['host1:5000']}
        >>> del os.environ["TF_CONFIG"]
        """
        variable, config = _read()
        cluster = config.get("cluster", {})
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{variable}: cluster: {error}") from None

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task, by default of the task of this process.

        >>> import os
        >>> jobs = '{"worker": ["host1:5000"], "ps": ["host2:5000"]}'
        >>> os.environ["TF_CONFIG"] = f'{{"cluster": {jobs}}}'
        >>> zd.resolvers.TFConfigClusterResolver().master("worker", 0, "zmq")
        'zmq://host1:5000'
        >>> del os.environ["TF_CONFIG"]

        If the variable has a `session_master`, return this value unchanged. Otherwise, if the
        cluster has at most one task, return "".

        Raises:
          ValueError: the cluster has no such task, or it has several tasks and neither the
            arguments nor the variable name one of them.
        """
        variable, config = _read()
        if config.get("session_master") is not None:
            return str(config["session_master"])
        spec = self.cluster_spec()
        if not spec.jobs or (len(spec.jobs) == 1 and spec.num_tasks(spec.jobs[0]) == 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ValueError(
                f"{variable} does not say which task this process is; "
                'add "task": {"type": "worker", "index": 0}, or give task_type and task_id to the '
                "resolver"
            )
        try:
            address = spec.task_address(task_type, task_id)
        except ValueError as error:
            raise ValueError(f"{variable}: task: {error}") from None
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    def environment(self) -> str:
        if self._environment is not None:
            return self._environment
        return str(_read()[1].get("environment") or "")

    def _own_task_type(self) -> str | None:
        if self._task_type is not None:
            return str(self._task_type)
        value = _task().get("type")
        return None if value is None else str(value)

    def _own_task_id(self) -> int | None:
        if self._task_id is not None:
            return int(self._task_id)
        value = _task().get("index")
        try:
            return None if value is None else int(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"{_read()[0]}: task: the index must be a number, not {value!r}"
            ) from None

    def _own_rpc_layer(self) -> str | None:
        if self._rpc_layer is not None:
            return self._rpc_layer
        value = _read()[1].get("rpc_layer")
        return None if value is None else str(value)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Return how many accelerators of each type a task has, by default the task of this
        process.

        >>> zd.resolvers.TFConfigClusterResolver().num_accelerators()
        {}
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return super().num_accelerators(task_type, task_id, config_proto)


def _task() -> dict[str, Any]:
    variable, config = _read()
    task = config.get("task") or {}
    if not isinstance(task, dict):
        raise ValueError(
            f'{variable}: task must be an object like {{"type": "worker", "index": 0}}, not '
            f"{task!r}"
        )
    return task


def _read() -> tuple[str, dict[str, Any]]:
    """Return the name of the environment variable that describes the cluster, and its content as a
    dict in the form of TF_CONFIG."""
    text = os.environ.get(TF_CONFIG_ENV)
    if text is not None:
        return TF_CONFIG_ENV, _parsed(TF_CONFIG_ENV, text)
    text = os.environ.get(CONFIG_ENV)
    if not text:
        return TF_CONFIG_ENV, {}
    return CONFIG_ENV, _parsed(CONFIG_ENV, text) if is_json(text) else _of_file()


def _parsed(variable: str, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(
            f'{variable} is no JSON; write {{"cluster": {{...}}, "task": {{...}}}} or '
            f"unset it: {error.msg}",
            text,
            error.pos,
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            f'{variable} must be a JSON object like {{"cluster": {{...}}}}, not {config!r}'
        )
    return config


def _of_file() -> dict[str, Any]:
    """Return the content of the cluster file that ZMQDIST_CONFIG names, in the form of
    TF_CONFIG.
    """
    from zmqdist.cluster import ClusterConfig  # YAML takes 20 ms to import

    config = ClusterConfig.from_environment()
    assert config is not None
    return {"cluster": config.task_spec, "rpc_layer": "zmq"}


# -- the launcher's cluster, for the other resolvers ------------------------------------------------


def launched_cluster() -> TFConfigClusterResolver | None:
    """Return a resolver of the cluster of `zmqdist launch`, or None if `zmqdist launch` has not
    started this process."""
    path = os.environ.get(CONFIG_ENV)
    if not path or is_json(path) or TF_CONFIG_ENV not in os.environ:
        return None
    from zmqdist.cluster import ClusterConfig  # YAML takes 20 ms to import

    config = ClusterConfig.from_environment()
    return None if config is None or config.runtime is None else TFConfigClusterResolver()


def has_no_address(resolver: ClusterResolver, task_type: str | None) -> bool:
    """Return whether a task belongs to the job of this process and the cluster has no addresses for
    this job.

    Such a task is the program, or a worker of a cluster file that has only a count of workers. No
    process connects to it.

    Args:
      task_type: the job of the task. None means the job of this process.
    """
    own_job = task_type is None or task_type == resolver.task_type
    return own_job and resolver.task_type not in resolver.cluster_spec().jobs
