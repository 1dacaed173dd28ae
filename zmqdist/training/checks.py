"""Checks whether a ParameterServerStrategy can use a cluster, before `connect` contacts its tasks.
The error texts are TensorFlow's."""

from __future__ import annotations

from typing import Final

from zmqdist.cluster.spec import ClusterSpec

JOBS: Final = ("chief", "worker", "evaluator", "ps")
"""The job names that a cluster with parameter servers may have."""


def check_cluster(
    spec: ClusterSpec, task_type: str | None = None, task_id: int | None = None
) -> None:
    """Check that a strategy can connect to the cluster.

    Args:
      task_type, task_id: the program's own task in the cluster. None or "" means that the program
        is outside the cluster.

    Raises:
      ValueError: the cluster is empty, has a job that is not in JOBS, has no worker or no ps, has
        gaps in the numbers of its ps, or has more than one chief or evaluator. It is also raised if
        the cluster does not have the program's own task.
    """
    if not spec:
        raise ValueError(
            "Cluster spec must be non-empty: a strategy with parameter servers needs workers and ps"
        )
    if strange := [job for job in spec.jobs if job not in JOBS]:
        raise ValueError(
            f"Disallowed task type found in cluster spec: {', '.join(map(repr, strange))}. "
            f"Allowed types are {', '.join(JOBS)}"
        )
    if task_type and task_type not in JOBS:
        raise ValueError(
            f"Unrecognized task_type: {task_type}, valid task types are: {', '.join(JOBS)}"
        )
    if task_type and task_type not in spec.jobs and task_type != "evaluator":
        raise ValueError(
            f"`task_type` {task_type!r} not found in cluster_spec; it has {', '.join(spec.jobs)}"
        )
    for job in ("chief", "evaluator"):
        if _count(spec, job) > 1:
            raise ValueError(f"There must be at most one {job!r} job.")
    if (
        task_type in spec.jobs
        and task_id is not None
        and task_id not in spec.task_indices(str(task_type))
    ):
        raise ValueError(
            f"The `task_id` {task_id} exceeds the maximum id of {task_type}: it has "
            f"{spec.task_indices(str(task_type))}"
        )
    for job in ("ps", "worker"):
        if not _count(spec, job):
            raise ValueError(f"There must be at least one {job}.")
    check_ps(spec.task_indices("ps"))


def check_ps(indices: list[int]) -> None:
    """Raise ValueError unless the ps are numbered from 0 without gaps."""
    if indices != list(range(len(indices))):
        raise ValueError(
            f"The ps must have the numbers 0 to {len(indices) - 1} without gaps, not {indices}"
        )


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0
