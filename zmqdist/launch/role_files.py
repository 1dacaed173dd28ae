"""The files that a launcher makes for a role if the cluster has keys: a join ticket, and the
cluster file with the paths of its host.

The launcher gives a role no key, because the role makes its own keys and joins with the ticket,
which works once (transport/join_ticket.py). A ticket is a secret. It reaches the role only as a
file of the order `StartRole`, or as a private file on the launcher's host, never in an argument or
an environment variable (docs/internals/launching.md).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from zmqdist import limits
from zmqdist.cluster.environment import CONFIG_ENV
from zmqdist.launch.children import Child, Children
from zmqdist.launch.folders import write_private
from zmqdist.launch.launcher_interface import LineHandler
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.transport.credentials import KEYS_DIR_VARIABLE, TOKEN_FILE_VARIABLE

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.launch.roles import TaskConfig

OpenJoin: TypeAlias = Callable[[str, str], str]
"""A function that returns a new join ticket. Its arguments are the name of the role and, for a ps,
the address at which the ps listens."""


class JoiningChildren(Children):
    """Child processes that each join the cluster with a ticket, so that each has keys of its own.

    Args:
      files: the RoleFiles that makes the files of each role.
      folder: the private folder that has the files.
    """

    def __init__(self, on_exit: Callable[[Child], object], files: RoleFiles, folder: Path) -> None:
        super().__init__(on_exit)
        self._files = files
        self._folder = folder

    def start_role(
        self,
        config: WorkerConfig | TaskConfig,
        environment: Mapping[str, str],
        on_line: LineHandler | None = None,
    ) -> Child:
        config, variables, files = self._files.pack(
            config, environment, str(self._folder), len(os.sched_getaffinity(0))
        )
        for name, text in files.items():
            write_private(self._folder, name, text)
        return super().start_role(config, variables, on_line)


class RoleFiles:
    """Makes the files of the roles of one cluster.

    Args:
      cluster: the cluster file with its section `runtime`.
      open_join: a function that returns a new ticket. It is called once for each start of a role.
    """

    def __init__(self, cluster: ClusterConfig, open_join: OpenJoin) -> None:
        self._cluster = cluster
        self._open_join = open_join

    def pack(
        self,
        config: WorkerConfig | TaskConfig,
        environment: Mapping[str, str],
        parent: str,
        cores: int,
    ) -> tuple[WorkerConfig | TaskConfig, dict[str, str], dict[str, str]]:
        """Return the config, the environment variables and the files of a role. The names of the
        files are relative to `parent`.

        Args:
          parent: the folder on the role's host that will have the files.
          cores: number of cores of that host.
        """
        folder = f"{config.job}-{config.index}"
        keys_dir = f"{parent}/{folder}/keys"
        address = (
            "" if isinstance(config, WorkerConfig) else config.cluster[config.job][config.index]
        )
        files = {
            f"{folder}/ticket": self._open_join(f"{config.job}:{config.index}", address),
            f"{folder}/cluster.yaml": self._cluster_file(keys_dir),
        }
        paths = {KEYS_DIR_VARIABLE: keys_dir, CONFIG_ENV: f"{parent}/{folder}/cluster.yaml"}
        # a role with keys must not use the token of its launcher
        own_variables = {
            name: value for name, value in environment.items() if name != TOKEN_FILE_VARIABLE
        }
        worker = self._cluster.jobs.worker
        if isinstance(config, WorkerConfig) and worker is not None and worker.slots == "auto":
            config = dataclasses.replace(config, slots=min(cores, limits.SLOTS_MAX))
        ticket_file = f"{parent}/{folder}/ticket"
        config = dataclasses.replace(
            config, keys_dir=keys_dir, token_file=None, ticket_file=ticket_file
        )
        return config, {**own_variables, **paths}, files

    def _cluster_file(self, keys_dir: str) -> str:
        assert self._cluster.runtime is not None
        runtime = msgspec.structs.replace(self._cluster.runtime, keys_dir=keys_dir)
        security = msgspec.structs.replace(self._cluster.security, keys=None)
        return msgspec.structs.replace(self._cluster, runtime=runtime, security=security).to_yaml()
