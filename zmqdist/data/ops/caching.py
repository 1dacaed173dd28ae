"""What was computed once: cache in memory and in a file.

Rules
    The first complete pass is recorded; one that ends early leaves nothing. An iterator reads the record where there is one when it is
    opened, else it records.

    In memory the record belongs to the Dataset object; in a file, to whoever opens it. The file is written as
    `<filename>.part` and renamed at the end of the pass; a `.part` that is there already belongs to another writer: AlreadyExistsError.

    A state holds what is recorded so far, or the whole record in memory, so that another process can go on.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from zmqdist.data.iterators import Context, Node, load_elements, save_elements
from zmqdist.data.ops.base import Op, operator
from zmqdist.errors import AlreadyExistsError, DataLossError
from zmqdist.wire import safe

if TYPE_CHECKING:
    from zmqdist.data.tree import Tree

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
        raise DataLossError(None, None, f"{path}: corrupted record")
    return count


def _exactly(file: IO[bytes], count: int, path: str) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise DataLossError(None, None, f"{path}: corrupted record: the file is cut off")
    return data


# -- the operator ---------------------------------------------------------------------------------------------------


class _CacheNode(Node):
    """`position` elements are given; `recorded` are those of this pass, None when it reads a record."""

    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        self.position = 0
        self.reading: list[Any] | None = dataset.memory.kept.get("cache")
        self.recorded: list[Any] = []

    def run(self) -> Iterator[Any]:
        if self.reading is not None:
            for x in self.reading[self.position :]:
                self.position += 1
                yield x
            return
        for x in self.source():
            self.recorded.append(x)
            yield x
        if not self.context.probing:
            self.dataset.memory.kept["cache"] = self.recorded

    def state(self) -> dict[str, Any]:
        held = self.recorded if self.reading is None else self.reading
        return {"position": self.position, "reading": self.reading is not None, "held": save_elements(held)}

    def load(self, state: dict[str, Any]) -> None:
        held = load_elements(state["held"])
        self.position = state["position"]
        self.reading, self.recorded = (held, []) if state["reading"] else (None, held)


@operator("cache", _CacheNode)
@dataclass(frozen=True)
class Cache(Op):
    """Elements kept in memory from the first complete pass on."""


class _FileCacheNode(Node):
    """`position` elements are given, of the file where `reading`."""

    def __init__(self, dataset: Tree, context: Context) -> None:
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
                    None,
                    None,
                    f"There appears to be a concurrent caching iterator running: {self.path}.part is there."
                    " If it was left by a program that has died, delete it.",
                ) from None
            self.part.write(_MAGIC)
            for x in self.carried:
                write_element(self.part, x)
        return self.part

    def _recorded(self) -> Iterator[Any]:
        with open(self.path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise DataLossError(None, None, f"{self.path}: not a cache file of this version")
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
        held = []
        if self.part is not None:
            self.part.flush()
            with open(self.path + ".part", "rb") as file:
                file.seek(len(_MAGIC))
                held = list(read_elements(file, self.path))
        return {"position": self.position, "reading": self.reading, "held": save_elements(held or self.carried)}

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
