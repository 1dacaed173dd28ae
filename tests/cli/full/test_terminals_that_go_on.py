"""Roles in several terminals: lost and started again, drained, configured by files and keys."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cli.conftest import Open, start_worker
from tests.cli.helpers import Terminal, run, workers
from tests.launch.helpers import eventually
from zmqdist.coordinator import ClusterCoordinator


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; Python itself has none for SIGTERM."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_restarted_dispatcher_regains_worker(
    terminal: Open, dispatcher: tuple[Terminal, str]
) -> None:
    first, address = dispatcher
    worker = start_worker(terminal, address)
    with ClusterCoordinator(address) as coordinator:
        assert coordinator.schedule(lambda: 1).fetch() == 1
        first.kill()
        again = terminal("dispatcher", "--port", address.rpartition(":")[2])
        again.saw(f"dispatcher at zmq://{address}")
        eventually(lambda: workers(address) == ["worker:0"], "the worker rejoins")
        assert coordinator.schedule(lambda: 2).fetch() == 2  # the prompt goes on
    assert worker.process.poll() is None
    assert run("shutdown", address).code == 0
    assert (again.ends(), worker.ends()) == (0, 0)


def test_drained_worker_leaves_alone(terminal: Open, dispatcher: tuple[Terminal, str]) -> None:
    _, address = dispatcher
    staying, leaving = start_worker(terminal, address), start_worker(terminal, address, "--threads")
    result = run("drain", address, "worker:1", "--grace", "3")
    assert (result.code, result.out) == (
        0,
        "worker:1 leaves; its running functions have 3 s to end\n",
    )
    assert leaving.ends() == 0
    assert workers(address) == ["worker:0"]
    assert staying.process.poll() is None


def test_waiting_worker_can_be_interrupted(terminal: Open) -> None:
    waiting = terminal("worker", "--dispatcher", "127.0.0.1:9", "--threads")
    eventually(lambda: catches(waiting.pid, signal.SIGTERM), "it has begun")
    waiting.interrupt()
    assert waiting.ends() == 0
    assert not [line for line in waiting.lines if "Traceback" in line]


def test_file_completes_command_line_of_role(
    terminal: Open, dispatcher: tuple[Terminal, str], tmp_path: Path
) -> None:
    _, address = dispatcher
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: test\njobs:\n"
        f"  dispatcher: {{address: {address}, lease_s: 4}}\n"
        "  worker: {count: 1, slots: 3, env: {GREETING: hello}}\n"
        "program: 'true'\n"
    )
    from_file = terminal("worker", "--config", str(file))
    assert from_file.saw("worker:0 of").endswith("3 slots")
    with ClusterCoordinator(address) as coordinator:
        assert coordinator.schedule(lambda: os.environ["GREETING"]).fetch() == "hello"
    assert (
        terminal("worker", "--config", str(file), "--slots", "1")
        .saw("worker:1 of")
        .endswith("1 slot")
    )
    second = terminal("dispatcher", "--config", str(file), "--port", "0")
    assert second.saw("dispatcher at") != f"dispatcher at zmq://{address}"


def test_cluster_with_keys_uses_curve(terminal: Open, tmp_path: Path) -> None:
    assert run("keygen", str(tmp_path / "keys")).code == 0
    keys = ["--keys", str(tmp_path / "keys")]
    opened = terminal("dispatcher", "--port", "0", *keys)
    address = opened.saw("dispatcher at zmq://").partition("zmq://")[2]
    start_worker(terminal, address, *keys)
    assert "  worker:0  alive" in run("status", address, *keys).out
    assert run("shutdown", address, *keys).code == 0
