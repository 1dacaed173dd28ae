"""How a child process that has ended is reaped: its exit code is read first, its process id is let go later.

Between the two the number is still that of the dead child, so a signal to it or to its group cannot reach anybody else.
"""

from __future__ import annotations

import math
import os
import select
import signal


def exit_code(pid: int) -> int:
    """Return how a child of this process has ended: its exit code, negative for a signal. Its process id stays its own."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def end_group(pid: int) -> None:
    """Kill a child that leads a process group, and all that it has started there; one that has ended must not be reaped yet."""
    os.killpg(pid, signal.SIGKILL)


def reap(pid: int) -> None:
    """Let the process id of a child that has ended go."""
    os.waitpid(pid, 0)


def wait_and_reap(pid: int, timeout_s: float) -> int | None:
    """Wait for the end of a child of this process; return its exit code, or None where it runs still."""
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
