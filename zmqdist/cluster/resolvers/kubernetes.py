"""The resolver that finds the cluster by the labels of pods. It needs the package `kubernetes`,
or a client from the caller.

Rules
    A job is a list of label selectors. Its tasks are the pods that the first selector matches, then
    those that the second matches, and so on. The pods of a selector are sorted by name. A number at
    the end of a name is compared as a number, so that worker-2 precedes worker-10, and each pod of
    a StatefulSet gets its index in the set. If a pod does not run, `cluster_spec` raises. If it
    left the pod out instead, another pod would get the pod's index.

    In a process that `zmqdist launch` has started, the resolver describes the launcher's cluster
    (tf_config.py), because such a process has no right to list pods. If the caller passes a client
    or OFF_CLUSTER, the resolver lists pods nevertheless.

No method waits for pods unless `wait_s` is set. Each request to the API server has its own
time-out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from zmqdist import clock as time
from zmqdist import limits
from zmqdist.addresses import join_address
from zmqdist.clock import duration
from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.tf_config import has_no_address, launched_cluster
from zmqdist.errors import needs
from zmqdist.field_types import checked, converted


class ExecutableLocation(enum.Enum):
    """Where the program runs, which decides how it finds the API server.

    >>> zd.resolvers.ExecutableLocation.OFF_CLUSTER.name
    'OFF_CLUSTER'
    """

    WITHIN_CLUSTER = 0
    """The program runs in a pod and uses the pod's service account."""
    OFF_CLUSTER = 1
    """The program runs outside of the Kubernetes cluster and uses the user's kubeconfig."""


class _NotYet(Exception):
    """A problem that may disappear while `cluster_spec` waits."""


@checked
class KubernetesClusterResolver(ClusterResolver):
    """A resolver whose tasks are the running pods with given labels. Each call of `cluster_spec`
    requests the pods from the API server.

    >>> resolver = zd.resolvers.KubernetesClusterResolver(override_client=core_v1)
    >>> resolver.cluster_spec().as_dict()
    {'worker': ['10.0.0.1:8470', '10.0.0.2:8470']}

    In a process that `zmqdist launch` has started, all methods describe the launcher's cluster, and
    the arguments have no effect. If `override_client` is given or `executable_location` is
    OFF_CLUSTER, the resolver lists pods in such a process, too.

    Args:
      job_to_label_mapping: the label selectors of each job. By default the workers are the pods
        with `job-name=tensorflow`.
      tf_server_port: the port of every task.
      override_client: a client to use in place of a `kubernetes.client.CoreV1Api`. The package
        `kubernetes` is then not needed.
      executable_location: WITHIN_CLUSTER or OFF_CLUSTER. It has no effect if `override_client` is
        given.
      address_type: "host_ip" selects the address of the node, which is right for pods with
        `hostNetwork`. "pod_ip" selects the address of the pod. "dns" selects the name of the pod,
        which a pod of a StatefulSet keeps when it is restarted; the headless Service of the pod
        must exist.
      namespace: the pods' namespace. None searches all namespaces, which pods rarely have the right
        to do.
      wait_s: how many seconds `cluster_spec` waits for pods that do not run yet. 0 means that it
        does not wait. If it waits, each job without `num_tasks` must have at least one pod.
      num_tasks: how many pods each job must have, so that a cluster that is still starting is not
        taken for complete.

    Raises:
      ImportError: the package `kubernetes` is not installed.
      RuntimeError: the package does not find the API server.
      ValueError: the location or the address type is unknown, or `num_tasks` names an unknown job.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Iterable[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "zmq",
        override_client: Any = None,
        executable_location: ExecutableLocation = ExecutableLocation.WITHIN_CLUSTER,
        *,
        address_type: Literal["host_ip", "pod_ip", "dns"] = "host_ip",
        namespace: str | None = None,
        wait_s: float = 0.0,
        num_tasks: Mapping[str, int] | None = None,
    ) -> None:
        if address_type not in ("host_ip", "pod_ip", "dns"):
            raise ValueError(
                f'address_type must be "host_ip", "pod_ip" or "dns", not {address_type!r}'
            )
        mapping = (
            {"worker": ["job-name=tensorflow"]}
            if job_to_label_mapping is None
            else job_to_label_mapping
        )
        self._selectors = {job: list(selectors) for job, selectors in mapping.items()}
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._address_type = address_type
        self._namespace = namespace
        self._wait_s = duration("wait_s", wait_s)
        self._num_tasks = dict(num_tasks or {})
        if extra_jobs := sorted(self._num_tasks.keys() - self._selectors.keys()):
            raise ValueError(
                f"num_tasks names jobs that have no label selectors: {', '.join(extra_jobs)}"
            )
        executable_location = converted(
            "executable_location", ExecutableLocation, executable_location
        )
        within = (
            override_client is None and executable_location is ExecutableLocation.WITHIN_CLUSTER
        )
        self._launched = launched_cluster() if within else None
        if self._launched is not None:
            self._task_type, self._task_id = self._launched.task_type, self._launched.task_id
        elif override_client is None:
            self._client = _client(executable_location)
        else:
            self._client = override_client

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the pods as they are now.

        >>> resolver = zd.resolvers.KubernetesClusterResolver(override_client=core_v1)
        >>> resolver.cluster_spec().num_tasks("worker")
        2

        Raises:
          RuntimeError: after `wait_s` a pod does not run or has no address, or pods are missing. If
            a pod has ended or has no name in DNS ("dns"), or if this process has no right to list
            pods, this is raised at once. Other errors of the client are not caught.
        """
        if self._launched is not None:
            return self._launched.cluster_spec()
        until = time.monotonic() + self._wait_s
        while True:
            try:
                return ClusterSpec({job: self._addresses(job) for job in self._selectors})
            except _NotYet as problem:
                left = until - time.monotonic()
                if left <= 0:
                    wait_text = f" (waited {self._wait_s:g} s)" if self._wait_s else ""
                    raise RuntimeError(f"{problem}{wait_text}") from None
            time.sleep(min(left, limits.POD_POLL_S))

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task, by default of the task of this process. "" means that this task
        is unknown or has no address.

        >>> resolver = zd.resolvers.KubernetesClusterResolver(override_client=core_v1)
        >>> resolver.master("worker", 1)
        'zmq://10.0.0.2:8470'
        """
        if self._launched is not None and has_no_address(self, task_type):
            return ""
        return self._task_master(task_type, task_id, rpc_layer)

    def _addresses(self, job: str) -> list[str]:
        pods = [pod for selector in self._selectors[job] for pod in self._pods(selector)]
        for pod in pods:
            phase = pod.status.phase
            if phase != "Running":
                text = f'Pod "{pod.metadata.name}" is not running; phase: "{phase}"'
                # a pod that has ended never runs again, so waiting would be in vain
                raise (RuntimeError if phase in ("Failed", "Succeeded") else _NotYet)(text)
        expected = self._num_tasks.get(job, 1 if self._wait_s else 0)
        if len(pods) < expected or (job in self._num_tasks and len(pods) > expected):
            text = " or ".join(self._selectors[job])
            raise _NotYet(
                f"job {job!r} has {len(pods)} pods with the label {text}, expected {expected}"
            )
        return [join_address(self._host(pod), self._port) for pod in pods]

    def _pods(self, selector: str) -> list[Any]:
        bound = {"label_selector": selector, "_request_timeout": limits.POD_LIST_S}
        try:
            if self._namespace is None:
                pod_list = self._client.list_pod_for_all_namespaces(**bound)
            else:
                pod_list = self._client.list_namespaced_pod(self._namespace, **bound)
        except Exception as error:
            # 401 and 403 are the answers to a service account without this right
            if getattr(error, "status", None) not in (401, 403):
                raise
            where = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
            text = f"the API server does not let us list the pods of {where}: give the service account that right"
            raise RuntimeError(
                text + (", or name a namespace" if self._namespace is None else "")
            ) from error
        return sorted(pod_list.items, key=lambda pod: _order(str(pod.metadata.name)))

    def _host(self, pod: Any) -> str:
        if self._address_type == "dns":
            if not (pod.spec.hostname and pod.spec.subdomain):
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}" has no name in DNS: '
                    "only pods of a StatefulSet, or with hostname and subdomain, have one"
                )
            return f"{pod.spec.hostname}.{pod.spec.subdomain}.{pod.metadata.namespace}.svc"
        host = getattr(pod.status, self._address_type)
        if not host:
            raise _NotYet(f'Pod "{pod.metadata.name}" has no {self._address_type} yet')
        return str(host)


def _order(name: str) -> tuple[str, int]:
    """Return the sort key of a pod: the pod's name without the number at its end, and this
    number.
    """
    front, dash, number = name.rpartition("-")
    return (front, int(number)) if dash and number.isascii() and number.isdecimal() else (name, -1)


def _client(location: ExecutableLocation) -> Any:
    try:
        import kubernetes
    except ImportError:
        raise ImportError(needs("KubernetesClusterResolver", "kubernetes")) from None
    within = ExecutableLocation(location) is ExecutableLocation.WITHIN_CLUSTER
    load = kubernetes.config.load_incluster_config if within else kubernetes.config.load_kube_config
    try:
        load()
    except kubernetes.config.ConfigException as error:
        hint = (
            "this is not a pod with a service account; elsewhere pass "
            "executable_location=ExecutableLocation.OFF_CLUSTER"
            if within
            else "there is no kubeconfig that can be used; in a pod pass "
            "ExecutableLocation.WITHIN_CLUSTER"
        )
        raise RuntimeError(f"no Kubernetes API server is known ({error}): {hint}") from error
    return kubernetes.client.CoreV1Api()
