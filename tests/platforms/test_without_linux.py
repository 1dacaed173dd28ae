"""Clients and RPC servers on macOS and Windows: in a process without the calls that only Linux has,
against a cluster and peers on Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.errors import NotFoundError
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport import keys

ROOT = Path(__file__).resolve().parents[2]


class Program:
    """A process without the calls of Linux, which runs the scenarios of program.py."""

    def __init__(self, system: str) -> None:
        self.system = system
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.platforms.program", system],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def start(self, scenario: str, address: str = "", **variables: str) -> None:
        self._input.write(json.dumps([scenario, address, variables]) + "\n")
        self._input.flush()

    def read(self) -> Any:
        return json.loads(self._output.readline())

    def run(self, scenario: str, address: str, **variables: str) -> None:
        self.start(scenario, address, **variables)
        assert (problem := self.read()) == "", problem

    def end(self) -> None:
        self._input.close()
        assert self._process.wait(30) == 0
        self._output.close()


@pytest.fixture(scope="module", params=["darwin", "win32"])
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    process = Program(request.param)
    yield process
    process.end()


def fail() -> None:
    raise NotFoundError("no such thing")


def count(upto: int) -> Iterator[int]:
    yield from range(upto)


METHODS = {"echo": lambda value: value, "fail": fail, "count": count, "sleep": time.sleep}


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1, slots=2) as local:
        yield local


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A dispatcher with CURVE keys: its target, and the folder of keys."""
    folder = str(tmp_path_factory.mktemp("keys") / "keys")
    keys.keygen(folder)
    dispatcher = zd.DispatchServer(DispatcherConfig(keys_dir=folder))
    with dispatcher, zd.WorkerServer(WorkerConfig(dispatcher.address, keys_dir=folder)):
        yield dispatcher.target, folder


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    keys.create(tmp_path / "private" / "token")
    return str(tmp_path / "private" / "token")


def test_rpc_client_with_token(program: Program, token_file: str) -> None:
    with zd.rpc.serve("127.0.0.1:0", METHODS, token_file=token_file) as server:
        program.run("rpc_client", server.address, ZMQDIST_TOKEN_FILE=token_file)


def test_rpc_server_with_token(program: Program, token_file: str) -> None:
    program.start("rpc_server", ZMQDIST_TOKEN_FILE=token_file)
    with zd.rpc.connect(program.read(), token_file=token_file) as client:
        large = np.arange(2**23)
        assert np.array_equal(client.echo_blocking(large), large)
        assert list(client.count(500)) == list(range(500))
        client.stop_blocking()
    assert program.read() == ""


@pytest.mark.parametrize("scenario", ["coordinator", "actors", "executor", "lost_function"])
def test_program_with_token(program: Program, scenario: str, cluster: zd.local_cluster) -> None:
    secret = str(cluster.credentials.token_file)
    program.run(scenario, cluster.target, ZMQDIST_TOKEN_FILE=secret)


def test_token_is_not_shown_unless_its_file_is_named(program: Program) -> None:
    with zd.rpc.serve("127.0.0.1:0", METHODS) as server:
        program.start("unnamed_token", server.address)
        assert program.read() == (
            f"{program.system} does not tell which user listens on {server.address}, and another "
            "user would learn your token: name its file if no one else uses this host "
            "(ZMQDIST_TOKEN_FILE), or use CURVE keys (`zmqdist keygen`)"
        )
    assert program.read() == ""


@pytest.mark.parametrize("scenario", ["coordinator", "executor"])
def test_program_with_keys(program: Program, scenario: str, keyed: tuple[str, str]) -> None:
    target, folder = keyed
    program.run(scenario, target, ZMQDIST_KEYS_DIR=folder)


def test_rpc_client_with_keys(program: Program, keyed: tuple[str, str]) -> None:
    _, folder = keyed
    with zd.rpc.serve("127.0.0.1:0", METHODS, keys_dir=folder) as server:
        program.run("rpc_client", server.address, ZMQDIST_KEYS_DIR=folder)


def test_error_says_what_needs_linux(program: Program) -> None:
    by_address = "use a cluster on Linux hosts by its address"
    remedies = {
        "zmqdist.local_cluster": by_address,
        "zmqdist.DispatchServer": by_address,
        "zmqdist.WorkerServer": by_address,
        "an Executor without a target": "name the cluster's dispatcher as the target",
    }
    program.start("refused")
    assert program.read() == [
        f"{subject} needs Linux, and this is {program.system}: {remedy}"
        for subject, remedy in remedies.items()
    ]
    assert program.read() == ""


def test_commands_that_need_linux_say_so(program: Program, cluster: zd.local_cluster) -> None:
    secret = str(cluster.credentials.token_file)
    program.start("command", cluster.target, ZMQDIST_TOKEN_FILE=secret)
    assert program.read() == [
        0,
        [
            f"zmqdist {name} needs Linux, and this is {program.system}: run it on a Linux host"
            for name in ("launch", "dispatcher", "worker", "server", "doctor", "bench")
        ],
    ]
    assert program.read() == ""
