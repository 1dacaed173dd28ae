"""The resolver for the processes of a Slurm job step. It reads the environment variables that Slurm
sets.

Rules
    The rules of by_rank.py hold, and SLURM_PROCID is the rank of a process.

    If a variable of the step is absent, the resolver reads the variable of the job instead, such as
    SLURM_JOB_NODELIST in place of SLURM_STEP_NODELIST. It therefore also works in a script of
    `sbatch` without `srun`.

Not here: the components of a heterogeneous job. Slurm tells each component only its own nodes, so
pass `jobs`, and a dict for `tasks_per_node`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from zmqdist.cluster import ClusterSpec
from zmqdist.cluster.resolvers import devices
from zmqdist.cluster.resolvers.by_rank import ResolverByRank, value_of
from zmqdist.cluster.resolvers.hostlist import expand_hostlist, expand_tasks_per_node
from zmqdist.field_types import checked

_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


@checked
class SlurmClusterResolver(ResolverByRank):
    """A resolver whose tasks are the processes of a Slurm job step. The constructor reads Slurm's
    variables, and `cluster_spec` assigns GPUs to this process.

    >>> import os, unittest.mock
    >>> srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    >>> srun["SLURM_TASKS_PER_NODE"] = "1(x2)"
    >>> with unittest.mock.patch.dict(os.environ, srun):  # srun sets these
    ...     resolver = zd.resolvers.SlurmClusterResolver({"worker": 2}, gpus_per_node=0)
    ...     print(resolver.cluster_spec().as_dict(), resolver.task_id)
    {'worker': ['n1:8888', 'n2:8888']} 1

    `task_type` and `task_id` are known at once. As in TensorFlow, `get_task_info` and `master` know
    the task of this process only after the first call of `cluster_spec`, or after a user has set
    the task. In a process that `zmqdist launch` has started, the resolver describes the launcher's
    cluster, and the arguments have no effect.

    Args:
      jobs: the number of tasks of each job. By default all tasks are workers.
      port_base: the port of the first task of each host. The other tasks of the host have the next
        ports.
      gpus_per_node: the number of GPUs of a node. The default is the number in
        CUDA_VISIBLE_DEVICES, or else the number that nvidia-smi lists. Without nvidia-smi it is 0.
      gpus_per_task: the number of GPUs of a task. The default is the GPUs of a node, divided by the
        largest number of tasks on a node.
      tasks_per_node: a number for all nodes, or {host: number}. The default is Slurm's numbers.
      auto_set_gpu: whether `cluster_spec` sets CUDA_VISIBLE_DEVICES of this process to its GPUs.
        Without GPUs it changes nothing.
      order: "name" sorts hosts by name, so that n10 precedes n9. "nodelist" uses Slurm's order of
        hosts, in which Slurm itself numbers tasks unless a user changes their distribution. With
        the wrong order a task gets the address of another host, which `validate` reports.

    Raises:
      RuntimeError: a variable is absent or unreadable (the text names it), the numbers of tasks do
        not match, this process is not one of the tasks, or the tasks of a node need more GPUs than
        the node has.
      ValueError: `order` is neither "name" nor "nodelist".
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
        super().__init__(port_base, rpc_layer)
        self._is_resolved = False
        self._auto_set_gpu = auto_set_gpu
        if self._launched is not None:
            return
        rank = self._resolve_own_rank()
        jobs = {"worker": self._resolve_num_tasks()} if jobs is None else jobs
        if tasks_per_node is None:
            tasks_per_node = self._resolve_task_configuration()
        elif not isinstance(tasks_per_node, Mapping):
            tasks_per_node = dict.fromkeys(self._resolve_hostlist(), tasks_per_node)
        self._set_tasks(
            rank, jobs, dict(sorted(tasks_per_node.items())) if order == "name" else tasks_per_node
        )
        self._check_tasks()
        self._share_gpus(gpus_per_node, gpus_per_task)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster. With `auto_set_gpu` it also sets CUDA_VISIBLE_DEVICES.

        >>> import os, unittest.mock
        >>> srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        >>> srun["SLURM_TASKS_PER_NODE"] = "1(x2)"
        >>> with unittest.mock.patch.dict(os.environ, srun):  # srun sets these
        ...     resolver = zd.resolvers.SlurmClusterResolver({"worker": 2}, gpus_per_node=0)
        ...     print(resolver.cluster_spec().as_dict())
        {'worker': ['n1:8888', 'n2:8888']}
        """
        self._is_resolved = True
        if self._launched is None and self._auto_set_gpu and self._gpus_per_task:
            _, index = self._positions()[self._rank]
            mine = self._gpus[index * self._gpus_per_task : (index + 1) * self._gpus_per_task]
            os.environ[devices.CUDA] = ",".join(mine)
        return super().cluster_spec()

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return (task_type, task_id). Both are None before the first call of `cluster_spec`,
        unless they were set.

        >>> import os, unittest.mock
        >>> srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        >>> srun["SLURM_TASKS_PER_NODE"] = "1(x2)"
        >>> with unittest.mock.patch.dict(os.environ, srun):  # srun sets these
        ...     resolver = zd.resolvers.SlurmClusterResolver({"worker": 2}, gpus_per_node=0)
        ...     _ = resolver.cluster_spec()
        ...     print(resolver.get_task_info())
        ('worker', 1)
        """
        has_task = self._is_resolved or (self._task_type, self._task_id) != (None, None)
        return (self.task_type, self.task_id) if has_task else (None, None)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the URL of a task, by default of the task of this process. "" means that this task
        has no address or is not known yet.

        >>> import os, unittest.mock
        >>> srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        >>> srun["SLURM_TASKS_PER_NODE"] = "1(x2)"
        >>> with unittest.mock.patch.dict(os.environ, srun):  # srun sets these
        ...     resolver = zd.resolvers.SlurmClusterResolver({"worker": 2}, gpus_per_node=0)
        ...     print(resolver.master("worker", 0, "zmq"))
        zmq://n1:8888
        """
        own_type, own_id = self.get_task_info()
        task_type = own_type if task_type is None else task_type
        task_id = own_id if task_id is None else task_id
        return (
            ""
            if task_type is None or task_id is None
            else super().master(task_type, task_id, rpc_layer)
        )

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Return the number of GPUs of a task, as {"GPU": 2}. All tasks have equally many GPUs.

        >>> import os, unittest.mock
        >>> srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        >>> srun["SLURM_TASKS_PER_NODE"] = "1(x2)"
        >>> with unittest.mock.patch.dict(os.environ, srun):  # srun sets these
        ...     resolver = zd.resolvers.SlurmClusterResolver({"worker": 2}, gpus_per_node=0)
        ...     print(resolver.num_accelerators())
        {}
        """
        if self._launched is not None:
            return super().num_accelerators(task_type, task_id, config_proto)
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}

    def validate(self) -> list[str]:
        """Return the problems that the base class finds. Also check that this process runs on the
        host of its address.

        >>> import os, unittest.mock
        >>> srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
        >>> srun["SLURM_TASKS_PER_NODE"] = "1(x2)"
        >>> with unittest.mock.patch.dict(os.environ, srun):  # srun sets these
        ...     resolver = zd.resolvers.SlurmClusterResolver({"worker": 2}, gpus_per_node=0)
        ...     print(resolver.validate())
        []
        """
        problems = super().validate()
        if self._launched is not None:
            return problems
        here, (host, _) = os.environ.get("SLURMD_NODENAME"), self._positions()[self._rank]
        if here is not None and here != host:
            problems.append(
                f"rank {self._rank} has an address at {host}, but this is {here}: "
                'pass order="nodelist", and do not change the distribution of tasks in srun'
            )
        return problems

    # -- Slurm's variables; a subclass for a similar system overrides these ------------------------

    def _resolve_own_rank(self) -> int:
        """Return the number of this process among all tasks, from 0."""
        return value_of(_variable("SLURM_PROCID"), int)

    def _resolve_num_tasks(self) -> int:
        """Return the number of all tasks."""
        return value_of(_variable(*_NUM_TASKS), int)

    def _resolve_hostlist(self) -> list[str]:
        """Return the names of the hosts."""
        return value_of(_variable(*_NODELIST), expand_hostlist)

    def _resolve_task_configuration(self) -> dict[str, int]:
        """Return the number of tasks of each host."""
        hosts = self._resolve_hostlist()
        variable = _variable(*_TASKS_PER_NODE)
        counts = value_of(variable, expand_tasks_per_node)
        if len(hosts) != len(counts):
            raise RuntimeError(
                f"{variable} is {os.environ[variable]!r}, for {len(counts)} nodes, but the list of nodes has "
                f"{len(hosts)}"
            )
        return dict(zip(hosts, counts, strict=True))

    # -- tasks and GPUs ----------------------------------------------------------------------------

    def _check_tasks(self) -> None:
        count, slurm_count = sum(self._jobs.values()), len(self._positions())
        if count != slurm_count:
            raise RuntimeError(
                f"the jobs ({self._jobs_text()}) have {count} tasks together, but Slurm gives "
                f"{slurm_count}: change jobs, or srun --ntasks"
            )
        if not 0 <= self._rank < slurm_count:
            raise RuntimeError(
                f"SLURM_PROCID is {self._rank}, but there are {slurm_count} tasks, with the numbers "
                f"0 to {slurm_count - 1}: is this a part of a "
                "heterogeneous job? Then give jobs, and {host: number} for tasks_per_node"
            )

    def _share_gpus(self, per_node: int | None, per_task: int | None) -> None:
        named = devices.gpus() if per_node is None or devices.CUDA in os.environ else []
        per_node = len(named) if per_node is None else per_node
        most = max(self._per_node.values())
        self._gpus_per_task = per_node // most if per_task is None else per_task
        if most * self._gpus_per_task > per_node:
            raise RuntimeError(
                f"{most} tasks with {self._gpus_per_task} GPUs each need more than the {per_node} "
                f"GPUs that a node has"
            )
        # Prefer the named ids to 0, 1, 2, ..., because CUDA_VISIBLE_DEVICES may list only some of
        # the node's GPUs, such as 4,5,6,7.
        self._gpus = named if len(named) >= per_node else [str(index) for index in range(per_node)]


def _variable(*names: str) -> str:
    """Return the first of these variables that is set."""
    for name in names:
        if name in os.environ:
            return name
    raise RuntimeError(f"{' or '.join(names)} is not set: is this a task of srun?")
