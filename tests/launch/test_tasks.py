"""The jobs of a cluster file besides the workers: parameter servers, the chief, an evaluator; and
which tasks are started again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.helpers import UNTIL_END_FILE, WITH_PS, Launched, eventually
from zmqdist import errors
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import tasks
from zmqdist.launch.launcher import launch as launch_here

Launcher = Callable[..., Launched]


def test_used_ps_port_error_before_any_process(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        file = tmp_path / "cluster.yaml"
        file.write_text(WITH_PS.replace("{count: 2}", f"{{tasks: [{address}]}}"))
        with pytest.raises(
            errors.UnknownError, match=f"could not bind {address}: Address already in use"
        ):
            launch_here(ClusterConfig.load(str(file)))


def test_killed_ps_restarts_at_its_address(
    launch: Launcher,
) -> None:
    job = launch(UNTIL_END_FILE, file=WITH_PS)
    job.saw("it runs")
    before = job.task("ps", 1)
    os.kill(before, signal.SIGKILL)
    job.saw(
        "[ps-1] ended (killed by SIGKILL); its variables are lost; it is started again (1 of 3)"
    )
    eventually(lambda: job.task("ps", 1) != before, "another is there")
    (job.process_folder / "end").touch()
    assert job.ends() == 0, job.text
    job.left_nothing()


def test_pauses_between_restarts_grow_and_have_a_bound() -> None:
    restarts = tasks.Restarts(8)
    restarts.began(100.0)
    assert [restarts.pause_after(-9, 100.0) for _ in range(8)] == [
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
        6.4,
        10.0,
        10.0,
    ]
    assert restarts.pause_after(-9, 100.0) is None
    assert restarts.used == 8
    assert restarts.pause_after(-9, 1e6) == 0.2, "the task has run for long"
    assert [restarts.pause_after(code, 1e6) for code in (0, 2, 4)] == [None, None, None]
