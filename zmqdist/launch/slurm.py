"""The launcher `slurm`: its hosts are the nodes of an allocation of Slurm. This module makes the
srun command that starts the agent of each node, and explains why the command failed.

The launcher runs inside a job of Slurm. `zmqdist launch` has submitted this job (slurm_job.py), or
the user has, with sbatch or salloc. On each node one step of the job runs the agent. This step may
use all resources that the job has on the node, because it overlaps with the batch step, in which
the dispatcher and the program run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from typing import Final

from zmqdist import errors
from zmqdist.cluster.resolvers.hostlist import expand_hostlist, expand_tasks_per_node
from zmqdist.launch.agent import agent_command
from zmqdist.launch.agent_stream import AgentHost, ProcessStream

SRUN: Final = "srun"
NODELIST_ENV: Final = "SLURM_JOB_NODELIST"
CORES_ENV: Final = "SLURM_JOB_CPUS_PER_NODE"
"""The cores that the job has on each node, in order: "4,2(x3)"."""


def slurm_hosts(silence_limit_s: float) -> list[AgentHost]:
    """Return the nodes of the allocation in which this process runs. This function starts no agent.

    Raises:
      NotFoundError: this host has no srun.
      FailedPreconditionError: this process does not run in an allocation of Slurm.
    """
    if shutil.which(SRUN) is None:
        raise errors.NotFoundError(
            "launcher: slurm needs the program `srun`, which is not found: load Slurm's module"
        )
    nodes = os.environ.get(NODELIST_ENV)
    if nodes is None:
        raise errors.FailedPreconditionError(
            f"{NODELIST_ENV} is not set, so this is no allocation of Slurm: run this in a job of "
            f"sbatch or salloc"
        )
    try:
        return [_host(node, silence_limit_s) for node in expand_hostlist(nodes)]
    except ValueError as error:
        raise errors.FailedPreconditionError(f"{NODELIST_ENV}: {error}") from None


def allocated_cores() -> int | None:
    """Return how many cores the allocation has on all its nodes together. None means that Slurm
    does not report it."""
    try:
        return sum(expand_tasks_per_node(os.environ.get(CORES_ENV, "")))
    except ValueError:
        return None


def _host(node: str, silence_limit_s: float) -> AgentHost:
    command = srun_command(node, agent_command(sys.executable, silence_limit_s))
    return AgentHost(node, None, partial(ProcessStream, command, explain))


def srun_command(node: str, command: list[str]) -> list[str]:
    """Return the srun command that runs `command` on a node of the allocation and passes on the
    standard input and output of `command`."""
    return [
        *(
            SRUN,
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node}",
            "--job-name=zmqdist-agent",
        ),
        *("--export=ALL", "--mpi=none", "--cpu-bind=none", "--unbuffered"),
        *command,
    ]


def explain(exit_code: int, notes: str) -> str:
    """Return a phrase that says why srun ended and what the user can do.

    Args:
      notes: the last lines of srun's standard error.
    """
    # the first pattern wins, because the later ones are less specific
    for pattern, cause in _CAUSES:
        match = re.search(pattern, notes, re.IGNORECASE)
        if match is not None:
            return cause.format(found=match[0].strip())
    lines = [
        re.sub(r"^(srun|slurmstepd): (error: )?", "", line)
        for line in notes.splitlines()
        if line.strip()
    ]
    last = lines[-1].strip() if lines else "it said nothing"
    return f"srun ended ({errors.describe_exit(exit_code)}): {last}"


_CAUSES: Final = (
    (
        r"DUE TO TIME LIMIT",
        "the time limit of the job is over: ask for more as slurm.time",
    ),
    (r"DUE TO PREEMPTION", "Slurm has ended the job in favour of another one: submit it again"),
    (
        r"oom[-_ ]?kill|Out Of Memory|memory limit",
        (
            "Slurm ended its processes because the job ran out of memory: ask for more, such as "
            "extra: [--mem=16G]"
        ),
    ),
    (
        (
            r"DUE TO NODE FAILURE|Node failure|Socket timed out|Communication connection "
            r"failure|Unable to contact|not responding"
        ),
        "its node does not answer any more ({found}): `sinfo -R` says why",
    ),
    (
        r"execve\(\): [^:\n]*: No such file or directory",
        (
            "its node does not see this Python ({found}): put the environment on a file system that "
            "all nodes mount"
        ),
    ),
    (
        (
            r"Job/step already completing or completed|Invalid job id|Job has expired|Expired or "
            r"invalid job"
        ),
        "the allocation has ended",
    ),
    (
        (
            r"Unable to create step.*|Unable to confirm allocation.*|Step creation temporarily "
            r"disabled.*"
        ),
        "Slurm starts no step there ({found}): `scontrol show job` shows what the job has",
    ),
    (r"CANCELLED AT", "its step was cancelled"),
)
