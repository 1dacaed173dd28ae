"""What travels with a role to its host: the keys that it needs and no others, under the paths that are right there."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import yaml

from zmqdist.cluster import ClusterConfig
from zmqdist.cluster.sections import RuntimeConfig
from zmqdist.launch.agent_protocol import AgentHello
from zmqdist.launch.role_files import RoleFiles
from zmqdist.launch.roles import TaskConfig
from zmqdist.scheduling.dispatcher.config import WorkerConfig
from zmqdist.transport import keys

HELLO = AgentHello("3.11.7", "1.0", "/there/zmqdist", 6, 0.0, "there", 1, "/memory/zmqdist-x")
WORKER = WorkerConfig("h:1", index=2, slots=1, token_file="/here/token", keys_dir="/here/keys")
PS = TaskConfig({"ps": {0: "h:2"}}, "ps", 0, keys_dir="/here/keys")


@pytest.fixture
def files(tmp_path: Path) -> RoleFiles:
    return role_files(tmp_path, slots=1)


def role_files(folder: Path, slots: object) -> RoleFiles:
    keys.keygen(folder / "keys")
    given = {
        "name": "c",
        "program": ["x"],
        "jobs": {"worker": {"count": 3, "slots": slots}},
        "security": {"keys": str(folder / "keys")},
    }
    runtime = RuntimeConfig(dispatcher="zmq://h:1", keys_dir=str(folder / "keys"))
    cluster = msgspec.structs.replace(ClusterConfig.from_dict(given), runtime=runtime)
    return RoleFiles(cluster, str(folder / "keys"))


def test_a_worker_has_the_keys_of_a_worker(files: RoleFiles, tmp_path: Path) -> None:
    config, variables, found = files.pack(WORKER, {"A": "1", "ZMQDIST_TOKEN_FILE": "/here/token"}, HELLO)
    folder = "worker-2"
    assert sorted(found) == [
        f"{folder}/cluster.yaml",
        f"{folder}/keys/authorized",
        f"{folder}/keys/server.pub",
        f"{folder}/keys/worker.key",
    ]
    assert found[f"{folder}/keys/worker.key"] == (tmp_path / "keys" / "worker.key").read_text()
    assert (config.keys_dir, config.token_file) == (f"/memory/zmqdist-x/{folder}/keys", None)
    assert variables == {
        "A": "1",
        "ZMQDIST_KEYS_DIR": f"/memory/zmqdist-x/{folder}/keys",
        "ZMQDIST_CONFIG": f"/memory/zmqdist-x/{folder}/cluster.yaml",
    }


def test_a_ps_has_the_key_of_the_servers_too(files: RoleFiles) -> None:
    _, _, found = files.pack(PS, {}, HELLO)
    assert {os.path.basename(name) for name in found if "/keys/" in name} == {
        "worker.key",
        "server.key",
        "server.pub",
        "authorized",
    }


def test_the_cluster_file_has_the_paths_of_the_host(files: RoleFiles, tmp_path: Path) -> None:
    _, _, found = files.pack(WORKER, {}, HELLO)
    text = found["worker-2/cluster.yaml"]
    assert yaml.safe_load(text)["runtime"] == {
        "dispatcher": "zmq://h:1",
        "keys_dir": "/memory/zmqdist-x/worker-2/keys",
    }
    assert str(tmp_path) not in text


def test_slots_auto_are_the_cores_of_the_host(tmp_path: Path) -> None:
    config, _, _ = role_files(tmp_path, slots="auto").pack(WORKER, {}, HELLO)
    assert isinstance(config, WorkerConfig)
    assert config.slots == 6
