"""What the end of a program, however it comes, does to its scheduled and submitted work, and what a
stop of some seconds does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zmqdist as zd
from tests.ports import free_port
from tests.scheduling.work import until

pytestmark = pytest.mark.timeout(150)

SUBMITS = """
import sys, time
from pathlib import Path
import zmqdist as zd
if __name__ == "__main__":
    folder = Path(sys.argv[1])
def work(number):
    time.sleep(0.2)
    (folder / str(number)).touch()
    print(f"done {number}", flush=True)
"""

OWN = """
cluster = zd.local_cluster(workers=2)
executor = zd.Executor(cluster)
futures = [executor.submit(work, number) for number in range(5)]
"""

ENDS = {
    "the end of the script": ("", 0),
    "shutdown(wait=False)": ("executor.shutdown(wait=False)", 0),
    "nobody refers to the executor": ("del executor, futures", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an uncaught error": ("raise ValueError('uncaught')", 1),
}


def run_submitting(program: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUBMITS + program, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS.keys())
def test_submitted_work_outlives_every_program_end(end: str, code: int, tmp_path: Path) -> None:
    process = run_submitting(f"{OWN}\n{end}", str(tmp_path))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]
    if code == 0:
        assert stderr == ""


def test_submit_is_refused_at_program_end(tmp_path: Path) -> None:
    late = """
import atexit
def submits():
    try:
        executor.submit(int)
    except RuntimeError as error:
        print(error, flush=True)
executor = zd.Executor("127.0.0.1:1")
atexit.register(submits)
"""
    stdout, stderr = run_submitting(late, str(tmp_path)).communicate(timeout=60)
    assert (stdout, stderr) == ("cannot schedule new futures after interpreter shutdown\n", "")


def test_program_without_dispatcher_gives_up_with_message(tmp_path: Path) -> None:
    program = f"""
executor = zd.Executor("127.0.0.1:{free_port()}", cluster_lost_limit_s=1.0)
future = executor.submit(print, "never")
"""
    process = run_submitting(program, str(tmp_path))
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    assert stderr.count("\n") == 1, stderr
    assert "the program ends without the results of 1 function that it has submitted" in stderr
    assert "without a dispatcher for 1 s" in stderr


def test_atexit_functions_run_before_program_gives_up(tmp_path: Path) -> None:
    program = f"""
import atexit
atexit.register(print, "the last")
executor = zd.Executor("127.0.0.1:{free_port()}", cluster_lost_limit_s=0.2)
future = executor.submit(print, "never")
"""
    process = run_submitting(program, str(tmp_path))
    stdout, _ = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "the last\n")


@pytest.mark.parametrize("where", ["in the program", "at its end"])
def test_interrupt_ends_program_and_its_work(where: str, tmp_path: Path) -> None:
    program = OWN.replace("range(5)", "range(500)")
    # Python notices a signal that arrives just before it begins to sleep only afterwards.
    program += "while True: time.sleep(0.1)" if where == "in the program" else ""
    with run_submitting(program, str(tmp_path)) as process:
        try:
            until(lambda: list(tmp_path.iterdir()))
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT, stderr
    assert "submitted functions that had not ended were given up" in stderr
    assert len(list(tmp_path.iterdir())) < 500


SCHEDULES = """
import sys
from types import SimpleNamespace
import numpy as np
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.transport.credentials import Credentials
target, token = sys.argv[1:]
coordinator = ClusterCoordinator(SimpleNamespace(target=target, credentials=Credentials(token_file=token)))
"""

SCHEDULES_FAILING = """
import time
value = coordinator.schedule(int, ("x",))
while not value.done():
    time.sleep(0.005)
"""

SCHEDULES_LARGE = """
import time
def make(number):
    time.sleep(0.02)
    return np.full(500_000, number)
values = [coordinator.schedule(make, (number,)) for number in range(100)]
values[5].get()
print("begun", flush=True)
coordinator.join()
assert [int(value.get()[0]) for value in values] == list(range(100))
coordinator.close()
"""


def run_scheduling(cluster: zd.local_cluster, program: str) -> subprocess.Popen[str]:
    token = cluster.credentials.token_file
    assert token is not None
    arguments = [sys.executable, "-c", SCHEDULES + program, cluster.target, token]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_unseen_errors_are_on_stderr_at_program_end() -> None:
    with zd.local_cluster(workers=1, processes=False) as cluster:
        process = run_scheduling(cluster, SCHEDULES_FAILING)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the program has not looked at 1 error of scheduled functions" in stderr
    assert "ValueError: invalid literal for int() with base 10: 'x'" in stderr


def test_stopped_program_fetches_large_results_after_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had begun to fetch was let go of, and runs again."""
    monkeypatch.setenv("ZMQDIST_ARENA", "off")
    with (
        zd.local_cluster(workers=2, lease_s=2.0) as cluster,
        run_scheduling(cluster, SCHEDULES_LARGE) as process,
    ):
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(12.0)
            process.send_signal(signal.SIGCONT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, stderr
