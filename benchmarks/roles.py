"""A role of zmqdist in a process of its own, and what the kernel knows of that process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def role(*arguments: str) -> Iterator[tuple[int, str]]:
    """`zmqdist ARGUMENTS` while entered.

    Returns:
      Its process number, and the address "host:port" at the end of the first line that it says.

    Raises:
      RuntimeError: it ended before it had begun.
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
    """Bytes, as the kernel counts them: VmRSS now, VmHWM at most."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def processor_s(pid: int) -> float:
    """Seconds that all threads of a process have run; those that have ended are not counted."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9
