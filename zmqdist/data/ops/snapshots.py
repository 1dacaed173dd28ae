"""Elements in files: those of a saved run, and the chunks of a distributed snapshot, which may still be growing.

Rules
    The chunks of a snapshot come in the order (index, stream), and those that are there before those that are yet to be
    written; a stream's own always in order. So the order of a snapshot that is whole is the same for everybody.

    Whoever reads one that is being written waits for the next commit, and ends when DONE is there. An ERROR that appears is
    raised with the code of whoever wrote it.

    Dealt out, one chunk is one position. Where that begins before the snapshot is whole, nobody knows their number: positions are dealt
    without end, and whoever gets one that does not exist has come to the end. It waits until the snapshot is whole, since only
    then everybody has the same number for the same chunk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import IO, Any, ClassVar

import numpy as np

from zmqdist.data import snapshot_layout, storage
from zmqdist.data.chunks import read_elements
from zmqdist.data.constants import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from zmqdist.data.interfaces import DatasetLike, make, operator
from zmqdist.data.iterators import Context, OperatorNode
from zmqdist.data.ops.base import Op
from zmqdist.data.ops.combining import InterleaveNode
from zmqdist.data.ops.readers import FileReader, ReaderNode
from zmqdist.data.ops.sources import Tensors
from zmqdist.data.structure import invalid
from zmqdist.errors import CancelledError, DataLossError, UnimplementedError
from zmqdist.specs import TensorSpec

POLL_S = (0.02, 1.0)
"""Seconds between two looks for new chunks: at first, and at most."""

COMPRESSIONS = {"AUTO": "SNAPPY", "GZIP": "GZIP", "SNAPPY": "SNAPPY", "ZLIB": "ZLIB", None: "", "": ""}
"""What a user calls them, and what the metadata says. SNAPPY is a zlib stream of level 1: quick, and read everywhere."""


def checked_compression(compression: Any) -> str:
    """The name in the metadata. Raises InvalidArgumentError for an unknown one."""
    if (compression is not None and not isinstance(compression, str)) or compression not in COMPRESSIONS:
        names = [name for name in COMPRESSIONS if name]
        raise invalid(f"Invalid `compression` argument: {compression}. Must be one of {names} or None.")
    return COMPRESSIONS[compression]


@operator("saved", ReaderNode)
@dataclass(frozen=True)
class SavedFiles(FileReader):
    """Elements of files, one file after the other.

    Attributes:
      files, count: so many elements are in so many files; -1 where that is not known.
    """

    spec: Any = None
    files: int = -1
    count: int = -1

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        return read_elements(file, path)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count if inputs[0] == self.files != -1 else UNKNOWN_CARDINALITY

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return self.spec


class OpenFile:
    """The dataset of one file: what `reader_func` gets datasets of."""

    def __init__(self, spec: Any, compression: str) -> None:
        self.spec, self.compression = spec, compression

    def __call__(self, path: Any) -> DatasetLike:
        return make(SavedFiles(self.compression, self.spec), [make(Tensors.build(str(path)))])


class _ChunkFilesNode(OperatorNode):
    """`given` is how many chunks of each stream were given."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.emitted: dict[int, int] = {}
        self.splits = context.next_splits()
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        self._abandoned.set()

    def run(self) -> Iterator[Any]:
        if self.splits is not None:
            yield from self._run_splits()
            return
        delay = POLL_S[0]
        while True:
            done = self._is_done()
            for chunk in snapshot_layout.committed(self.op.path):
                expected = self.emitted.get(chunk.stream, 0)
                if chunk.index == expected:
                    self.emitted[chunk.stream] = expected + 1
                    delay = POLL_S[0]
                    yield self._path(chunk)
                elif chunk.index > expected and done:
                    raise DataLossError(f"{self.op.path}: lost chunk {expected} of stream {chunk.stream}")
            if done:
                return
            self._wait(delay)
            delay = min(POLL_S[1], delay * 1.5)

    def _run_splits(self) -> Iterator[Any]:
        chunks: list[snapshot_layout.CommittedChunk] | None = None
        assert self.splits is not None
        for position in self.splits:
            if chunks is None:
                delay = POLL_S[0]
                while not self._is_done():
                    self._wait(delay)
                    delay = min(POLL_S[1], delay * 1.5)
                chunks = snapshot_layout.committed(self.op.path)
            if position >= len(chunks):
                return
            yield self._path(chunks[position])

    def _is_done(self) -> bool:
        """Whether all chunks are there; to be asked before looking at them."""
        if storage.exists(snapshot_layout.snapshot_done_path(self.op.path)):
            return True
        error = snapshot_layout.read_error(self.op.path)
        if error is not None:
            raise error
        return False

    def _wait(self, delay: float) -> None:
        if self._abandoned.wait(delay):
            raise CancelledError(f"nobody waits for {self.op.path} any more")

    def _path(self, chunk: snapshot_layout.CommittedChunk) -> Any:
        return storage.join(snapshot_layout.chunks_path(self.op.path), chunk.name)

    def state(self) -> dict[str, Any]:
        if self.splits is not None:
            return {"dealt": self.splits.state()}
        return {"given": sorted(self.emitted.items())}

    def load(self, state: dict[str, Any]) -> None:
        if self.splits is not None:
            self.splits.load(state["dealt"])
        else:
            self.emitted = dict(state["given"])


@operator("chunk_files", _ChunkFilesNode)
@dataclass(frozen=True)
class ChunkFiles(Op):
    """Paths of the chunks of a snapshot."""

    path: str

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return UNKNOWN_CARDINALITY if (count := self._count()) is None else count

    def split_count(self) -> int:
        return INFINITE_CARDINALITY if (count := self._count()) is None else count

    def per_split(self) -> Fraction | None:
        if self._count() is None:
            text = f"{self.path} is still being written: exactly-once delivery and reading in order need to know its chunks"
            raise UnimplementedError(text)
        return Fraction(1)

    def _count(self) -> int | None:
        done = storage.exists(snapshot_layout.snapshot_done_path(self.path))
        return len(snapshot_layout.committed(self.path)) if done else None

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return TensorSpec((), np.str_)


@operator("chunks", InterleaveNode)
@dataclass(frozen=True)
class Chunks(Op):
    """Elements of files, `cycle_length` of them open at once, one element of each in turn."""

    is_reader: ClassVar[bool] = True
    instead: ClassVar[str] = ", or load with reader_func=lambda chunks: chunks.flat_map(lambda chunk: chunk)"
    block_length: ClassVar[int] = 1
    parallel: ClassVar[int] = 0
    deterministic: ClassVar[bool] = True
    compression: str
    spec: Any
    cycle_length: int

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self, inputs: tuple[Any, ...]) -> Any:
        return self.spec

    def per_split(self) -> Fraction | None:
        return None if self.cycle_length == 1 else super().per_split()

    def dataset_of(self, x: Any) -> DatasetLike:
        """The dataset of a file."""
        return OpenFile(self.spec, self.compression)(x)


def load(path: str, spec: Any, compression: str, requested: str | None, reader_func: Callable[..., Any] | None) -> Any:
    """The elements of a distributed snapshot.

    By default as many chunks are open at once as there are processors, and give an element each in turn; of one that is being
    written, one chunk after the other, as waiting for several would hold back the elements of those that are there.

    Raises:
      InvalidArgumentError: whoever wrote it failed; it has another compression than `wanted`.
    """
    path = storage.absolute(path)
    error = snapshot_layout.read_error(path)
    if error is not None:
        raise invalid(f"{path}: {type(error).__name__}: {error}: The save job failed to write it.")
    if requested is not None and checked_compression(requested) != compression:
        raise invalid(f"User specified compression {requested}, but the actual compression is {compression or None}.")
    files: Any = make(ChunkFiles(path))
    if reader_func is not None:
        return reader_func(files.map(OpenFile(spec, compression)))
    complete = storage.exists(snapshot_layout.snapshot_done_path(path))
    return make(Chunks(compression, spec, (os.cpu_count() or 1) if complete else 1), [files])
