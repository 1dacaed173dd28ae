"""The files that travel with a role to its host: a join ticket and no key, and a cluster file with
the paths of that host."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from zmqdist.cluster import ClusterConfig
from zmqdist.cluster.file_sections import RuntimeConfig
from zmqdist.launch.role_files import RoleFiles
from zmqdist.launch.roles import TaskConfig
from zmqdist.scheduling.shared.config import WorkerConfig

FOLDER = "/memory/zmqdist-x"
WORKER = WorkerConfig("h:1", index=2, slots=1, token_file="/here/token", keys_dir="/here/keys")
PS = TaskConfig({"ps": {0: "h:2"}}, "ps", 0, keys_dir="/here/keys")


@pytest.fixture
def files(tmp_path: Path) -> RoleFiles:
    return role_files(tmp_path, slots=1)


def role_files(folder: Path, slots: object) -> RoleFiles:
    rows = {
        "name": "c",
        "program": ["x"],
        "jobs": {"worker": {"count": 3, "slots": slots}},
        "security": {"keys": str(folder / "keys")},
    }
    runtime = RuntimeConfig(dispatcher="zmq://h:1", keys_dir=str(folder / "keys"))
    cluster = msgspec.structs.replace(ClusterConfig.from_dict(rows), runtime=runtime)
    return RoleFiles(cluster, lambda name, address: f"ticket {name} {address}".rstrip())


def test_worker_gets_ticket_and_no_key(files: RoleFiles) -> None:
    config, variables, matches = files.pack(
        WORKER, {"A": "1", "ZMQDIST_TOKEN_FILE": "/here/token"}, FOLDER, 6
    )
    folder = "worker-2"
    assert sorted(matches) == [f"{folder}/cluster.yaml", f"{folder}/ticket"]
    assert matches[f"{folder}/ticket"] == "ticket worker:2"
    there = f"/memory/zmqdist-x/{folder}"
    assert (config.keys_dir, config.ticket_file, config.token_file) == (
        f"{there}/keys",
        f"{there}/ticket",
        None,
    )
    assert variables == {
        "A": "1",
        "ZMQDIST_KEYS_DIR": f"{there}/keys",
        "ZMQDIST_CONFIG": f"{there}/cluster.yaml",
    }


def test_ps_ticket_names_its_address(files: RoleFiles) -> None:
    _, _, matches = files.pack(PS, {}, FOLDER, 6)
    assert matches["ps-0/ticket"] == "ticket ps:0 h:2"


def test_cluster_file_has_paths_of_host(files: RoleFiles, tmp_path: Path) -> None:
    _, _, matches = files.pack(WORKER, {}, FOLDER, 6)
    text = matches["worker-2/cluster.yaml"]
    assert yaml.safe_load(text)["runtime"] == {
        "dispatcher": "zmq://h:1",
        "keys_dir": "/memory/zmqdist-x/worker-2/keys",
    }
    assert str(tmp_path) not in text


def test_slots_auto_are_the_cores_of_the_host(tmp_path: Path) -> None:
    config, _, _ = role_files(tmp_path, slots="auto").pack(WORKER, {}, FOLDER, 6)
    assert isinstance(config, WorkerConfig)
    assert config.slots == 6
