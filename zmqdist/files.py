"""Files that a user names: opened so that nothing at that name can hold the reader up.

A named pipe blocks whoever opens it until another process writes, and a device may never end. So what is no regular file is refused. Only
what the user has opened for this process is read whatever it is: `/dev/stdin`, and `/dev/fd/63` as a shell writes it for `<(command)`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import IO, Final

_HANDED_OVER: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read it.

    Raises OSError: it cannot be opened, or is neither a regular file nor handed over by the user.
    """
    name = os.fspath(path)
    if name.startswith(_HANDED_OVER):
        return open(name, "rb")
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return open(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    raise OSError(errno.EINVAL, "it is not a regular file", name)


def read_regular(path: str | os.PathLike[str], bytes_max: int = -1) -> bytes:
    """The content of a file, at most `bytes_max` bytes of it. Raises as `open_regular`, and what reading raises."""
    with open_regular(path) as file:
        return file.read(bytes_max)
