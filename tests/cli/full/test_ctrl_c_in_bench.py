"""Ctrl-C at a terminal while `zmqdist bench` measures: it reaches all processes of the terminal, and none has anything to say."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(300)  # on a busy machine the last phase begins after a minute

PATIENCE_S = 60.0


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("phase", ["calls", "tasks", "large results"])
def test_it_ends_without_a_traceback(phase: str, again: bool) -> None:
    ours, theirs = pty.openpty()  # at a terminal it says what it measures
    bench = subprocess.Popen(
        [sys.executable, "-m", "zmqdist_cli", "bench", "--quick"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    interrupted_at = 0.0
    while True:
        try:
            said += os.read(ours, 4096)
        except OSError:  # all that had the terminal have ended
            break
        if not interrupted_at and b"measuring " + phase.encode() in said:
            interrupted_at = time.monotonic()
            os.killpg(bench.pid, signal.SIGINT)
            if again:
                time.sleep(0.05)  # a person's second keystroke; whatever it meets must be quiet
                os.killpg(bench.pid, signal.SIGINT)
    os.close(ours)
    assert bench.wait(PATIENCE_S) in ({130, -signal.SIGINT} if again else {130})
    assert interrupted_at
    assert b"Traceback" not in said, said.decode()
