"""The cluster of a Slurm job step: which nodes, how many tasks on each, and which of them this process is.

Rules
    Every task of the step asks Slurm's variables and comes to the same list of addresses: the hosts in order, and on each host as
    many ports from `port_base` as it has tasks. The jobs share out that list in the order of their names, and SLURM_PROCID is
    the place of this process in it.

    A variable of the step that is absent is looked for under its name in the job (SLURM_STEP_NODELIST as SLURM_JOB_NODELIST), so that a
    script of `sbatch` without `srun` has an answer, too.

Not here: the parts of a heterogeneous job. Slurm tells each part its own nodes only; give `jobs` and a dict for `tasks_per_node`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers import devices
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.cluster.resolvers.hostlist import expand_hostlist, expand_tasks_per_node

_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class SlurmClusterResolver(ClusterResolver):
    """Reads Slurm's variables when it is made; `cluster_spec` finds out the own task, and gives it its GPUs.

    Args:
      jobs: how many tasks each job has; by default all are workers.
      port_base: port of the first task of each host; further tasks have the next ones.
      gpus_per_node: by default what CUDA_VISIBLE_DEVICES or nvidia-smi says; 0 on hosts without any.
      gpus_per_task: by default the GPUs of a node, shared out equally to the largest number of tasks that a node has.
      tasks_per_node: a number for all nodes, or {host: number}; by default what Slurm says.
      auto_set_gpu: whether `cluster_spec` sets CUDA_VISIBLE_DEVICES of this process to its GPUs. Without GPUs it changes nothing.
      order: hosts by "name", which puts n10 before n9; or as in Slurm's "nodelist", which is how Slurm itself numbers tasks
        unless it was told to distribute them otherwise. `validate` says when this process is on another host than its address.

    Raises:
      RuntimeError: a variable is absent or unreadable (the text names it), the numbers of tasks disagree, this process
        is none of them, or more GPUs are wanted than a node has.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "zmq",
        *,
        order: Literal["name", "nodelist"] = "name",
    ) -> None:
        if order not in ("name", "nodelist"):
            raise ValueError(f'order must be "name" or "nodelist", not {order!r}')
        self._rank = self._resolve_own_rank()
        self._jobs = {"worker": self._resolve_num_tasks()} if jobs is None else dict(jobs)
        if tasks_per_node is None:
            per_node = self._resolve_task_configuration()
        elif isinstance(tasks_per_node, Mapping):
            per_node = dict(tasks_per_node)
        else:
            per_node = dict.fromkeys(self._resolve_hostlist(), tasks_per_node)
        self._per_node = dict(sorted(per_node.items())) if order == "name" else per_node
        self._check_tasks()
        self._share_gpus(gpus_per_node, gpus_per_task)
        self._port_base = port_base
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster. Also takes `task_type` and `task_id` from the rank, unless they were set, and see `auto_set_gpu`."""
        addresses = [f"{host}:{self._port_base + index}" for host, index in self._places()]
        cluster: dict[str, list[str]] = {}
        first = 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = addresses[first : first + count]
            if first <= self._rank < first + count and (self._task_type, self._task_id) == (None, None):
                self._task_type, self._task_id = job, self._rank - first
            first += count
        if self._auto_set_gpu and self._gpus_per_task:
            _, index = self._places()[self._rank]
            mine = self._gpus[index * self._gpus_per_task : (index + 1) * self._gpus_per_task]
            os.environ[devices.CUDA] = ",".join(mine)
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """(task_type, task_id); None for both before `cluster_spec` was asked, unless they were set."""
        return self.task_type, self.task_id

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The URL of that task, or of the own one; "" before that is known."""
        return self._task_master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """The GPUs of a task; all tasks have equally many."""
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}

    def validate(self) -> list[str]:
        """As the base; and whether this process is where its address is."""
        problems = super().validate()
        here, (host, _) = os.environ.get("SLURMD_NODENAME"), self._places()[self._rank]
        if here is not None and here != host:
            problems.append(
                f"rank {self._rank} has an address at {host}, but this is {here}: "
                'pass order="nodelist", and do not change the distribution of tasks in srun'
            )
        return problems

    # -- what Slurm says; to be overridden for something else that is like it ----------------------------------------

    def _resolve_own_rank(self) -> int:
        """The number of this process among all tasks, from 0."""
        return _number("SLURM_PROCID")

    def _resolve_num_tasks(self) -> int:
        """How many tasks there are."""
        return _number(*_NUM_TASKS)

    def _resolve_hostlist(self) -> list[str]:
        """The names of the hosts."""
        text, variable = _variable(*_NODELIST)
        try:
            return expand_hostlist(text)
        except ValueError as error:
            raise RuntimeError(f"{variable}: {error}") from None

    def _resolve_task_configuration(self) -> dict[str, int]:
        """How many tasks each host has."""
        hosts = self._resolve_hostlist()
        text, variable = _variable(*_TASKS_PER_NODE)
        try:
            counts = expand_tasks_per_node(text)
        except ValueError as error:
            raise RuntimeError(f"{variable}: {error}") from None
        if len(hosts) != len(counts):
            raise RuntimeError(
                f"{variable} is {text!r}, for {len(counts)} nodes, but the list of nodes has {len(hosts)}"
            )
        return dict(zip(hosts, counts, strict=True))

    # -- from these to tasks and GPUs -------------------------------------------------------------------------------

    def _places(self) -> list[tuple[str, int]]:
        """(host, number on that host) of each task by its rank."""
        return [(host, index) for host, count in self._per_node.items() for index in range(count)]

    def _check_tasks(self) -> None:
        wanted, placed = sum(self._jobs.values()), len(self._places())
        if wanted != placed:
            jobs = ", ".join(f"{job}: {count}" for job, count in sorted(self._jobs.items()))
            raise RuntimeError(
                f"the jobs ({jobs}) have {wanted} tasks together, but Slurm gives {placed}: change jobs, or srun --ntasks"
            )
        if not 0 <= self._rank < placed:
            raise RuntimeError(
                f"SLURM_PROCID is {self._rank}, but there are {placed} tasks, from 0: is this a part of a heterogeneous job? "
                "Then give jobs, and {host: number} for tasks_per_node"
            )

    def _share_gpus(self, per_node: int | None, per_task: int | None) -> None:
        named = devices.gpus() if per_node is None or devices.CUDA in os.environ else []
        per_node = len(named) if per_node is None else per_node
        most = max(self._per_node.values())
        self._gpus_per_task = per_node // most if per_task is None else per_task
        if most * self._gpus_per_task > per_node:
            raise RuntimeError(
                f"{most} tasks with {self._gpus_per_task} GPUs each want more than the {per_node} GPUs that a node has"
            )
        # What the node shows us may be some of its GPUs, under their own numbers.
        self._gpus = named if len(named) >= per_node else [str(index) for index in range(per_node)]


def _variable(*names: str) -> tuple[str, str]:
    """(value, name) of the first of these variables that is there."""
    for name in names:
        if name in os.environ:
            return os.environ[name], name
    raise RuntimeError(f"{' or '.join(names)} is not set: is this a task of srun?")


def _number(*names: str) -> int:
    text, name = _variable(*names)
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{name} must be a number, not {text!r}") from None
