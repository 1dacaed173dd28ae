"""The files of deploy/: each command is one of ours with options that there are, each role has the
keys that it needs and no others."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from zmqdist.launch.kubernetes import ROLE_FILES
from zmqdist_cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
USER = "10001"


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of a command of ours, as click takes them. Raises click.UsageError."""
    assert words[0].rpartition("/")[2] == "zmqdist"
    assert words[1] in COMMANDS
    command = cli.get_command(click.Context(cli), words[1])
    assert command is not None
    return command.make_context(words[1], list(words[2:])).params


def test_wrong_option_is_noticed() -> None:
    assert parsed(["zmqdist", "worker", "--slots", "2"])["slots"] == 2
    with pytest.raises(click.UsageError):
        parsed(["zmqdist", "worker", "--slotts", "2"])


# -- compose.yaml ----------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return made


def test_compose_services_have_keys_of_roles() -> None:
    services = compose()["services"]
    assert list(services) == ["dispatcher", "worker-0", "worker-1", "ps-0", "program"]
    for name, service in services.items():
        assert set(service["secrets"]) <= set(ROLE_FILES[name.partition("-")[0]]) | {
            "client.key"
        }, name
        assert ("server.key" in service["secrets"]) == (name in ("dispatcher", "ps-0"))
        assert set(service["secrets"]) <= compose()["secrets"].keys()
        assert service["user"].startswith("${ZMQDIST_USER:?")
        assert service["cap_drop"] == ["ALL"]


def test_compose_commands_fit_together() -> None:
    services = compose()["services"]
    dispatcher = parsed(services["dispatcher"]["command"])
    assert (
        parsed(services["dispatcher"]["healthcheck"]["test"][1:])["target"]
        == f"127.0.0.1:{dispatcher['port']}"
    )
    for index in (0, 1):
        worker = parsed(services[f"worker-{index}"]["command"])
        assert (worker["target"], worker["index"]) == (f"dispatcher:{dispatcher['port']}", index)
    ps = parsed(services["ps-0"]["command"])
    assert (ps["spec"], ps["job"], ps["index"]) == ('{"ps": ["ps-0:5052"]}', "ps", 0)


def test_compose_program_finds_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zmqdist.cluster import ClusterConfig

    (tmp_path / "cluster.yaml").write_text(compose()["configs"]["cluster"]["content"])
    monkeypatch.setenv("ZMQDIST_CONFIG", str(tmp_path / "cluster.yaml"))
    config = ClusterConfig.from_environment()
    assert config is not None
    assert config.runtime is not None
    assert config.runtime.dispatcher == "zmq://dispatcher:5050"
    assert (
        config.runtime.keys_dir
        == compose()["services"]["program"]["environment"]["ZMQDIST_KEYS_DIR"]
    )
    assert config.spec.as_dict() == {"dispatcher": ["dispatcher:5050"], "ps": ["ps-0:5052"]}
    assert list(config.command) == compose()["services"]["program"]["command"]


# -- the image -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [
        (line.split()[0], line.partition(" ")[2])
        for line in text.splitlines()
        if line and line[0] != "#"
    ]


def test_image_copies_existing_files() -> None:
    let_in = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    copied = set()
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            copied |= set([word for word in rest.split() if not word.startswith("--")][:-1])
    assert copied == let_in
    assert all((ROOT / each).exists() for each in copied)


def test_image_runs_as_user_of_manifests() -> None:
    from zmqdist.cluster.launcher_sections import KubernetesConfig

    last = [rest for name, rest in instructions() if name == "USER"][-1]
    assert last == f"{USER}:{USER}"
    assert KubernetesConfig().user_id == int(USER)
    assert next(rest for name, rest in instructions() if name == "FROM").endswith(" AS build")


# -- systemd ---------------------------------------------------------------------------------------


def unit(path: Path) -> list[tuple[str, str]]:
    """The settings of a unit; a key may be there several times."""
    lines = [line for line in path.read_text().splitlines() if line and line[0] not in "#["]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_runs_command_with_keys_of_role(path: Path) -> None:
    settings = unit(path)
    (start,) = [value for key, value in settings if key == "ExecStart"]
    role = re.findall(r"zmqdist-(\w+)", path.name)[0]
    parsed(
        shlex.split(
            start.replace("%i", "7")
            .replace("${ZMQDIST_DISPATCHER}", "a:5050")
            .replace("%S", "/var/lib")
        )
    )
    loaded = [value.partition(":") for key, value in settings if key == "LoadCredential"]
    assert {name for name, _, _ in loaded} == set(ROLE_FILES[role]) - {
        "client.key",
        "server.pub",
    } | ({"server.pub"} if role == "worker" else set())
    assert all(source == f"/etc/zmqdist/keys/{name}" for name, _, source in loaded)
    assert ("Environment", "ZMQDIST_KEYS_DIR=%d") in settings
    assert ("DynamicUser", "yes") in settings


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on this machine"
)
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_is_valid_and_hardened(path: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "zmqdist"
    text = path.read_text().replace("/opt/zmqdist/bin/zmqdist", str(script))
    file = tmp_path / path.name.replace("@.", "@0.")
    file.write_text(text)
    (tmp_path / path.name).write_text(text)  # the template, of which the other is an instance
    for words in (
        ["verify", "--man=no"],
        ["security", "--offline=true", "--threshold=30", "--no-pager"],
    ):
        done = subprocess.run(
            ["systemd-analyze", *words, file],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert words[0] != "verify" or not done.stderr
