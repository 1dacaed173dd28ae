"""`zmqdist server`: a task of a cluster as a process."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.conftest import Open
from tests.cli.helpers import PATIENCE_S, run_here
from tests.cli.test_failures import assert_one_line
from tests.launch.helpers import eventually
from tests.ports import free_address
from zmqdist.launch.exit_codes import ExitCode
from zmqdist_cli.main import main

FILE = """
name: test
jobs:
  worker:
    tasks: [{0}, {1}]
    env: {{GREETING: hello}}
  ps: {{count: 1}}
program: "true"
"""


@pytest.fixture
def addresses() -> list[str]:
    """Two that are free."""
    return [free_address(), free_address()]


@pytest.fixture
def file(addresses: list[str], tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.format(*addresses))
    return str(path)


def test_tasks_of_file_find_each_other(terminal: Open, file: str, addresses: list[str]) -> None:
    tasks = [terminal("server", file, "--job", "worker", "--index", str(index)) for index in (0, 1)]
    for index, task in enumerate(tasks):
        assert task.saw(" at zmq://") == f"worker:{index} at zmq://{addresses[index]}"
    result = run_here("doctor", file)
    assert result.code == ExitCode.OK, result.out
    assert "ok       from worker:0: reaches worker:1" in result.out
    assert "ok       from worker:1: reaches worker:0" in result.out
    with zd.Session(f"zmq://{addresses[0]}") as session:
        assert (
            session.run(lambda: __import__("os").environ["GREETING"], timeout_in_ms=20_000)
            == "hello"
        )
    tasks[0].interrupt()
    tasks[1].process.send_signal(signal.SIGTERM)
    assert [task.ends() for task in tasks] == [0, 0]
    assert [task.lines for task in tasks] == [
        [f"worker:{index} at zmq://{addresses[index]}"] for index in (0, 1)
    ]


def test_running_call_has_grace(terminal: Open, tmp_path: Path) -> None:
    def work(folder: str) -> str:
        import pathlib
        import time

        (pathlib.Path(folder) / "begun").touch()
        while not (pathlib.Path(folder) / "go").exists():
            time.sleep(0.01)
        return "done"

    task = terminal("server", "--spec", '{"worker": ["127.0.0.1:0"]}', "--grace", "20")
    target = task.saw("worker:0 at ").partition(" at ")[2]
    received: list[Any] = []
    with zd.Session(target) as session:
        asking = threading.Thread(
            target=lambda: received.append(session.run(work, str(tmp_path))), daemon=True
        )
        asking.start()
        eventually((tmp_path / "begun").exists, "the function runs")
        task.process.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        asking.join(PATIENCE_S)
    assert received == ["done"]
    assert task.ends() == 0


def test_second_signal_skips_grace(terminal: Open, tmp_path: Path) -> None:
    def work(folder: str) -> None:
        import pathlib
        import time

        (pathlib.Path(folder) / "begun").touch()
        while True:
            time.sleep(0.1)

    task = terminal("server", "--spec", '{"worker": ["127.0.0.1:0"]}', "--grace", "100")
    target = task.saw("worker:0 at ").partition(" at ")[2]
    failed: list[Any] = []

    def ask() -> None:
        with zd.Session(target) as session:
            try:
                session.run(work, str(tmp_path))
            except zd.errors.UnavailableError as error:
                failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    eventually((tmp_path / "begun").exists, "the function runs")
    eventually(
        lambda: task.process.poll() is not None or bool(task.interrupt()),
        "it ends long before the grace",
    )
    assert task.ends() == ExitCode.PROGRAM_FAILED
    asking.join(PATIENCE_S)
    assert failed


def test_environment_names_task(
    terminal: Open, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 1}}
    task = terminal("server", environment={"TF_CONFIG": json.dumps(text)})
    task.saw(f"worker:1 at zmq://{addresses[1]}")
    monkeypatch.setenv("TF_CONFIG", json.dumps(text))
    result = run_here("doctor")
    assert (
        f"ok       worker:0 {addresses[0]}: {addresses[0]} belongs to this host and is free"
        in result.out
    )
    assert f"problem  from worker:1: it cannot reach worker:0 at {addresses[0]}" in result.out
    monkeypatch.setenv("TF_CONFIG", "{")
    assert run_here("doctor").code == ExitCode.PROGRAM_FAILED
    assert run_here("shutdown", addresses[1]).code == 0
    assert task.ends() == 0


def test_used_port_is_named(terminal: Open, addresses: list[str]) -> None:
    spec = json.dumps({"worker": [addresses[0]]})
    terminal("server", "--spec", spec).saw("worker:0 at ")
    result = run_here("server", "--spec", spec)
    assert (result.code, result.out) == (ExitCode.PROGRAM_FAILED, "")
    assert (
        f"server: could not start the server of worker:0: could not bind {addresses[0]}: the port "
        f"is in use" in result.err
    )
    assert_one_line(result.err)


MISTAKES = [
    ("server", "which cluster? Give a CONFIG or --spec, or set TF_CONFIG or ZMQDIST_CONFIG"),
    ("server {file} --spec {{}}", "CONFIG and --spec both describe the cluster"),
    ("server nofile.yaml", "nofile.yaml:1: (file): cannot be read"),
    ("server {file}", "which task of job 'worker'?"),
    ("server {file} --job worker --index 7", "task 7 of job 'worker' was not defined"),
    ("server {file} --job ps", "cluster.yaml has no addresses for its tasks"),
    ("server --spec @nowhere.json", "--spec: nowhere.json cannot be read"),
    ("server --spec [1", "--spec: Expecting"),
    ("server --spec 3", "--spec: "),
    ('server --spec {{"worker":["10.1.2.3"]}}', "worker:0 needs an address with a port"),
    ('server --spec {{"worker":["127.0.0.1:0"]}} --bind 0.0.0.0', "no CURVE keys are given"),
    ('server --spec {{"worker":["127.0.0.1:0"]}} --index -1', "Invalid value for '--index'"),
]


@pytest.mark.parametrize(("line", "text"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_is_one_line(
    line: str,
    text: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREETING", "")  # so that it is put back: the command takes over the file's
    code = main(line.format(file=file).split())
    output = capsys.readouterr()
    assert (code, output.out) == (ExitCode.USAGE, ""), output.err
    assert text in output.err
    assert_one_line(output.err)


def test_file_without_addresses_is_for_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text('name: x\njobs:\n  worker: {count: 2}\nprogram: "true"\n')
    assert main(["server", str(tmp_path / "c.yaml"), "--job", "worker"]) == ExitCode.USAGE
    assert (
        "c.yaml has no addresses for its tasks: write `tasks: [host:port, ...]`"
        in capsys.readouterr().err
    )
