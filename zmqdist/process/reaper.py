"""Reaping of child processes in two steps: first read the exit code, later release the process id.

Between the two steps the kernel gives the process id to no other process, so that a signal to the
dead child or its process group cannot reach another process.
"""

from __future__ import annotations

import math
import os
import select
import signal


def exit_code(pid: int) -> int:
    """Wait until a child has ended, and return its exit code, which is -n if signal n ended it. The
    process id of the child stays reserved until `reap`.
    """
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def end_group(pid: int) -> None:
    """Kill all processes in the process group that a child leads. The child may have ended, but
    must not have been reaped."""
    os.killpg(pid, signal.SIGKILL)


def reap(pid: int) -> None:
    """Release the process id of a child that has ended."""
    os.waitpid(pid, 0)


def wait_and_reap(pid: int, timeout_s: float) -> int | None:
    """Wait at most `timeout_s` until a child has ended, and reap it. Return its exit code, or None
    if the child still runs."""
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
