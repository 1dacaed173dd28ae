"""Servers in processes of their own that a session, or the command, ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.tasks.helpers import cluster_of, start_child
from zmqdist.tasks.session import Session

Child = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize("how", ["stop_task", "shutdown", "command"])
def test_stop_of_tasks_from_elsewhere(child: Child, how: str) -> None:
    cluster = cluster_of(worker=1, ps=2)  # ps:1 is never started
    processes = [start_child(child, cluster, job, 0) for job in cluster]
    if how == "command":
        done = subprocess.run(
            [sys.executable, "-m", "zmqdist_cli", "shutdown", cluster["worker"][0]],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"the server at {cluster['worker'][0]} ends: ps:0, worker:0\n"
    else:
        with Session(f"zmq://{cluster['worker'][0]}") as session:
            if how == "shutdown":
                assert session.shutdown(0) == ["ps:0", "worker:0"]
            else:
                session.stop_task("ps:0", 0)
                session.stop_task(grace=0)
    for process in processes:
        assert process.communicate(timeout=20)[0] == "ended\n"
        assert process.returncode == 0
