"""A cluster file is started, its program run, everything stopped: whatever the program, the user or the machine does."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launched import FILE, Launched, eventually
from zmqdist import DispatchServer, errors
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.launcher import launch as launch_here

Launcher = Callable[..., Launched]

BUSY = """
    import time
    from zmqdist.coordinator import ClusterCoordinator

    def endless():
        print("a function runs")
        while True:
            time.sleep(0.05)

    with ClusterCoordinator() as coordinator:
        values = [coordinator.schedule(endless) for _ in range(4)]
        coordinator.join()
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
    ],
)
def test_the_exit_code_is_the_programs(launch: Launcher, ending: str, code: int) -> None:
    job = launch(ending)
    assert job.ends() == code, job.text
    assert job.lines == []
    job.left_nothing()


def test_a_program_has_its_arguments_and_finds_the_cluster(launch: Launcher) -> None:
    program = """
        import json, os, sys
        from zmqdist.coordinator import ClusterCoordinator
        with ClusterCoordinator() as coordinator:
            print(coordinator.schedule(sum, ([1, 2],)).get())
        print(sys.argv[1:], json.loads(os.environ["TF_CONFIG"])["task"])
    """
    job = launch(program, arguments=("--epochs", "3"))
    assert job.ends() == 0, job.text
    assert job.lines == ["3", "['--epochs', '3'] {'type': 'chief', 'index': 0}"]


def test_the_program_and_each_worker_find_the_cluster_and_themselves_in_it(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what stands in the environment of the launcher, which may be of another cluster."""
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["elsewhere:1"]}, "task": {"type": "worker", "index": 7}}')
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    program = """
        import zmqdist as zd

        def found():
            resolver = zd.resolvers.TFConfigClusterResolver()
            assert resolver.validate() == []
            return resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id

        with zd.coordinator.ClusterCoordinator() as coordinator:
            print(*found(), *coordinator.schedule(found).get())
    """
    job = launch(program, file=FILE.replace("{count: 2}", f"{{tasks: {{4: '{place}'}}}}"))
    assert job.ends() == 0, job.text
    cluster = {"worker": {4: place}}
    assert job.lines == [f"{cluster} chief 0 {cluster} worker 4"]


def test_functions_import_modules_beside_the_script_and_see_the_environment_of_their_job(
    launch: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("import os\ndef ask(name):\n    return os.environ.get(name)\n")
    program = """
        import os, beside
        from zmqdist.coordinator import ClusterCoordinator
        with ClusterCoordinator() as coordinator:
            print(coordinator.schedule(beside.ask, ("GREETING",)).get(), os.environ.get("GREETING"))
    """
    job = launch(program, file=FILE.replace("{count: 2}", "{count: 1, env: {GREETING: hello}}"))
    assert job.ends() == 0, job.text
    assert job.lines == ["hello None"]


def test_what_functions_write_has_the_name_of_their_worker(launch: Launcher) -> None:
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


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "SIGINT to the launcher alone"])
def test_a_signal_ends_everything_and_leaves_nothing(launch: Launcher, how: str) -> None:
    job = launch(BUSY)
    job.saw("a function runs")
    if how == "Ctrl-C":
        job.interrupt()
    else:
        job.process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
    assert job.ends() == 128 + (signal.SIGTERM if how == "SIGTERM" else signal.SIGINT), job.text
    job.left_nothing()


def test_a_program_that_does_not_listen_to_a_signal_is_killed_after_the_grace(launch: Launcher) -> None:
    program = """
        import signal
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print("deaf", flush=True)
        while True:
            signal.pause()
    """
    job = launch(program)
    job.saw("deaf")
    job.process.terminate()
    assert job.ends() == 128 + signal.SIGKILL, job.text
    job.left_nothing()


def test_workers_and_program_end_with_a_launcher_that_is_killed(launch: Launcher) -> None:
    """The folder with the token stays until the next start, see test_folders.py."""
    job = launch(BUSY)
    workers = [job.worker(0), job.worker(1)]
    job.saw("a function runs")
    job.process.kill()
    assert job.ends() == -signal.SIGKILL
    for pid in workers:
        eventually(lambda pid=pid: not Path("/proc", str(pid)).exists(), "the worker ends", 5.0)  # type: ignore[misc]
    job.left_nothing(folders=False)


def test_the_loss_of_the_last_worker_is_told(launch: Launcher) -> None:
    job = launch(BUSY, file=FILE.replace("count: 2", "count: 1, restarts: 0"))
    pid = job.worker(0)
    job.saw("a function runs")
    os.kill(pid, signal.SIGKILL)
    job.saw("[worker-0] ended (killed by SIGKILL); no worker is left: what is scheduled fails after a while")
    job.interrupt()
    job.ends()
    job.left_nothing()


def test_a_worker_that_cannot_start_says_why(launch: Launcher) -> None:
    """Its Python does not find the standard library."""
    job = launch(
        "import signal; signal.pause()",
        file=FILE.replace("{count: 2}", "{count: 1, restarts: 0, env: {PYTHONHOME: /nowhere}}"),
    )
    job.saw("[worker-0] ended (exit code 1); no worker is left")
    assert any(line.startswith("[worker-0] ") and "encodings" in line for line in job.lines), job.text
    job.interrupt()
    job.ends()
    job.left_nothing()


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
        "program: python program.py",
        "program: python program.py\nlauncher: ssh",
        NotImplementedError,
        "launcher: ssh is not there yet; `local` starts everything on this host",
    ),
    (
        "{address: 127.0.0.1:0}",
        "{address: 127.0.0.1:0, fault_tolerant_mode: true}",
        ValueError,
        "Cannot enable fault tolerant mode without configuring a work dir",
    ),
]


@pytest.mark.parametrize(("before", "after", "kind", "told"), REFUSED, ids=[row[3][:20] for row in REFUSED])
def test_what_cannot_be_started_is_refused_before_anything_is(
    tmp_path: Path, before: str, after: str, kind: type[Exception], told: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.replace(before, after))
    with pytest.raises(kind) as caught:
        launch_here(ClusterConfig.load(str(file)))
    assert str(caught.value) == told


def test_a_worker_with_an_address_binds_it(launch: Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        job = launch("import signal; signal.pause()", file=FILE.replace("count: 2", f"tasks: ['{address}']"))
        line = job.saw("[worker-0] ")
        assert address in line
        assert "in use" in line
        job.interrupt()
        job.ends()
        job.left_nothing()


def test_a_port_in_use_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with DispatchServer() as other:
        file = tmp_path / "cluster.yaml"
        file.write_text(FILE.replace("127.0.0.1:0", other.address))
        with pytest.raises(errors.OpError, match=rf"{other.address}.*in use"):
            launch_here(ClusterConfig.load(str(file)))
