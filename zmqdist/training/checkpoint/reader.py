"""Reads rows of a checkpoint: any range of rows, even if the variable was saved in pieces with
other bounds.

Rules
    `verify` reads every file that will be used, and compares its size and checksum. Callers call it
    before they assign a value, so that a damaged checkpoint changes no variable.

    When a file is missing or wrong, the reader reads the manifest again. If the manifest does not
    exist any more, or names other files, the checkpoint was deleted or replaced. The reader then
    raises NotFoundError, and the caller can use the next checkpoint. If the manifest is unchanged,
    the checkpoint is damaged. The reader then raises DataLossError, and the caller needs a copy or
    another checkpoint.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.data import storage
from zmqdist.errors import DataLossError, NotFoundError, OpError
from zmqdist.limits import CHECKPOINT_SHARDS_AT_ONCE
from zmqdist.training.checkpoint.manifest import Entry, Manifest, Part, StoredPiece
from zmqdist.update_rules import KINDS

_BLOCK = 2**20
"""Bytes that are read and checked at a time. They fit into the CPU's cache."""


class CheckpointReader:
    """Reads one checkpoint. Threads may share a reader."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest. Raises NotFoundError, DataLossError, FailedPreconditionError as
        Manifest.read does."""
        self.path = storage.absolute(path)
        self.manifest = Manifest.read(self.path)

    def verify(self, names: Iterable[str]) -> None:
        """Compare each file of these entries with the size and checksum in the manifest.

        Raises:
          DataLossError: a file is missing, cut off or changed. The error text names file, variable
            and rows.
          NotFoundError: the checkpoint was deleted or replaced after its manifest was read.
        """
        entries = self.manifest.entries
        pieces = [
            (name, piece) for name in names if name in entries for piece in entries[name].pieces
        ]
        with ThreadPoolExecutor(CHECKPOINT_SHARDS_AT_ONCE, "zmqdist-checkpoint") as threads:
            try:
                list(threads.map(lambda of: self._verify(*of), pieces))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def rows(self, name: str, start: int, stop: int, cache: dict[str, Part] | None = None) -> Part:
        """Return rows of an entry, with the same rows of its slots. `kept` caches the contents of
        the last file. Pass one dict in successive calls with ascending rows, so that no file is
        read twice.

        Raises:
          DataLossError, NotFoundError: as `verify`.
        """
        entry = self.manifest.entries[name]
        cache = {} if cache is None else cache
        touched = [
            piece for piece in entry.pieces if max(piece.start, start) < min(piece.stop, stop)
        ]
        # If no rows are requested, the empty result has the shapes and slots of the first piece.
        touched = touched or [entry.pieces[0]]
        if len(touched) == 1 and (touched[0].start, touched[0].stop) == (start, stop):
            return self._load(name, touched[0])
        value = np.empty((stop - start, *entry.shape[1:]), entry.dtype)
        slots: dict[str, NDArray[Any]] = {}
        for piece in touched:
            if piece.file not in cache:
                cache.clear()
                cache[piece.file] = self._load(name, piece)
            part = cache[piece.file]
            first, last = max(piece.start, start), max(piece.start, start, min(piece.stop, stop))
            from_piece, to_rows = (
                slice(first - piece.start, last - piece.start),
                slice(first - start, last - start),
            )
            value[to_rows] = part.value[from_piece]
            for slot, array in part.slots.items():
                if entry.cut_by_rows(slot):
                    if slot not in slots:
                        # rows of pieces that lack the slot keep its initial value
                        slots[slot] = np.full(
                            (stop - start, *array.shape[1:]), initial_of(slot), array.dtype
                        )
                    slots[slot][to_rows] = array[from_piece]
                else:
                    slots[slot] = (
                        np.maximum(slots[slot], array)
                        if slot in slots and array.shape == () and array.dtype.kind in "iu"
                        else array
                    )
        return Part(value, slots, max(piece.version for piece in touched))

    def whole(self, name: str) -> NDArray[Any]:
        """Return the whole value of an entry."""
        entry = self.manifest.entries[name]
        return self.rows(name, 0, entry.shape[0] if entry.shape else 1).value

    def _verify(self, name: str, piece: StoredPiece) -> None:
        path = storage.join(self.path, piece.file)
        size = crc32 = 0
        try:
            with storage.open_read(path) as file:
                while block := file.read(_BLOCK):
                    size += len(block)
                    crc32 = zlib.crc32(block, crc32)
        except OSError as error:
            raise self._lost(name, piece, error.strerror or str(error)) from error
        if size != piece.size:
            raise self._lost(name, piece, f"it has {size} bytes, but {piece.size} were written")
        if crc32 != piece.crc32:
            raise self._lost(name, piece, "its bytes are not those that were written (checksum)")

    def _load(self, name: str, piece: StoredPiece) -> Part:
        entry = self.manifest.entries[name]
        shape = (piece.stop - piece.start, *entry.shape[1:]) if entry.shape else ()
        try:
            with (
                storage.open_read(storage.join(self.path, piece.file)) as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                value = _as_described(arrays["value"], shape, entry.dtype)
                slots = {
                    slot: _as_described(
                        arrays[f"slot:{slot}"], description.shape, description.dtype
                    )
                    for slot, description in piece.slots.items()
                }
                once = arrays["once"].tobytes() if "once" in arrays.files else b""
        except (
            OSError,
            EOFError,
            ValueError,
            KeyError,
            NotImplementedError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise self._lost(name, piece, str(error)) from error
        return Part(value, slots, piece.version, piece.source, once)

    def _lost(self, name: str, piece: StoredPiece, problem: str) -> OpError:
        try:
            if Manifest.read(self.path).files != self.manifest.files:
                return NotFoundError(f"checkpoint {self.path} was replaced while it was read")
        except NotFoundError:
            return NotFoundError(f"checkpoint {self.path} was deleted while it was read")
        entry: Entry = self.manifest.entries[name]
        shard = f"shard {entry.pieces.index(piece)} of {len(entry.pieces)}"
        return DataLossError(
            f"{storage.join(self.path, piece.file)}: {problem}; it holds {shard} of {name!r} "
            f"(rows {piece.start} to {piece.stop})",
        )


def initial_of(slot: str) -> float:
    """Return the initial value of a slot such as "Adagrad/accumulator". Return 0 for a slot that no
    optimizer of zmqdist has."""
    kind, _, name = slot.rpartition("/")
    return KINDS[kind]().slot_values.get(name, 0.0) if kind in KINDS else 0.0


def _as_described(
    array: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    if (
        (dtype.isbuiltin == 2 or dtype.names)
        and array.dtype.kind == "V"
        and array.dtype.itemsize == dtype.itemsize
    ):
        array = np.ascontiguousarray(array).view(dtype).reshape(array.shape)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"an array of shape {array.shape} and {array.dtype} where the manifest says {shape} "
            f"and {dtype}"
        )
    return array
