"""The `zmqdist` command, as two terminals would use it: real processes, their output, their exit codes, what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zmqdist as zd
from zmqdist_cli.main import COMMANDS, cli

COMMAND = [sys.executable, "-m", "zmqdist_cli"]
PATIENCE_S = 15.0


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=30, env={**os.environ, **(env or {})}
    )


@contextmanager
def running(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command in the foreground of another terminal, and the first line that it says."""
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(PATIENCE_S)


def until(ready: Callable[[], Any]) -> Any:
    """What `ready` gives, as soon as it is true."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not (value := ready()):
        assert time.monotonic() < deadline, "not within the time"
        pause.wait(0.05)
    return value


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def workers_of(address: str) -> list[str]:
    """Names of the workers that `status` shows; none while nobody answers."""
    told = run("status", address, "--json", "--timeout", "1")
    return [worker["name"] for worker in json.loads(told.stdout)["workers"]] if told.returncode == 0 else []


def test_two_terminals_and_a_prompt_go_on_after_the_dispatcher_was_killed() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with running("dispatcher", "--port", str(port)) as (dispatcher, said):
        assert f"zmq://{address}" in said
        with running("worker", "--dispatcher", address, "--slots", "2") as (worker, hello):
            assert "worker:0" in hello
            assert "2 slots" in hello
            with zd.coordinator.ClusterCoordinator(address) as coordinator:
                assert coordinator.schedule(lambda: 1 + 1).fetch(PATIENCE_S) == 2
                table = run("top", address)
                assert table.returncode == 0
                assert "worker:0" in table.stdout
                dispatcher.kill()
                dispatcher.wait()
                with running("dispatcher", "--port", str(port)):
                    assert until(lambda: workers_of(address)) == ["worker:0"]
                    assert coordinator.schedule(lambda: 2 + 2).fetch(PATIENCE_S) == 4
                    assert run("shutdown", address).returncode == 0
                    assert worker.wait(PATIENCE_S) == 0


def test_drain_ends_one_worker_and_the_other_stays() -> None:
    with running("dispatcher") as (_, said):
        address = said.split("zmq://")[1].split()[0]
        with (
            running("worker", "--dispatcher", address, "--index", "0") as (first, _),
            running("worker", "--dispatcher", address, "--index", "1"),
        ):
            assert workers_of(address) == ["worker:0", "worker:1"]
            assert run("drain", address, "worker:0").returncode == 0
            assert first.wait(PATIENCE_S) == 0
            assert workers_of(address) == ["worker:1"]
            nobody = run("drain", address, "worker:7")
            assert nobody.returncode != 0
            assert "worker:7" in nobody.stderr
            assert "worker:1" in nobody.stderr, "it says who is there"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_dispatcher_and_worker_in_good_order(number: signal.Signals) -> None:
    with running("dispatcher") as (dispatcher, said):
        address = said.split("zmq://")[1].split()[0]
        with running("worker", "--dispatcher", address) as (worker, _):
            for process in (worker, dispatcher):
                process.send_signal(number)
                assert process.wait(PATIENCE_S) in (0, 130)


NOBODY = "127.0.0.1:9"
MISTAKES: list[tuple[list[str], int, str]] = [
    (["status", NOBODY, "--timeout", "0.5"], 3, r"no dispatcher answered at 127\.0\.0\.1:9"),
    (["top", NOBODY, "--timeout", "0.5"], 3, "no dispatcher answered"),
    (["shutdown", NOBODY, "--timeout", "0.5"], 3, "no dispatcher answered"),
    (["drain", NOBODY, "worker:0", "--timeout", "0.5"], 3, "no dispatcher answered"),
    (["status"], 2, "TARGET"),
    (["status", "not an address"], 2, "not an address"),
    (["stauts"], 2, "did you mean status"),
    (["launch", "nowhere.yaml"], 2, "nowhere.yaml"),
    (["validate", "nowhere.yaml"], 2, "nowhere.yaml"),
    (["dispatcher", "--port", "70000"], 2, "70000"),
    (["dispatcher", "--host", "0.0.0.0"], 2, "keygen"),
    (["worker"], 2, "dispatcher"),
    (["worker", "--dispatcher", NOBODY, "--slots", "0"], 2, "0"),
    (["worker", "--dispatcher", NOBODY, "--orphan-limit", "0.5"], 3, "no dispatcher"),
    (["keygen"], 2, "DIR"),
]


@pytest.mark.parametrize(("words", "code", "told"), MISTAKES, ids=[" ".join(words) for words, *_ in MISTAKES])
def test_an_expected_failure_is_told_in_a_line_with_its_exit_code(words: list[str], code: int, told: str) -> None:
    ended = run(*words)
    assert ended.returncode == code, ended.stderr
    assert re.search(told, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_a_port_that_is_taken_is_told_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("dispatcher", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "in use" in ended.stderr


def test_a_wrong_token_is_refused_and_told_so(tmp_path: Path) -> None:
    other = tmp_path / "token"
    other.write_text("x" * 64)
    other.chmod(0o600)
    with running("dispatcher") as (_, said):
        address = said.split("zmq://")[1].split()[0]
        for words in (["status", address], ["worker", "--dispatcher", address]):
            ended = run(*words, "--token-file", str(other))
            assert ended.returncode == 4, ended.stderr
            assert "refused" in ended.stderr
            assert "Traceback" not in ended.stderr
            assert "xxxx" not in ended.stderr, "a secret is never told"


def test_the_help_of_every_command_says_what_the_list_says() -> None:
    runner = CliRunner()
    for name, (_, short) in COMMANDS.items():
        told = runner.invoke(cli, [name, "--help"])
        assert told.exit_code == 0
        begins = told.output.split("\n\n")[1].split()[0]
        assert begins == short.split()[0], f"{name}: the list says {short!r}, its help begins with {begins!r}"


def test_the_help_imports_neither_numpy_nor_zeromq() -> None:
    code = (
        "import sys\nfrom zmqdist_cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(int('numpy' in sys.modules or 'zmq' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=30).returncode == 0


def test_bench_prints_every_figure() -> None:
    told = run("bench", "--quick", "--json")
    assert told.returncode == 0, told.stderr
    figures = {figure["what"]: figure for figure in json.loads(told.stdout)["figures"]}
    assert len(figures) == 9
    assert all(figure["ours"] > 0 for figure in figures.values())
    assert sum(figure["ratio"] is not None for figure in figures.values()) == 6
