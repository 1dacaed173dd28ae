"""Selects the hosts on which agents start the roles of a cluster file, according to its key
`launcher`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist import errors, limits
from zmqdist.launch.hosts import AgentHost

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig


def agent_hosts(config: ClusterConfig) -> list[AgentHost] | None:
    """Return the hosts whose agents start the roles. None means that the roles are child processes
    of the launcher. This function starts no agent.

    Raises:
      NotFoundError: a program or package that the launcher needs is missing.
      FailedPreconditionError: the launcher is slurm, and this process does not run in an allocation
        of Slurm.
      UnimplementedError: `zmqdist launch` does not have this launcher.
    """
    orphan_limit_s = (
        limits.ORPHAN_LIMIT_S if config.jobs.worker is None else config.jobs.worker.orphan_limit_s
    )
    silence_limit_s = max(orphan_limit_s, limits.AGENT_SILENCE_S_MIN)
    if config.launcher == "local":
        return None
    if config.launcher == "ssh":
        from zmqdist.launch.ssh import ssh_hosts

        return ssh_hosts(config.ssh, silence_limit_s)
    if config.launcher == "slurm":
        from zmqdist.launch.slurm import slurm_hosts

        return slurm_hosts(silence_limit_s)
    if config.launcher == "ray":
        from zmqdist.launch.ray import ray_hosts

        return ray_hosts(config, silence_limit_s)
    raise errors.UnimplementedError(
        f"`zmqdist launch` cannot run `launcher: {config.launcher}`; it runs local, ssh, slurm "
        f"and ray"
    )
