"""Translates a cluster file into manifests of Kubernetes, as text for `kubectl apply -f -`.
Kubernetes then does the work of a launcher.

Promises
    K1  The same file, arguments and grace give the same bytes.
    K2  A pod mounts only the keys of its role, so that no worker and no program has the server's
        key. The manifests contain no key: they name the Secret that has the keys.
    K3  Workers, parameter servers and the program find the cluster by ZMQDIST_CONFIG, TF_CONFIG and
        ZMQDIST_KEYS_DIR, and the evaluator by TF_CONFIG, as under the local launcher. The addresses
        are names of Services, which do not change when a pod is replaced.
    K4  Pods do not run as root and have no privileges. They have a token for the API of Kubernetes
        only if the file names a service account.

Two things differ from the local launcher. Kubernetes ignores `restarts`, and restarts workers and
parameter servers without a bound. Workers and parameter servers run until the manifests are
deleted, even if the program has ended.

This module does not connect to Kubernetes.
"""

from __future__ import annotations

import json
import math
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from zmqdist import limits
from zmqdist.addresses import VARIABLE as PORTS_ENV
from zmqdist.addresses import split_address
from zmqdist.blas_threads import VARIABLES as THREAD_VARIABLES
from zmqdist.cluster.check import split_command
from zmqdist.cluster.config import ClusterConfig, yaml_documents
from zmqdist.cluster.environment import CONFIG_ENV, TF_CONFIG_ENV
from zmqdist.cluster.file_sections import (
    DispatcherJob,
    JobsConfig,
    RuntimeConfig,
    SecurityConfig,
    SingleJob,
    WorkerJob,
)
from zmqdist.cluster.launcher_sections import KubernetesConfig, PodResources
from zmqdist.transport import keys
from zmqdist.transport.credentials import KEYS_DIR_VARIABLE

DISPATCHER_PORT: Final = 5050
WORKER_PORT: Final = 5051
PS_PORT: Final = 5052

KEYS_DIR: Final = "/etc/zmqdist/keys"
CONFIG_DIR: Final = "/etc/zmqdist/config"
CONFIG_FILE: Final = f"{CONFIG_DIR}/cluster.yaml"
DATA_DIR: Final = "/var/lib/zmqdist"
EVERY_INTERFACE: Final = "0.0.0.0"

ROLE_FILES: Final = {
    "dispatcher": ("server.key", keys.AUTHORIZED, "server.pub", "client.key"),
    "ps": ("server.key", "worker.key", keys.AUTHORIZED, "server.pub", "client.key"),
    "worker": ("worker.key", keys.AUTHORIZED, "server.pub"),
    "program": ("submit.key", keys.AUTHORIZED, "server.pub"),
    "evaluator": (),
}
"""The key files of each role, as SECURITY.md lists them. The dispatcher and ps also have the
client's key, because their liveness probes are clients."""

SECRET_FILES: Final = (
    "server.key",
    "worker.key",
    "submit.key",
    "client.key",
    "server.pub",
    keys.AUTHORIZED,
)
"""The files in the Secret. The admin's key is not among them: it stays in the folder in which it
was made."""

_INDEX_ENV: Final = "POD_INDEX"
_INDEX: Final = f"$({_INDEX_ENV})"
_READ_BY_OWNER: Final = 0o400

_Object = dict[str, Any]


def render(
    config: ClusterConfig, arguments: Sequence[str] = (), grace_s: float = limits.GRACE_S
) -> str:
    """Return the manifests of a cluster file as YAML documents. Comments at the beginning of the
    text say how to apply the manifests.

    Args:
      config: the cluster file. Its check (cluster/check.py) has refused settings that pods cannot
        have.
      arguments: words to add to the program's command line.
      grace_s: when Kubernetes ends a pod, the seconds that a worker or ps may drain, or that the
        program may take to end.
    """
    cluster = _Cluster(config, arguments, grace_s)
    head = [
        (
            f"Manifests of the cluster {config.name}, written by `zmqdist launch --on kubernetes "
            f"--render`; apply them with kubectl apply -f."
        ),
        (
            f"The program is in the image {cluster.section.image}; its command runs in the working "
            f"directory of the image."
        ),
        f"The pods mount their keys from the Secret {cluster.secret}. This command makes it, once:",
        f"  {secret_command(config)}",
    ]
    return "".join(f"# {line}\n" for line in head) + yaml_documents(cluster.objects())


def secret_command(config: ClusterConfig) -> str:
    """Return the shell command that makes the Secret. The command uses the keys in the folder that
    the file names, or else makes new keys.
    """
    folder = config.security.keys or "keys"
    files = " ".join(
        f"--from-file={shlex.quote(posixpath.join(folder, name))}" for name in SECRET_FILES
    )
    create = f"kubectl create secret generic {config.name}-keys --namespace {config.kubernetes.namespace} {files}"
    return create if config.security.keys else f"zmqdist keygen {folder} && {create}"


class _Cluster:
    """The objects of Kubernetes for one cluster file."""

    def __init__(self, config: ClusterConfig, arguments: Sequence[str], grace_s: float) -> None:
        self.name = config.name
        self.section: KubernetesConfig = config.kubernetes
        self.secret = f"{config.name}-keys"
        self._program = [*config.command, *arguments]
        self._grace_s = grace_s
        self._ports = {} if config.ports is None else {PORTS_ENV: config.ports}
        self._environments = {name: job.env for name, job in config.jobs.task_jobs().items()}
        self._config = self._with_addresses(config)
        self._dispatcher = self._config.jobs.dispatcher or DispatcherJob()

    def objects(self) -> Iterator[_Object]:
        """Yield all objects of the cluster. Each object follows the objects that it needs."""
        jobs = self._config.jobs
        text = self._config.to_yaml()
        yield self._object(
            "v1", "ConfigMap", "config", {"data": {posixpath.basename(CONFIG_FILE): text}}
        )
        yield self._service(
            "dispatcher", split_address(self._dispatcher.address)[1], headless=False
        )
        yield self._dispatcher_set()
        if jobs.ps is not None:
            yield self._service("ps", PS_PORT)
            yield self._stateful_set("ps", self._ps_container(), len(jobs.ps.indices()))
        if jobs.worker is not None:
            yield self._service("worker", WORKER_PORT)
            # no liveness probe: the dispatcher itself notices a frozen worker by heartbeats
            options = ["--config", CONFIG_FILE, "--index", _INDEX, "--port", str(WORKER_PORT)]
            container = self._serving_container(
                "worker", ["zmqdist", "worker", *options], WORKER_PORT
            )
            yield self._stateful_set("worker", container, len(jobs.worker.indices()))
        if jobs.evaluator is not None:
            program = jobs.evaluator.program
            command = self._program if program is None else list(split_command(program))
            yield self._job("evaluator", jobs.evaluator, command)
        yield self._job("program", jobs.chief or SingleJob(), self._program)

    # -- the cluster file as pods see it -----------------------------------------------------------

    def _with_addresses(self, config: ClusterConfig) -> ClusterConfig:
        """Return the cluster file for the pods. Its addresses are names of Services, and it has no
        settings that only this module reads.

        It also has no `env`, because a pod gets only the environment variables of its own job.
        """
        dispatcher = config.jobs.dispatcher or DispatcherJob()
        port = split_address(dispatcher.address)[1] or DISPATCHER_PORT
        address = f"{self._host('dispatcher')}:{port}"
        work_dir = None if dispatcher.work_dir is None else f"{DATA_DIR}/work"
        worker = config.jobs.worker or WorkerJob(count=1)
        chief, evaluator, ps = config.jobs.chief, config.jobs.evaluator, config.jobs.ps
        jobs = JobsConfig(
            dispatcher=msgspec.structs.replace(dispatcher, address=address, work_dir=work_dir),
            worker=msgspec.structs.replace(
                self._with_tasks("worker", worker, WORKER_PORT),
                slots=self._slots(worker),
                threads_per_slot=self._threads_per_slot(worker),
            ),
            ps=None if ps is None else self._with_tasks("ps", ps, PS_PORT),
            chief=None if chief is None else msgspec.structs.replace(chief, env={}),
            evaluator=None if evaluator is None else msgspec.structs.replace(evaluator, env={}),
        )
        return ClusterConfig(
            name=config.name,
            jobs=jobs,
            program=config.program,
            security=SecurityConfig(curve=True, keys=KEYS_DIR),
            runtime=RuntimeConfig(dispatcher=f"zmq://{address}", keys_dir=KEYS_DIR),
        )

    def _with_tasks(self, job: str, section: Any, port: int) -> Any:
        host = self._host(job)
        tasks = [f"{self.name}-{job}-{index}.{host}:{port}" for index in section.indices()]
        return msgspec.structs.replace(section, count=None, tasks=tasks, env={})

    def _slots(self, worker: WorkerJob) -> int:
        """Return the number of slots of a worker. `auto` means one slot for each core of the pod.
        This is computed here, because the worker itself would count the cores of the whole node.
        """
        return (
            math.ceil(self.section.resources.worker.cpu or 1)
            if worker.slots == "auto"
            else worker.slots
        )

    def _threads_per_slot(self, worker: WorkerJob) -> int | None:
        """Return the number of threads of BLAS in each slot: the number in the file, or else the
        pod's cores divided by its slots. This is computed here, because the worker itself would
        divide the cores of the whole node.
        """
        cores = self.section.resources.worker.cpu
        if (
            worker.threads_per_slot is not None
            or cores is None
            or any(name in worker.env for name in THREAD_VARIABLES)
        ):
            return worker.threads_per_slot
        return max(1, math.floor(cores / self._slots(worker)))

    def _host(self, job: str) -> str:
        return f"{self.name}-{job}.{self.section.namespace}.svc"

    # -- containers --------------------------------------------------------------------------------

    def _dispatcher_set(self) -> _Object:
        port = split_address(self._dispatcher.address)[1]
        command = ["zmqdist", "dispatcher", "--config", CONFIG_FILE, "--host", EVERY_INTERFACE]
        container = self._container("dispatcher", command, {}, port)
        container["livenessProbe"] = _answers("status", port)
        stateful_set = self._stateful_set("dispatcher", container, 1)
        if self._dispatcher.work_dir is not None:
            container["volumeMounts"].append({"name": "data", "mountPath": DATA_DIR})
            storage = {"requests": {"storage": self.section.storage}}
            claim = {"accessModes": ["ReadWriteOnce"], "resources": storage}
            stateful_set["spec"]["volumeClaimTemplates"] = [
                {"metadata": {"name": "data"}, "spec": claim}
            ]
            # Without this policy each mount would open the files of the work_dir to the group, and
            # the dispatcher refuses such files.
            stateful_set["spec"]["template"]["spec"]["securityContext"]["fsGroupChangePolicy"] = (
                "OnRootMismatch"
            )
        return stateful_set

    def _ps_container(self) -> _Object:
        assert self._config.jobs.ps is not None
        spec = json.dumps({"ps": [*self._config.jobs.ps.addresses().values()]})
        command = [
            "zmqdist",
            "server",
            "--spec",
            spec,
            "--job",
            "ps",
            "--index",
            _INDEX,
            "--bind",
            EVERY_INTERFACE,
        ]
        container = self._serving_container("ps", command, PS_PORT)
        container["livenessProbe"] = _answers("methods", PS_PORT)
        return container

    def _serving_container(self, job: str, command: Sequence[str], port: int) -> _Object:
        variables = {**self._task(job, _INDEX), **_importable(self._program)}
        return self._container(job, [*command, "--grace", f"{self._grace_s:g}"], variables, port)

    def _container(
        self, job: str, command: Sequence[str], variables: Mapping[str, str], port: int = 0
    ) -> _Object:
        files = ROLE_FILES[job]
        own = {KEYS_DIR_VARIABLE: KEYS_DIR, **self._ports} if files else {}
        variables = {**own, **variables, **self._user_variables(job)}
        environment: list[_Object] = [
            {"name": name, "value": value} for name, value in variables.items()
        ]
        if any(_INDEX in word for word in command):
            field = {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
            # This variable has to be the first, because Kubernetes replaces references to it only
            # in the variables after it.
            environment.insert(0, {"name": _INDEX_ENV, "valueFrom": {"fieldRef": field}})
        container: _Object = {"name": job, "image": self.section.image, "command": list(command)}
        if self.section.image_pull_policy is not None:
            container["imagePullPolicy"] = self.section.image_pull_policy
        if environment:
            container["env"] = environment
        if port:
            container["ports"] = [{"name": "zmq", "containerPort": port}]
            # A pod is ready when its port is bound, because ZeroMQ keeps messages that arrive
            # before the process serves.
            container["readinessProbe"] = {
                "tcpSocket": {"port": "zmq"},
                "periodSeconds": limits.POD_READY_LOOK_S,
            }
        if resources := _resources(getattr(self.section.resources, job)):
            container["resources"] = resources
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        if files:
            mounts = [
                {"name": "keys", "mountPath": KEYS_DIR},
                {"name": "config", "mountPath": CONFIG_DIR},
            ]
            container["volumeMounts"] = [{**mount, "readOnly": True} for mount in mounts]
        return container

    def _task(self, job: str, index: str) -> dict[str, str]:
        """Return the environment variables by which a task finds its cluster. `index` may be a
        reference $(NAME), which Kubernetes replaces.
        """
        cluster = _literal(json.dumps(self._config.task_spec.as_dict()))
        tf_config = f'{{"cluster": {cluster}, "task": {{"type": "{job}", "index": {index}}}, "rpc_layer": "zmq"}}'
        return {CONFIG_ENV: CONFIG_FILE, TF_CONFIG_ENV: tf_config}

    def _user_variables(self, job: str) -> dict[str, str]:
        environment = self._environments.get("chief" if job == "program" else job, {})
        return {name: _literal(value) for name, value in environment.items()}

    # -- objects -----------------------------------------------------------------------------------

    def _stateful_set(self, job: str, container: _Object, replicas: int) -> _Object:
        spec = {
            "serviceName": f"{self.name}-{job}",
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self._selector(job)},
            "template": self._template(job, container, "Always"),
        }
        return self._object("apps/v1", "StatefulSet", job, {"spec": spec})

    def _job(self, job: str, section: SingleJob, command: Sequence[str]) -> _Object:
        """Return a Job that runs a program once. As under `zmqdist launch`, a program that failed
        is not restarted."""
        task = "chief" if job == "program" else job
        (index,) = section.indices()
        variables = {**self._task(task, str(index)), **_importable(command)}
        if task == "evaluator":
            # With this variable the evaluator's program would find the dispatcher and train a
            # second time (`Launch._start_evaluator`).
            del variables[CONFIG_ENV]
        container = self._container(job, [_literal(word) for word in command], variables)
        spec = {"backoffLimit": 0, "template": self._template(job, container, "Never")}
        return self._object("batch/v1", "Job", job, {"spec": spec})

    def _template(self, job: str, container: _Object, restart_policy: str) -> _Object:
        section, user = self.section, self.section.user_id
        spec: _Object = {
            "restartPolicy": restart_policy,
            # The pod's grace is longer than the role's, so that the role ends by itself before the
            # kubelet kills it.
            "terminationGracePeriodSeconds": math.ceil(self._grace_s) + limits.POD_GRACE_MARGIN_S,
            "automountServiceAccountToken": section.service_account is not None,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        }
        if section.service_account is not None:
            spec["serviceAccountName"] = section.service_account
        if files := ROLE_FILES[job]:
            items = [{"key": name, "path": name} for name in files]
            secret = {"secretName": self.secret, "defaultMode": _READ_BY_OWNER, "items": items}
            spec["volumes"] = [
                {"name": "keys", "secret": secret},
                {"name": "config", "configMap": {"name": f"{self.name}-config"}},
            ]
        return {"metadata": {"labels": self._labels(job)}, "spec": spec}

    def _service(self, job: str, port: int, headless: bool = True) -> _Object:
        """Return the Service of a job. A headless Service gives each pod a name as soon as the pod
        has an address.

        The dispatcher's Service is not headless: it has an address of its own, so that its name can
        be resolved at once and its address stays the same when the pod is replaced.
        """
        spec: _Object = {
            "selector": self._selector(job),
            "ports": [{"name": "zmq", "port": port, "targetPort": "zmq"}],
        }
        if headless:
            spec = {"clusterIP": "None", "publishNotReadyAddresses": True, **spec}
        return self._object("v1", "Service", job, {"spec": spec})

    def _object(self, version: str, kind: str, part: str, body: _Object) -> _Object:
        name = {
            "name": f"{self.name}-{part}",
            "namespace": self.section.namespace,
            "labels": self._labels(part),
        }
        return {"apiVersion": version, "kind": kind, "metadata": name, **body}

    def _labels(self, part: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "zmqdist", **self._selector(part)}

    def _selector(self, part: str) -> dict[str, str]:
        return {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/component": part}


def _literal(text: str) -> str:
    """Return a text with each `$` doubled, so that Kubernetes does not replace $(NAME) in it."""
    return text.replace("$", "$$")


def _importable(command: Sequence[str]) -> dict[str, str]:
    """Return the PYTHONPATH with the folder of the program's script, so that functions can import
    modules beside the script."""
    script = next((word for word in command[1:] if word.endswith(".py")), None)
    return {} if script is None else {"PYTHONPATH": _literal(str(PurePosixPath(script).parent))}


def _resources(section: PodResources) -> _Object:
    """Return the requests and limits of a container. Cores are requested but not limited, so that a
    pod may use idle cores. Memory is requested and limited. GPUs are limited, and Kubernetes takes
    this limit as the request, too.
    """
    whole = {} if section.memory is None else {"memory": section.memory}
    bounds = {**whole, **({"nvidia.com/gpu": str(section.gpus)} if section.gpus else {})}
    requests = {**({} if section.cpu is None else {"cpu": _cores(section.cpu)}), **whole}
    return {
        **({"requests": requests} if requests else {}),
        **({"limits": bounds} if bounds else {}),
    }


def _cores(cores: float) -> str:
    thousandths = math.ceil(round(cores * 1000, 6))
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def _answers(command: str, port: int) -> _Object:
    """Return a liveness probe that calls the server with the client's key.

    The period of the probe is long, because each probe starts a Python interpreter, which takes
    half a second of a core. Kubernetes restarts the pod only after POD_ALIVE_FAILURES probes in a
    row have failed, because a restart costs more than a wait.
    """
    words = [
        "zmqdist",
        command,
        f"127.0.0.1:{port}",
        "--timeout",
        f"{limits.POD_ALIVE_ANSWER_S / 2:g}",
    ]
    return {
        "exec": {"command": words},
        "periodSeconds": limits.POD_ALIVE_LOOK_S,
        "timeoutSeconds": limits.POD_ALIVE_ANSWER_S,
        "failureThreshold": limits.POD_ALIVE_FAILURES,
    }
