"""The meaning of job names in a cluster that trains: which task is chief, which tasks count as
workers, and which task leads.

Rules
    The jobs are chief, worker, ps, evaluator and zmqdist's dispatcher. There is at most one chief
    and at most one evaluator. The evaluator does not take part in the training. It is its own
    chief, is not a worker, and takes part in no collective.

The result of each function depends only on the arguments, so that all tasks get equal results
without communication. A job without tasks counts as absent. In a sparse job the task with the
lowest index has the role of task 0. All functions except `coordination_leader` raise the ValueError
of `validate_cluster_spec`.
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


def validate_cluster_spec(
    cluster: Cluster, task_type: str | None = None, task_id: int | None = None
) -> None:
    """Raise ValueError if a cluster cannot train, or if the calling task is not in the cluster.

    Args:
      task_type: the job of the calling task. None means that only the jobs are checked.
      task_id: the index of the calling task. None means that the index is not checked.

    Raises:
      ValueError: a job has a name that is not in JOBS, there is more than one chief or evaluator,
        `cluster` is wrong (see `ClusterSpec`), or the task is not in the cluster. An evaluator need
        not be in the cluster, because it runs beside the cluster.
      TypeError: `cluster`, or a part of it, has a wrong type (see `ClusterSpec`).
    """
    spec = ClusterSpec(cluster)
    for job in spec.jobs:
        if job not in JOBS:
            hint = " (TensorFlow 1 called the chief master)" if job == "master" else ""
            raise ValueError(
                f"there is no job {job!r} in a cluster that trains; allowed are "
                f"{', '.join(JOBS)}{hint}"
            )
    for job in ("chief", "evaluator"):
        if (count := _count(spec, job)) > 1:
            raise ValueError(f"the cluster has {count} tasks of job {job!r}, at most 1 is allowed")
    if task_type is None:
        return
    if task_type not in JOBS:
        raise ValueError(f"there is no task type {task_type!r}; allowed are {', '.join(JOBS)}")
    if task_type not in spec.jobs:
        if task_type == "evaluator":  # it runs beside the cluster
            return
        raise ValueError(
            f"task type {task_type!r} is not a job of the cluster; it has "
            f"{', '.join(sorted(spec.jobs))}"
        )
    if task_id is not None and task_id not in spec.task_indices(task_type):
        raise ValueError(
            f"job {task_type!r} has no task {task_id}; it has {_indices(spec, task_type)}"
        )


def is_chief(cluster: Cluster, task_type: str | None = None, task_id: int | None = None) -> bool:
    """Return whether this task does the work that only one task must do, such as writing
    checkpoints.

    This is True for the chief, for the evaluator, and for the first worker of a cluster without a
    chief. It is also True for a program without a cluster, which has an empty `cluster` and no
    `task_type`.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    if task_type in ("chief", "evaluator") or (task_type is None and not spec):
        return True
    return (
        task_type == "worker"
        and not _count(spec, "chief")
        and task_id == min(spec.task_indices("worker"))
    )


def worker_count(cluster: Cluster, task_type: str) -> int:
    """Return how many tasks train together. For a chief or worker, these are the chief and the
    workers. For an evaluator, these are the evaluators.

    Raises:
      ValueError: `validate_cluster_spec` raises it, or `task_type` is a job that does not train,
        such as ps.
    """
    validate_cluster_spec(cluster, task_type)
    spec = ClusterSpec(cluster)
    if task_type == "evaluator":
        return _count(spec, "evaluator")
    if task_type not in ("chief", "worker"):
        raise ValueError(
            f"a {task_type} does not train, so it has no worker count: name a chief, worker or "
            f"evaluator"
        )
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(cluster: Cluster, task_type: str, task_id: int) -> int:
    """Return the rank of this task, from 0, among the tasks that train. The order is the chief and
    then the workers by index.

    The rank of an evaluator is its index.

    Raises:
      ValueError: `validate_cluster_spec` raises it, or `task_type` is a job that does not train,
        such as ps.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    if task_type == "chief":
        return 0
    if task_type == "worker":
        return _count(spec, "chief") + spec.task_indices("worker").index(task_id)
    if task_type == "evaluator":
        return task_id
    raise ValueError(
        f"a {task_type} has no rank among the workers: only a chief, worker or evaluator has a rank"
    )


def collective_leader(
    cluster: Cluster, task_type: str | None = None, task_id: int | None = None
) -> Task | None:
    """Return the task that leads the collectives in which this task takes part. This is the chief,
    or the first worker if there is no chief.

    Return None for an evaluator, because it takes part in no collective, and for a cluster with
    neither a chief nor a worker.
    """
    validate_cluster_spec(cluster, task_type, task_id)
    spec = ClusterSpec(cluster)
    return None if task_type == "evaluator" else _first(spec, "chief", "worker")


def coordination_leader(cluster: Cluster) -> Task | None:
    """Return the task that keeps barriers, keys and the states of tasks. This is the first ps, else
    the chief, else the first worker.

    In a cluster with none of these jobs, it is the first task of the job whose name sorts first.
    None means that the cluster has no tasks other than a dispatcher.
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
    return (
        f"{indices[0]} to {indices[-1]}"
        if dense and len(indices) > 1
        else ", ".join(map(str, indices[:10]))
    )
