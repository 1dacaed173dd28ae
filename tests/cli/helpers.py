"""The command in child processes, as a terminal has it: what it says as it comes, its exit code,
what it leaves behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.helpers import eventually
from zmqdist_cli.main import main

PATIENCE_S = 20.0
COMMAND = [sys.executable, "-W", "error", "-m", "zmqdist_cli"]


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


def run(
    *arguments: str, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Run a command to its end."""
    start = time.monotonic()
    result = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        check=False,
    )
    return Ended(result.returncode, result.stdout, result.stderr, time.monotonic() - start)


def run_here(*arguments: str, cwd: Path | None = None) -> Ended:
    """The same command in this process: what it says and its exit code, without the start of
    another Python."""
    start, before = time.monotonic(), os.getcwd()
    out, err = io.StringIO(), io.StringIO()
    try:
        os.chdir(cwd or before)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    finally:
        os.chdir(before)
    return Ended(code, out.getvalue(), err.getvalue(), time.monotonic() - start)


def status(address: str) -> dict[str, Any] | None:
    """The record of a dispatcher; None while it does not answer."""
    result = run_here("status", address, "--json", "--timeout", "1")
    assert result.code in (0, 3), result.err
    return json.loads(result.out) if result.code == 0 else None


def workers(address: str) -> list[str]:
    """The names of the workers that are alive."""
    record = status(address)
    return (
        []
        if record is None
        else [row["name"] for row in record["workers"] if row["state"] == "alive"]
    )


class Terminal:
    """A command that goes on: its lines are kept as they come."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def saw(self, text: str) -> str:
        """Wait for a line with this in it, and give it."""
        eventually(
            lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
            repr(text),
        )
        matches = [line for line in self.lines if text in line]
        assert matches, f"it ended without {text!r}: {self.lines}"
        return matches[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to all processes of the terminal."""
        os.killpg(self.pid, signal.SIGINT)

    def ends(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """End it whatever it does; nothing when it has ended."""
        if self.process.returncode is None:
            self.process.kill()
            self.ends()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
