"""Dispatcher, workers and looks at them from several terminals, as a new user would."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Open, start_worker
from tests.cli.helpers import Terminal, run, run_here, status
from tests.launch.helpers import eventually
from zmqdist.coordinator import ClusterCoordinator


@pytest.mark.processes("command")
def test_worker_registers_and_leaves(terminal: Open, dispatcher: tuple[Terminal, str]) -> None:
    opened, address = dispatcher
    opened.saw("add a worker")
    assert opened.lines == [
        f"dispatcher at zmq://{address}",
        f"  add a worker: zmqdist worker --dispatcher {address}",
    ]
    worker = start_worker(terminal, address, "--slots", "2")
    assert worker.lines == [f"worker:0 of {address}: 2 slots"]
    record = status(address)
    assert record is not None
    assert [(row["name"], row["slots"], row["pid"]) for row in record["workers"]] == [
        ("worker:0", 2, worker.pid)
    ]
    for command in ("status", "top"):
        shown = run_here(command, f"zmq://{address}")
        assert shown.code == 0
        assert shown.out.startswith(
            f"dispatcher at {address} (pid {opened.pid}): 1 worker, 2 slots, "
        )
        assert "  worker:0  alive      2 " in shown.out
    with ClusterCoordinator(address) as coordinator:
        assert coordinator.schedule(lambda: os.getpid()).fetch() != worker.pid
    result = run("shutdown", address, "--grace", "5")
    assert (result.code, result.out, result.err) == (
        0,
        f"dispatcher at {address} ends, with 1 worker\n",
        "",
    )
    assert (opened.ends(), worker.ends()) == (0, 0)
    assert status(address) is None


@pytest.mark.killed("command")
def test_killed_worker_is_shown_as_loss(terminal: Open, dispatcher: tuple[Terminal, str]) -> None:
    _, address = dispatcher
    start_worker(terminal, address).kill()
    eventually(lambda: bool((status(address) or {}).get("losses_count")), "the loss")
    shown = run_here("status", address)
    assert ", 1 loss\n" in shown.out
    assert "lost workers (last 1 of 1)" in shown.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_signalled_role_ends_with_code_0(
    number: signal.Signals, terminal: Open, dispatcher: tuple[Terminal, str]
) -> None:
    opened, address = dispatcher
    worker = start_worker(terminal, address, "--slots", "2")
    for item in worker, opened:
        # The whole process group, as at a terminal; the tests' own checks look for what is left.
        os.killpg(item.pid, number)
        assert item.ends() == 0, item.lines
        assert not [line for line in item.lines if "Traceback" in line], "\n".join(item.lines)


def test_json_is_json_on_every_listing(dispatcher_here: str, tmp_path: Path) -> None:
    address = dispatcher_here
    (tmp_path / "cluster.yaml").write_text(
        "name: test\njobs:\n  worker: {count: 1}\nprogram: 'true'\n"
    )
    for words in (
        ["status", address],
        ["top", address],
        ["validate", str(tmp_path / "cluster.yaml")],
    ):
        result = run_here(*words, "--json")
        assert result.code == 0, result.err
        assert isinstance(json.loads(result.out), dict)


def test_launch_prefixes_lines_and_returns_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "import zmqdist as zd\n"
        "with zd.coordinator.ClusterCoordinator() as coordinator:\n"
        "    coordinator.schedule(lambda: print('from a worker', flush=True)).fetch()\n"
        "from zmqdist_cli.main import main\n"
        "for words in (['status'], ['status', '--json'], ['doctor']):\n"
        "    assert main(words) == 0\n"
        "print('arguments', sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "cluster.yaml").write_text(
        "name: test\njobs:\n  worker: {count: 1}\nprogram: python program.py\n"
    )
    result = run("launch", "cluster.yaml", "--", "--epochs", "3", cwd=tmp_path)
    assert (result.code, result.err) == (7, "")
    assert "[worker-0] from a worker\n" in result.out
    assert "arguments ['--epochs', '3']\n" in result.out
    assert ": 1 worker, 1 slot, " in result.out  # TARGET is known inside
    assert '"workers": [' in result.out
    assert "ok       dispatcher localhost:" in result.out  # with its token
