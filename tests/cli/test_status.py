"""`zmqdist top` on a terminal: it shows, goes on while the dispatcher is away, and gives the
terminal back."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from tests.cli.helpers import COMMAND, PATIENCE_S
from tests.zygote import ServerProcess
from zmqdist.scheduling.shared.config import WorkerConfig


class Screen:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=environment,
            start_new_session=True,
        )
        self.seen = ""

    def saw(self, text: str) -> None:
        """Wait for a text that is new."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"not seen: {text!r}; the screen had {self.seen[-2000:]!r}"
            if select.select([self.ours], [], [], left)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def ends(self) -> int:
        """Its exit code; what it writes meanwhile is read, so that it does not wait for us."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it did not end"
            if select.select([self.ours], [], [], 0.02)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
        return self.process.returncode


@pytest.fixture
def dispatcher() -> Iterator[ServerProcess]:
    """One that can be killed, forked: the command itself is not what is shown here."""
    server = ServerProcess("dispatcher")
    yield server
    server.stop()


@pytest.fixture
def screen(dispatcher: ServerProcess) -> Iterator[Screen]:
    opened = Screen("top", dispatcher.address, "--interval", "0.1", "--timeout", "1")
    yield opened
    opened.close()


def test_q_ends_it_with_0_and_the_terminal_is_as_before(screen: Screen) -> None:
    screen.saw("0 workers")
    os.write(screen.ours, b"q")
    assert screen.ends() == 0
    assert termios.tcgetattr(screen.theirs) == screen.before


def test_ctrl_c_ends_it_with_0(screen: Screen) -> None:
    screen.saw("0 workers")
    screen.process.send_signal(signal.SIGINT)
    assert screen.ends() == 0
    assert termios.tcgetattr(screen.theirs) == screen.before
    assert "Traceback" not in screen.seen


def test_top_outlives_dispatcher_restart(screen: Screen, dispatcher: ServerProcess) -> None:
    screen.saw("0 workers")
    with zd.WorkerServer(WorkerConfig(dispatcher_address=dispatcher.address)):
        screen.saw("1 worker,")
        screen.saw("worker:0")
        dispatcher.kill()
        screen.saw("trying again")
        dispatcher.start()
        screen.saw("1 worker,")


def test_top_without_textual_prints_status_once(
    dispatcher: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # a finder that knows no textual, as where the extra is not installed
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'textual' else find(name, *more)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    screen = Screen("top", dispatcher.address)
    screen.saw("needs 'zmqdist[top]': pip install 'zmqdist[top]'")
    screen.saw("0 workers")
    assert screen.ends() == 0
    screen.close()
