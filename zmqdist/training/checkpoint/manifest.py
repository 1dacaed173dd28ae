"""The layout of a checkpoint's folder, and its manifest.

<path>/
  manifest.json           {"format", "crc32", "checkpoint": {...}}. Written last: a folder without this file is not a checkpoint.
  00003-emb-00001-of-00004.5f0c9a21.npz
                          the rows of one shard: "value", and "slot:<name>" for each slot of an
                          optimizer beside it

Rules
    An entry is one array, with its logical name, its full shape and dtype, and its pieces. Each
    piece has some consecutive rows in a file of its own. Together, in order, the pieces have all
    rows. A variable has one piece for each shard that it had when it was saved. When it is
    restored, the variable may have other shards.

    An optimizer's slot is cut by rows, like its variable, if in every piece the slot has as many
    rows as the piece. Any other slot, such as a count of steps, is not cut, and each piece has a
    copy of the slot.

    Files hold plain data only, as JSON and npz, and nothing is unpickled. A manifest is validated
    before it is used. The sizes and checksums of all needed files are checked before any data of a
    checkpoint is used.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from zmqdist.data import storage
from zmqdist.errors import DataLossError, FailedPreconditionError, NotFoundError
from zmqdist.wire.arrays import BadArray, dtype_from_json, dtype_to_json

MANIFEST = "manifest.json"
FORMAT = 1
"""Number of this format. A reader refuses a manifest with a higher number."""

Shape: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
Plain: TypeAlias = bool | int | float | str | None
"""A value of a built-in type. It is stored in the manifest, not in a file of its own."""


@dataclass(frozen=True)
class Part:
    """Rows of a variable, with the rows of its slots. The code that has a Part owns the arrays, and
    no other code changes them.

    Attributes:
      slots: the slots of optimizers, by name.
      version: version of the variable at the moment when it was read.
      source: the identity of the variable: (number of its session, its number in the session). (0,
        0) means that the rows are not from a single variable.
      once: encoded keys of the updates that the value contains (variables/variable_host.py). The
        keys are valid for the variable `source` only.
    """

    value: NDArray[Any]
    slots: dict[str, NDArray[Any]] = field(default_factory=dict)
    version: int = 0
    source: tuple[int, int] = (0, 0)
    once: bytes = b""


class StoredSlot(msgspec.Struct, frozen=True):
    """Shape and dtype of the rows of a slot in one file."""

    shape: Shape
    dtype: np.dtype[Any]


class StoredPiece(msgspec.Struct, frozen=True):
    """Some rows of an entry, and the file that holds them.

    Attributes:
      rows: the first row, and the row after the last, counted in the whole variable. A scalar is
        one row.
      file, size, crc32: name of the file, and the number and checksum of its bytes.
      version: version of the variable when it was read.
      source: the identity of the variable, as in Part.
      slots: the slots that the file has beside the value.
    """

    rows: tuple[int, int]
    file: Annotated[str, msgspec.Meta(max_length=250)]
    size: int
    crc32: int
    version: int
    slots: dict[str, StoredSlot]
    source: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*\.npz", self.file, re.ASCII):
            raise ValueError(f"no file of a checkpoint is called {self.file[:100]!r}")

    @property
    def start(self) -> int:
        return self.rows[0]

    @property
    def stop(self) -> int:
        return self.rows[1]


class Entry(msgspec.Struct, frozen=True):
    """An array under one logical name: a variable, or an array of the program."""

    shape: Shape
    dtype: np.dtype[Any]
    pieces: tuple[StoredPiece, ...]
    kind: Literal["variable", "array"] = "variable"

    def __post_init__(self) -> None:
        reached = 0
        for piece in self.pieces:
            if piece.start != reached or piece.stop < piece.start:
                raise ValueError(
                    f"a piece has rows {piece.start} to {piece.stop}, but the previous "
                    f"one ends at {reached}"
                )
            reached = piece.stop
        if not self.pieces or reached != (self.shape[0] if self.shape else 1):
            raise ValueError(
                f"the pieces have {reached} rows, but the array has shape {self.shape}"
            )

    def cut_by_rows(self, slot: str) -> bool:
        """Return whether a slot has a row for each row of the value, in every piece that has the
        slot."""
        return bool(self.shape) and all(
            piece.slots[slot].shape[:1] == (piece.stop - piece.start,)
            for piece in self.pieces
            if slot in piece.slots
        )

    def __str__(self) -> str:
        return f"shape {self.shape} and dtype {self.dtype}"


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a checkpoint.

    Attributes:
      entries, values: the arrays and the plain values, by logical name.
      step: the step that was passed to `save`, or None.
      serial: a number that increases with each checkpoint that is saved to a directory.
      saved_at: the time of the save in seconds since 1970, on the clock of the program that saved
        the checkpoint.
    """

    entries: dict[str, Entry]
    values: dict[str, Plain]
    step: int | None
    serial: int
    saved_at: float

    @property
    def names(self) -> list[str]:
        """All logical names, sorted."""
        return sorted([*self.entries, *self.values])

    @property
    def files(self) -> set[str]:
        """Names of the files of all pieces."""
        return {piece.file for entry in self.entries.values() for piece in entry.pieces}

    def write(self, path: str) -> None:
        """Write the manifest to a folder. If the folder has a manifest already, replace it
        atomically."""
        body = msgspec.to_builtins(self, enc_hook=dtype_to_json)
        whole = {"format": FORMAT, "crc32": zlib.crc32(_canonical(body)), "checkpoint": body}
        storage.write(
            storage.join(path, MANIFEST), json.dumps(whole, indent=1, sort_keys=True).encode()
        )

    @classmethod
    def read(cls, path: str) -> Manifest:
        """Return the manifest of a checkpoint's folder.

        Raises:
          NotFoundError: there is no checkpoint at `path`, or it is unfinished.
          DataLossError: the manifest is damaged.
          FailedPreconditionError: a newer zmqdist wrote it.
        """
        file = storage.join(path, MANIFEST)
        try:
            data = storage.read(file)
        except (FileNotFoundError, NotADirectoryError):
            text = (
                f"it has no {MANIFEST}: the checkpoint was not completely written"
                if storage.exists(path)
                else "not found"
            )
            if within := _checkpoints_in(path):
                text = f"this is a folder of checkpoints: pass one of them, such as {within[-1]}"
            raise NotFoundError(f"checkpoint {path}: {text}") from None
        except OSError as error:
            raise storage.error_of(error, file) from error
        try:
            whole = json.loads(data)
            # a newer format may have another checksum, so look at the number first
            if isinstance(whole["format"], int) and whole["format"] > FORMAT:
                raise FailedPreconditionError(
                    f"{file} is of format {whole['format']}, and this zmqdist reads formats up to "
                    f"{FORMAT}: install a newer zmqdist",
                )
            body = whole["checkpoint"]
            if whole["format"] != FORMAT or zlib.crc32(_canonical(body)) != whole["crc32"]:
                raise ValueError("its contents do not match its checksum")
            return msgspec.convert(body, cls, dec_hook=_read_dtype)
        except (
            msgspec.ValidationError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise DataLossError(f"{file} is damaged: {error}") from None


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _read_dtype(kind: Any, description: Any) -> np.dtype[Any]:
    try:
        return dtype_from_json(description)
    except BadArray as error:
        raise ValueError(str(error)) from None


def _checkpoints_in(path: str) -> list[str]:
    """Return the names of the folders in `path` that have a manifest."""
    try:
        return [
            name
            for name in storage.list_names(path)
            if storage.exists(storage.join(path, name, MANIFEST))
        ]
    except OSError:
        return []
