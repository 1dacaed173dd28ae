"""A role of zmqdist in a process of its own, and the memory and processor time of a process, from
/proc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def role(*arguments: str) -> Iterator[tuple[int, str]]:
    """Return a context manager that runs `zmqdist ARGUMENTS` in a process, until the with-statement
    ends.

    Returns:
      The context manager yields the pid, and the address "host:port" at the end of the first line
      that the process prints.

    Raises:
      RuntimeError: the process ended before it printed a line.
    """
    command = [sys.executable, "-m", "zmqdist_cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        try:
            if not line:
                raise RuntimeError(f"{' '.join(arguments)} ended before it had begun")
            yield process.pid, line.rpartition("zmq://")[2]
        finally:
            process.terminate()


def memory(pid: int, key: str) -> int:
    """Return the resident memory of a process in bytes. The key is VmRSS for the present memory, or
    VmHWM for the most that it ever had."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def processor_s(pid: int) -> float:
    """Return the seconds of processor time of the threads that a process has now. Threads that have
    ended are not counted."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9
