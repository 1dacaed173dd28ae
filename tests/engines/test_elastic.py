"""`zmqdist scale` of clusters on several hosts: on hosts that ssh reaches, and in a job of
Slurm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.slurm_cluster import LOGIN, SlurmCluster
from tests.engines.ssh_hosts import SshNetwork, left_on
from tests.engines.test_slurm import Commands
from tests.launch.helpers import Launched, eventually, read

HOSTS = ("a", "b", "c")
NODES = ("n1", "n2")
ALL = ("worker:0", "worker:1", "worker:2", "worker:3")
STEP_S = 60.0

pytestmark = pytest.mark.timeout(300)

GROWS = """
    import pathlib, socket, threading
    from zmqdist.coordinator import ClusterCoordinator, get_current_worker_index

    def where(number):
        threading.Event().wait(0.05)
        return f"worker:{get_current_worker_index()}@{socket.gethostname()}"

    with ClusterCoordinator() as coordinator:
        print("it runs", flush=True)
        shown = None
        while not pathlib.Path("end").exists():
            found = sorted({value.get() for value in coordinator.map(where, range(16))})
            names = [each.partition("@")[0] for each in found]
            if found != shown and names == coordinator.workers():
                shown = found
                print("functions run on", *found, flush=True)
"""

ON_SSH = """
name: test
launcher: ssh
jobs:
  worker: {count: 1}
  ps: {count: 1}
ssh:
  hosts: [{host: a, slots: 2}, {host: b, slots: 2}, {host: c, slots: 1}]
"""


def scale(size: str) -> list[str]:
    return [sys.executable, "-m", "zmqdist_cli", "scale", "cluster.yaml", size, "--timeout", "20"]


def output(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a command, and return its exit code, output and standard error."""
    out, err = process.communicate(timeout=STEP_S)
    return process.returncode, out, err


def leaving(done: tuple[int, str, str]) -> list[str]:
    """Check that a smaller size was accepted, and return the names of the workers that leave,
    sorted. They have running functions."""
    code, out, err = done
    assert (code, err) == (0, ""), done
    *reports, last = out.splitlines()
    assert all(": finished within the grace, else run elsewhere: " in line for line in reports), out
    return sorted(re.findall(r"worker:\d+", last))


def run_on(lines: list[str], workers: Sequence[str]) -> set[str]:
    """Wait until functions run on exactly these workers, and return the hosts of the workers."""

    def hosts_by_worker() -> dict[str, str]:
        last = [line for line in lines if line.startswith("functions run on")][-1]
        return dict(each.split("@") for each in last.split()[3:])

    eventually(
        lambda: list(hosts_by_worker()) == list(workers), f"functions run on {workers}", STEP_S
    )
    return set(hosts_by_worker().values())


def workers_among(pids: Iterable[int]) -> list[str]:
    """The names of the workers among these processes, sorted."""
    names = (read(Path("/proc", str(pid), "comm")).strip() for pid in pids)
    return sorted(name for name in names if name.startswith("worker:"))


@pytest.mark.parametrize("end", ["normal end", "kill -9"])
def test_ssh_cluster_scales_within_slots(tmp_path: Path, end: str) -> None:
    (tmp_path / "ssh").mkdir()
    with SshNetwork(tmp_path / "ssh", *HOSTS) as net:
        file = f"{ON_SSH}  options: {net.options}\nprogram: python program.py\n"
        job = Launched(tmp_path / "run", GROWS, file=file, start=net.head.run)

        def scaled(size: str) -> tuple[int, str, str]:
            environment = {**os.environ, "TMPDIR": str(job.temporary)}
            pipes: dict[str, Any] = {
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
            }
            return output(
                net.head.run(scale(size), cwd=job.process_folder, env=environment, **pipes)
            )

        def workers() -> list[str]:
            return workers_among(pid for name in HOSTS for pid in net[name].processes())

        try:
            job.saw("functions run on worker:0@", STEP_S)
            assert scaled("worker=4") == (0, "worker:1, worker:2, worker:3 start\n", "")
            assert run_on(job.lines, ALL) == set(HOSTS)
            assert scaled("worker=5") == (
                2,
                "",
                (
                    "zmqdist scale: there cannot be 5 workers: the hosts of launcher: ssh have slots "
                    "for 4 workers\n"
                ),
            )
            if end == "kill -9":
                job.process.kill()
                assert job.ends(STEP_S) == -signal.SIGKILL
            else:
                gone = leaving(scaled("worker=1"))
                (stays,) = sorted(set(ALL) - set(gone))
                eventually(lambda: workers() == [stays], "three workers end", STEP_S)
                run_on(job.lines, [stays])
                assert scaled("worker=4")[0] == 0
                run_on(job.lines, ALL)
                (job.process_folder / "end").touch()
                assert job.ends(STEP_S) == 0, job.text
            job.left_nothing(folders=end != "kill -9")
            for name in HOSTS:
                eventually(
                    lambda name=name: not left_on(net[name]), f"nothing is left on {name}", STEP_S
                )  # type: ignore[misc]
        finally:
            job.kill()


@pytest.mark.parametrize("end", ["normal end", "scancel"])
def test_slurm_job_scales_within_allocation(tmp_path: Path, end: str) -> None:
    with SlurmCluster(*NODES) as slurm:
        commands = Commands(slurm, tmp_path)
        try:
            name = commands.file(GROWS, ", extra: [--cpus-per-task=2]")
            text = (tmp_path / name).read_text()
            (tmp_path / name).write_text(text.replace("worker: {count: 2}", "worker: {count: 1}"))
            command = commands.run("launch", name)
            number = commands.job(command)
            command.saw("functions run on worker:0@")

            def scaled(size: str) -> tuple[int, str, str]:
                step = [
                    "srun",
                    f"--jobid={number}",
                    "--overlap",
                    "--nodes=1",
                    "--ntasks=1",
                    "--nodelist=n1",
                ]
                pipes: dict[str, Any] = {
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.PIPE,
                    "text": True,
                }
                environment = {"TMPDIR": str(tmp_path / "temporary")}
                return output(
                    slurm.start(
                        [*step, *scale(size)], cwd=tmp_path, environment=environment, **pipes
                    )
                )

            def workers() -> list[str]:
                return workers_among(pid for node in NODES for pid in slurm.find(node, ""))

            assert scaled("worker=4") == (0, "worker:1, worker:2, worker:3 start\n", "")
            assert run_on(command.lines, ALL) == set(NODES)
            code, out, err = scaled("worker=5")
            assert (code, out) == (2, "")
            assert err.startswith(
                "zmqdist scale: there cannot be 5 workers: the allocation of Slurm has 4 cores, "
                "which are slots for 4 workers\n"
            ), err
            if end == "scancel":
                slurm.run("scancel", number)
                assert command.ends() == 143, command.text
            else:
                gone = leaving(scaled("worker=2"))
                stay = sorted(set(ALL) - set(gone))
                assert len(stay) == 2
                eventually(lambda: workers() == stay, "two workers end", STEP_S)
                run_on(command.lines, stay)
                (tmp_path / "end").touch()
                assert command.ends() == 0, command.text
            commands.left_nothing()
        finally:
            commands.close()


def test_user_in_allocation_scales_cluster(tmp_path: Path) -> None:
    with SlurmCluster(*NODES) as slurm:
        commands = Commands(slurm, tmp_path)
        (tmp_path / "temporary").mkdir()
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {"TMPDIR": str(tmp_path / "temporary")}
        words = [
            "salloc",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--cpus-per-task=2",
            sys.executable,
            "-m",
            "zmqdist_cli",
        ]
        launching = slurm.start(
            [*words, "launch", commands.file(GROWS)], cwd=tmp_path, environment=environment, **pipes
        )
        try:
            found = next(line for line in launching.stdout if line.startswith("functions run on"))
            assert found.split()[3:] == ["worker:0@n1", "worker:1@n2"]
            done = output(
                slurm.start(scale("worker=3"), cwd=tmp_path, environment=environment, **pipes)
            )
            assert done == (0, "worker:2 starts\n", "")
            assert any(" worker:2@" in line for line in launching.stdout)
            (tmp_path / "end").touch()
            assert output(launching)[0] == 0
            commands.left_nothing()
            assert not slurm.find(LOGIN, "")
        finally:
            launching.kill()
            commands.close()
