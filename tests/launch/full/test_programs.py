"""Programs and workers of a launched cluster: their environment, their output, and how they end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.helpers import BUSY, FILE, Launched
from tests.ports import free_address

Launcher = Callable[..., Launched]

WAITS = """
    import threading
    print("it waits", flush=True)
    while True:
        threading.Event().wait(0.02)
"""
"""Ends with a SIGINT. Before the line is printed, Python may still lose a SIGINT in a callback of
an import."""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
    ],
)
def test_launcher_returns_exit_code_of_program(launch: Launcher, ending: str, code: int) -> None:
    job = launch(ending)
    assert job.ends() == code, job.text
    assert job.lines == []
    job.left_nothing()


def test_program_and_workers_find_their_tasks(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables in the launcher's own environment, which may name another cluster, are not
    used."""
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["elsewhere:1"]}, "task": {"type": "worker", "index": 7}}',
    )
    address = free_address()
    program = """
        import zmqdist as zd

        def found():
            resolver = zd.resolvers.TFConfigClusterResolver()
            assert resolver.validate() == []
            return resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id

        with zd.coordinator.ClusterCoordinator() as coordinator:
            print(*found(), *coordinator.schedule(found).get())
    """
    job = launch(program, file=FILE.replace("{count: 2}", f"{{tasks: {{4: '{address}'}}}}"))
    assert job.ends() == 0, job.text
    cluster = {"worker": {4: address}}
    assert job.lines == [f"{cluster} chief 0 {cluster} worker 4"]


def test_functions_see_script_folder_and_job_env(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import os\ndef ask(name):\n    return os.environ.get(name)\n"
    )
    program = """
        import os, beside
        from zmqdist.coordinator import ClusterCoordinator
        with ClusterCoordinator() as coordinator:
            print(coordinator.schedule(beside.ask, ("GREETING",)).get(), os.environ.get("GREETING"))
    """
    job = launch(program, file=FILE.replace("{count: 2}", "{count: 1, env: {GREETING: hello}}"))
    assert job.ends() == 0, job.text
    assert job.lines == ["hello None"]


def test_lines_of_functions_name_their_worker(launch: Launcher) -> None:
    program = """
        import sys
        from zmqdist.coordinator import ClusterCoordinator

        def write():
            print("to stdout")
            print("to stderr", file=sys.stderr)

        with ClusterCoordinator() as coordinator:
            coordinator.schedule(write).get()
    """
    job = launch(program, file=FILE.replace("count: 2", "count: 1"))
    assert job.ends() == 0, job.text
    assert sorted(job.lines) == ["[worker-0] to stderr", "[worker-0] to stdout"]


def test_stubborn_program_killed_after_grace(launch: Launcher) -> None:
    program = """
        import signal
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("deaf", flush=True)
        while True:
            signal.pause()
    """
    job = launch(program, grace_s=0.5)
    job.saw("deaf")
    job.process.terminate()
    assert job.ends() == 128 + signal.SIGKILL, job.text
    job.left_nothing()


def test_last_worker_loss_is_printed(launch: Launcher) -> None:
    job = launch(BUSY, file=FILE.replace("count: 2", "count: 1, restarts: 0"))
    pid = job.worker(0)
    job.saw("a function runs")
    os.kill(pid, signal.SIGKILL)
    job.saw(
        "[worker-0] ended (killed by SIGKILL); no worker is left: scheduled functions fail after "
        "a while"
    )
    job.interrupt()
    job.ends()
    job.left_nothing()


def test_failing_worker_prints_reason(launch: Launcher) -> None:
    """The worker's Python does not find the standard library."""
    job = launch(
        WAITS,
        file=FILE.replace("{count: 2}", "{count: 1, restarts: 0, env: {PYTHONHOME: /nowhere}}"),
    )
    job.saw("it waits")
    job.saw("[worker-0] ended (exit code 1); no worker is left")
    assert job.saw("encodings").startswith("[worker-0] ")
    job.interrupt()
    job.ends()
    job.left_nothing()


def test_worker_binds_address_of_file(launch: Launcher) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        job = launch(WAITS, file=FILE.replace("count: 2", f"tasks: ['{address}']"))
        job.saw("it waits")
        line = job.saw("[worker-0] ")
        assert address in line
        assert "in use" in line
        job.interrupt()
        job.ends()
        job.left_nothing()


def test_sigint_to_launcher_alone_ends_all(launch: Launcher) -> None:
    job = launch(BUSY)
    job.saw("a function runs")
    job.process.send_signal(signal.SIGINT)
    assert job.ends() == 128 + signal.SIGINT, job.text
    job.left_nothing()
