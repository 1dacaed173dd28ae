"""The client in JavaScript (examples/node) against real servers, and its codec against the vectors
of docs/protocol.md.

It needs node 18 or newer and npm, whose registry has the packages zeromq and @msgpack/msgpack.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.ports import free_port
from zmqdist.transport import keys

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).with_name("node_checks.mjs")
NODE, NPM = shutil.which("node"), shutil.which("npm")
pytestmark = pytest.mark.skipif(NODE is None or NPM is None, reason="needs node and npm")

OTHER_BYTES = (
    "1 + 2j",
    "'\\ud800'",
    "np.float32(1.5)",
    "np.int64(-1)",
    "np.str_('a')",
    "[np.zeros(65_537, '|u1'), np.ones(65_538, '|u1')]",
    "TensorSpec([None, 2], np.float32)",
)
"""Values for which JavaScript has no type of its own, and one with parts."""
MESSAGES = ("Call(", "Chunk(", "Credit(", "Hello(", "Replies(", "Reply(")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/node with its packages."""
    copy = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(ROOT / "examples" / "node", copy, ignore=shutil.ignore_patterns("node_modules"))
    command = [NPM, "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"npm cannot install the packages: {installed.stderr[-200:]}")
    return copy


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("secret") / "private" / "token"
    keys.create(path)
    return str(path)


def kind(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    return f"{value.dtype} {value.shape}" if is_array else type(value).__name__


def count(upto: int, size: int = 0) -> Iterator[Any]:
    if upto < 0:
        raise ValueError(f"upto is {upto}")
    for number in range(upto):
        yield np.full(size, number) if size else number


def find(name: str) -> None:
    raise zd.errors.NotFoundError(f"nobody is called {name}")


def wait() -> None:
    """Return when the caller or the server has gone."""
    while not zd.cancelled():
        time.sleep(0.001)


METHODS = {
    "add": lambda x, y: x + y,
    "count": count,
    "echo": lambda value: value,
    "find": find,
    "kind": kind,
    "sleep": time.sleep,
    "wait": wait,
    "text": lambda array: str(array.tolist()),
}


def start(folder: Path, token_file: str, *words: str) -> subprocess.Popen[str]:
    assert NODE is not None
    return subprocess.Popen(
        [NODE, *words],
        cwd=folder,
        env={**os.environ, "ZMQDIST_TOKEN_FILE": token_file},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, error_text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, error_text
    return out


@pytest.mark.parametrize("check", ["values", "arrays", "errors", "streams", "deadline", "token"])
def test_client_calls_server(check: str, folder: Path, token_file: str) -> None:
    with zd.rpc.serve("127.0.0.1:0", METHODS, token_file=token_file) as server:
        finish(start(folder, token_file, str(CHECKS), str(folder), check, server.address))


def test_client_reconnects(folder: Path, token_file: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    over = zd.rpc.serve(address, METHODS, token_file=token_file)
    process = start(folder, token_file, str(CHECKS), str(folder), "reconnect", address)
    assert process.stdout is not None
    assert process.stdout.readline() == "called\n"
    over.stop(grace_s=0.1)
    assert process.stdout.readline() == "lost\n"
    with zd.rpc.serve(address, METHODS, token_file=token_file):
        assert finish(process) == "again\n"


def test_codec_writes_bytes_of_page(folder: Path, token_file: str) -> None:
    vectors = (ROOT / "docs" / "protocol.md").read_text().partition("## Test vectors")[2]
    rows = dict(re.findall(r"^- `(.+)`:\s+`([0-9a-f]+)`$", vectors, re.MULTILINE))
    assert set(OTHER_BYTES) <= set(rows)
    bodies = [
        digits
        for text, digits in rows.items()
        if text not in OTHER_BYTES and not text.startswith(MESSAGES)
    ]
    assert len(bodies) >= 28
    finish(start(folder, token_file, str(CHECKS), str(folder), "codec", json.dumps(bodies)))


def test_example_prints_what_its_page_says(folder: Path, token_file: str) -> None:
    page = (ROOT / "examples" / "node" / "README.md").read_text()
    server = subprocess.Popen(
        [sys.executable, ROOT / "examples" / "node" / "server.py", "127.0.0.1:0"],
        env={**os.environ, "ZMQDIST_TOKEN_FILE": token_file},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            printed = finish(start(folder, token_file, "example.mjs", address))
        finally:
            server.kill()
    assert printed == page.partition("```text\n")[2].partition("```")[0]
