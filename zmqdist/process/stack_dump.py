"""The Python stacks of a child process, also of one that hangs in C and holds the GIL.

A process that calls `serve_stacks` writes the stacks of all its threads to a memory file of its own
at each SIGNAL. `faulthandler` does this in C, so it needs neither the GIL nor the main thread's
turn. The parent opens the file through /proc, so no process keeps a descriptor for the other.

Promises, checked by tests/scheduling/full/test_stacks.py
    a process that cannot serve gets no signal, because the signal would end it: one that has
    executed another program, or has closed the file
    the system calls of the signalled process are restarted, except those that Linux never restarts
    (sleep, poll): Python calls them again itself
    a dump is whole: the reader waits until no thread of the process handles the signal
"""

from __future__ import annotations

import faulthandler
import os
import re
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from zmqdist import clock as time
from zmqdist.errors import UnavailableError

SIGNAL: Final = int(getattr(signal, "SIGRTMAX", 64)) - 4
"""The signal for a dump: a real-time signal, because programs use the others, counted from the end,
because libraries count from the beginning."""

MASKS: Final = ("SigPnd", "ShdPnd", "SigBlk")
FILE: Final = "zmqdist-stacks"
POLL_S: Final = 0.0005

_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Frame(NamedTuple):
    """One call on a stack. `line` is 0 if it is not known."""

    file: str
    line: int
    function: str


def serve_stacks() -> None:
    """Write the stacks of this process to its memory file at each SIGNAL from now on."""
    import fcntl

    file = os.memfd_create(FILE, os.MFD_CLOEXEC)
    # The reader empties the file, and the next dump must begin at its start.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, file, all_threads=True)


class StackReader:
    """Reads the stacks of one process. Make one with `stack_reader`."""

    def __init__(self, pid: int, pidfd: int, file: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._file = file
        self._bit = 1 << (SIGNAL - 1)
        self._deaf = {task for task, masks in self._masks() if masks["SigBlk"] & self._bit}
        """The threads that block the signal all the time, as those of ZeroMQ do."""

    def signal(self) -> None:
        """Have the process append a dump to its file. Raises ProcessLookupError if it has ended."""
        signal.pidfd_send_signal(self._pidfd, SIGNAL)

    def take(self, timeout_s: float) -> str:
        """Wait until the process has written all dumps that it was signalled for; return them, and
        empty the file.

        Raises UnavailableError if the process has ended, or writes nothing within `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        while not os.fstat(self._file).st_size or self._handles_signal():
            if _has_ended(self._pidfd):
                raise _ended(self.pid)
            if time.monotonic() > until:
                raise UnavailableError(
                    f"process {self.pid} wrote no stack within {timeout_s:g} s: it is suspended, "
                    f"or waits for a disk (state {_status(f'/proc/{self.pid}').get('State')})"
                )
            time.sleep(POLL_S)
        text = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        os.ftruncate(self._file, 0)
        return text

    def _handles_signal(self) -> bool:
        """Return whether a thread handles the signal, which is blocked meanwhile, or will do so."""
        return any(
            (masks["SigPnd"] | masks["ShdPnd"]) & self._bit
            or (masks["SigBlk"] & self._bit and task not in self._deaf)
            for task, masks in self._masks()
        )

    def _masks(self) -> Iterator[tuple[str, dict[str, int]]]:
        folder = f"/proc/{self.pid}/task"
        for task in _entries(self.pid, folder):
            status = _status(f"{folder}/{task}")
            if status:
                yield task, {name: int(status.get(name, "0"), 16) for name in MASKS}


@contextmanager
def stack_reader(pid: int) -> Iterator[StackReader]:
    """Return a context manager with a StackReader of a child process. One reader at a time.

    Raises UnavailableError if the process has ended, or does not serve its stacks.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise _ended(pid) from None
    try:
        file = _open_file(pid)
        try:
            if not int(_status(f"/proc/{pid}").get("SigCgt", "0"), 16) >> (SIGNAL - 1) & 1:
                raise _serves_not(pid)
            os.ftruncate(file, 0)
            yield StackReader(pid, pidfd, file)
        finally:
            os.close(file)
    except ProcessLookupError:
        raise _ended(pid) from None
    finally:
        os.close(pidfd)


def read_stacks(pid: int, timeout_s: float) -> str:
    """Return the stacks of the threads of a child process, as faulthandler writes them. The errors
    are those of `stack_reader` and `take`."""
    with stack_reader(pid) as reader:
        reader.signal()
        return reader.take(timeout_s)


def parse_stacks(text: str) -> list[list[Frame]]:
    """Return the stacks in dumps, each with the outermost call first. A thread without Python code
    is left out."""
    stacks: list[list[Frame]] = [[]]
    for line in text.split("\n"):
        frame = _FRAME.fullmatch(line)
        if frame is None:
            stacks.append([])
        else:
            file, number, function = frame.groups()
            stacks[-1].insert(0, Frame(file, int(number) if number.isdigit() else 0, function))
    return [stack for stack in stacks if stack]


def _open_file(pid: int) -> int:
    folder = f"/proc/{pid}/fd"
    for number in _entries(pid, folder):
        try:
            if os.readlink(f"{folder}/{number}") == f"/memfd:{FILE} (deleted)":
                return os.open(f"{folder}/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # closed meanwhile
            continue
    raise _serves_not(pid)


def _entries(pid: int, folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        raise _ended(pid) from None
    except PermissionError:
        raise UnavailableError(
            f"process {pid} cannot be looked into: it runs as another user"
        ) from None


def _status(folder: str) -> dict[str, str]:
    """Return the fields of /proc/PID/status; no fields if the process has ended."""
    try:
        lines = Path(folder, "status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _ended(pid: int) -> UnavailableError:
    return UnavailableError(f"process {pid} has ended")


def _serves_not(pid: int) -> UnavailableError:
    return UnavailableError(
        f"process {pid} does not show its stacks: it is starting, has executed another program, or "
        f"its function has closed all files"
    )


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()  # as `select.select` takes no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
