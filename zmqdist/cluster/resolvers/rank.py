"""The resolver for processes that mpirun, mpiexec or torchrun has started. It reads the environment
variables that these programs set.

Rules
    The rules of by_rank.py hold. Rank 0 is the chief.

    Three families of variables are known: those of torchrun, those of Open MPI, and those of PMI,
    which MPICH, Intel MPI and Cray's launchers set. If all variables of several families are set,
    the resolver prefers torchrun's, because mpirun or mpiexec often starts torchrun itself.

    None of these systems tells a process the names of all hosts. The resolver takes the names from
    the argument `hosts`, or else from the Slurm job in which the processes run. If all processes
    are on one host, no names are needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from zmqdist.cluster.resolvers.by_rank import ResolverByRank, value_of
from zmqdist.cluster.resolvers.hostlist import expand_hostlist
from zmqdist.field_types import checked

LOOPBACK: Final = "127.0.0.1"
NODELIST: Final = "SLURM_JOB_NODELIST"


class _Family(NamedTuple):
    """The environment variables of one system. Each tuple has the names that different versions of
    the system give to one variable.

    Attributes:
      rank, size: variables for the rank of this process, and for the number of all processes.
      local_rank, local_size: variables for the rank of this process on its host, and for the number
        of processes on the host.
    """

    system: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]

    def missing(self) -> list[str]:
        """Return the names of those variables of this system that are not set in the
        environment.
        """
        variables = (self.rank, self.size, self.local_rank, self.local_size)
        return [
            " or ".join(names)
            for names in variables
            if not any(name in os.environ for name in names)
        ]


FAMILIES: Final = (
    _Family("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Family(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(
        "PMI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)


@checked
class RankClusterResolver(ResolverByRank):
    """A resolver whose tasks are the processes that mpirun, mpiexec or torchrun has started. Rank 0
    is the chief. The constructor reads the environment variables.

    >>> import os, unittest.mock
    >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    >>> with unittest.mock.patch.dict(os.environ, torchrun):  # torchrun sets these
    ...     resolver = zd.resolvers.RankClusterResolver({"worker": 1}, hosts=["a"], port_base=8888)
    ...     print(resolver.cluster_spec().as_dict())
    {'chief': ['a:8888'], 'worker': ['a:8889']}

    In a process that `zmqdist launch` has started, the resolver describes the launcher's cluster,
    and the arguments have no effect.

    Args:
      jobs: the number of tasks of each job other than the chief. By default all of these tasks are
        workers. The jobs get the ranks from 1 on, in the order of their names.
      hosts: the hosts in the order of the ranks on them. In a dict the value is the number of
        processes of the host. In a list each host has as many processes as the host of this
        process. The default is the hosts of the Slurm job in which this process runs, or 127.0.0.1
        if all processes are on one host.
      port_base: the port of the first process of each host. The other processes of the host have
        the next ports.

    Raises:
      RuntimeError: variables are absent or unreadable (the text names them), the names of the hosts
        are not known, or the numbers of tasks do not match.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        hosts: Sequence[str] | Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "zmq",
    ) -> None:
        super().__init__(port_base, rpc_layer)
        if self._launched is not None:
            return
        family = _family()
        rank, size = value_of(_name(family.rank), int), value_of(_name(family.size), int)
        self._local_rank = value_of(_name(family.local_rank), int)
        local_size = value_of(_name(family.local_size), int)
        if not 0 <= rank < size:
            raise RuntimeError(
                f"{_name(family.rank)} is {rank}, but there are {size} processes, with the ranks "
                f"0 to {size - 1}"
            )
        per_node = _hosts(family, size, local_size) if hosts is None else hosts
        if not isinstance(per_node, Mapping):
            per_node = dict.fromkeys(per_node, local_size)
        for job, count in (jobs or {}).items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise RuntimeError(
                    f"jobs: {job!r} has {count!r} tasks, but a number of tasks is an int of 0 or "
                    f"more"
                )
        jobs = _with_chief({"worker": size - 1} if jobs is None else jobs)
        self._set_tasks(rank, jobs, per_node)
        self._check_tasks(family.system, size)

    def validate(self) -> list[str]:
        """Return the problems that the base class finds. Also check that the ranks fill one host
        after the other, as the addresses assume.

        >>> import os, unittest.mock
        >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        >>> with unittest.mock.patch.dict(os.environ, torchrun):  # torchrun sets these
        ...     jobs = {"worker": 1}
        ...     resolver = zd.resolvers.RankClusterResolver(jobs, hosts=["a"], port_base=8888)
        ...     print(resolver.validate())
        []
        """
        problems = super().validate()
        if self._launched is None:
            host, index = self._positions()[self._rank]
            if index != self._local_rank:
                problems.append(
                    f"rank {self._rank} has the address of process {index} at {host}, but is "
                    f"process {self._local_rank} "
                    "of its host: start as many processes on each host, one host after the other "
                    "(mpirun --map-by slot)"
                )
        return problems

    def _check_tasks(self, system: str, size: int) -> None:
        task_count, host_count = sum(self._jobs.values()), len(self._positions())
        if task_count != size:
            raise RuntimeError(
                f"the jobs ({self._jobs_text()}) have {task_count} tasks together, but {system} "
                f"has started {size}"
            )
        if host_count != size:
            hosts = ", ".join(f"{host}: {count}" for host, count in self._per_node.items())
            raise RuntimeError(
                f"the hosts ({hosts}) have {host_count} processes together, but {system} has "
                f"started {size}: "
                "pass hosts={host: number}"
            )


def _with_chief(jobs: Mapping[str, int]) -> dict[str, int]:
    """Return the jobs together with the chief. The chief gets rank 0, because the name "chief"
    sorts before those of the other jobs."""
    if jobs.get("chief", 1) != 1 or any(job < "chief" for job in jobs):
        raise RuntimeError(f"rank 0 is the only chief, so `jobs` cannot be {dict(jobs)}")
    return {"chief": 1, **{job: count for job, count in jobs.items() if count}}


def _hosts(family: _Family, size: int, local_size: int) -> list[str]:
    if local_size == size:
        return [LOOPBACK]
    if NODELIST in os.environ:
        return value_of(NODELIST, expand_hostlist)
    raise RuntimeError(
        f"{family.system} has started {size} processes, {local_size} of them on this host, and "
        f"does not tell the names of the hosts: "
        "pass hosts=[...], in the order in which ranks fill them"
    )


def _family() -> _Family:
    """Return the first family whose variables are all set."""
    for family in FAMILIES:
        if not family.missing():
            return family
    for family in FAMILIES:
        if any(name in os.environ for name in family.rank):
            raise RuntimeError(
                f"{_name(family.rank)} is set, but {', '.join(family.missing())} is not: is this "
                f"a process of {family.system}?"
            )
    families = "; ".join(f"{', '.join(family.missing())} ({family.system})" for family in FAMILIES)
    raise RuntimeError(
        f"none of these are set: {families}; is this a process of mpirun or torchrun?"
    )


def _name(names: tuple[str, ...]) -> str:
    return next(name for name in names if name in os.environ)
