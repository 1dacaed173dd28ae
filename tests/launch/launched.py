"""A launcher in a child process, as a terminal would start it: its lines as it prints them, its
processes, the files that it leaves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from zmqdist.launch.agent import MEMORY_FOLDER
from zmqdist.launch.folders import OWNER

PATIENCE_S = 40.0

LAUNCH = """
import sys
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.launcher import launch
sys.exit(launch(ClusterConfig.load(sys.argv[1]), sys.argv[3:], grace_s=float(sys.argv[2])))
"""

FILE = """
name: test
jobs:
  dispatcher: {address: 127.0.0.1:0}
  worker: {count: 2}
program: python program.py
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

WITH_PS = FILE.replace("worker: {count: 2}", "worker: {count: 1}\n  ps: {count: 2}")

UNTIL_TOLD = """
    import pathlib, signal, threading
    print("it runs", flush=True)
    while not pathlib.Path("end").exists():
        threading.Event().wait(0.02)
"""


def eventually(found: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Poll a condition until it is true; the text of a failure names the condition."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not found():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        pause.wait(0.01)


def stop(pid: int) -> None:
    """Send SIGSTOP to a process, and wait until none of its threads runs. `waitpid` cannot do this
    for a child of the zygote."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _states(pid) == {"T"}, f"process {pid} stops")


def _states(pid: int) -> set[str]:
    """Return the states of the threads of a process, as in /proc."""
    threads = Path("/proc", str(pid), "task").iterdir()
    return {read(thread / "stat").rpartition(")")[2].strip()[:1] for thread in threads}


class Launched:
    """A child process in `folder`, with a folder for temporary files of its own.

    Args:
      program: text of program.py, which the cluster file `FILE` runs; None: no program.
      file: text of the cluster file, or its path.
      run: Python text of the launcher.
      terminal: the descriptor of the controlling terminal; None: without a terminal.
      grace_s: the time that program and workers have to end. The default is longer than a test
        needs, even on a busy host.
      start: the function that starts the process: subprocess.Popen, or `Host.run` of a host of a
        test.
    """

    def __init__(
        self,
        folder: Path,
        program: str | None = None,
        file: str | Path = FILE,
        arguments: tuple[str, ...] = (),
        run: str = LAUNCH,
        grace_s: float = PATIENCE_S,
        terminal: int | None = None,
        start: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    ) -> None:
        self.process_folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        if program is not None:
            (folder / "program.py").write_text(textwrap.dedent(program))
        if isinstance(file, str):
            (folder / "cluster.yaml").write_text(file)
            file = folder / "cluster.yaml"
        self._mark = f"ZMQDIST_LAUNCHED={uuid.uuid4()}"
        name, value = self._mark.split("=")
        environment = {
            **os.environ,
            name: value,
            "TMPDIR": str(self.temporary),
            "PYTHONWARNINGS": "error",
        }
        # Under this variable `print` writes a line in several pieces, and a line of another process
        # may come between them.
        environment.pop("PYTHONUNBUFFERED", None)
        self.process = start(
            [sys.executable, "-c", run, str(file), str(grace_s), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=None
            if terminal is None
            else lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def saw(self, text: str, within_s: float = PATIENCE_S) -> str:
        """Wait for a line that contains this text, and return the line."""
        with contextlib.suppress(AssertionError):  # the text of the one below has the output
            eventually(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
                repr(text),
                within_s,
            )
        found = [line for line in self.lines if text in line]
        assert found, (
            f"it ended without {text!r}, or did not print it within {within_s:g} s:\n{self.text}"
        )
        return found[0]

    def ends(self, within_s: float = PATIENCE_S) -> int:
        """Wait for the end of the launcher, and return its exit code."""
        code = self.process.wait(within_s)
        self._reader.join(within_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def worker(self, index: int) -> int:
        """The pid of a worker."""
        return self.task("worker", index)

    def task(self, job: str, index: int) -> int:
        """The pid of a worker or ps."""
        found: list[int] = []

        def look() -> bool:
            for folder in self._processes():
                if read(folder / "comm") == f"{job}:{index}\n":
                    # the name of the process in `ps`, `top` and `pgrep`
                    found.append(int(folder.name))
            return bool(found)

        eventually(look, f"{job} {index} runs")
        return found[0]

    def agents(self) -> dict[int, Path]:
        """Return the folder of each agent that runs for the launcher, by the pid of the agent."""
        found = {}
        for folder in self._processes():
            for descriptor in links(folder / "fd"):
                if descriptor.name == OWNER and descriptor.is_relative_to(MEMORY_FOLDER):
                    found[int(folder.name)] = descriptor.parent
        return found

    def interrupt(self) -> None:
        """Send SIGINT to the launcher's process group, as Ctrl-C at a terminal does. Without a
        terminal the program is in another group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left_nothing(self, folders: bool = True) -> None:
        """Check that the launcher, which has ended, has left no process and no file."""
        eventually(
            lambda: not list(self._processes()), f"all processes end; the output was\n{self.text}"
        )
        left = [str(path) for path in self.temporary.rglob("*")]
        assert not (folders and left)

    def kill(self) -> None:
        """Kill all processes that the launcher has left."""
        for folder in self._processes():
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.ends()

    def _processes(self) -> Iterator[Path]:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._mark in read(folder / "environ").split("\0"):
                yield folder

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def links(folder: Path) -> list[Path]:
    """Return the files of the descriptors of a process; an empty list if the process has ended."""
    try:
        return [each.readlink() for each in folder.iterdir()]
    except OSError:
        return []


def read(path: Path) -> str:
    """Return the text of a file of /proc; "" if the process has ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # the process has just ended
        return ""
