"""Folders for what a cluster of one run needs on disk: its token, its keys, its resolved file. Gone with their owner.

A folder is known as one of ours, and as used, by a locked file in it. The kernel drops the lock with the last process that has the
file open, so a launcher that was killed is told from one that lives without trusting process ids, which are used again. Whoever makes
the next folder removes what such launchers have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "zmqdist-"
OWNER: Final = "owner"


class RunFolder:
    """A private folder (0700) of this process, until `close`.

    Attributes:
      path: where it is.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        remove_left_behind()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = -1
        with contextlib.suppress(OSError):  # a file system without locks: then nobody will tidy up after a kill
            lock_path = self.path / f".{OWNER}"
            self._lock = os.open(lock_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            lock_path.rename(self.path / OWNER)  # nobody can meet it without its lock

    def close(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left_behind() -> list[Path]:
    """Remove the folders of this user whose owners have ended without doing so. Returns them."""
    removed = []
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _is_left_behind(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_left_behind(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fd = os.open(path / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # without the file it is somebody else's, or just being made
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
