"""Dispatcher, workers and looks at them from several terminals, as a new user would."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Open
from tests.cli.running import Terminal, eventually, run, status, workers
from zmqdist.coordinator import ClusterCoordinator


def start_worker(terminal: Open, address: str, *options: str) -> Terminal:
    opened = terminal("worker", "--dispatcher", address, *options)
    opened.saw(f" of {address}: ")
    return opened


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; Python itself has none for SIGTERM."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_dispatcher_says_where_it_is_and_how_to_go_on(dispatcher: tuple[Terminal, str]) -> None:
    opened, address = dispatcher
    opened.saw("add a worker")
    assert opened.lines == [
        f"dispatcher at zmq://{address}",
        f"  add a worker: zmqdist worker --dispatcher {address}",
    ]


def test_a_worker_registers_shows_up_and_leaves_with_the_dispatcher(
    terminal: Open, dispatcher: tuple[Terminal, str]
) -> None:
    opened, address = dispatcher
    worker = start_worker(terminal, address, "--slots", "2")
    assert worker.lines == [f"worker:0 of {address}: 2 slots"]
    record = status(address)
    assert record is not None
    assert [(row["name"], row["slots"], row["pid"]) for row in record["workers"]] == [("worker:0", 2, worker.pid)]
    for command in ("status", "top"):
        shown = run(command, f"zmq://{address}")
        assert shown.code == 0
        assert shown.out.startswith(f"dispatcher at {address} (pid {opened.pid}): 1 worker, 2 slots, ")
        assert "  worker:0  alive      2 " in shown.out
    with ClusterCoordinator(address) as coordinator:
        assert coordinator.schedule(lambda: os.getpid()).fetch() != worker.pid
    done = run("shutdown", address, "--grace", "5")
    assert (done.code, done.out, done.err) == (0, f"dispatcher at {address} ends, with 1 worker\n", "")
    assert (opened.ends(), worker.ends()) == (0, 0)
    assert status(address) is None


def test_a_dispatcher_that_was_killed_and_started_again_gets_its_worker_back(
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


def test_a_drained_worker_leaves_and_the_other_stays(terminal: Open, dispatcher: tuple[Terminal, str]) -> None:
    _, address = dispatcher
    staying, leaving = start_worker(terminal, address), start_worker(terminal, address, "--threads")
    done = run("drain", address, "worker:1", "--grace", "3")
    assert (done.code, done.out) == (0, "worker:1 leaves; what it runs has 3 s to end\n")
    assert leaving.ends() == 0
    assert workers(address) == ["worker:0"]
    assert staying.process.poll() is None


def test_a_killed_worker_is_shown_as_a_loss(terminal: Open, dispatcher: tuple[Terminal, str]) -> None:
    _, address = dispatcher
    start_worker(terminal, address).kill()
    eventually(lambda: bool((status(address) or {}).get("losses_count")), "the loss")
    shown = run("status", address)
    assert ", 1 loss\n" in shown.out
    assert "lost workers (last 1 of 1)" in shown.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_role_that_is_asked_to_end_does_so_with_exit_code_0(
    number: signal.Signals, terminal: Open, dispatcher: tuple[Terminal, str]
) -> None:
    opened, address = dispatcher
    worker = start_worker(terminal, address, "--slots", "2")
    for each in (
        worker,
        opened,
    ):  # the whole process group, as at a terminal; the tests' own checks look for what is left
        os.killpg(each.pid, number)
        assert each.ends() == 0, each.lines
        assert not [line for line in each.lines if "Traceback" in line]


def test_a_worker_that_waits_for_its_dispatcher_can_be_interrupted(terminal: Open) -> None:
    waiting = terminal("worker", "--dispatcher", "127.0.0.1:9", "--threads")
    eventually(lambda: catches(waiting.pid, signal.SIGTERM), "it has begun")
    waiting.interrupt()
    assert waiting.ends() == 0
    assert not [line for line in waiting.lines if "Traceback" in line]


def test_a_cluster_file_gives_a_role_what_the_command_line_does_not_say(
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
    assert terminal("worker", "--config", str(file), "--slots", "1").saw("worker:1 of").endswith("1 slot")
    second = terminal("dispatcher", "--config", str(file), "--port", "0")
    assert second.saw("dispatcher at") != f"dispatcher at zmq://{address}"


def test_with_keys_the_whole_cluster_speaks_curve(terminal: Open, tmp_path: Path) -> None:
    assert run("keygen", str(tmp_path / "keys")).code == 0
    keys = ["--keys", str(tmp_path / "keys")]
    opened = terminal("dispatcher", "--port", "0", *keys)
    address = opened.saw("dispatcher at zmq://").partition("zmq://")[2]
    start_worker(terminal, address, *keys)
    assert "  worker:0  alive" in run("status", address, *keys).out
    assert run("shutdown", address, *keys).code == 0


def test_launch_streams_prefixed_lines_and_ends_with_the_programs_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, subprocess, sys\n"
        "import zmqdist as zd\n"
        "with zd.coordinator.ClusterCoordinator() as coordinator:\n"
        "    coordinator.schedule(lambda: print('from a worker', flush=True)).fetch()\n"
        "for words in (['status'], ['status', '--json']):\n"
        "    subprocess.run([sys.executable, '-m', 'zmqdist_cli', *words], check=True)\n"
        "print('arguments', sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    (tmp_path / "cluster.yaml").write_text("name: test\njobs:\n  worker: {count: 1}\nprogram: python program.py\n")
    done = run("launch", "cluster.yaml", "--", "--epochs", "3", cwd=tmp_path)
    assert (done.code, done.err) == (7, "")
    assert "[worker-0] from a worker\n" in done.out
    assert "arguments ['--epochs', '3']\n" in done.out
    assert ": 1 worker, 1 slot, " in done.out  # TARGET is known inside
    assert '"workers": [' in done.out


def test_json_is_json_on_every_listing(dispatcher: tuple[Terminal, str], tmp_path: Path) -> None:
    _, address = dispatcher
    (tmp_path / "cluster.yaml").write_text("name: test\njobs:\n  worker: {count: 1}\nprogram: 'true'\n")
    for words in (["status", address], ["top", address], ["validate", str(tmp_path / "cluster.yaml")]):
        done = run(*words, "--json")
        assert done.code == 0, done.err
        assert isinstance(json.loads(done.out), dict)
