"""Programs whose standard streams are closed, as by a shell (`>&-`) or by a daemon: nothing else
gets the numbers 0 to 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.helpers import FILE, LAUNCH

PROGRAM = """
import os, sys
import numpy as np
import zmqdist as zd
if sys.argv[1] == "daemon":
    for number in sys.argv[2]:
        os.close(int(number))

def streams(*ignored):
    print("printed by a function", flush=True)
    print("printed by a function", file=sys.stderr, flush=True)
    os.system("echo printed by a child")
    return [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]

large = zd.freeze(np.zeros(300_000))
with zd.local_cluster(workers=1, ps=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    # A worker reads what its slots write through pipes.
    found = [streams(), coordinator.schedule(streams, (large,)).get()[:1]]
    for pid in cluster.pids.values():
        found.append([os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)])
    strategy = zd.ParameterServerStrategy(cluster)
    with strategy.scope():
        assert zd.Variable(large).numpy().sum() == 0
with open("found", "w") as file:
    print(*sum(found, []), sep="\\n", file=file)
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "12", "012"])
@pytest.mark.parametrize("how", ["shell", "daemon"])
def test_closed_stream_number_stays_reserved(tmp_path: Path, how: str, closed: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    redirections = " ".join(f"{number}>&-" for number in closed) if how == "shell" else ""
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        result = subprocess.run(
            ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, script, how, closed],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=tmp_path,
            timeout=50,
            check=False,
        )
    assert result.returncode == 0, (tmp_path / "err").read_text()
    files = {"/dev/null", *(str(tmp_path / name) for name in ("out", "err"))}
    assert set((tmp_path / "found").read_text().split()) <= files
    printed = {
        (tmp_path / name).read_text()
        for name, number in (("out", "1"), ("err", "2"))
        if number in closed
    }
    assert printed <= {""}


OPENS_A_FILE = """
import os
import sys

own = open("own", "w+")
with open("told", "w") as told:
    print(own.fileno(), file=told)

import zmqdist as zd

with zd.local_cluster(workers=1) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    for run in (lambda function: function(), lambda function: coordinator.schedule(function).get()):
        run(lambda: print("printed by print", flush=True))
        run(lambda: print("printed by print", file=sys.stderr, flush=True))
        run(lambda: os.system("echo printed by echo; echo printed by echo >&2"))
own.write("mine")
own.close()
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "12", "012"])
def test_opened_file_gets_no_output(tmp_path: Path, closed: str) -> None:
    (tmp_path / "script.py").write_text(OPENS_A_FILE)
    result = subprocess.run(
        [
            "sh",
            "-c",
            f'exec "$@" {" ".join(f"{number}>&-" for number in closed)}',
            "sh",
            sys.executable,
            "script.py",
        ],
        cwd=tmp_path,
        timeout=50,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert result.returncode == 0, result.stderr
    assert int((tmp_path / "told").read_text()) == int(closed[0])
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.parametrize("closed", ["1", "2", "012"])
def test_launch_without_standard_streams_runs_the_program(tmp_path: Path, closed: str) -> None:
    (tmp_path / "program.py").write_text(
        "import zmqdist as zd\nwith zd.coordinator.ClusterCoordinator() as coordinator:\n"
        "    coordinator.schedule(print, ('printed',)).get()\n    open('done', 'w').close()\n"
    )
    (tmp_path / "cluster.yaml").write_text(FILE)
    redirections = " ".join(f"{number}>&-" for number in closed)
    command = [sys.executable, "-m", "zmqdist_cli", "launch", "cluster.yaml"]
    for arguments in (command, [sys.executable, "-c", LAUNCH, "cluster.yaml", "5"]):
        result = subprocess.run(
            ["sh", "-c", f'exec "$@" {redirections}', "sh", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        assert (result.returncode, result.stderr) == (0, "")
        (tmp_path / "done").unlink()
