"""The meaning of job names in a cluster that trains: which task is chief, which tasks count as workers, and which task leads.

Rules
    The jobs are chief, worker, ps, evaluator, and zmqdist's dispatcher, with at most one chief and one evaluator. The evaluator does not
    take part in the training: it is its own chief, does not count as a worker, and takes part in no collective.

Each function depends on the spec only, so all tasks get the same result without communication. A job without tasks counts as absent, and in
a sparse job the task with the lowest index takes the place of task 0. All functions but `coordination_leader` raise the ValueError of
`validate_cluster_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from zmqdist.cluster.defs import ClusterDef
from zmqdist.cluster.spec import ClusterSpec

JOBS = ("chief", "worker", "ps", "evaluator", "dispatcher")
"""The allowed names of jobs. TensorFlow's strategies do not know the dispatcher."""

Cluster: TypeAlias = "ClusterSpec | ClusterDef | Mapping[Any, Any]"
Task: TypeAlias = tuple[str, int]
"""A task, as (job, index)."""


def validate_cluster_spec(cluster: Cluster, task_type: str | None = None, task_id: int | None = None) -> None:
    """Raise ValueError for a cluster that cannot train, or a task that is not in it.

    Args:
      task_type: the job of the calling task; None checks the jobs only.
      task_id: its index; None if only the job is known.

    Raises:
      ValueError: there is a job of another name, or more than one chief or evaluator. Or the task is not in the cluster; but an evaluator
        need not be, because it runs beside the cluster. Or `cluster` describes no cluster: see `ClusterSpec`.
    """
    spec = ClusterSpec(cluster)
    for job in spec.jobs:
        if job not in JOBS:
            hint = " (TensorFlow 1 called the chief master)" if job == "master" else ""
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
    """Return whether this task does the work that only one task must do, such as writing checkpoints.

    True for the chief, for the evaluator, for the first worker of a cluster without a chief, and for a program without a cluster: an empty
    `cluster` and no `task_type`.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    if task_type in ("chief", "evaluator") or (task_type is None and not spec):
        return True
    return task_type == "worker" and not _count(spec, "chief") and task_id == min(spec.task_indices("worker"))


def worker_count(cluster: Cluster, task_type: str) -> int:
    """Return how many tasks train together with a task of this type: chief and workers; for an evaluator, the evaluators.

    Raises:
      ValueError: also for a task that does not train, such as a ps.
    """
    validate_cluster_spec(cluster, task_type)
    spec = ClusterSpec(cluster)
    if task_type == "evaluator":
        return _count(spec, "evaluator")
    if task_type not in ("chief", "worker"):
        raise ValueError(f"a {task_type} is not counted among the workers; count for chief, worker or evaluator")
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(cluster: Cluster, task_type: str, task_id: int) -> int:
    """Return the rank of this task, from 0, among those that train: the chief, then the workers by index.

    Evaluators have ranks of their own.

    Raises:
      ValueError: also for a task that does not train, such as a ps.
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
    """Return the task that leads the collectives in which this task takes part: the chief or, without a chief, the first worker.

    None for an evaluator, which takes part in no collective, and for a cluster with neither chief nor worker.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    return None if task_type == "evaluator" else _first(spec, "chief", "worker")


def coordination_leader(cluster: Cluster) -> Task | None:
    """Return the task that keeps barriers, keys and the states of tasks: the first ps, else the chief, else the first worker.

    In a cluster whose jobs have other names, it is the first task of the job whose name sorts first. None for a cluster without tasks; a
    dispatcher does not count.
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
