"""What was computed once: cache in memory and in a file.

Rules
    The first complete pass is recorded; one that ends early leaves nothing. An iterator reads the record where there is one when it is
    opened, else it records.

    In memory the record belongs to the Dataset object; in a file, to whoever opens it. The file is written as
    `<filename>.part` and renamed at the end of the pass; a `.part` that is there already belongs to another writer: AlreadyExistsError.

    A state holds what is recorded so far, or the whole record in memory, so that another process can go on.

    What is kept in memory is handed out read-only, in the first pass, too: else a reader that writes into it would find that in the next.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import Context, Node, load_elements, save_elements
from zmqdist.data.ops.base import Op
from zmqdist.data.structure import READY, own_dicts, read_only
from zmqdist.errors import AlreadyExistsError, DataLossError
from zmqdist.files import open_regular
from zmqdist.wire import safe

_MAGIC = b"zmqdist elements 1\n"
_LENGTH = struct.Struct("<Q")


# -- elements in a file ---------------------------------------------------------------------------------------------


def write_element(file: IO[bytes], value: Any) -> None:
    """Append one element: the number of its parts, the length of each, the parts."""
    body, frames = safe.encode(value)
    parts = [body, *(memoryview(frame).cast("B") if memoryview(frame).nbytes else b"" for frame in frames)]
    file.write(_LENGTH.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) for part in parts))
    for part in parts:
        file.write(part)


def read_elements(file: IO[bytes], path: str) -> Iterator[Any]:
    """The elements from here to the end. Raises DataLossError where they are cut off."""
    while head := file.read(_LENGTH.size):
        lengths = struct.unpack(f"<{_number(head, path)}Q", _exactly(file, 8 * _number(head, path), path))
        body, *frames = [bytearray(_exactly(file, length, path)) for length in lengths]
        yield safe.decode(bytes(body), frames, path)


def _number(head: bytes, path: str) -> int:
    count = int(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else 0
    if not 1 <= count < 2**20:
        raise DataLossError(f"{path}: corrupted record")
    return count


def _exactly(file: IO[bytes], count: int, path: str) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise DataLossError(f"{path}: corrupted record: the file is cut off")
    return data


# -- the operator ---------------------------------------------------------------------------------------------------


class _CacheNode(Node):
    """`position` elements are given; `recorded` are those of this pass, None when it reads a record; `dicts`: there are some in them."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = 0
        self.reading: list[Any] | None = dataset.memory.kept.get("cache")
        self.recorded: list[Any] = []
        self.dicts: bool = dataset.memory.kept.get("cache has dicts", False)

    def run(self) -> Iterator[Any]:
        if self.reading is not None:
            dicts = self.dicts
            for x in self.reading[self.position :]:
                self.position += 1
                yield own_dicts(x) if dicts else x
            return
        for x in self.source():
            if type(x) in READY:
                self.recorded.append(x)
                yield x
            else:
                yield self._record(x)
        if not self.context.probing:
            self.dataset.memory.kept["cache has dicts"] = self.dicts
            self.dataset.memory.kept["cache"] = self.recorded

    def _record(self, x: Any) -> Any:
        """What the reader gets of it."""
        kept = read_only(x)
        self.recorded.append(kept)
        given = read_only(kept)
        self.dicts = self.dicts or given is not kept
        return given

    def state(self) -> dict[str, Any]:
        held = self.recorded if self.reading is None else self.reading
        return {"position": self.position, "reading": self.reading is not None, "held": save_elements(held)}

    def load(self, state: dict[str, Any]) -> None:
        held = list(map(read_only, load_elements(state["held"])))
        self.dicts = any(read_only(x) is not x for x in held)
        self.position = state["position"]
        self.reading, self.recorded = (held, []) if state["reading"] else (None, held)


@operator("cache", _CacheNode)
@dataclass(frozen=True)
class Cache(Op):
    """Elements kept in memory from the first complete pass on."""


class _FileCacheNode(Node):
    """`position` elements are given, of the file where `reading`."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = 0
        self.path = self.op.filename + ".data"
        self.reading = os.path.exists(self.path)
        self.part: IO[bytes] | None = None
        self.carried: list[Any] = []

    def run(self) -> Iterator[Any]:
        if self.reading:
            yield from self._recorded()
        elif self.context.probing:
            yield from self.source()
        else:
            part = self._opened()
            for x in self.source():
                write_element(part, x)
                self.position += 1
                yield x
            part.close()
            os.replace(self.path + ".part", self.path)
            self.part, self.reading = None, True

    def _opened(self) -> IO[bytes]:
        if self.part is None:
            try:
                self.part = open(self.path + ".part", "xb")  # noqa: SIM115 it is closed at the end of the pass
            except FileExistsError:
                raise AlreadyExistsError(
                    f"There appears to be a concurrent caching iterator running: {self.path}.part is there."
                    " If it was left by a program that has died, delete it.",
                ) from None
            self.part.write(_MAGIC)
            for x in self.carried:
                write_element(self.part, x)
        return self.part

    def _recorded(self) -> Iterator[Any]:
        with open_regular(self.path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise DataLossError(f"{self.path}: not a cache file of this version")
            for number, x in enumerate(read_elements(file, self.path)):
                if number >= self.position:
                    self.position += 1
                    yield x

    def close(self) -> None:
        super().close()
        if self.part is not None:
            self.part.close()
            self.part = None
            with contextlib.suppress(OSError):
                os.unlink(self.path + ".part")

    def state(self) -> dict[str, Any]:
        if self.part is None:
            held = save_elements(self.carried)
        else:
            self.part.flush()
            with open(self.path + ".part", "rb") as file:
                file.seek(len(_MAGIC))
                held = save_elements(read_elements(file, self.path))
        return {"position": self.position, "reading": self.reading, "held": held}

    def load(self, state: dict[str, Any]) -> None:
        self.close_part()
        self.position, self.reading = state["position"], state["reading"]
        self.carried = load_elements(state["held"])

    def close_part(self) -> None:
        """Give up what this iterator has written."""
        if self.part is not None:
            self.part.close()
            os.unlink(self.path + ".part")
            self.part = None


@operator("cache_file", _FileCacheNode)
@dataclass(frozen=True)
class FileCache(Op):
    """Elements kept in a file from the first complete pass on; later processes read it."""

    filename: str = ""
