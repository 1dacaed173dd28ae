"""ClusterSpec: the jobs of a cluster, and the addresses of their tasks.

Rules
    A job is dense (a list of addresses) or sparse (a dict of index to address). A ClusterSpec
    stores dense and sparse jobs as dicts. The constructor copies its argument, and a ClusterSpec
    never changes. Only `validate` checks addresses, because a spec may be built before its ports
    are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from zmqdist.addresses import split_address
from zmqdist.cluster.defs import ClusterDef, JobDef
from zmqdist.field_types import checked

_INT32 = 2**31

Tasks: TypeAlias = "list[str] | dict[int, str]"
"""The tasks of one job as `as_dict` returns them: the list of a dense job, or the dict of a sparse
job."""


@checked
class ClusterSpec:
    """The jobs of a cluster with the addresses of their tasks.

    >>> spec = zd.ClusterSpec({"worker": ["host1:5000", "host2:5000"], "ps": ["host3:5000"]})
    >>> spec.jobs
    ['worker', 'ps']

    Args:
      cluster: a ClusterDef, another ClusterSpec, or a dict. The keys of the dict are names of jobs,
        and each value is a list or tuple of addresses or a dict {index: address}. Names and
        addresses may be bytes (UTF-8). Indices are converted by `int()`.

    Raises:
      TypeError: `cluster`, or a name, address or list of tasks in it, has a wrong type. The text
        names the job.
      ValueError: a job is listed twice, or an index is not a number, negative, above int32 or
        listed twice. Addresses are not checked: call `validate`.
    """

    __hash__ = None  # type: ignore[assignment]  # a ClusterSpec may equal a dict, which is unhashable, so it must be unhashable, too

    def __init__(self, cluster: Mapping[Any, Any] | ClusterDef | ClusterSpec) -> None:
        self._jobs: dict[str, dict[int, str]] = {}
        for name, tasks in _jobs_of(cluster):
            job = _text(name, "job name")
            if job in self._jobs:
                raise ValueError(f"job {job!r} is listed twice")
            self._jobs[job] = _tasks(job, tasks)
        self._def = ClusterDef(
            [JobDef(job, dict(sorted(self._jobs[job].items()))) for job in sorted(self._jobs)]
        )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order of the dict. They are sorted if the spec was built
        from a ClusterDef or ClusterSpec."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks the job has. Raises ValueError for an unknown job.

        >>> zd.ClusterSpec({"worker": ["host1:5000", "host2:5000"]}).num_tasks("worker")
        2
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the job's tasks, sorted. Raises ValueError for an unknown job.

        >>> zd.ClusterSpec({"worker": {3: "host1:5000", 1: "host2:5000"}}).task_indices("worker")
        [1, 3]
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: Any) -> str:
        """Return the address of one task. Raises ValueError if the job or the index is unknown. The
        index must be an int.

        >>> zd.ClusterSpec({"worker": ["host1:5000", "host2:5000"]}).task_address("worker", 1)
        'host2:5000'
        """
        tasks = self._job(job_name)
        if not isinstance(task_index, int) or task_index not in tasks:
            raise ValueError(f"job {job_name!r} has no task with index {task_index!r} (task_index)")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return a list with the address of each task at its index. At an index without a task the
        list has None. An empty job gives [].

        >>> zd.ClusterSpec({"worker": {1: "host2:5000"}}).job_tasks("worker")
        [None, 'host2:5000']

        The list is as long as the highest index requires, so do not call this if indices may be in
        the millions.

        Raises:
          ValueError: the spec has no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Tasks]:
        """Return the jobs as a new dict. A dense job is a list, a sparse job is a dict, and an
        empty job is {}.

        >>> zd.ClusterSpec({"worker": ["host1:5000"]}).as_dict()
        {'worker': ['host1:5000']}
        """
        return {job: _dense_or_sparse(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> ClusterDef:
        """Return the ClusterDef of this spec, sorted by job and index. Each call returns the same
        object: copy it, do not change it.

        >>> zd.ClusterSpec({"worker": ["host1:5000"]}).as_cluster_def().job[0].name
        'worker'
        """
        return self._def

    def validate(self) -> list[str]:
        """Return one sentence for each problem with the addresses. An empty list means that there
        is no problem.

        >>> zd.ClusterSpec({"worker": ["host1:5000"]}).validate()
        []

        A problem is an address that is not `host:port`, such as one without a port or with an IPv6
        host without brackets. An address that two tasks have is also a problem, except with port 0,
        for which the system chooses a port.
        """
        problems: list[str] = []
        first: dict[tuple[str, int], str] = {}
        for job in sorted(self._jobs):
            for index, address in sorted(self._jobs[job].items()):
                try:
                    host_port = split_address(address)
                except ValueError as error:
                    problems.append(f"{job}:{index} has the address {address!r}: {error}")
                    continue
                owner = first.setdefault(host_port, f"{job}:{index}")
                if host_port[1] and owner != f"{job}:{index}":
                    problems.append(
                        f"{job}:{index} has the address {address!r}, which {owner} has already"
                    )
        return problems

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return self._jobs == other

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    def _job(self, job_name: str) -> dict[int, str]:
        try:
            return self._jobs[job_name]
        except KeyError:
            raise ValueError(
                f"no job {job_name!r} in this cluster; it has {sorted(self._jobs)}"
            ) from None


def _jobs_of(cluster: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(cluster, ClusterSpec):
        cluster = cluster.as_cluster_def()
    if isinstance(cluster, ClusterDef):
        yield from ((job.name, job.tasks) for job in sorted(cluster.job, key=lambda job: job.name))
    elif isinstance(cluster, Mapping):
        yield from cluster.items()
    else:
        raise TypeError(
            f"a cluster is a dict of jobs, a ClusterDef or a ClusterSpec, not {cluster!r}"
        )


def _tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(f"the tasks of job {job!r} must be a list or a dict, not {tasks!r}")
    read: dict[int, str] = {}
    for key, address in tasks.items():
        index = _index(job, key)
        if index in read:
            raise ValueError(f"job {job!r} has the task index {index} twice")
        read[index] = _text(address, f"address of task {index} of job {job!r}")
    return read


def _index(job: str, key: Any) -> int:
    try:
        index = int(key)
    except (ValueError, OverflowError):
        raise ValueError(f"task index {key!r} of job {job!r} is not a number") from None
    except TypeError:
        raise TypeError(f"task index {key!r} of job {job!r} is not a number") from None
    if not 0 <= index < _INT32:
        raise ValueError(f"task index {key!r} of job {job!r} is not between 0 and {_INT32 - 1}")
    return index


def _text(value: object, label: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{label} must be a string, not {value!r}")
    return value


def _dense_or_sparse(tasks: dict[int, str]) -> Tasks:
    if tasks and max(tasks) == len(tasks) - 1:
        return [tasks[index] for index in range(len(tasks))]
    return dict(sorted(tasks.items()))
