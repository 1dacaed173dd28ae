"""Files and folders of snapshots and checkpoints. They are on local disks, or at URLs for which
fsspec has a driver.

Rules
    A path that contains "://" is a URL and needs the package fsspec. Any other path is local. Of
    the other modules, only the writer of checkpoints distinguishes URLs from local paths, because
    at many URLs a rename copies the file.

    A file that other processes read appears as a whole, because it is written under another name
    and then renamed. `write` does both. Code that writes a larger file step by step calls `sync`
    and `rename` itself. On a local disk the file is durable when the rename returns, because `sync`
    and `rename` call fsync for the file and its folder. A name that ends in `.tmp` is an unfinished
    file, and `list_names` leaves it out.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import shutil
import uuid
import zlib
from typing import IO, Any

from zmqdist.errors import (
    FailedPreconditionError,
    OpError,
    ResourceExhaustedError,
    UnknownError,
    needs,
)
from zmqdist.files import open_regular

TMP = ".tmp"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def join(path: str, *names: str) -> str:
    """Join a path and the names of folders or files below it."""
    return (
        "/".join([path.rstrip("/") or "/", *names]) if "://" in path else os.path.join(path, *names)
    )


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in any working directory."""
    path = os.fspath(path)
    return path.rstrip("/") if "://" in path else os.path.abspath(path)


def open_read(path: str) -> IO[bytes]:
    """Open a file for reading. Raises FileNotFoundError if it does not exist, and OSError if it is
    a pipe or a device, which could block for ever.
    """
    if "://" not in path:
        return open_regular(path)
    files, name = _driver(path)
    return files.open(name, "rb")  # type: ignore[no-any-return]


def open_write(path: str, append: bool = False) -> IO[bytes]:
    """Open a file for writing. Empty the file first, or with `append` write at its end. Raises
    FileNotFoundError if the folder does not exist.
    """
    mode = "ab" if append else "wb"
    if "://" not in path:
        return open(path, mode)
    files, name = _driver(path)
    return files.open(name, mode)  # type: ignore[no-any-return]


def sync(file: IO[bytes]) -> None:
    """Flush an open file, and fsync it if it is local. The driver of a URL decides when a file is
    durable."""
    file.flush()
    try:
        number = file.fileno()
    except (OSError, AttributeError):
        return
    os.fsync(number)


def read(path: str) -> bytes:
    """Return the content of a file. Raises FileNotFoundError if it does not exist."""
    with open_read(path) as file:
        return file.read()


def write(path: str, data: bytes, staging_folder: str | None = None) -> None:
    """Create or replace a file in one step: write the data under a temporary name, sync the file,
    and rename it.

    Args:
      staging_folder: the folder of the temporary file; None means the folder of `path`. If another
        process removes this folder, `write` fails.
    """
    folder, name = path.rsplit("/", 1)
    unfinished = join(staging_folder or folder, f"{name}.{uuid.uuid4().hex[:8]}{TMP}")
    try:
        with open_write(unfinished) as file:
            file.write(data)
            sync(file)
        rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(unfinished)
        raise


def rename(old: str, new: str) -> None:
    """Move a file or folder in one step. Replace a file at `new`. Raises FileNotFoundError if `old`
    does not exist."""
    if "://" in old:
        files, name = _driver(old)
        files.mv(name, _driver(new)[1], recursive=files.isdir(name))
        return
    os.replace(old, new)
    # sync the folder, because a power failure could otherwise undo the rename
    _sync_folder(os.path.dirname(new))


def _sync_folder(path: str) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def list_names(folder: str, unfinished: bool = False) -> list[str]:
    """Return the sorted names in a folder, or [] if the folder does not exist. Without
    `unfinished`, leave out names that end in `.tmp`."""
    try:
        if "://" in folder:
            files, name = _driver(folder)
            # empty the driver's cache of names, because other processes add files
            files.invalidate_cache()
            names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in files.ls(name, detail=False)]
        else:
            names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(entry for entry in names if unfinished or not entry.endswith(TMP))


def exists(path: str) -> bool:
    """Return whether a file, folder or link has this name."""
    if "://" not in path:
        return os.path.lexists(path)
    files, name = _driver(path)
    files.invalidate_cache()
    return bool(files.exists(name))


def make_folder(path: str) -> None:
    """Create a folder and its parents. Does nothing if the folder exists."""
    if "://" not in path:
        os.makedirs(path, exist_ok=True)
        return
    files, name = _driver(path)
    files.makedirs(name, exist_ok=True)


def remove(path: str) -> None:
    """Delete a file. Raises FileNotFoundError if it does not exist."""
    if "://" not in path:
        os.unlink(path)
        return
    files, name = _driver(path)
    files.rm_file(name)


def remove_tree(path: str) -> None:
    """Delete a folder with everything in it. Does nothing if the folder does not exist, and leaves
    local files that it cannot delete."""
    if "://" not in path:
        shutil.rmtree(path, ignore_errors=True)
        return
    files, name = _driver(path)
    with contextlib.suppress(FileNotFoundError):
        files.rm(name, recursive=True)


def check_renames(path: str) -> None:
    """Raise FailedPreconditionError if the file system of a URL has no atomic rename. Most object
    stores have none.

    Without it, a rename copies the file and then deletes the original, so that other processes
    could see an incomplete copy.
    """
    if "://" not in path:
        return
    files, _ = _driver(path)
    from fsspec import AbstractFileSystem

    if type(files).mv is AbstractFileSystem.mv:
        raise FailedPreconditionError(
            f"{path}: this file system has no atomic rename, and several processes write a "
            f"snapshot at once: save it to a "
            "local or shared disk or HDFS, and copy it from there",
        )


def error_of(error: OSError, path: str) -> OpError:
    """Convert an OSError into an error of zmqdist: ResourceExhaustedError for a full disk,
    otherwise UnknownError."""
    text = f"{path}: {error.strerror or error}"
    return (ResourceExhaustedError if error.errno in _FULL else UnknownError)(text)


def _driver(path: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise FailedPreconditionError(needs(f"{path}: a URL", "fsspec")) from None
    driver: tuple[Any, str] = url_to_fs(path)
    return driver


# -- compression of a file -------------------------------------------------------------------------


_PIECE = 2**18
"""The number of bytes of a compressed file that are read at a time."""


class _ZlibWriter(io.RawIOBase):
    """Writes one zlib stream. Closing the writer does not close the file."""

    def __init__(self, file: IO[bytes], level: int) -> None:
        self._file = file
        self._compressor: Any = zlib.compressobj(level)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(self._compressor.compress(data))
        return memoryview(data).nbytes

    def close(self) -> None:
        compressor, self._compressor = self._compressor, None
        try:
            if compressor is not None:
                self._file.write(compressor.flush())
        finally:
            super().close()


class _ZlibReader(io.RawIOBase):
    """Reads the content of consecutive zlib streams. Closing the reader closes the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._decompressor = file, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decompressor.eof:
                # look for a further stream, because ElementsFile may have appended one
                data = self._decompressor.unused_data or self._file.read(_PIECE)
                if not data:
                    return 0
                self._decompressor = zlib.decompressobj()
            else:
                data = self._decompressor.unconsumed_tail or self._file.read(_PIECE)
            output = self._decompressor.decompress(data, len(buffer))
            if output:
                buffer[: len(output)] = output
                return len(output)
            if not data:
                raise EOFError("the file is truncated")

    def close(self) -> None:
        self._file.close()
        super().close()


def compressing(file: IO[bytes], compression: str) -> Any:
    """Return a writer that compresses into an open file. For the compression "", return the file
    itself. Closing the writer does not close the file, so close the writer first.
    """
    if compression == "GZIP":
        return gzip.GzipFile("", "wb", 1, file, 0)
    if compression in ("ZLIB", "SNAPPY"):
        return io.BufferedWriter(_ZlibWriter(file, 1 if compression == "SNAPPY" else 6), 2**16)
    return file


class _GzipReader(gzip.GzipFile):
    """A GzipFile that also closes the file that it reads."""

    def close(self) -> None:
        file: Any = self.fileobj
        closed = self.closed
        super().close()
        if not closed and file is not None:
            file.close()


def decompressing(file: IO[bytes], compression: str) -> IO[bytes]:
    """Return a reader of the content of a compressed file. Closing the reader closes the file."""
    if compression == "GZIP":
        return _GzipReader(fileobj=file, mode="rb")  # type: ignore[return-value]
    if compression in ("ZLIB", "SNAPPY"):
        return io.BufferedReader(_ZlibReader(file), 2**16)
    return file
