"""The descriptions of the registered datasets. Each description is in a file of its own, or all are
in memory. The dispatcher passes the fingerprint of a description as its id, so that equal
descriptions share a file.

Rules
    A file exists as a whole or not at all. It is on the disk when `put` returns. Only *then* does
    the dispatcher journal the registration of the dataset. If the dispatcher dies between these two
    steps, the file stays until a description with the same id overwrites it. Any text can be an id.
    A short id of lower-case letters, digits, "-" and "_" is itself the file's name. For any other
    id the file's name is a hash, so that the file is always inside the folder, its name is never
    too long, and file systems that ignore case do not mix up two ids.
    Workers run the code in these files, so a work_dir or file that another user owns or may write
    to is refused (SECURITY.md).

Not here: which ids are registered (the dispatcher's durable state).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import zlib
from contextlib import suppress

from zmqdist.errors import DataLossError, NotFoundError, OpError, ResourceExhaustedError
from zmqdist.files import open_regular
from zmqdist.transport.keys import require_private

_PLAIN = re.compile(r"[a-z0-9_-]{1,64}")

_WRITABLE_BY_OTHERS = 0o022


class DatasetStore:
    """Stores texts by id. Several threads may use the store at the same time, but not with the same
    id.

    Args:
      folder: a dispatcher's work_dir, created if it is missing. None keeps the texts in memory.

    Raises:
      FailedPreconditionError: the folder, or a file in it, belongs to another user, or other users
        may write to it.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else os.path.join(os.path.abspath(folder), "datasets")
        self._texts: dict[str, str] = {}
        # workers run the code in these files
        if self._folder is not None:
            _make_private(self._folder)

    def put(self, dataset_id: str, text: str) -> None:
        """Store a text, in place of an earlier text with this id. Blocks until the text is on the
        disk.

        Raises:
          ResourceExhaustedError: the file cannot be written. An earlier text with this id is
            unchanged.
        """
        path = self.path(dataset_id)
        if path is None:
            self._texts[dataset_id] = text
            return
        try:
            _write(path, text)
        except OSError as error:
            raise _unwritable(path, error) from error

    def get(self, dataset_id: str) -> str:
        """Return the text of an id.

        Raises:
          NotFoundError: the texts are in memory, and no text was stored under this id.
          DataLossError: "corrupted record": the file is missing or damaged. A missing file is a
            loss, because the text of each registered dataset was stored before the registration.
        """
        path = self.path(dataset_id)
        if path is not None:
            return read(path)
        try:
            return self._texts[dataset_id]
        except KeyError:
            raise NotFoundError(f"no dataset {dataset_id!r} is registered here") from None

    def path(self, dataset_id: str) -> str | None:
        """Return the path of the file for an id, whether or not it exists, or None if the texts are
        in memory."""
        if self._folder is None:
            return None
        if _PLAIN.fullmatch(dataset_id):
            return os.path.join(self._folder, dataset_id)
        return os.path.join(self._folder, "%" + hashlib.sha256(_encoded(dataset_id)).hexdigest())


def read(path: str) -> str:
    """Return the text in a file of a DatasetStore.

    Raises:
      DataLossError: "corrupted record": the file is missing or damaged.
      FailedPreconditionError: another user owns the file, or other users may write to it.
    """
    try:
        with open_regular(path) as file:
            require_private(os.fstat(file.fileno()), path, mode_bits=_WRITABLE_BY_OTHERS)
            checksum, _, body = file.read().partition(b"\n")
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror}") from error
    if checksum != _checksum(body):
        raise _damaged(path, "it differs from its checksum")
    return body.decode("utf-8", "surrogatepass")


def _write(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    body = _encoded(text)
    # No id's file has a dot in its name, so this name is free. A file that a killed process left is
    # overwritten.
    new = path + ".tmp"
    try:
        with open(new, "wb", opener=_private) as file:
            file.write(_checksum(body) + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(new)
        raise
    synchronise(folder)


def _make_private(folder: str) -> None:
    """Create the folder "datasets" and the work_dir around it. Refuse a folder or journal that
    another user owns or may write to. Other users may have permission to read them.
    """
    work_dir = os.path.dirname(folder)
    for path in (work_dir, folder):
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            status = os.stat(path)
        except OSError:
            # ignore the fault: storing the first dataset or opening the journal will report it
            return
        require_private(status, f"the dispatcher's work_dir {path}", mode_bits=_WRITABLE_BY_OTHERS)
    with os.scandir(work_dir) as entries:
        for entry in entries:
            if entry.name.startswith("journal."):
                status = entry.stat(follow_symlinks=False)
                require_private(
                    status, f"the dispatcher's journal {entry.path}", mode_bits=_WRITABLE_BY_OTHERS
                )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def synchronise(folder: str) -> None:
    """Make the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _checksum(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)


def _damaged(path: str, damage: str) -> DataLossError:
    return DataLossError(
        f"{path}: corrupted record: {damage}. Register the dataset again, or put back a copy of the "
        f"dispatcher's work_dir",
    )


def _unwritable(path: str, error: OSError) -> OpError:
    hint = {
        errno.ENOSPC: "make room on that disk",
        errno.EDQUOT: "make room within the user's quota",
        errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    }.get(error.errno or 0, "let the dispatcher's user write there")
    return ResourceExhaustedError(
        f"{path}: the dispatcher cannot keep this dataset ({error.strerror}): {hint}, and try again"
    )
