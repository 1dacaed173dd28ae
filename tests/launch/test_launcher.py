"""A launcher starts a cluster file, runs its program, and stops all processes, whatever the
program, the user or the host does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.helpers import BUSY, FILE, Launched, eventually
from zmqdist import DispatchServer, errors
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.launcher import launch as launch_here

Launcher = Callable[..., Launched]


@pytest.mark.processes("launch")
def test_program_gets_arguments_and_cluster(
    launch: Launcher,
) -> None:
    program = """
        import json, os, sys
        from zmqdist.coordinator import ClusterCoordinator
        with ClusterCoordinator() as coordinator:
            print(coordinator.schedule(sum, ([1, 2],)).get())
        print(sys.argv[1:], json.loads(os.environ["TF_CONFIG"])["task"])
        sys.exit(7)
    """
    job = launch(program, arguments=("--epochs", "3"))
    assert job.ends() == 7, job.text
    assert job.lines == ["3", "['--epochs', '3'] {'type': 'chief', 'index': 0}"]
    job.left_nothing()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_signal_ends_all_and_leaves_nothing(launch: Launcher, how: str) -> None:
    job = launch(BUSY)
    job.saw("a function runs")
    if how == "Ctrl-C":
        job.interrupt()
    else:
        job.process.terminate()
    assert job.ends() == 128 + (signal.SIGTERM if how == "SIGTERM" else signal.SIGINT), job.text
    job.left_nothing()


COUNTS = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("ready", flush=True)
    signal.sigwait({signal.SIGINT})
    print("again" if signal.sigtimedwait({signal.SIGINT}, 0.5) else "once", flush=True)
"""


@pytest.mark.parametrize("at", ["terminal", "group"])
def test_program_gets_one_sigint_per_ctrl_c(launch: Launcher, at: str) -> None:
    """Wherever the program's standard input comes from: a second KeyboardInterrupt would interrupt
    the handling of the first."""
    keyboard, terminal = os.openpty()
    with (
        os.fdopen(keyboard, "wb", buffering=0) as keys,
        os.fdopen(terminal, "wb", buffering=0) as screen,
    ):
        job = launch(COUNTS, terminal=screen.fileno() if at == "terminal" else None)
        job.saw("ready")
        if at == "terminal":
            keys.write(b"\x03")
        else:
            job.interrupt()
        assert job.ends() == 0
        assert job.lines[-1] == "once"


EARLY = """
import os, pathlib, signal, subprocess, sys, time
from zmqdist.cluster import ClusterConfig
from zmqdist.launch import launcher

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "program.py" in command:
            while not pathlib.Path("blocks").exists():
                time.sleep(0.005)
            os.killpg(0, signal.SIGINT)

launcher.subprocess.Popen = Popen
sys.exit(launcher.launch(ClusterConfig.load(sys.argv[1]), sys.argv[3:], grace_s=float(sys.argv[2])))
"""


def test_early_ctrl_c_reaches_program_once(launch: Launcher) -> None:
    """The program gets the signal from the terminal, although the launcher does not know the
    program's pid yet."""
    program = COUNTS.replace('print("ready", flush=True)', 'open("blocks", "w").close()')
    keyboard, terminal = os.openpty()
    with os.fdopen(keyboard, "wb"), os.fdopen(terminal, "wb") as screen:
        job = launch(program, run=EARLY, terminal=screen.fileno())
        assert job.ends() == 0
        assert job.lines[-1] == "once"


@pytest.mark.killed("launch")
def test_workers_and_program_end_with_a_launcher_that_is_killed(launch: Launcher) -> None:
    """The folder with the token stays until the next start: see test_folders.py."""
    job = launch(BUSY)
    workers = [job.worker(0), job.worker(1)]
    job.saw("a function runs")
    job.process.kill()
    assert job.ends() == -signal.SIGKILL
    for pid in workers:
        eventually(lambda pid=pid: not Path("/proc", str(pid)).exists(), "the worker ends")  # type: ignore[misc]
    job.left_nothing(folders=False)


REFUSED = [
    (
        "program: python program.py",
        "program: no-such-command --x",
        errors.NotFoundError,
        "program: 'no-such-command' is not found, or may not be executed",
    ),
    (
        "worker: {count: 2}",
        "worker: {count: 2}\n  evaluator: {program: no-such-evaluation}",
        errors.NotFoundError,
        "jobs.evaluator.program: 'no-such-evaluation' is not found, or may not be executed",
    ),
    (
        "{address: 127.0.0.1:0}",
        "{address: 127.0.0.1:0, fault_tolerant_mode: true}",
        ValueError,
        "Cannot enable fault tolerant mode without configuring a work dir",
    ),
]


@pytest.mark.parametrize(
    ("before", "after", "kind", "text"), REFUSED, ids=[row[3][:20] for row in REFUSED]
)
def test_unstartable_program_refused_first(
    tmp_path: Path, before: str, after: str, kind: type[Exception], text: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.replace(before, after))
    with pytest.raises(kind) as caught:
        launch_here(ClusterConfig.load(str(file)))
    assert str(caught.value) == text


def test_used_port_error_before_any_process(tmp_path: Path) -> None:
    with DispatchServer() as second:
        file = tmp_path / "cluster.yaml"
        file.write_text(FILE.replace("127.0.0.1:0", second.address))
        with pytest.raises(errors.OpError, match=rf"{second.address}.*in use"):
            launch_here(ClusterConfig.load(str(file)))
