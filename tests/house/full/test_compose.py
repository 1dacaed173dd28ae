"""The services of deploy/compose.yaml as processes of this machine, each with its secrets and no
others: the program ends with 0."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import trained_accuracy
from tests.house.test_deploy import DEPLOY, ROOT
from tests.ports import free_address
from zmqdist.transport.keys import keygen

COMMANDS = {"zmqdist": [sys.executable, "-m", "zmqdist_cli"], "python": [sys.executable]}


@pytest.mark.timeout(180)
def test_compose_services_learn_digits(tmp_path: Path) -> None:
    addresses = {"dispatcher:5050": free_address(), "ps-0:5052": free_address()}
    text = (DEPLOY / "compose.yaml").read_text()
    for name, address in addresses.items():
        text = text.replace(name, address)
    compose: dict[str, Any] = yaml.safe_load(text)
    keygen(tmp_path / "keys")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")

    def start(name: str) -> subprocess.Popen[str]:
        service, folder = compose["services"][name], tmp_path / name
        folder.mkdir()
        for each in service["secrets"]:
            shutil.copy(tmp_path / "keys" / each, folder / each)
        (folder / "cluster.yaml").write_text(
            compose["configs"]["cluster"]["content"].replace("/run/secrets", str(folder))
        )
        words = list(service["command"])
        if name == "dispatcher":  # here the services share an interface and its ports
            words[words.index("--port") + 1] = addresses["dispatcher:5050"].rpartition(":")[2]
        words = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]
        variables = {
            key: value.replace("/run/secrets", str(folder)).replace("/etc/zmqdist", str(folder))
            for key, value in service["environment"].items()
        }
        with (folder / "output.txt").open("w") as output:
            return subprocess.Popen(
                [*COMMANDS[words[0]], *words[1:]],
                cwd=tmp_path,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    running = [start(name) for name in compose["services"] if name != "program"]
    try:
        code = start("program").wait(150)
        said = (tmp_path / "program" / "output.txt").read_text()
        assert code == 0, said
        assert trained_accuracy(said) >= 0.95
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)
