"""`zd.Executor()` without a target: the cluster of the environment, else one of its own that ends
with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import zmqdist as zd
from tests.launch.helpers import FILE, Launched, eventually, read

Launcher = Callable[..., Launched]

PROGRAM = """
import os, sys
import zmqdist as zd

def triple(number):
    return 3 * number

executor = zd.Executor(max_workers=2)
print(executor.submit(triple, 7).result(), flush=True)
"""

WAITS = PROGRAM + "import time\ntime.sleep(60)\n"


def processes(mark: str) -> list[str]:
    """The pids of the processes whose environment has the mark."""
    matches = [item for item in Path("/proc").iterdir() if item.name.isdigit()]
    return [item.name for item in matches if mark in read(item / "environ").split("\0")]


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-W", "error", *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_own_cluster_has_worker_per_core() -> None:
    with zd.Executor() as executor:
        pids = set(executor.map(pid_of_worker, range(200)))
    assert len(pids) == len(os.sched_getaffinity(0))
    assert os.getpid() not in pids
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its workers end")


def pid_of_worker(_: int) -> int:
    """The pid of the worker whose slot runs this function."""
    signal.sigtimedwait([], 0.01)
    return os.getppid()


def test_killed_executor_ends_its_cluster() -> None:
    executor = zd.Executor(max_workers=1)
    future = executor.submit(signal.pause)
    eventually(future.running, "the function runs")
    executor.kill_workers()
    assert future.exception(timeout=10) is not None


def test_impossible_worker_count_starts_nothing() -> None:
    with pytest.raises(ValueError, match="max_workers must be greater than 0, and is 0"):
        zd.Executor(max_workers=0)


def tripled(number: int) -> int:
    with zd.Executor() as executor:
        return executor.submit(int.__mul__, number, 3).result()


def test_executor_in_function_uses_its_cluster() -> None:
    with zd.Executor(max_workers=2) as executor:
        assert executor.submit(tripled, 7).result() == 21


@pytest.mark.parametrize("how", ["file", "standard input", "-c"])
def test_forgotten_executor_leaves_nothing(
    tmp_path: Path, how: str, program: Callable[..., subprocess.Popen[str]]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = {
        "file": [str(tmp_path / "program.py")],
        "standard input": ["-"],
        "-c": ["-c", PROGRAM],
    }[how]
    child = program(*words)
    out, err = child.communicate(PROGRAM if how == "standard input" else None, timeout=50)
    assert (child.returncode, out, err) == (0, "21\n", "")
    assert not processes(f"TMPDIR={tmp_path}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_signalled_program_leaves_no_process(
    tmp_path: Path, number: int, program: Callable[..., subprocess.Popen[str]]
) -> None:
    child = program("-c", WAITS)
    assert child.stdout is not None
    assert child.stdout.readline() == "21\n"
    assert len(processes(f"TMPDIR={tmp_path}")) >= 4  # the program, a zygote, two workers
    child.send_signal(number)
    child.communicate(timeout=30)
    eventually(lambda: not processes(f"TMPDIR={tmp_path}"), "no process is left")


def test_executor_uses_cluster_of_environment(launch: Launcher) -> None:
    program = """
        import os
        import zmqdist as zd
        from zmqdist.cluster import ClusterConfig

        with zd.Executor() as executor, zd.connect() as cluster:
            executor.submit(abs, 1).result()
            print(len(cluster.status()["coordinators"]), cluster.workers)
    """
    job = launch(program, file=FILE)
    assert job.ends() == 0, job.text
    assert job.lines == ["1 2"]
    job.left_nothing()
