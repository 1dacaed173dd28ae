"""Programs and commands under limits of the shell that are too low: one sentence that says what to
do, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = {
    "local_cluster": "with zd.local_cluster(workers=1, ps=1): pass",
    "dispatcher": "zd.DispatchServer().stop()",
    "server": "server = zd.rpc.Server.create('zmq', '127.0.0.1:0'); server.start(); server.stop()",
    "client": "zd.rpc.Client.create('zmq', '127.0.0.1:1', timeout_in_ms=10).close()",
}

PROGRAM = """
import pathlib, resource
import zmqdist as zd
import zmqdist.servers.dispatch_server, zmqdist.launch.local_cluster, zmqdist.rpc
resource.setrlimit(resource.{limit}, ({soft}, resource.getrlimit(resource.{limit})[1]))
try:
    {start}
except zd.errors.OpError as error:
    print(type(error).__name__, error)
"""

IN_USE = (
    "int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() + 2**24"
)


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize(
    ("limit", "soft", "text"),
    [
        ("RLIMIT_NOFILE", "8", "raise `ulimit -n`"),
        ("RLIMIT_NOFILE", "14", "raise `ulimit -n`"),
        ("RLIMIT_NOFILE", "19", "raise `ulimit -n`"),
        ("RLIMIT_AS", IN_USE, "raise `ulimit -v`"),
    ],
)
def test_low_limit_named_before_libzmq_aborts(
    tmp_path: Path, start: str, limit: str, soft: str, text: str
) -> None:
    program = PROGRAM.format(limit=limit, soft=soft, start=START[start])
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=environment,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ResourceExhaustedError ")
    assert text in result.stdout
    assert list(tmp_path.iterdir()) == []


CLUSTER = "name: test\njobs: {worker: {count: 1}, ps: {count: 1}}\nprogram: python program.py\n"


@pytest.mark.parametrize(
    ("limit", "arguments", "code", "text"),
    [
        ("-n 20", "launch cluster.yaml", 1, "zmqdist launch: zmqdist launch needs 50 descriptors"),
        ("-n 40", "launch cluster.yaml", 1, "zmqdist launch: zmqdist launch needs 50 descriptors"),
        (
            "-n 20",
            "dispatcher --port 0",
            1,
            "dispatcher: the thread zmqdist-dispatcher needs 16 descriptors",
        ),
        ("-n 30", "worker --dispatcher 127.0.0.1:1", 1, "worker: 1 slots need "),
        (
            "-n 20",
            "status 127.0.0.1:1",
            1,
            "zmqdist status: the first client of this process needs 16 descriptors",
        ),
        ("-f 0", "launch cluster.yaml", 2, "zmqdist launch: No usable temporary directory found"),
    ],
)
def test_command_under_low_limit_prints_one_line(
    tmp_path: Path, limit: str, arguments: str, code: int, text: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "program.py").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$0" -m zmqdist_cli {arguments}', sys.executable],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(text)
    assert result.stderr.count("\n") == 1
    assert list(temporary.iterdir()) == []
