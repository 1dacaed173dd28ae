"""Functions that open and read the files that a user names, and refuse files on which they could
block by mistake; and one that keeps the numbers of the standard streams from other files.

Opening a named pipe blocks until another process writes to the pipe, and reading a device may never
end. These functions therefore refuse files that are not regular. They accept file descriptors that
the user has opened for this process, such as `/dev/stdin`, or `/dev/fd/63` for the shell's
`<(command)`, and wait for their data.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import IO, Final

from zmqdist.platforms import open_flags

_HANDED_OVER: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


null_streams: Final[dict[int, int]] = {}
"""The descriptor of /dev/null for each standard stream whose number a file of the program has."""


def fill_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that is closed, as in a daemon or after
    `>&-`. Call it before this process opens a socket, pipe or memory file that stays open. The
    kernel would give it the number of the closed stream, and a `print` of this process or of a
    child would write into it.
    """
    filled = set()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            filled.add(os.open(os.devnull, os.O_RDWR))  # the lowest free number, which is this one
            os.set_inheritable(number, True)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            if number not in filled:
                # a file that the program has opened has the number of the closed stream
                null_streams[number] = os.open(os.devnull, os.O_RDWR)
            fd = null_streams.get(number, number)
            setattr(sys, name, os.fdopen(fd, "w" if number else "r", closefd=False))


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file for reading.

    Raises OSError if the file cannot be opened, or is neither a regular file nor a file descriptor
    that the user has opened.
    """
    name = os.fspath(path)
    if name.startswith(_HANDED_OVER):
        return open(name, "rb")
    fd = os.open(name, open_flags("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK"))
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return open(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise OSError(errno.EINVAL, "it is not a regular file", name)


def read_regular(path: str | os.PathLike[str], bytes_max: int = -1) -> bytes:
    """Return the first `bytes_max` bytes of a file, or with -1 all bytes. Raises OSError if
    `open_regular` does, or if reading fails."""
    with open_regular(path) as file:
        return file.read(bytes_max)
