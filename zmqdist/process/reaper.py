"""Reaping of child processes in two steps: first read the exit code, later release the process id.

Between the two steps the process id still belongs to the dead child, so that a signal to it or to its group cannot reach another process.
"""

from __future__ import annotations

import math
import os
import select
import signal


def exit_code(pid: int) -> int:
    """Wait for the end of a child and return its exit code, negative for a signal. Its process id stays reserved."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def end_group(pid: int) -> None:
    """Kill a child that leads a process group, and all processes in that group. A child that has ended must not have been reaped yet."""
    os.killpg(pid, signal.SIGKILL)


def reap(pid: int) -> None:
    """Release the process id of a child that has ended."""
    os.waitpid(pid, 0)


def wait_and_reap(pid: int, timeout_s: float) -> int | None:
    """Wait at most `timeout_s` for the end of a child. Return its exit code, or None if it still runs."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(math.ceil(timeout_s * 1000)):
            return None
    finally:
        os.close(pidfd)
    code = exit_code(pid)
    reap(pid)
    return code
