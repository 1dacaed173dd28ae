"""Writes a checkpoint: one file for each shard, several files at the same time, and the manifest
last.

Rules
    A checkpoint appears under its name only when all of it is on disk: its files are written into
    another folder, which is then renamed. If a checkpoint of that name exists already, the new
    files are written beside the old files, the manifest is replaced atomically, and then the old
    files are deleted. At a URL the files are written into the folder itself, too. A crash before
    the manifest is replaced leaves the old checkpoint. Files in the folder that belong to no
    checkpoint stay.

    After an error the unfinished files are deleted, and the earlier checkpoint stays. The text of a
    disk error names the file.
"""

from __future__ import annotations

import contextlib
import io
import re
import uuid
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from zmqdist import clock as time
from zmqdist.data import storage
from zmqdist.limits import CHECKPOINT_SHARDS_AT_ONCE
from zmqdist.training.checkpoint.manifest import (
    Entry,
    Manifest,
    Part,
    Plain,
    StoredPiece,
    StoredSlot,
)
from zmqdist.wire.arrays import dtype_to_json

_OWN = re.compile(r"\d{5,}-[A-Za-z0-9_.-]{0,80}-\d{5,}-of-\d{5,}\.[0-9a-f]{8}\.npz", re.ASCII)
"""Names of files that `_write_shards` makes."""


@dataclass(frozen=True)
class ToWrite:
    """An array to be saved.

    Attributes:
      shards: for each shard (first row, row after the last, function that returns the rows). The
        function is called in another thread.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: list[tuple[int, int, Callable[[], Part]]]
    variable: bool


def write(
    path: str,
    arrays: Iterable[ToWrite],
    values: dict[str, Plain],
    *,
    step: int | None = None,
    serial: int = 0,
) -> Manifest:
    """Write a checkpoint to `path`, in place of any checkpoint that `path` has. Return the manifest
    of the new checkpoint.

    Raises:
      ResourceExhaustedError: the disk is full.
      UnknownError: another fault of the disk.
    """
    path = storage.absolute(path)
    # Give the files new names, so that the files of a checkpoint that is replaced stay readable
    # until the new manifest is written.
    suffix = uuid.uuid4().hex[:8]
    # At a URL the files are written to the final folder, because a rename there may copy the files.
    exists = "://" in path or storage.exists(path)
    folder = path if exists else f"{path}.{suffix}{storage.TMP}"
    written: list[str] = []
    try:
        storage.make_folder(folder)
        manifest = Manifest(
            _write_shards(folder, list(arrays), suffix, written), values, step, serial, time.time()
        )
        manifest.write(folder)
        if not exists:
            storage.rename(folder, path)
    except BaseException as error:
        if exists:
            _remove(folder, written)
        else:
            storage.remove_tree(folder)
        if isinstance(error, OSError):
            raise storage.error_of(error, error.filename or folder) from error
        raise
    if exists:
        _remove(
            path,
            [
                name
                for name in storage.list_names(path)
                if _OWN.fullmatch(name) and name not in manifest.files
            ],
        )
    return manifest


def _remove(folder: str, files: list[str]) -> None:
    for name in files:
        with contextlib.suppress(OSError):
            storage.remove(storage.join(folder, name))


def _write_shards(
    folder: str, arrays: list[ToWrite], suffix: str, written: list[str]
) -> dict[str, Entry]:
    with ThreadPoolExecutor(CHECKPOINT_SHARDS_AT_ONCE, "zmqdist-checkpoint") as threads:
        jobs: list[list[Future[StoredPiece]]] = []
        for number, array in enumerate(arrays):
            label = re.sub(r"[^A-Za-z0-9_.-]+", "_", array.name)[:80]
            count = len(array.shards)
            of_array = []
            for index, (start, stop, read) in enumerate(array.shards):
                file = f"{number:05d}-{label}-{index:05d}-of-{count:05d}.{suffix}.npz"
                written.append(file)
                of_array.append(
                    threads.submit(_write_shard, folder, file, array, start, stop, read)
                )
            jobs.append(of_array)
        try:
            pieces = [tuple(job.result() for job in of_array) for of_array in jobs]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return {
        array.name: Entry(
            array.shape, array.dtype, stored, "variable" if array.variable else "array"
        )
        for array, stored in zip(arrays, pieces, strict=True)
    }


def _write_shard(
    folder: str, file: str, array: ToWrite, start: int, stop: int, read: Callable[[], Part]
) -> StoredPiece:
    part = read()
    shape = (stop - start, *array.shape[1:]) if array.shape else ()
    if part.value.shape != shape or part.value.dtype != array.dtype:
        raise AssertionError(
            f"rows {start} to {stop} of {array.name!r} have shape {part.value.shape} and dtype "
            f"{part.value.dtype}, not {shape}"
        )
    path = storage.join(folder, file)
    try:
        with storage.open_write(path) as raw:
            counted = _Counted(raw)
            arrays = {"value": part.value} | {
                f"slot:{name}": slot for name, slot in part.slots.items()
            }
            if part.once:
                arrays["once"] = np.frombuffer(part.once, np.uint8)
            storable: dict[str, Any] = {name: _storable(array) for name, array in arrays.items()}
            np.savez(counted, **storable)
            storage.sync(raw)
    except OSError as error:
        raise storage.error_of(error, path) from error
    slots = {name: StoredSlot(slot.shape, slot.dtype) for name, slot in part.slots.items()}
    rows, size, crc32 = (start, stop), counted.size, counted.crc32
    return StoredPiece(rows, file, size, crc32, part.version, slots, part.source)


def _storable(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in a form that npz can hold. An array with fields, or of a dtype that is not
    NumPy's own, becomes raw bytes, and the manifest records its dtype.

    Raises:
      BadArray: the array holds Python objects, which npz would pickle.
    """
    dtype_to_json(array.dtype)
    if array.dtype.isbuiltin == 2 or array.dtype.names:
        return (
            np.ascontiguousarray(array)
            .view(np.dtype(f"V{array.dtype.itemsize}"))
            .reshape(array.shape)
        )
    return array


class _Counted(io.RawIOBase):
    """A file object that writes to another file, and computes the number and the checksum of the
    bytes. It cannot seek, so that `np.savez` does not go back to change bytes that the checksum
    contains already.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._file.write(data)
        self.size += count
        self.crc32 = zlib.crc32(data, self.crc32)
        return count
