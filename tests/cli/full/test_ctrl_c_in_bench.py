"""Ctrl-C at a terminal while `zmqdist bench` measures: it reaches all processes of the terminal,
and none has anything to say."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.launch.helpers import eventually

pytestmark = pytest.mark.timeout(300)  # on a busy machine the last phase begins after a minute

PATIENCE_S = 60.0


def pending(pid: int) -> bool:
    """Whether a SIGINT to this process has not been taken by it; False when it has ended."""
    try:
        with open(f"/proc/{pid}/status") as status:
            masks = [
                int(line.split()[1], 16)
                for line in status
                if line.startswith(("SigPnd:", "ShdPnd:"))
            ]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(mask & 1 << signal.SIGINT - 1 for mask in masks)


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("phase", ["calls", "tasks", "large results"])
def test_ctrl_c_prints_no_traceback(phase: str, again: bool) -> None:
    ours, theirs = pty.openpty()  # at a terminal it says what it measures
    bench = subprocess.Popen(
        [sys.executable, "-m", "zmqdist_cli", "bench", "--quick"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    output = b""
    interrupted = False
    while True:
        try:
            output += os.read(ours, 4096)
        except OSError:  # all that had the terminal have ended
            break
        if not interrupted and b"measuring " + phase.encode() in output:
            interrupted = True
            os.killpg(bench.pid, signal.SIGINT)
            if again:
                # What the second one meets must be quiet.
                eventually(lambda: not pending(bench.pid), "the first one is heard")
                os.killpg(bench.pid, signal.SIGINT)
    os.close(ours)
    assert bench.wait(PATIENCE_S) in ({130, -signal.SIGINT} if again else {130})
    assert interrupted
    assert b"Traceback" not in output, output.decode()
