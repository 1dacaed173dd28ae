"""The launcher `slurm` with a real Slurm: jobs on two nodes that share a file system and nothing
else."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.slurm_cluster import LOGIN, SlurmCluster
from tests.helpers import trained_accuracy
from tests.launch.conformance import CHECKS
from tests.launch.helpers import eventually

ROOT = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2")
JOB_S = 120.0
CANCEL_ROUNDS = 5

FILE = """
name: test
launcher: slurm
jobs:
  worker: {{count: 2}}
  ps: {{count: 1}}
slurm: {{nodes: 2{more}}}
program: {program}
"""

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

HOSTS = """
    import socket, sys
    import zmqdist as zd
    from zmqdist.coordinator import ClusterCoordinator

    slurm = zd.resolvers.SlurmClusterResolver()
    assert slurm.cluster_spec() == zd.resolvers.TFConfigClusterResolver().cluster_spec()
    assert slurm.cluster_spec().num_tasks("ps") == 1
    assert (slurm.task_type, slurm.task_id) == ("chief", 0)

    def host(own):
        return own, socket.gethostname()

    with ClusterCoordinator() as coordinator:
        found = set()
        while {name for _, name in found} != {"n1", "n2"}:
            found |= {value.fetch() for value in [coordinator.schedule(host, (number,)) for number in range(8)]}
    print("functions ran on", *sorted({name for _, name in found}), "and the program on", socket.gethostname(), *sys.argv[1:])
    sys.exit(7)
"""

TOLD = """
    import signal, sys, threading
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    print("it runs")
    assert told.wait(100)
    print("told to end")
    sys.exit(5)
"""

SURVIVES = """
    import pathlib, time
    from zmqdist.coordinator import ClusterCoordinator

    def slowly(number):
        print("a function runs", flush=True)
        time.sleep(0.2)
        return number

    with ClusterCoordinator() as coordinator:
        numbers = 0
        while not pathlib.Path("lost").exists() or numbers < 200:
            numbers += sum(value.fetch() >= 0 for value in [coordinator.schedule(slowly, (n,)) for n in range(10)])
        print("all functions ran", flush=True)
"""


VISITS = """
import sys
from tests.observe.dashboard.visitor import Visitor

visitor = Visitor(sys.argv[1])
with visitor.stream(visitor.token()) as messages:
    print(next(len(message["facts"]["workers"]) for message in messages
               if len(message["facts"]["workers"]) == 2))
"""


class Command:
    """`zmqdist` on the login host, in a folder that all hosts see."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *words: str) -> None:
        temporary = folder / "temporary"
        temporary.mkdir(exist_ok=True)
        self.process = slurm.start(
            [sys.executable, "-m", "zmqdist_cli", *words],
            cwd=folder,
            environment={"TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def saw(self, text: str) -> str:
        """Wait for a line with this in it, and return it."""
        eventually(
            lambda: text in self.text or not self._reader.is_alive(),
            f"{text!r} in\n{self.text}",
            JOB_S,
        )
        assert text in self.text, self.text
        return next(line for line in self.lines if text in line)

    def ends(self) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(JOB_S)
        self._reader.join(JOB_S)
        self.process.stdout.close()
        return int(code)


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster(*NODES) as cluster:
        yield cluster


@pytest.fixture
def commands(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Commands]:
    found = Commands(slurm, tmp_path)
    yield found
    found.close()


class Commands:
    """What a test starts in its folder, ended after the test."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self._started: list[Command] = []

    def file(self, program: str, more: str = "") -> str:
        """Write a cluster file and its program; return the name of the file."""
        (self.folder / "program.py").write_text(textwrap.dedent(program))
        (self.folder / "cluster.yaml").write_text(
            FILE.format(program="python program.py", more=more)
        )
        return "cluster.yaml"

    def run(self, *words: str) -> Command:
        command = Command(self.slurm, self.folder, *words)
        self._started.append(command)
        return command

    def job(self, command: Command) -> str:
        """The number of the job that the command has submitted."""
        found = re.search(r"job (\d+) is submitted", command.saw("is submitted"))
        assert found is not None
        return found[1]

    def left_nothing(self, folders: bool = True) -> None:
        """No job, no process, no file in memory or in a temporary folder, on any host."""
        eventually(lambda: not self._left(), f"all hosts are empty: {self._left()}", 60.0)
        assert not self.slurm.jobs()
        assert not folders or not list((self.folder / "temporary").iterdir())

    def _left(self) -> list[str]:
        return [each for name in (LOGIN, *NODES) for each in self.slurm.left_on(name)]

    def close(self) -> None:
        for number in self.slurm.jobs():
            self.slurm.run("scancel", number)
        for command in self._started:
            with contextlib.suppress(ProcessLookupError):
                command.process.kill()
            command.ends()
        eventually(lambda: not self.slurm.jobs(), "no job is left", 60.0)


def test_job_on_two_nodes_learns_digits(commands: Commands) -> None:
    (commands.folder / "cluster.yaml").write_text(
        FILE.format(program=f"python {ROOT}/examples/digits.py", more="").replace(
            "ps: {count: 1}", "ps: {count: 2}"
        )
    )
    command = commands.run("launch", "cluster.yaml")
    assert command.ends() == 0, command.text
    assert trained_accuracy(command.text) >= 0.95
    commands.left_nothing()


def test_functions_run_on_both_nodes(
    commands: Commands,
) -> None:
    command = commands.run("launch", commands.file(HOSTS), "--on", "slurm", "--", "an argument")
    assert command.ends() == 7, command.text
    assert "functions ran on n1 n2 and the program on n1 an argument" in command.lines
    commands.left_nothing()


def test_launcher_in_allocation_submits_no_job(commands: Commands) -> None:
    name = commands.file(HOSTS)
    process = commands.slurm.start(
        [
            "salloc",
            "--nodes=2",
            "--ntasks-per-node=1",
            sys.executable,
            "-m",
            "zmqdist_cli",
            "launch",
            name,
        ],
        cwd=commands.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out, _ = process.communicate(timeout=JOB_S)
    assert process.returncode == 7, out
    assert f"functions ran on n1 n2 and the program on {LOGIN}" in out
    commands.left_nothing(folders=False)


@pytest.mark.timeout(300)
def test_launcher_keeps_promises(commands: Commands) -> None:
    """Each check of tests/launch/conformance.py, in an allocation."""
    name = commands.file(HOSTS)
    process = commands.slurm.start(
        [
            *("salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", sys.executable),
            *("-m", "tests.launch.conformance", str(commands.folder / name)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert out.count("passed r") == len(CHECKS), out
    commands.left_nothing(folders=False)


def test_dashboard_of_a_job_is_on_its_node(commands: Commands) -> None:
    command = commands.run("launch", "--dashboard", commands.file(BUSY))
    link = command.saw("dashboard: ").partition("dashboard: ")[2]
    commands.job(command)
    node = commands.slurm.run("squeue", "--noheader", "--format=%B").strip()
    visitor = commands.slurm.nodes[node].run(
        [sys.executable, "-c", VISITS, link], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    out, _ = visitor.communicate(timeout=JOB_S)
    assert out.strip() == "2"
    command.process.send_signal(signal.SIGINT)
    command.ends()
    commands.left_nothing()


def test_detached_job_is_attached_later(commands: Commands) -> None:
    detached = commands.run("launch", commands.file(HOSTS), "--detach")
    assert detached.ends() == 0
    number = detached.text
    assert number.isdecimal()
    attached = commands.run("launch", "--attach", number)
    assert attached.ends() == 7, attached.text
    assert "functions ran on n1 n2 and the program on n1" in attached.lines
    again = commands.run("launch", "--attach", number)
    assert again.ends() == 7, "an ended job tells its output and exit code, too"
    assert "functions ran on n1 n2 and the program on n1" in again.lines


def test_ctrl_c_cancels_job_with_message(commands: Commands) -> None:
    command = commands.run("launch", commands.file(BUSY))
    command.saw("a function runs")
    command.process.send_signal(signal.SIGINT)
    assert command.ends() == 130
    assert (
        f"[slurm] job {commands.job(command)} is cancelled; a second Ctrl-C does not wait for its "
        f"end" in command.lines
    )
    commands.left_nothing()


def test_job_outlives_killed_command(commands: Commands) -> None:
    command = commands.run("launch", commands.file(BUSY))
    command.saw("a function runs")
    number = commands.job(command)
    command.process.kill()
    command.ends()
    attached = commands.run("launch", "--attach", number)
    attached.saw("a function runs")
    attached.process.send_signal(signal.SIGINT)
    assert attached.ends() == 130
    commands.left_nothing()


def test_secrets_stay_out_of_arguments_and_files(commands: Commands) -> None:
    command = commands.run("launch", commands.file(BUSY))
    command.saw("a function runs")
    for name in NODES:
        (folder,) = commands.slurm.memory(name).glob("zmqdist-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = list(folder.glob("*/keys/*.key"))
        assert files
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        secrets = {
            match.encode()
            for file in files
            for match in re.findall(r"^secret (\S{40})$", file.read_text(), re.M)
        }
        assert secrets
        for pid in commands.slurm.find(name, ""):
            for kind in ("cmdline", "environ"):
                shown = Path("/proc", str(pid), kind).read_bytes()
                assert not any(secret in shown for secret in secrets)
    command.process.send_signal(signal.SIGINT)
    assert command.ends() == 130


@pytest.mark.timeout(600)
def test_scancel_leaves_nothing_in_any_round(commands: Commands) -> None:
    name = commands.file(BUSY)
    for _ in range(CANCEL_ROUNDS):
        command = commands.run("launch", name)
        command.saw("a function runs")
        number = commands.job(command)
        commands.slurm.run("scancel", number)
        assert command.ends() == 143, command.text
        assert f"[slurm] job {number} was cancelled" in command.lines
        commands.left_nothing()


def test_kill_9_of_launcher_leaves_nothing(commands: Commands) -> None:
    command = commands.run("launch", commands.file(BUSY))
    command.saw("a function runs")
    (launcher,) = commands.slurm.find("n1", " launch ")
    os.kill(launcher, signal.SIGKILL)
    assert command.ends() == 137, command.text
    commands.left_nothing(folders=False)


def test_unknown_partition_is_one_sentence(commands: Commands) -> None:
    command = commands.run("launch", commands.file(HOSTS, ", partition: nope"))
    assert command.ends() == 2
    assert command.text == (
        "zmqdist launch: Slurm has no partition 'nope': write one that `sinfo` lists as "
        "slurm.partition "
        "(Batch job submission failed: Invalid partition name specified)"
    )


def test_too_many_nodes_are_one_sentence(commands: Commands) -> None:
    command = commands.run("launch", commands.file(HOSTS, ", extra: [--nodes=9]"))
    assert command.ends() == 2
    assert "Slurm cannot start job" in command.lines[-1]
    assert "too few nodes" in command.lines[-1]


def test_signal_before_time_limit_lets_program_end(commands: Commands) -> None:
    command = commands.run(
        "launch", commands.file(TOLD, ", time: '1', extra: ['--signal=B:TERM@20']")
    )
    assert command.ends() == 5, command.text
    assert "told to end" in command.lines
    commands.left_nothing()


def test_preemption_lets_program_end(commands: Commands) -> None:
    command = commands.run("launch", commands.file(TOLD, ", extra: [--exclusive]"))
    command.saw("it runs")
    # Look for the nodes of a job that waits, because a job that ends between two looks of its
    # follower has no such line.
    command.saw(f"[slurm] job {commands.job(command)} runs on n[1-2]")
    commands.slurm.run(
        "sbatch",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=true",
    )
    assert command.ends() == 5, command.text
    assert "told to end" in command.lines
    eventually(lambda: not commands.slurm.jobs(), "the urgent job ends, too", JOB_S)
    commands.left_nothing()


@pytest.mark.timeout(300)
def test_job_beyond_time_limit_ends_with_sentence(commands: Commands) -> None:
    command = commands.run("launch", commands.file(BUSY, ", time: '1'"))
    assert command.ends() == 143, command.text  # of the program, by SIGTERM
    assert (
        f"[slurm] job {commands.job(command)} was ended by its time limit of 00:01:00: ask for "
        f"more as slurm.time" in command.lines
    )
    commands.left_nothing(folders=False)


@pytest.mark.timeout(300)
def test_work_of_lost_node_runs_on_other(tmp_path: Path) -> None:
    with SlurmCluster(*NODES) as own:
        commands = Commands(own, tmp_path)
        try:
            command = commands.run("launch", commands.file(SURVIVES))
            command.saw("@n2] a function runs")
            own.kill_node("n2")
            (tmp_path / "lost").touch()
            command.saw("[n2] is lost")
            assert command.ends() == 0, command.text
            assert "all functions ran" in command.lines
        finally:
            commands.close()
