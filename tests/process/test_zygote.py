"""Workers are forked from the zygote of the starting process: what each worker has of its own, and
what the death of the zygote changes."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.helpers import eventually, read
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.process.zygote import NAME


def zygotes() -> list[int]:
    """Return the running zygotes of this process."""
    tasks = Path("/proc/self/task").iterdir()
    children = {pid for task in tasks for pid in read(task / "children").split()}
    named = [pid for pid in children if read(Path("/proc", pid, "comm")) == f"{NAME}\n"]
    # a process that has ended has none
    return [int(pid) for pid in named if read(Path("/proc", pid, "cmdline"))]


def test_workers_have_own_environment_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own() -> tuple[object, ...]:
        return (
            os.getppid(),
            os.getcwd(),
            os.environ.get("GREETING"),
            random.random(),
            float(np.random.random()),
        )

    found, parents = [], set()
    for greeting in ("hello", "good bye"):
        (tmp_path / greeting).mkdir()
        monkeypatch.chdir(tmp_path / greeting)
        monkeypatch.setenv("GREETING", greeting)
        with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
            found.append(coordinator.schedule(own).get(20))
            (pid,) = [row.pid for row in cluster.dispatcher.snapshot().workers]
            assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
            parents.add(parent_of(pid))
            assert Path("/proc", str(pid), "comm").read_text() == "worker:0\n"
    assert [row[1:3] for row in found] == [
        (str(tmp_path / text), text) for text in ("hello", "good bye")
    ]
    for column in (0, 3, 4):
        assert found[0][column] != found[1][column]
    assert len(parents) == 1, "both have the same"
    assert parents <= set(zygotes())


def parent_of(pid: int) -> int:
    return int(read(Path("/proc", str(pid), "stat")).rpartition(")")[2].split()[1])


@pytest.mark.killed("local cluster")
def test_killed_zygote_is_replaced_by_command(caplog: pytest.LogCaptureFixture) -> None:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        zygote = parent_of(cluster.pids["worker:0"])
        with caplog.at_level(logging.WARNING, "zmqdist.launch"):
            os.kill(zygote, signal.SIGKILL)
            eventually(lambda: zygote not in zygotes(), "it has ended")
            assert cluster.add_worker() == 1
        (line,) = caplog.messages
        assert line == (
            "the zygote, which forks child processes, ended (killed by SIGKILL); this child is "
            "started by command"
        )
        assert cluster.dispatcher.num_workers == 2
        others = zygotes()  # of workers with another number of threads
        assert parent_of(cluster.pids["worker:1"]) == os.getpid()
        assert cluster.add_worker() == 2
        assert parent_of(cluster.pids["worker:2"]) in set(zygotes()) - set(others), (
            "the next child has a new one"
        )
        assert coordinator.fetch([coordinator.schedule(abs, (-n,)) for n in range(20)]) == list(
            range(20)
        )
        cluster.kill_worker(0)
        eventually(
            lambda: cluster.dispatcher.num_workers == 2,
            "the end of one that it had forked is noticed",
        )


INTERRUPTED = """
import os, signal
from zmqdist.process.zygote_client import fork_slots_zygote
os.register_at_fork(after_in_child=lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)])
zygote = fork_slots_zygote({})
zygote.control.close()  # a zygote that works ends then, with exit code 0
print(zygote.wait(20.0), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_signal_to_forking_worker_spares_zygote() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 set()\n", "")
