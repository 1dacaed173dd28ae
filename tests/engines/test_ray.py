"""Workers and parameter servers in a real Ray cluster of this machine: the digits are learnt, and
nothing is left, whatever ends.

Needs the package ray: pip install zmqdist[engines].
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import trained_accuracy
from tests.launch.conformance import CHECKS
from tests.launch.helpers import eventually, read
from zmqdist import limits

pytest.importorskip("ray", reason="needs pip install zmqdist[engines]")

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0

LAUNCH = """
import sys
from zmqdist import limits
limits.RAY_PLACE_S = float(sys.argv[1])
from zmqdist_cli.main import main
sys.exit(main(sys.argv[2:]))
"""

WAITS = """
    import pathlib, threading
    from zmqdist.coordinator import ClusterCoordinator

    with ClusterCoordinator() as coordinator:
        print("workers:", sorted(coordinator.fetch([coordinator.schedule(int, (index,), worker=index) for index in (0, 1)])), flush=True)
        while not pathlib.Path("end").exists():
            threading.Event().wait(0.05)
"""

THREADS = """
    import os
    from zmqdist.coordinator import ClusterCoordinator

    with ClusterCoordinator() as coordinator:
        print("threads:", coordinator.schedule(lambda: os.environ["OMP_NUM_THREADS"]).get())
"""

FILE = """
name: test
launcher: ray
jobs: {worker: {count: 2}, ps: {count: 1}}
program: python program.py
ray: {address: "ADDRESS"}
"""


class Ray:
    """A Ray cluster of one node, with all that it has started."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._mark = f"ZMQDIST_RAY={uuid.uuid4()}"
        name, value = self._mark.split("=")
        self.folders: set[Path] = set()
        """The folders for secrets of the agents that `roles` has seen; others of this machine may
        belong to other tests."""
        self.environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        words = [
            "--head",
            "--block",
            "--num-cpus",
            "8",
            "--include-dashboard",
            "false",
            "--disable-usage-stats",
        ]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    Path(sys.executable).parent / "ray",
                    "start",
                    *words,
                    "--port",
                    str(port),
                    "--temp-dir",
                    folder,
                ],
                env={**self.environment, name: value},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(lambda: "Ray runtime started" in self._log.read_text(), "Ray starts", START_S)

    def roles(self) -> dict[str, int]:
        """The pids of the processes of zmqdist in Ray, by their names ("worker:0"), or by their
        command where they have none."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._mark in read(folder / "environ").split("\0"):
                name, command = read(folder / "comm").strip(), read(folder / "cmdline")
                self.folders |= held_folders(folder)
                if "zmqdist" in command or re.fullmatch(r"\w+:\d+", name):
                    found[
                        name
                        if ":" in name
                        else f"{command.replace(chr(0), ' ')[:60]} {folder.name}"
                    ] = int(folder.name)
        return found

    def actor_of(self, role: str) -> int:
        """The pid of the actor's process that carries a role."""
        eventually(lambda: role in self.roles(), f"{role} runs in Ray")
        pid = self.roles()[role]
        while not read(Path(f"/proc/{pid}/cmdline")).startswith("ray::"):
            pid = int(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])
            assert pid > 1
        return pid

    def check_clean(self) -> None:
        assert self.folders
        eventually(lambda: not self.roles(), "roles and agents end")
        eventually(
            lambda: not any(folder.exists() for folder in self.folders),
            "the files of the agents go",
        )
        self.folders.clear()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(START_S)
        finally:
            for folder in Path("/proc").iterdir():
                if folder.name.isdigit() and self._mark in read(folder / "environ").split("\0"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(folder.name), signal.SIGKILL)


def held_folders(process: Path) -> set[Path]:
    """The folder of an agent, whose owner's file it holds open."""
    found = set()
    with contextlib.suppress(OSError):  # it has just gone
        for each in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(os.readlink(each))
                if target.parent.name.startswith("zmqdist-") and target.exists():
                    found.add(target.parent)
    return found


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        cluster = Ray(Path(folder))
        yield cluster
        cluster.stop()


class Launcher:
    """`zmqdist launch FILE` in a child process; Ray has `place_s` to place each actor."""

    def __init__(
        self, ray: Ray, folder: Path, file: str, place_s: float = limits.RAY_PLACE_S
    ) -> None:
        (folder / "cluster.yaml").write_text(file.replace("ADDRESS", ray.address))
        command = [sys.executable, "-c", LAUNCH, str(place_s), "launch", "cluster.yaml"]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=ray.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(line.rstrip("\n") for line in lines)

    def saw(self, text: str) -> None:
        eventually(
            lambda: text in "\n".join(self.lines) or not self._reader.is_alive(), text, START_S
        )
        assert text in "\n".join(self.lines), "\n".join(self.lines)

    def ends(self) -> int:
        code = self.process.wait(START_S)
        self._reader.join(START_S)
        return code


@pytest.fixture
def start(ray: Ray, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """start(file, ...): a launcher in the test's own folder, which is ended with the test."""
    made: list[Launcher] = []

    def make(file: str, **options: float) -> Launcher:
        made.append(Launcher(ray, tmp_path, file, **options))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.ends()


@pytest.fixture
def launch(ray: Ray, tmp_path: Path, start: Callable[..., Launcher]) -> Launcher:
    """A launcher whose program waits, when two workers have worked."""
    (tmp_path / "program.py").write_text(textwrap.dedent(WAITS))
    launcher = start(FILE)
    launcher.saw("workers: [0, 1]")
    ray.folders.clear()
    eventually(
        lambda: {"worker:0", "worker:1", "ps:0"} <= ray.roles().keys(), "all roles run in Ray"
    )
    assert ray.folders
    assert all(folder.exists() for folder in ray.folders)
    return launcher


def learns_the_digits(launcher: Launcher) -> None:
    assert launcher.ends() == 0, "\n".join(launcher.lines)
    assert trained_accuracy("\n".join(launcher.lines)) >= 0.95


@pytest.mark.parametrize("an_actor_is_killed", [False, True])
def test_example_learns_digits(
    ray: Ray, tmp_path: Path, start: Callable[..., Launcher], an_actor_is_killed: bool
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    file = (ROOT / "configs" / "ray.yaml").read_text()
    assert "address: auto" in file
    launcher = start(file.replace("address: auto", 'address: "ADDRESS"'))
    launcher.saw("epoch  3")
    assert "worker:0" in ray.roles()
    if an_actor_is_killed:
        os.kill(ray.actor_of("worker:1"), signal.SIGKILL)
        launcher.saw("is lost: its actor has died")
    learns_the_digits(launcher)
    ray.check_clean()


def conformance(ray: Ray, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The checks of tests/launch/conformance.py with four workers in Ray."""
    file = folder / "conformance.yaml"
    file.write_text(
        FILE.replace("ADDRESS", ray.address).replace("count: 2}, ps: {count: 1", "count: 4")
    )
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launch.conformance", str(file), *arguments],
        cwd=ROOT,
        env=ray.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(300)
def test_launcher_keeps_promises(ray: Ray, tmp_path: Path) -> None:
    process = conformance(ray, tmp_path)
    try:
        text, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, text
    assert text.count("passed r") == len(CHECKS), text
    eventually(lambda: not ray.roles(), "roles and agents end")


def test_roles_end_with_killed_launcher(ray: Ray, tmp_path: Path) -> None:
    with conformance(ray, tmp_path, "KILLED") as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if line.startswith("pids "))
        assert {"worker:0", "worker:1"} <= ray.roles().keys()
        process.kill()
    ray.check_clean()


def test_slots_of_actor_share_cpus(
    ray: Ray, tmp_path: Path, start: Callable[..., Launcher]
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(THREADS))
    ray.environment.pop("OMP_NUM_THREADS", None)
    launcher = start(
        FILE.replace("count: 2}", "count: 1, slots: 2}").replace('S"}', 'S", worker: {cpus: 4}}')
    )
    assert launcher.ends() == 0, "\n".join(launcher.lines)
    assert "threads: 2" in launcher.lines


def test_ended_program_leaves_nothing(ray: Ray, launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    assert launch.ends() == 0, "\n".join(launch.lines)
    ray.check_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_launcher_leaves_nothing(ray: Ray, launch: Launcher, number: int) -> None:
    if number == signal.SIGINT:
        os.killpg(launch.process.pid, number)
    else:
        launch.process.send_signal(number)
    assert launch.ends() == (-number if number == signal.SIGKILL else 128 + number), "\n".join(
        launch.lines
    )
    assert "SIGTERM received" not in "\n".join(launch.lines)
    ray.check_clean()


def test_roles_of_actor_end_with_actor(ray: Ray, launch: Launcher) -> None:
    os.kill(ray.actor_of("worker:0"), signal.SIGKILL)
    eventually(lambda: "worker:0" not in ray.roles(), "worker:0 ends with its actor")
    launch.saw("[worker-0@ray-worker-0] ended (killed by SIGKILL)")
    assert "worker:1" in ray.roles()


def test_actor_without_resources_is_one_sentence(
    ray: Ray, tmp_path: Path, start: Callable[..., Launcher]
) -> None:
    (tmp_path / "program.py").touch()
    launcher = start(
        FILE.replace('S"}', 'S", worker: {gpus: 1, resources: {big: 2}}}'), place_s=3.0
    )
    assert launcher.ends() == 3
    assert launcher.lines[-1] == (
        "zmqdist launch: ray-worker-0: Ray has not placed its actor within 3 s, which asks for 1 "
        "CPU, 1 GPU, 2 big: `ray status` "
        "shows what is free"
    )
    eventually(lambda: not ray.roles(), "roles and agents end")
