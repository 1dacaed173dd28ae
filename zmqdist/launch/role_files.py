"""What travels with a role to its host: the keys that it needs, and the cluster file; with its paths as they are there.

Secrets travel as files of the order `start` only, never in an argument or a variable (docs/internals/launching.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from zmqdist import limits
from zmqdist.cluster.environment import CONFIG_ENV
from zmqdist.launch.agent_protocol import AgentHello
from zmqdist.scheduling.dispatcher.config import WorkerConfig
from zmqdist.transport.credentials import KEYS_DIR_VARIABLE, TOKEN_FILE_VARIABLE

if TYPE_CHECKING:
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.launch.roles import TaskConfig

KEYS_OF: Final = {
    "WorkerConfig": ("worker.key", "server.pub", "authorized"),
    "TaskConfig": ("worker.key", "server.key", "server.pub", "authorized"),
}
"""The key files that each kind of role needs; a task connects to the others as a worker does."""


class RoleFiles:
    """The files of the roles of one cluster.

    Args:
      cluster: with `runtime`.
      keys_dir: the keys of the cluster on this host.
    """

    def __init__(self, cluster: ClusterConfig, keys_dir: str) -> None:
        self._cluster = cluster
        self._keys_dir = Path(keys_dir)

    def pack(
        self, config: WorkerConfig | TaskConfig, environment: Mapping[str, str], hello: AgentHello
    ) -> tuple[WorkerConfig | TaskConfig, dict[str, str], dict[str, str]]:
        """Return the config, the environment and the files of a role on the host of this agent."""
        folder = f"{config.job}-{config.index}"
        keys_dir = f"{hello.folder}/{folder}/keys"
        files = {
            f"{folder}/keys/{name}": (self._keys_dir / name).read_text() for name in KEYS_OF[type(config).__name__]
        }
        files[f"{folder}/cluster.yaml"] = self._cluster_file(keys_dir)
        paths = {KEYS_DIR_VARIABLE: keys_dir, CONFIG_ENV: f"{hello.folder}/{folder}/cluster.yaml"}
        kept = {name: value for name, value in environment.items() if name != TOKEN_FILE_VARIABLE}
        if isinstance(config, WorkerConfig) and self._one_slot_a_core():
            config = dataclasses.replace(config, slots=min(hello.cores, limits.SLOTS_MAX))
        config = dataclasses.replace(config, keys_dir=keys_dir, token_file=None)
        return config, {**kept, **paths}, files

    def _one_slot_a_core(self) -> bool:
        worker = self._cluster.jobs.worker
        return worker is not None and worker.slots == "auto"

    def _cluster_file(self, keys_dir: str) -> str:
        assert self._cluster.runtime is not None
        runtime = msgspec.structs.replace(self._cluster.runtime, keys_dir=keys_dir)
        security = msgspec.structs.replace(self._cluster.security, keys=None)
        return msgspec.structs.replace(self._cluster, runtime=runtime, security=security).to_yaml()
