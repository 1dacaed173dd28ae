"""Which hosts a cluster file runs on, by its `launcher:`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqdist import errors, limits
from zmqdist.launch.hosts import AgentHost

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig


def agent_hosts(config: ClusterConfig) -> list[AgentHost] | None:
    """Return the hosts whose agents start the roles; None: the roles are children of the launcher. Starts nothing.

    Raises:
      NotFoundError: a program that the launcher needs is missing.
      UnimplementedError: there is no such launcher yet.
    """
    silence_limit_s = limits.ORPHAN_LIMIT_S if config.jobs.worker is None else config.jobs.worker.orphan_limit_s
    if config.launcher == "local":
        return None
    if config.launcher == "ssh":
        from zmqdist.launch.ssh import ssh_hosts

        return ssh_hosts(config.ssh, silence_limit_s)
    raise errors.UnimplementedError(f"launcher: {config.launcher} does not run yet; local and ssh do")
