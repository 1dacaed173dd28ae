"""What the names of jobs mean in a cluster that trains: who is chief, who counts as a worker, who leads.

Rules
    Jobs are chief, worker, ps, evaluator, and zmqdist's dispatcher; at most one chief and one evaluator. The evaluator is
    apart from the training: it is its own chief, is not counted, and takes part in no collective.

Everything here is a pure function of the spec, so all tasks come to the same answer without a word between them. A job with
no tasks is as good as absent, and in a sparse job the task with the lowest index stands for task 0. All but
`coordination_leader` refuse what `validate_cluster_spec` refuses, with its ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from zmqdist.cluster.defs import ClusterDef
from zmqdist.cluster.spec import ClusterSpec

JOBS = ("chief", "worker", "ps", "evaluator", "dispatcher")
"""The names that a job may have. TensorFlow's strategies do not know the last one."""

Cluster: TypeAlias = "ClusterSpec | ClusterDef | Mapping[Any, Any]"
Task: TypeAlias = tuple[str, int]
"""(job, index)."""


def validate_cluster_spec(cluster: Cluster, task_type: str | None = None, task_id: int | None = None) -> None:
    """Refuse a cluster that cannot train, and a task that is not in it.

    Args:
      task_type: which task asks; None checks the jobs alone.
      task_id: None where the job alone is known.

    Raises:
      ValueError: a job of another name, more than one chief or evaluator, or the task is not there (an evaluator need not
        be: it runs beside the cluster). Or `cluster` is none: see `ClusterSpec`.
    """
    spec = ClusterSpec(cluster)
    for job in spec.jobs:
        if job not in JOBS:
            hint = " (TensorFlow 1 said master for chief)" if job == "master" else ""
            raise ValueError(f"there is no job {job!r} in a cluster that trains; allowed are {', '.join(JOBS)}{hint}")
    for job in ("chief", "evaluator"):
        if (count := _count(spec, job)) > 1:
            raise ValueError(f"the cluster has {count} tasks of job {job!r}, at most 1 is allowed")
    if task_type is None:
        return
    if task_type not in JOBS:
        raise ValueError(f"there is no task type {task_type!r}; allowed are {', '.join(JOBS)}")
    if task_type not in spec.jobs:
        if task_type == "evaluator":
            return
        raise ValueError(f"task type {task_type!r} is not a job of the cluster; it has {', '.join(sorted(spec.jobs))}")
    if task_id is not None and task_id not in spec.task_indices(task_type):
        raise ValueError(f"job {task_type!r} has no task {task_id}; it has {_indices(spec, task_type)}")


def is_chief(cluster: Cluster, task_type: str | None = None, task_id: int | None = None) -> bool:
    """Whether this task does what one task alone must do, such as writing checkpoints.

    True for the chief, for the evaluator, for the first worker of a cluster without a chief, and for a program that has no
    cluster at all: an empty `cluster` and no `task_type`.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    if task_type in ("chief", "evaluator") or (task_type is None and not spec):
        return True
    return task_type == "worker" and not _count(spec, "chief") and task_id == min(spec.task_indices("worker"))


def worker_count(cluster: Cluster, task_type: str) -> int:
    """How many tasks train together with this one: chief and workers, or the evaluators for an evaluator.

    Raises:
      ValueError: also for a task that does not train, as a ps.
    """
    validate_cluster_spec(cluster, task_type)
    spec = ClusterSpec(cluster)
    if task_type == "evaluator":
        return _count(spec, "evaluator")
    if task_type not in ("chief", "worker"):
        raise ValueError(f"a {task_type} is not counted among the workers; count for chief, worker or evaluator")
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(cluster: Cluster, task_type: str, task_id: int) -> int:
    """The rank of this task among those that train, from 0: the chief, then the workers by index; evaluators apart.

    Raises:
      ValueError: also for a task that does not train, as a ps.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    if task_type == "chief":
        return 0
    if task_type == "worker":
        return _count(spec, "chief") + spec.task_indices("worker").index(task_id)
    if task_type == "evaluator":
        return task_id
    raise ValueError(f"a {task_type} has no rank among the workers; only chief, worker and evaluator have")


def collective_leader(cluster: Cluster, task_type: str | None = None, task_id: int | None = None) -> Task | None:
    """The task that leads the collectives of this one: the chief, else the first worker.

    None for an evaluator, which takes part in none, and where there is neither.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    return None if task_type == "evaluator" else _first(spec, "chief", "worker")


def coordination_leader(cluster: Cluster) -> Task | None:
    """The task that keeps barriers, keys and the list of who is alive: the first ps, else the chief, else the first worker.

    In a cluster whose jobs have other names it is the first task of the job whose name sorts first. None where there is no
    task; the dispatcher is none.
    """
    spec = ClusterSpec(cluster)
    other_jobs = sorted(job for job in spec.jobs if job != "dispatcher")
    return _first(spec, "ps", "chief", "worker", *other_jobs)


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _first(spec: ClusterSpec, *jobs: str) -> Task | None:
    return next(((job, min(spec.task_indices(job))) for job in jobs if _count(spec, job)), None)


def _indices(spec: ClusterSpec, job: str) -> str:
    indices = spec.task_indices(job)
    if not indices:
        return "none"
    dense = indices == list(range(len(indices)))
    return f"{indices[0]} to {indices[-1]}" if dense and len(indices) > 1 else ", ".join(map(str, indices[:10]))
