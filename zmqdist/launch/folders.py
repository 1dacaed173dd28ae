"""Private folders for the files of one run of a cluster, such as its token, keys and resolved
cluster file. The process that made a folder is the owner of the folder, and removes the folder
before it ends.

A folder in use has a file that its owner has locked. The kernel releases the lock when the owner
ends in any way. A launcher can therefore recognize the folder of a killed launcher by the missing
lock. It needs no process id, which the kernel may have reused. When a launcher makes a folder, it
removes the folders that killed launchers have left behind.

A child of a killed process may still be about to write a key into its folder. Therefore a folder
gets another name before it is removed. The child knows the old path and makes no missing folders
above its own, so it cannot write there any more.
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
_MODE: Final = 0o700
_REMOVED: Final = ".removed"
"""The end of the name of a folder that is being removed."""


class RunFolder:
    """A private folder (mode 0700), which this process owns until `close`.

    Attributes:
      path: the folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Create the folder in `parent`, by default the folder for temporary files. Raises OSError
        if that fails."""
        parent = parent or Path(tempfile.gettempdir())
        remove_left_behind(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = -1
        # If the file system has no locks, use the folder without one. A launcher that is killed
        # then leaves the folder behind.
        with contextlib.suppress(OSError):
            lock_path = self.path / f".{OWNER}"
            self._lock = os.open(
                lock_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # The file gets its name only after it is locked, so that no other launcher finds it
            # unlocked.
            lock_path.rename(self.path / OWNER)

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        _remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left_behind(parent: Path | None = None) -> list[Path]:
    """Remove the folders of this user in `parent` whose owners have ended without removing them.
    Return their paths."""
    removed = []
    with contextlib.suppress(OSError):
        for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
            if _in_use(path) is False:
                _remove(path)
                removed.append(path)
    return removed


def _remove(path: Path) -> None:
    if not path.name.endswith(_REMOVED):
        # If the name cannot be changed, for example because another user has a folder of the new
        # name, remove the folder under its name.
        with contextlib.suppress(OSError):
            path = path.rename(path.with_name(path.name + _REMOVED))
    shutil.rmtree(path, ignore_errors=True)


def folders_in_use(parent: Path | None = None) -> list[Path]:
    """Return the folders of this user in `parent` whose owners run, sorted."""
    return sorted(
        path
        for path in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")
        if _in_use(path) is True
    )


def _in_use(path: Path) -> bool | None:
    """Return whether the owner of this folder runs. None means that `path` is not a run folder of
    this user."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        if path.name.endswith(_REMOVED):
            # A process that was killed while it removed the folder may have removed the file
            # `owner`, so the mode is the only proof.
            return False if stat.S_IMODE(status.st_mode) == _MODE else None
        fd = os.open(path / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        # the folder belongs to another program, or a launcher is making it and has not locked the
        # file
        return None
    try:
        # The lock is shared, so that two processes that call this function at once do not take each
        # other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def write_private(folder: Path, name: str, text: str) -> None:
    """Write a file that only this user can read. Only the owner of `folder` may call this, because
    it makes missing folders, also `folder`, which a cleaner of temporary files may have removed.
    """
    path = folder / name
    for parent in reversed(path.relative_to(folder).parents):
        (folder / parent).mkdir(exist_ok=True, mode=_MODE)
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    with open(descriptor, "w") as file:
        file.write(text)
