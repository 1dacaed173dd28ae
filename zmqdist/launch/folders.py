"""Folders for the files of one run of a cluster (token, keys, resolved cluster file). Their owner removes them when it ends.

A locked file in the folder shows that it is in use. The kernel releases the lock when the last process that has the file open ends. So a
launcher can distinguish the folder of a killed launcher from that of a running one without process ids, which the system reuses. When a
launcher makes a folder, it removes the folders that killed launchers have left behind.
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
    """A private folder (mode 0700) of this process, until `close`.

    Attributes:
      path: the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Create the folder in `parent`, by default the folder for temporary files. Raises OSError if that fails."""
        parent = parent or Path(tempfile.gettempdir())
        remove_left_behind(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = -1
        with contextlib.suppress(OSError):  # without locks in the file system, the folder of a killed launcher stays
            lock_path = self.path / f".{OWNER}"
            self._lock = os.open(lock_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Only after it is locked, so that no other launcher sees the file unlocked.
            lock_path.rename(self.path / OWNER)

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left_behind(parent: Path | None = None) -> list[Path]:
    """Remove the folders of this user in `parent` whose owners have ended without removing them. Return their paths."""
    removed = []
    with contextlib.suppress(OSError):
        for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
            if _is_left_behind(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def folders_in_use(parent: Path | None = None) -> list[Path]:
    """Return the folders of this user in `parent` whose owners run, sorted."""
    return sorted(path for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*") if _in_use(path) is True)


def _is_left_behind(path: Path) -> bool:
    return _in_use(path) is False


def _in_use(path: Path) -> bool | None:
    """Return whether the owner of this folder runs; None: it is not the folder of a run of this user."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        fd = os.open(path / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a folder without the file belongs to another program, or a launcher is just making it
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
