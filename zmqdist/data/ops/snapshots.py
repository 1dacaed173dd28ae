"""Operators that read the elements of a saved run, and the chunks of a distributed snapshot, which
may be incomplete.

Rules
    The chunks of a complete snapshot are read in the order (index, stream), which is the same for
    all readers. While the snapshot is being written, a reader reads the chunks that exist before
    those that are committed later, and the chunks of one stream always in order.

    A reader of a snapshot that is being written waits for the next commit, and ends when DONE
    exists. If ERROR appears, the reader raises the writer's error, with its code.

    If the dataset is split, one chunk is one position. If splitting begins before the snapshot is
    complete, the number of chunks is unknown. Positions are then given out without end, and a
    process that gets a position without a chunk has reached the end. Each process waits until the
    snapshot is complete, because only then do all processes number the chunks in the same way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
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
"""The first and the longest pause between two checks for new chunks, in seconds."""

COMPRESSIONS = {
    "AUTO": "SNAPPY",
    "GZIP": "GZIP",
    "SNAPPY": "SNAPPY",
    "ZLIB": "ZLIB",
    None: "",
    "": "",
}
"""Maps a user's name of a compression to the name in the metadata. SNAPPY is a zlib stream of level
1, which is fast and needs no further package."""


def checked_compression(compression: Any) -> str:
    """Return the name, in a snapshot's metadata, of a compression that the user names. Raises
    InvalidArgumentError for an unknown name."""
    if (
        compression is not None and not isinstance(compression, str)
    ) or compression not in COMPRESSIONS:
        names = [name for name in COMPRESSIONS if name]
        raise invalid(
            f"Invalid `compression` argument: {compression}. Must be one of {names} or None."
        )
    return COMPRESSIONS[compression]


@operator("saved", ReaderNode)
class SavedFiles(FileReader):
    """Yields the elements of files, one file after another.

    Attributes:
      files, count: the number of files, and the number of elements in them; -1 if unknown.
    """

    spec_field = "spec"

    spec: Any = None
    files: int = -1
    count: int = -1

    def records(self, file: IO[bytes], path: str) -> Iterator[Any]:
        return read_elements(file, path)

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return self.count if inputs[0] == self.files != -1 else UNKNOWN_CARDINALITY


class OpenFile:
    """A picklable function that returns the dataset of one file. `reader_func` of `load` gets a
    dataset of such datasets."""

    def __init__(self, spec: Any, compression: str) -> None:
        self.spec, self.compression = spec, compression

    def __call__(self, path: Any) -> DatasetLike:
        return make(SavedFiles(self.compression, self.spec), [make(Tensors.build(str(path)))])


class _ChunkFilesNode(OperatorNode):
    """Yields the paths of a snapshot's chunks, and waits for further chunks. `emitted` counts the
    yielded chunks of each stream."""

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
            # Check before listing the chunks. With a check after the listing, a chunk that is
            # committed in between would be missed.
            is_complete = self._is_complete()
            for chunk in snapshot_layout.committed_chunks(self.op.path):
                expected = self.emitted.get(chunk.stream, 0)
                if chunk.index == expected:
                    self.emitted[chunk.stream] = expected + 1
                    delay = POLL_S[0]
                    yield self._path(chunk)
                # Until the snapshot is complete, the chunks before this one may still come.
                elif chunk.index > expected and is_complete:
                    raise DataLossError(
                        f"{self.op.path}: lost chunk {expected} of stream {chunk.stream}: its "
                        f"file is missing"
                    )
            if is_complete:
                return
            self._wait(delay)
            delay = min(POLL_S[1], delay * 1.5)

    def _run_splits(self) -> Iterator[Any]:
        chunks: list[snapshot_layout.CommittedChunk] | None = None
        assert self.splits is not None
        for position in self.splits:
            if chunks is None:
                # Only in a complete snapshot, a position means the same chunk in each process.
                delay = POLL_S[0]
                while not self._is_complete():
                    self._wait(delay)
                    delay = min(POLL_S[1], delay * 1.5)
                chunks = snapshot_layout.committed_chunks(self.op.path)
            if position >= len(chunks):
                return  # positions without end, from before the snapshot was complete
            yield self._path(chunks[position])

    def _is_complete(self) -> bool:
        """Return whether the snapshot is complete. Raises the error of a snapshot that has failed.
        Call this before listing the chunks. A call after the listing could return True although
        chunks were committed since the listing.
        """
        if storage.exists(snapshot_layout.snapshot_done_path(self.op.path)):
            return True
        error = snapshot_layout.read_error(self.op.path)
        if error is not None:
            raise error
        return False

    def _wait(self, delay: float) -> None:
        if self._abandoned.wait(delay):
            raise CancelledError(f"the iterator over {self.op.path} was closed")

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
class ChunkFiles(Op):
    """Yields the paths of a snapshot's chunks."""

    result_spec = TensorSpec((), np.str_)

    path: str

    def cardinality(self, inputs: tuple[int, ...]) -> int:
        return UNKNOWN_CARDINALITY if (count := self._count()) is None else count

    def split_count(self) -> int:
        return INFINITE_CARDINALITY if (count := self._count()) is None else count

    def per_split(self) -> Fraction | None:
        if self._count() is None:
            text = f"{self.path} is still being written: exactly-once delivery and reading in order need all of its chunks"
            raise UnimplementedError(text)
        return Fraction(1)

    def _count(self) -> int | None:
        is_complete = storage.exists(snapshot_layout.snapshot_done_path(self.path))
        return len(snapshot_layout.committed_chunks(self.path)) if is_complete else None


@operator("chunks", InterleaveNode)
class Chunks(Op):
    """Yields the elements of files. `cycle_length` files are open at the same time, and yield one
    element each in turn."""

    spec_field = "spec"
    result_count = UNKNOWN_CARDINALITY
    is_reader: ClassVar[bool] = True
    instead: ClassVar[str] = (
        ", or load with reader_func=lambda chunks: chunks.flat_map(lambda chunk: chunk)"
    )
    block_length: ClassVar[int] = 1
    parallel: ClassVar[int] = 0
    deterministic: ClassVar[bool] = True
    compression: str
    spec: Any
    cycle_length: int

    def per_split(self) -> Fraction | None:
        return None if self.cycle_length == 1 else super().per_split()

    def dataset_of(self, x: Any) -> DatasetLike:
        """Return the dataset of the elements in the file `x`."""
        return OpenFile(self.spec, self.compression)(x)


def load(
    path: str,
    spec: Any,
    compression: str,
    requested: str | None,
    reader_func: Callable[..., Any] | None,
) -> Any:
    """Return a dataset of the elements of a distributed snapshot.

    By default, as many chunks are open as there are processors, and they yield one element each in
    turn. While the snapshot is incomplete, one chunk is read after another, because waiting for a
    new chunk would delay the elements of the open chunks.

    Raises:
      InvalidArgumentError: writing the snapshot failed, or its compression is not `requested`.
    """
    path = storage.absolute(path)
    error = snapshot_layout.read_error(path)
    if error is not None:
        raise invalid(f"{path}: {type(error).__name__}: {error}: The save job failed to write it.")
    if requested is not None and checked_compression(requested) != compression:
        raise invalid(
            f"User specified compression {requested}, but the actual compression is "
            f"{compression or None}."
        )
    files: Any = make(ChunkFiles(path))
    if reader_func is not None:
        return reader_func(files.map(OpenFile(spec, compression)))
    complete = storage.exists(snapshot_layout.snapshot_done_path(path))
    return make(Chunks(compression, spec, (os.cpu_count() or 1) if complete else 1), [files])
