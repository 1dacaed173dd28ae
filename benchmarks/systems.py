"""The systems that are compared, each in a process of its own, and the session that asks such a
process a question.

Rules
    If a system is not installed, fails or hangs, the error Unusable gives the reason in one line.
    The other systems are still measured. All processes that a system has started, also its daemons,
    end with the system. They have a mark in their environment, and a process with this mark that
    still runs a moment after the end is killed.
    Systems whose packages cannot be installed together have a Python each: `--python
    ray=/path/to/python`, or the environment variable ZMQDIST_BENCH_PYTHON_RAY.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 90.0
ANSWER_LIMIT_S = 120.0
END_LIMIT_S = 10.0
LOOK_S = 0.2
"""Seconds between two checks whether the process of a system that has not answered still runs."""
LINGER_S = 1.0
_MARK = "ZMQDIST_BENCH_SYSTEM"
_numbers = itertools.count(1)


class Unusable(Exception):
    """The error for a system that cannot answer. The text says why, in one line."""


@dataclass(frozen=True)
class System:
    """One system, or one variant of it.

    Attributes:
      name: the name of the system for `--against`.
      title: the name of the system in figures, tables and plots.
      module: the module of benchmarks/peers that runs the system.
      variant: the word after the module's name on the command line; empty if there is none.
      owner: the part of the module's name before "_". Systems with the same owner need the same
        packages and Python (`--python`).
      environment: additional environment variables of the process.
      root: the checkout that has `benchmarks`, and zmqdist.
    """

    name: str
    title: str
    module: str
    variant: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    root: Path = ROOT

    @property
    def owner(self) -> str:
        return self.module.partition("_")[0]


OURS = System("zmqdist", "zmqdist", "zmqdist")
SYSTEMS = {
    system.name: system
    for system in (
        System("threads", "zmqdist, handler in a thread", "zmqdist", "threads"),
        System("sockets", "zmqdist, sockets only", "zmqdist", "sockets", {"ZMQDIST_ARENA": "off"}),
        System("inside", "zmqdist, one process", "zmqdist", "inside"),
        System("changeable", "zmqdist, not frozen", "zmqdist", "changeable"),
        System("memcpy", "memcpy", "memcpy"),
        System("raw", "bare pyzmq", "raw"),
        System("pool", "ProcessPoolExecutor", "pool"),
        System("grpc", "grpcio", "grpc"),
        System("ray", "Ray", "ray"),
        System("monarch", "Monarch", "monarch"),
        System("scaler", "Scaler", "scaler"),
        System("dask", "Dask", "dask"),
        System("ipyparallel", "ipyparallel", "ipyparallel"),
        System("parsl", "Parsl", "parsl"),
        System("tf", "TensorFlow", "tf"),
        System("tf-data", "tf.data service", "tf_data"),
        System("tf-inside", "tf.data service, one process", "tf_data", "inside"),
        System("tf-native", "tf.data service, TensorFlow's operations", "tf_data", "native"),
        System("torch", "PyTorch DataLoader", "torch"),
        System("ray-data", "Ray Data", "ray_data"),
    )
}


def python_of(system: System, pythons: dict[str, str]) -> str:
    """Return the path of the Python that runs a system: the path in `pythons`, or else in the
    environment, or else that of this process."""
    return (
        pythons.get(system.owner)
        or os.environ.get(f"ZMQDIST_BENCH_PYTHON_{system.owner.upper()}")
        or sys.executable
    )


class Session:
    """One process of a system, to which this object sends questions as lines of JSON
    (benchmarks/peers/served.py).

    Attributes:
      answers: the names of the questions that the system can answer.
      mark: a text in the environment of the process and of all processes that it starts.

    Raises:
      Unusable: the system is not installed, or does not start. `ask` raises it if the system fails,
        or takes longer than `limit_s`.
    """

    def __init__(self, system: System, pythons: dict[str, str]) -> None:
        self._system = system
        self.mark = f"{os.getpid()}.{next(_numbers)}"
        self._folder = tempfile.TemporaryDirectory(
            prefix="zmqdist-bench-", ignore_cleanup_errors=True
        )
        words = [system.variant] if system.variant else []
        python = python_of(system, pythons)
        self._errors = open(Path(self._folder.name) / "stderr", "w+")  # noqa: SIM115 (closed by close)
        try:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{system.module}", *words],
                cwd=self._folder.name,
                env=self._environment(python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            self._folder.cleanup()
            raise Unusable(f"{python} does not start: {error.strerror}") from None
        try:
            self.answers = frozenset(self._line(START_LIMIT_S)["answers"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _environment(self, python: str) -> dict[str, str]:
        paths = [str(self._system.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Some systems start their own commands by name, so the folder of their Python comes first.
        commands = [os.path.dirname(python), *filter(None, [os.environ.get("PATH")])]
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": os.pathsep.join(commands),
            _MARK: self.mark,
        }
        own["TMPDIR"] = self._folder.name
        # Drop ZMQDIST_*, because the cluster that they may name must not be measured. Drop
        # PYTHONDONTWRITEBYTECODE, because without the bytecode of its modules zmqdist would start
        # more slowly than the other systems, which are installed with theirs.
        ours = ("ZMQDIST_", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, **self._system.environment, **own}

    def ask(self, question: str, limit_s: float = ANSWER_LIMIT_S, **what: Any) -> list[float]:
        """Send a question, and return the answer in base units: seconds, pieces a second, bytes a
        second, or bytes."""
        self._say({"do": question, **what})
        return [float(value) for value in self._line(limit_s)["values"]]

    def version(self) -> str:
        """Return the name and version of the system, or only the version."""
        self._say({"do": "version"})
        return str(self._line(START_LIMIT_S)["version"])

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and `_line` reports why
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _line(self, limit_s: float) -> dict[str, Any]:
        """Return the next line that the process writes. Raises Unusable if the line reports a
        failure or does not come."""
        assert self._process.stdout is not None
        text = (
            self._process.stdout.readline() if self._answered(self._process.stdout, limit_s) else ""
        )
        if not text:
            raise Unusable(f"its process ended: {self._last_words()}")
        said: dict[str, Any] = json.loads(text)
        if "missing" in said:
            raise Unusable(f"not installed ({said['missing']})")
        if "failed" in said:
            raise Unusable(str(said["failed"]))
        return said

    def _answered(self, stdout: IO[str], limit_s: float) -> bool:
        """Wait for a line. Return False if the process has ended without one. The end of the pipe
        does not show this, because child processes may keep the pipe open."""
        until = time.monotonic() + limit_s
        while True:
            ended = self._process.poll() is not None
            if select.select([stdout], [], [], 0 if ended else min(LOOK_S, limit_s))[0]:
                return True
            if ended:
                return False
            if time.monotonic() >= until:
                raise Unusable(f"no answer after {limit_s:g} s")

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return f"exit code {self._process.poll()}, {lines[-1][:160] if lines else 'no word'}"

    def close(self) -> None:
        """End the process, and all processes that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        if not self._none_left(LINGER_S):  # give the processes time to end by themselves
            for pid in marked(self.mark):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._none_left(LINGER_S)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _none_left(self, limit_s: float) -> bool:
        """Wait at most `limit_s` until all processes of the system have ended. Return whether they
        have."""
        until = time.monotonic() + limit_s
        while left := marked(self.mark):
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        return not left

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def marked(mark: str) -> list[int]:
    """Return the pids of the processes that run with this mark. Zombies are left out, because they
    have no environment."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for name in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _processes() -> Iterator[str]:
    return (name for name in os.listdir("/proc") if name.isdigit())
