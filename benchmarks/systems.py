"""The systems that are compared, each in a process of its own, and the session that asks such a process a question.

Rules
    A system that is not installed, fails or hangs is Unusable, with a reason of one line; the others go on.
    All processes that a system has started, also its daemons, end with the system. They have a mark in their environment, and a process
    with this mark that still runs a moment after the end is killed.
    Systems whose packages cannot be installed together have a Python each: `--python ray=/path/to/python`, or the environment variable
    ZMQDIST_BENCH_PYTHON_RAY.
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
"""So often it is looked whether a system that does not answer is still there."""
LINGER_S = 1.0
_MARK = "ZMQDIST_BENCH_SYSTEM"
_numbers = itertools.count(1)


class Unusable(Exception):
    """A system cannot answer; the text says why, on one line."""


@dataclass(frozen=True)
class System:
    """One system, or one variant of it.

    Attributes:
      name: what `--against` and the figures call it.
      title: the same for a reader.
      module: of benchmarks/peers.
      variant: the word after the module's name.
      owner: whose packages it needs, for `--python`: what stands before "_" in the module's name.
      environment: what is set for it.
    """

    name: str
    title: str
    module: str
    variant: str = ""
    environment: dict[str, str] = field(default_factory=dict)

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
        System("memcpy", "memcpy", "memcpy"),
        System("raw", "bare pyzmq", "raw"),
        System("pool", "ProcessPoolExecutor", "pool"),
        System("grpc", "grpcio", "grpc"),
        System("ray", "Ray", "ray"),
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
    """The interpreter that a system runs in: as given, as the environment says, or ours."""
    return pythons.get(system.owner) or os.environ.get(f"ZMQDIST_BENCH_PYTHON_{system.owner.upper()}") or sys.executable


class Session:
    """One process of a system, asked line by line (benchmarks/peers/served.py).

    Attributes:
      answers: the questions that it knows.
      mark: stands in the environment of its process and of all that it starts.

    Raises:
      Unusable: it is not installed, or does not start. So does `ask` when it fails, or takes longer than `limit_s`.
    """

    def __init__(self, system: System, pythons: dict[str, str]) -> None:
        self._system = system
        self.mark = f"{os.getpid()}.{next(_numbers)}"
        self._folder = tempfile.TemporaryDirectory(prefix="zmqdist-bench-", ignore_cleanup_errors=True)
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
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        commands = [os.path.dirname(python), *filter(None, [os.environ.get("PATH")])]  # some start their own by name
        own = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(commands), _MARK: self.mark}
        own["TMPDIR"] = self._folder.name
        # A cluster that the environment names is not the one to measure. Others are installed with their bytecode.
        ours = ("ZMQDIST_", "PYTHONDONTWRITEBYTECODE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, **self._system.environment, **own}

    def ask(self, question: str, limit_s: float = ANSWER_LIMIT_S, **what: Any) -> list[float]:
        """Its answer in base units: seconds, pieces a second, bytes a second, bytes."""
        self._say({"do": question, **what})
        return [float(value) for value in self._line(limit_s)["values"]]

    def version(self) -> str:
        """What it is, exactly."""
        self._say({"do": "version"})
        return str(self._line(START_LIMIT_S)["version"])

    def _say(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last words say why
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _line(self, limit_s: float) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline() if self._answered(self._process.stdout, limit_s) else ""
        if not text:
            raise Unusable(f"its process ended: {self._last_words()}")
        said: dict[str, Any] = json.loads(text)
        if "missing" in said:
            raise Unusable(f"not installed ({said['missing']})")
        if "failed" in said:
            raise Unusable(str(said["failed"]))
        return said

    def _answered(self, stdout: IO[str], limit_s: float) -> bool:
        """Wait for a line. False when its process has ended; what it had forked may still hold the pipe open."""
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
        """End it, and everything that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        if not self._none_left(LINGER_S):  # what ends by itself may do so
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
        """Wait until nothing is left of what it has started."""
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
    """The processes that still run with this mark; zombies have no environment."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for name in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _processes() -> Iterator[str]:
    return (name for name in os.listdir("/proc") if name.isdigit())
