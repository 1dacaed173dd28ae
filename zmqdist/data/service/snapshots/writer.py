"""The writer of one stream of a snapshot. It runs the pipeline, and writes the elements into
chunks.

Theory
    The writer writes elements into chunks in the stream's folder
    `uncommitted_chunks/<incarnation>`. A commit publishes these chunks in two steps. First a
    checkpoint, which contains the iterator's state after the last element of the chunks, appears by
    a rename. Then the chunks are renamed into the snapshot's folder `chunks`. A writer may crash at
    any point. The writer that takes over the stream then loads the newest checkpoint. It moves the
    chunks before the checkpoint if the earlier writer has not moved them. It deletes the chunks
    after the checkpoint, and computes their elements again. Every element is therefore in the
    snapshot exactly once, if the pipeline has a state and computes the same elements again. The
    stream of a pipeline without a state is committed once, at its end.

    Each writer works in a folder of its own, and publishes only by renaming files out of that
    folder. A writer that takes over a stream first moves the folder of the earlier writer away.
    From then on the earlier writer cannot publish, even if it is alive, so that two writers never
    commit at the same time.

Promises
    P1  Every chunk in `chunks` is complete, and has only elements before the newest checkpoint.
    P2  The file DONE appears when all chunks are in `chunks`. The file ERROR contains the error of
        the pipeline or of the disk.
    P3  After `cancel` no further commit is published.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zmqdist import clock as time
from zmqdist.data import snapshot_layout, storage
from zmqdist.data.chunks import ElementsFile
from zmqdist.data.dataset import deserialize
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.snapshot_layout import CommittedChunk
from zmqdist.data.splits import open_stream
from zmqdist.data.tree import Tree
from zmqdist.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    OpError,
    ResourceExhaustedError,
    UnimplementedError,
    UnknownError,
)
from zmqdist.limits import SNAPSHOT_CHUNK_BYTES_MAX

LOG = logging.getLogger("zmqdist.data.snapshots")

RUN_MAX = 1024
"""The largest number of positions in one request of a stream."""

_QUICK_S, _SLOW_S = 0.1, 1.0
"""The shortest and the longest time for which a run of positions should last, in seconds. At the
end of the data, a longer run would leave other workers without positions."""


def commit_interval_s(chunk_index: int) -> float:
    """Return the seconds between two commits: five minutes, and half a minute more for each earlier
    chunk, but at most half an hour."""
    return min(30.0, 5.0 + 0.5 * chunk_index) * 60.0


class SnapshotTaskProgress(NamedTuple):
    """The progress of a stream that this worker writes or has written. `chunks` and `elements`
    count only committed chunks and elements."""

    snapshot_task_base_path: str
    snapshot_task_stream_index: int
    completed: bool = False
    chunks: int = 0
    elements: int = 0


class StreamWriter:
    """Writes a stream of a snapshot.

    Args:
      path: the snapshot's folder.
      ask: `ask(source, repetition, taken, count)` returns up to `count` positions of a source for
        this stream, after the `taken` positions that the stream has already used in that
        repetition. It returns no positions at the end of the repetition. It may block. A repeated
        call returns the same positions, perhaps followed by more.
      chunk_bytes_max: the size, in bytes, at which a chunk ends.
      interval_s: `interval_s(chunks)` returns the seconds until the next commit, where `chunks` is
        the number of chunks so far.

    Attributes:
      failed: whether `run` has raised an error of the pipeline or of the disk, with which the
        snapshot fails.
      progress: the numbers of committed chunks and elements, and whether the stream is complete.
    """

    def __init__(
        self,
        path: str,
        stream: int,
        ask: Callable[[int, int, int, int], Sequence[int]],
        chunk_bytes_max: int = SNAPSHOT_CHUNK_BYTES_MAX,
        interval_s: Callable[[int], float] = commit_interval_s,
    ) -> None:
        self._path = path
        self._stream = stream
        self._folder = snapshot_layout.stream_path(path, stream)
        self._work = storage.join(self._folder, "uncommitted_chunks", uuid.uuid4().hex[:16])
        self._open_path = storage.join(self._work, f"open{storage.TMP}")
        self._requests = _PositionRequests(ask, self._check)
        self._chunk_bytes_max = chunk_bytes_max
        self._interval_s = interval_s
        self._cancelled = threading.Event()
        self._leaving = threading.Event()
        self.failed = False
        self._iterator: DatasetIterator | None = None
        self._file: ElementsFile | None = None
        self._waiting: list[CommittedChunk] = []
        self._chunks = 0
        self._elements = 0
        self._first = 0
        self.progress = SnapshotTaskProgress(path, stream)

    def cancel(self) -> None:
        """Have `run` end at the next element. Any thread may call this. The caller must make sure
        that `ask` no longer blocks."""
        self._cancelled.set()
        if self._iterator is not None:
            self._iterator.close()

    def leave(self) -> None:
        """Have `run` commit after the next element and end, so that another writer continues from
        there. Any thread may call this."""
        self._leaving.set()

    def run(self) -> None:
        """Write the stream to its end, and write the file DONE.

        Raises:
          CancelledError: `cancel` or `leave` was called, or another writer has taken over the
            stream.
          OpError: the error of `ask`, unchanged, or an error of the pipeline or of the disk. `run`
            also tries to write an error of the pipeline or the disk into the file ERROR.
        """
        try:
            if not self._is_complete():
                self._write()
        except _TakenOver:
            raise CancelledError(
                f"stream {self._stream} of {self._path} has another writer now"
            ) from None
        except (Exception, SystemExit) as error:
            # SystemExit of user code has to fail the snapshot too
            # another worker continues the stream, so this is no failure of the snapshot
            if self._cancelled.is_set() or self._leaving.is_set() or error is self._requests.error:
                raise
            raise self._fail(error) from error
        finally:
            self._leave()

    def _write(self) -> None:
        metadata = json.loads(storage.read(storage.join(self._path, snapshot_layout.METADATA)))
        dataset = deserialize(storage.read(storage.join(self._path, "dataset_def.json")).decode())
        self._take_over()
        if self._is_complete():  # the earlier writer has completed the stream meanwhile
            return
        self._begin(dataset)
        assert self._iterator is not None
        due = time.monotonic() + self._interval_s(self._chunks)
        for x in self._iterator:
            self._check()
            if self._file is None:
                self._file = _guarded(ElementsFile, self._open_path, metadata["compression"])
                self._first = self._elements
            self._file.write(x)
            self._elements += 1
            if (
                self._file.nbytes >= self._chunk_bytes_max
                or time.monotonic() >= due
                or self._leaving.is_set()
            ):
                self._end_chunk()
            if time.monotonic() >= due or self._leaving.is_set():
                self._commit()
                if self._leaving.is_set():
                    raise CancelledError(
                        f"stream {self._stream} of {self._path} is left to other workers"
                    )
                due = time.monotonic() + self._interval_s(self._chunks)
        self._check()
        self._end_chunk()
        self._commit()
        self._publish(
            snapshot_layout.write_json,
            snapshot_layout.snapshot_done_path(self._folder),
            {"elements": self._elements},
        )
        self._note_progress(completed=True)
        storage.remove_tree(storage.join(self._folder, "checkpoints"))

    # -- the beginning --

    def _is_complete(self) -> bool:
        return storage.exists(snapshot_layout.snapshot_done_path(self._folder))

    def _take_over(self) -> None:
        """Move the folders of earlier writers away, so that these writers publish nothing any
        more.
        """
        storage.make_folder(self._work)
        uncommitted = storage.join(self._folder, "uncommitted_chunks")
        for incarnation in storage.list_names(uncommitted):
            if not self._work.endswith(incarnation):
                try:
                    storage.rename(
                        storage.join(uncommitted, incarnation),
                        storage.join(self._work, f"taken_{incarnation}"),
                    )
                except FileNotFoundError as error:
                    if not storage.exists(self._work):
                        raise _TakenOver from error
                    # Otherwise the earlier writer has just ended, and has removed its folder
                    # itself.

    def _begin(self, dataset: Tree) -> None:
        """Continue at the newest checkpoint."""
        checkpoint = max(
            map(_checkpoint, storage.list_names(storage.join(self._folder, "checkpoints"))),
            default=(0, 0, ""),
        )
        self._chunks, self._elements, name = checkpoint
        self._recover_chunks()
        self._iterator = open_stream(
            dataset, self._requests, entropy=(zlib.crc32(self._path.encode()), 0)
        )
        if name:
            state = json.loads(storage.read(storage.join(self._folder, "checkpoints", name)))
            self._iterator.load_state_dict(state)
        self._note_progress()

    def _recover_chunks(self) -> None:
        """Move the chunks before the checkpoint to the committed chunks, and delete the chunks
        after the checkpoint.

        Raises:
          InternalError: a chunk before the checkpoint is missing.
        """
        there = {
            chunk.index
            for chunk in snapshot_layout.committed_chunks(self._path)
            if chunk.stream == self._stream
        }
        for incarnation in storage.list_names(self._work):
            folder = storage.join(self._work, incarnation)
            for name in storage.list_names(folder):
                chunk = CommittedChunk.of(name)
                if chunk is not None and chunk.index < self._chunks and chunk.index not in there:
                    storage.rename(
                        storage.join(folder, name),
                        storage.join(snapshot_layout.chunks_path(self._path), name),
                    )
                    there.add(chunk.index)
            storage.remove_tree(folder)
        lost = sorted(set(range(self._chunks)) - there)
        # these elements cannot be computed again from the checkpoint
        if lost:
            raise InternalError(
                f"{self._path}: chunks {lost[:10]} of stream {self._stream} are missing, although "
                f"its checkpoint counts them"
            )

    # -- chunks and commits --

    def _end_chunk(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        chunk = CommittedChunk(self._chunks, self._stream, self._elements - self._first)
        _guarded(storage.rename, self._open_path, storage.join(self._work, chunk.name))
        self._waiting.append(chunk)
        self._chunks += 1

    def _commit(self) -> None:
        assert self._iterator is not None
        try:
            state = self._iterator.state_dict()
        except (UnimplementedError, InvalidArgumentError, ResourceExhaustedError) as error:
            LOG.warning(
                "%s: the stream is committed at its end only, because its pipeline has no state: "
                "%s",
                self._folder,
                error,
            )
            return
        checkpoints = storage.join(self._folder, "checkpoints")
        older = storage.list_names(checkpoints)
        storage.make_folder(checkpoints)
        name = f"checkpoint_{self._chunks}_{self._elements}"
        self._publish(snapshot_layout.write_json, storage.join(checkpoints, name), state)
        for chunk in self._waiting:
            there = storage.join(snapshot_layout.chunks_path(self._path), chunk.name)
            _guarded(storage.rename, storage.join(self._work, chunk.name), there)
        self._waiting.clear()
        self._note_progress()
        for checkpoint in older:
            if checkpoint != name:
                _guarded(storage.remove, storage.join(checkpoints, checkpoint))

    def _note_progress(self, completed: bool = False) -> None:
        figures = completed, self._chunks, self._elements
        self.progress = SnapshotTaskProgress(self._path, self._stream, *figures)

    def _publish(self, write: Callable[..., Any], path: str, value: Any) -> None:
        _guarded(write, path, value, self._work)

    # -- the end --

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"stream {self._stream} of {self._path} was cancelled")

    def _fail(self, error: Exception | SystemExit) -> OpError:
        """Write the file ERROR, and return the error as an OpError. First delete the unfinished
        chunk, because the disk may be full."""
        self.failed = True
        if isinstance(error, OSError):
            op_error: OpError = storage.error_of(error, self._folder)
        elif isinstance(error, OpError):
            op_error = error
        else:
            op_error = UnknownError(f"{type(error).__name__}: {error}")
        self._drop_file()
        try:
            self._publish(snapshot_layout.write_error, self._folder, op_error)
        except (OSError, _TakenOver):
            LOG.exception("%s: the file ERROR could not be written: %s", self._folder, op_error)
        return op_error

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.abort()
            if storage.exists(self._open_path):
                storage.remove(self._open_path)

    def _leave(self) -> None:
        self._drop_file()
        if self._iterator is not None:
            self._iterator.close()
        storage.remove_tree(self._work)


class _TakenOver(Exception):
    """The folder of this writer no longer exists, because another writer has taken over the
    stream.
    """


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except FileNotFoundError as error:
        raise _TakenOver from error


def _checkpoint(name: str) -> tuple[int, int, str]:
    match = re.fullmatch(r"checkpoint_(\d+)_(\d+)", name, re.ASCII)
    return (int(match[1]), int(match[2]), name) if match else (0, 0, "")


class _PositionRequests:
    """Requests runs of positions for `open_stream`. It adapts the length of the runs, so that a run
    lasts between _QUICK_S and _SLOW_S seconds.

    Attributes:
      error: the error that `ask` raised; None if it raised no error.
    """

    def __init__(
        self, ask: Callable[[int, int, int, int], Sequence[int]], check: Callable[[], None]
    ) -> None:
        self._ask = ask
        self._check = check
        self._count = 1
        self._requested_at = 0.0
        self.error: Exception | None = None

    def __call__(self, source: int, repetition: int, offset: int) -> Sequence[int]:
        self._check()
        now = time.monotonic()
        if now - self._requested_at < _QUICK_S:
            self._count = min(RUN_MAX, self._count * 2)
        elif now - self._requested_at > _SLOW_S:
            self._count = max(1, self._count // 2)
        self._requested_at = now
        try:
            return self._ask(source, repetition, offset, self._count)
        except Exception as error:
            self.error = error
            raise
