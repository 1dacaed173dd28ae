"""`zmqdist doctor`: a line for each finding, and an exit code that a script can use. What it finds:
tests/observe."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import PATIENCE_S, run_here
from zmqdist.launch.exit_codes import ExitCode

FILE = """
name: test
jobs:
  dispatcher: {{address: 127.0.0.1:{port}}}
  worker: {{count: 2}}
program: "true"
"""


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_doctor_without_arguments_checks_host() -> None:
    result = run_here("doctor")
    assert (result.code, result.err) == (ExitCode.OK, "")
    lines = result.out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert any(line.startswith("ok       zmqdist: ") for line in lines)


def test_dead_address_is_a_problem(dispatcher_here: str) -> None:
    address = dispatcher_here
    result = run_here("doctor", f"zmq://{address}")
    assert (result.code, result.err) == (ExitCode.OK, "")
    assert f"ok       {address}: dispatcher pid " in result.out
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{bound.getsockname()[1]}"
        result = run_here("doctor", dead, address, "--json")
    assert (result.code, result.err) == (ExitCode.PROGRAM_FAILED, "")
    matches = json.loads(result.out)
    assert [row["subject"] for row in matches if row["level"] == "problem"] == [dead]
    assert all(set(row) == {"level", "subject", "message", "advice"} for row in matches)
    assert all(row["advice"] for row in matches if row["level"] != "ok")


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ("kubernetes\nkubernetes: {image: i}", "cannot run `launcher: kubernetes`"),
        ("slurm", "launcher: slurm needs the program `srun`"),
    ],
    ids=["kubernetes", "slurm without srun"],
)
def test_unusable_launcher_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, reason: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "cluster.yaml"
    file.write_text(
        FILE.format(port=5050).replace("count: 2", "count: 1") + f"launcher: {launcher}\n"
    )
    lines = run_here("doctor", str(file)).out.splitlines()
    assert any(line.startswith("ok       worker: 1 task; ") for line in lines)
    (line,) = (line for line in lines if "its hosts are not checked: " in line)
    assert line.startswith("warning  ")
    assert reason in line


def test_ports_of_file_are_checked(dispatcher_here: str, tmp_path: Path) -> None:
    address = dispatcher_here
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.format(port=port_of(address)))
    result = run_here("doctor", str(file))
    assert (result.code, result.err) == (ExitCode.OK, "")
    assert f"ok       dispatcher:0 {address}: dispatcher pid " in result.out
    assert "ok       worker: 2 tasks" in result.out
    with socket.create_server(("127.0.0.1", 0)) as second:
        file.write_text(FILE.format(port=second.getsockname()[1]))
        result = run_here("doctor", str(file))
        line = f"problem  dispatcher:0 127.0.0.1:{second.getsockname()[1]}: pid "
    assert (result.code, result.err) == (ExitCode.PROGRAM_FAILED, "")
    assert line in result.out


def test_few_descriptors_have_ulimit_remedy() -> None:
    command = f"ulimit -n 256; exec {sys.executable} -m zmqdist_cli doctor"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (
        "warning  descriptors: 256 may be open, 1,024 are wanted: `ulimit -n 1024`" in result.stdout
    )
    assert result.returncode == ExitCode.OK


@pytest.mark.parametrize("secret", ["--token-file", "--keys"])
def test_missing_secret_is_a_finding(secret: str, dispatcher_here: str) -> None:
    address = dispatcher_here
    result = run_here("doctor", address, secret, "nowhere")
    assert (result.code, result.err) == (ExitCode.PROGRAM_FAILED, "")
    assert result.out.count("problem  ") == 2
