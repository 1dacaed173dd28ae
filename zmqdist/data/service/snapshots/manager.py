"""The dispatcher's part of a snapshot: its folder, who writes which stream, and which positions each stream got.

Rules
    The folder is the truth: whatever is answered was written before, so a dispatcher that begins again reads it and goes on.

    A stream belongs to an address. A worker that is lost leaves an orphan: the first to ask gets it, its former owner or a worker that
    has no unfinished stream of this snapshot, and goes on at the checkpoint. New streams begin until one has come to its end, since
    then there is nothing left to hand out.

    Positions of a source and repetition are handed out in order, to whichever stream asks. What a stream got is known by its own numbers:
    (stream, source, repetition, local index). Asked again from a local index it gets the same again, so a writer that begins again
    behind its checkpoint sees the same data. One hand-out is one file, of a run of positions where there is one source; where
    there are several a position each, because a zip pairs what it gets, and must not hold what another stream needs.

    Each repetition is dealt out for itself: a stream that is still in an earlier one finds there what is left of it.

Promises
    P1  each position of a source and repetition is handed out to one stream
    P2  one worker writes at most one stream of a snapshot, and streams of `concurrent_max` snapshots
    P3  DONE appears when all streams are done, ERROR when one has failed; nothing is handed out after either

All methods may be called from any thread; they write files.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from zmqdist.data import layout, storage
from zmqdist.data.chunks import spec_from_json, spec_to_json
from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.dataset import deserialize
from zmqdist.data.ops.snapshots import checked_compression
from zmqdist.data.splits import split_providers
from zmqdist.data.structure import invalid
from zmqdist.errors import (
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    OpError,
)


class Mode(Enum):
    """Where a snapshot is."""

    ACTIVE = "active"
    WINDING_DOWN = "winding down"
    DONE = "done"
    ERROR = "error"


class StreamState(Enum):
    """Where a stream is. ORPHAN: its worker is lost, and nobody has taken it over yet."""

    UNKNOWN = 0
    ASSIGNED = 1
    DONE = 2
    ORPHAN = 3


@dataclass(frozen=True)
class Run:
    """One hand-out: `count` positions from `start` on, the first being the stream's number `local`."""

    local: int
    start: int
    count: int


@dataclass
class Stream:
    """One stream; `runs` by (source, repetition), in order."""

    index: int
    owner: str
    state: StreamState = StreamState.ASSIGNED
    runs: dict[tuple[int, int], list[Run]] = field(default_factory=dict)


class Snapshot:
    """One snapshot, as its folder has it. Made by `create` or `recover`."""

    def __init__(self, path: str, metadata: dict[str, Any]) -> None:
        if metadata["version"] > layout.VERSION:
            raise FailedPreconditionError(
                f"{path} is a snapshot of version {metadata['version']}, this zmqdist knows {layout.VERSION}",
            )
        self.path = path
        self.mode = Mode.ACTIVE
        self.error: OpError | None = None
        self._counts: list[int] = metadata["sources"]
        self._repetitions: list[int] = metadata["repetitions"]
        self._streams: list[Stream] = []
        self._next: dict[tuple[int, int], int] = {}
        self._lock = threading.RLock()

    # -- making one --

    @classmethod
    def create(
        cls, path: str, dataset: str, spec: Any, compression: str | None = "AUTO", request: str = ""
    ) -> Snapshot:
        """Make the folder: skeleton, description, metadata.

        Args:
          dataset: its description, from `Dataset.serialize`. Nothing in it is unpickled.
          spec: of its elements, from `chunks.spec_to_json`.
          request: names this wish; who asks again, because the answer was lost, gets the folder that was made.

        Raises:
          InvalidArgumentError: the dataset is infinite. AlreadyExistsError: the path exists. FailedPreconditionError: the file system
            has no atomic rename. UnimplementedError: a source cannot be dealt out.
        """
        pressed = checked_compression(compression)
        spec_to_json(spec_from_json(spec))
        tree = deserialize(dataset)
        if tree.cardinality() == INFINITE_CARDINALITY:
            raise invalid("Saving an infinite dataset is not allowed")
        providers = split_providers(tree)
        storage.check_renames(path)
        if request and _request_of(path) == request:
            return cls.recover(path)
        if storage.exists(path):
            raise AlreadyExistsError(
                f"{path} exists: a snapshot there is already started or completed, or it is something else"
            )
        metadata = {
            "version": layout.VERSION,
            "request": request,
            "compression": pressed,
            "spec": spec,
            "sources": [each.count for each in providers],
            "repetitions": [each.repetitions for each in providers],
        }
        for folder in (layout.chunks_path(path), storage.join(path, "streams")):
            storage.make_folder(folder)
        storage.write(storage.join(path, "dataset_def.json"), dataset.encode())
        layout.write_json(storage.join(path, "dataset_spec.json"), spec)
        layout.write_json(storage.join(path, layout.METADATA), metadata)
        return cls(path, metadata)

    @classmethod
    def recover(cls, path: str) -> Snapshot:
        """The snapshot of a folder.

        Raises:
          InvalidArgumentError (a ValueError), InternalError (a RuntimeError): something in the folder cannot be right; the text names it.
          DataLossError: the metadata is unreadable.
        """
        try:
            metadata = json.loads(storage.read(storage.join(path, layout.METADATA)))
            made = cls(path, metadata)
        except FileNotFoundError:
            raise DataLossError(f"{path}: the snapshot has no {layout.METADATA}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise DataLossError(f"{path}/{layout.METADATA}: corrupted record: {error}") from None
        made.error = layout.read_error(path)
        if made.error is not None:
            made.mode = Mode.ERROR
        elif storage.exists(layout.snapshot_done_path(path)):
            made.mode = Mode.DONE
        made._streams = _Folder(path, made._counts).streams()
        for stream in made._streams:
            for key, runs in stream.runs.items():
                if runs:
                    made._next[key] = max(made._next.get(key, 0), runs[-1].start + runs[-1].count)
            if stream.state is StreamState.DONE:
                made._wind_down()
            elif made.error is None:
                failure = layout.read_error(layout.stream_path(path, stream.index))
                if failure is not None:
                    made._end(failure)
        return made

    # -- who writes --

    def assign(self, worker: str, may_begin: bool = True) -> int | None:
        """The stream that a worker should write: the one it has, else an orphan, else a new one. None: none.

        Args:
          may_begin: whether it may get one that it does not have.
        """
        with self._lock:
            if self.mode in (Mode.DONE, Mode.ERROR):
                return None
            unfinished = [stream for stream in self._streams if stream.state is not StreamState.DONE]
            for stream in unfinished:
                if stream.owner == worker:
                    stream.state = StreamState.ASSIGNED
                    return stream.index
            if not may_begin:
                return None
            for stream in unfinished:
                if stream.state is StreamState.ORPHAN:
                    self.reassign(stream.index, worker)
                    return stream.index
            return self._begin(worker) if self.mode is Mode.ACTIVE else None

    def _begin(self, worker: str) -> int:
        index = len(self._streams)
        folder = layout.stream_path(self.path, index)
        storage.make_folder(storage.join(folder, "splits"))
        storage.write(storage.join(folder, "owner_worker"), worker.encode())
        self._streams.append(Stream(index, worker))
        return index

    def reassign(self, stream: int, worker: str) -> None:
        """Give a stream to another worker, which goes on at its checkpoint; the former one is refused from now on."""
        with self._lock:
            storage.write(storage.join(layout.stream_path(self.path, stream), "owner_worker"), worker.encode())
            self._streams[stream].owner = worker
            self._streams[stream].state = StreamState.ASSIGNED

    def has(self, worker: str) -> bool:
        """Whether a worker has an unfinished stream of this snapshot that is still to be written."""
        with self._lock:
            return self.mode in (Mode.ACTIVE, Mode.WINDING_DOWN) and any(
                stream.owner == worker and stream.state is StreamState.ASSIGNED for stream in self._streams
            )

    def worker_lost(self, worker: str) -> None:
        """What a worker was writing is an orphan."""
        with self._lock:
            for stream in self._streams:
                if stream.owner == worker and stream.state is StreamState.ASSIGNED:
                    stream.state = StreamState.ORPHAN

    def owners(self) -> set[str]:
        """The workers that are writing, or should be."""
        with self._lock:
            return {stream.owner for stream in self._streams if stream.state is StreamState.ASSIGNED}

    # -- what it writes --

    def hand_out(
        self, worker: str, stream: int, source: int, repetition: int, local: int, count: int
    ) -> tuple[int, int]:
        """Positions for a stream: (the first, how many), none at the end of the repetition. They are on disk when this returns.

        Args:
          local: how many the stream has had. Where it had more already, these come again.

        Raises:
          InternalError: the stream is another worker's. FailedPreconditionError: the snapshot is over. InvalidArgumentError: there is no
            such source, or the stream never had what is before `local`.
        """
        with self._lock:
            if not 0 <= source < len(self._counts) or repetition < 0:
                raise invalid(f"{self.path}: no source {source}, or no repetition {repetition}")
            runs = self._owned(worker, stream).runs.setdefault((source, repetition), [])
            had = runs[-1].local + runs[-1].count if runs else 0
            if local < had:
                run = next(run for run in runs if local < run.local + run.count)
                return run.start + local - run.local, run.local + run.count - local
            if local > had:
                raise invalid(f"{self.path}: stream {stream} had {had} positions of source {source}, not {local}")
            start, number = self._more(source, repetition, count)
            if number:
                folder = layout.splits_path(self.path, stream, source, repetition)
                storage.make_folder(folder)
                storage.write(storage.join(folder, f"split_{local}_{start}"), b"" if number == 1 else b"%d" % number)
                runs.append(Run(local, start, number))
                self._next[source, repetition] = start + number
            return start, number

    def _more(self, source: int, repetition: int, count: int) -> tuple[int, int]:
        """What comes next of a source: at most a quarter of what would be each stream's share."""
        start = self._next.get((source, repetition), 0)
        total = self._counts[source]
        if 0 <= self._repetitions[source] <= repetition:
            return start, 0
        if len(self._counts) > 1:
            count = 1
        if total == INFINITE_CARDINALITY:
            return start, max(1, count)
        left = total - start
        return start, min(left, max(1, min(count, left // (4 * max(1, len(self._streams))))))

    def _owned(self, worker: str, index: int) -> Stream:
        if self.mode in (Mode.DONE, Mode.ERROR):
            text = f"{self.path}: the snapshot is over: {self.error or 'it is complete'}"
            raise FailedPreconditionError(text)
        if not 0 <= index < len(self._streams) or self._streams[index].owner != worker:
            raise InternalError(f"{self.path}: worker {worker} writes stream {index}, which is not its own")
        return self._streams[index]

    def finished(self, worker: str, stream: int) -> None:
        """A worker has written a stream to its end and left DONE. Harmless when told again, or too late.

        Raises:
          InternalError: the stream is another worker's.
        """
        with self._lock:
            if self.mode in (Mode.ACTIVE, Mode.WINDING_DOWN):
                self._owned(worker, stream).state = StreamState.DONE
                self._wind_down()

    def failed(self, worker: str, stream: int, error: OpError) -> None:
        """A worker cannot write its stream: the snapshot has failed. Nothing where that stream is not its own any more."""
        with self._lock:
            if self.mode in (Mode.ACTIVE, Mode.WINDING_DOWN) and self._streams[stream].owner == worker:
                self._end(error)

    def cancel(self) -> None:
        """Nobody needs it: ERROR with the code CANCELLED. What was committed stays. Harmless when it is over."""
        with self._lock:
            if self.mode in (Mode.ACTIVE, Mode.WINDING_DOWN):
                self._end(CancelledError(f"{self.path}: the snapshot was cancelled"))

    def _wind_down(self) -> None:
        if self.mode is Mode.ACTIVE:
            self.mode = Mode.WINDING_DOWN
        if self.mode is Mode.WINDING_DOWN and all(each.state is StreamState.DONE for each in self._streams):
            try:
                storage.write(layout.snapshot_done_path(self.path), b"{}")
            except OSError as error:  # nobody will say again that the last stream is done
                self._end(storage.error_of(error, self.path))
                raise
            self.mode = Mode.DONE

    def _end(self, error: OpError) -> None:
        """Over, whether or not that can be written: who waits must hear of it also where the disk is full."""
        self.mode, self.error = Mode.ERROR, error
        layout.write_error(self.path, error)

    # -- what it looks like --

    def streams(self) -> list[Stream]:
        """The streams, in order: copies without their runs."""
        with self._lock:
            return [Stream(each.index, each.owner, each.state) for each in self._streams]

    def progress(self) -> dict[str, Any]:
        """Figures, JSON-able: `state`, `error`, `streams` and `streams_done`, `chunks` and `elements` that are committed, `handed_out` and
        `positions`: those of all sources and repetitions, -1 without end."""
        chunks = layout.committed(self.path)
        with self._lock:
            totals = [count * times for count, times in zip(self._counts, self._repetitions, strict=True)]
            endless = any(INFINITE_CARDINALITY in pair for pair in zip(self._counts, self._repetitions, strict=True))
            return {
                "state": self.mode.value,
                "error": None if self.error is None else {"code": self.error.error_code, "message": str(self.error)},
                "streams": len(self._streams),
                "streams_done": sum(each.state is StreamState.DONE for each in self._streams),
                "chunks": len(chunks),
                "elements": sum(chunk.count for chunk in chunks),
                "handed_out": sum(self._next.values()),
                "positions": -1 if endless else sum(totals),
            }


# -- reading a folder back -------------------------------------------------------------------------------------------


class _Folder:
    """What is written of the streams of a snapshot, checked."""

    def __init__(self, path: str, counts: Sequence[int]) -> None:
        self._path = path
        self._counts = counts

    def streams(self) -> list[Stream]:
        """Every stream, in order. Raises InvalidArgumentError and InternalError."""
        root = storage.join(self._path, "streams")
        indexes = sorted(_number(name, "stream", root) for name in storage.names(root))
        # A folder without an owner is one that was being made when the dispatcher ended: nobody has heard of it.
        found = [self._stream(index) for index in indexes if self._owner(index) is not None]
        if [stream.index for stream in found] != list(range(len(found))):
            raise _wrong(f"{root}: a stream is missing: there are {[stream.index for stream in found]}")
        owners: dict[str, int] = {}
        for stream in found:
            if stream.state is not StreamState.DONE:
                if stream.owner in owners:
                    raise _wrong(
                        f"{root}: stream {stream.index} is owned by {stream.owner}, but that worker is already assigned "
                        f"to stream {owners[stream.owner]}"
                    )
                owners[stream.owner] = stream.index
        self._check_positions(found)
        return found

    def _owner(self, index: int) -> str | None:
        try:
            return storage.read(storage.join(layout.stream_path(self._path, index), "owner_worker")).decode()
        except FileNotFoundError:
            return None

    def _stream(self, index: int) -> Stream:
        folder = layout.stream_path(self._path, index)
        done = storage.exists(layout.snapshot_done_path(folder))
        stream = Stream(index, self._owner(index) or "", StreamState.DONE if done else StreamState.ASSIGNED)
        splits = storage.join(folder, "splits")
        for name in storage.names(splits):
            source = _number(name, "source", splits)
            if source >= len(self._counts):
                raise _wrong(
                    f"{splits}: Found conflict between {name} and the dataset, which has {len(self._counts)} sources"
                )
            for inner in storage.names(storage.join(splits, name)):
                repetition = _number(inner, "repetition", storage.join(splits, name))
                stream.runs[source, repetition] = self._runs(storage.join(splits, name, inner))
        return stream

    def _runs(self, folder: str) -> list[Run]:
        runs = sorted((self._run(folder, name) for name in storage.names(folder)), key=lambda run: run.local)
        local = 0
        for run in runs:
            if run.local != local:
                raise _wrong(f"{folder}: Found missing local split index {local}")
            local += run.count
        return runs

    def _run(self, folder: str, name: str) -> Run:
        found = re.fullmatch(r"split_(\d+)_(\d+)", name, re.ASCII)
        if found is None:
            raise invalid(f"{folder}/{name}: Expected split_<local_split_index>_<global_split_index>")
        local, start = int(found[1]), int(found[2])
        if local > start:
            raise invalid(f"{folder}/{name}: The local split index {local} exceeds the global split index {start}")
        text = storage.read(storage.join(folder, name))
        if text and not re.fullmatch(rb"[1-9]\d*", text):
            raise invalid(f"{folder}/{name}: not a number of positions: {text[:40]!r}")
        return Run(local, start, int(text or b"1"))

    def _check_positions(self, streams: Sequence[Stream]) -> None:
        everything: dict[tuple[int, int], list[Run]] = {}
        for stream in streams:
            for key, runs in stream.runs.items():
                everything.setdefault(key, []).extend(runs)
        for (source, repetition), runs in everything.items():
            what = f"{self._path}: source {source}, repetition {repetition}"
            runs.sort(key=lambda run: run.start)
            for run, after in pairwise(runs):
                if after.start < run.start + run.count:
                    raise _wrong(f"{what}: Found duplicate global split index {after.start}")
            position = 0
            for run in runs:
                if run.start != position:
                    raise _wrong(f"{what}: Found missing global split index {position}")
                position += run.count


def _request_of(path: str) -> str | None:
    try:
        return str(json.loads(storage.read(storage.join(path, layout.METADATA)))["request"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _wrong(text: str) -> InternalError:
    return InternalError(text)


def _number(name: str, kind: str, folder: str) -> int:
    found = re.fullmatch(kind + r"_(\d+)", name, re.ASCII)
    if found is None:
        raise _wrong(f"Can't parse {name} in {folder}: expected {kind}_<index>")
    return int(found[1])


# -- all of them -----------------------------------------------------------------------------------------------------


class Snapshots:
    """The snapshots of a dispatcher.

    Args:
      concurrent_max: streams that one worker writes at once.
    """

    def __init__(self, concurrent_max: int = 3) -> None:
        self._concurrent_max = concurrent_max
        self._by_path: dict[str, Snapshot] = {}
        self._lock = threading.Lock()
        self._assigning = threading.Lock()

    def __getitem__(self, path: str) -> Snapshot:
        with self._lock:
            if path not in self._by_path:
                raise NotFoundError(f"{path}: no snapshot of this dispatcher")
            return self._by_path[path]

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return bool(self._by_path)

    def create(self, path: str, dataset: str, spec: Any, compression: str | None, request: str) -> Snapshot:
        """Make one, which nobody gets a stream of before it is added. One at a time.

        Raises: as `Snapshot.create`. AlreadyExistsError: it is known, and `request` is not the one that it was made for.
        """
        with self._lock:
            known = self._by_path.get(path)
        if known is None:
            return Snapshot.create(path, dataset, spec, compression, request)
        if request and _request_of(path) == request:
            return known
        raise AlreadyExistsError(f"{path}: a snapshot there is already started or completed")

    def add(self, snapshot: Snapshot) -> None:
        """Let workers have its streams. Harmless when it is known."""
        with self._lock:
            self._by_path.setdefault(snapshot.path, snapshot)

    def recover(self, path: str) -> None:
        """Go on with one that was begun before. Raises as `Snapshot.recover`."""
        self.add(Snapshot.recover(path))

    def assign(self, worker: str) -> dict[str, int]:
        """The streams that a worker should write, by path; at most one of them is new, of the snapshot that has the fewest so far."""
        with self._assigning:  # whoever asks twice at the same time gets no two new ones
            return self._assign(worker)

    def _assign(self, worker: str) -> dict[str, int]:
        running = [each for each in self.all() if each.mode in (Mode.ACTIVE, Mode.WINDING_DOWN)]
        found = {each.path: index for each in running if (index := each.assign(worker, may_begin=False)) is not None}
        if len(found) >= self._concurrent_max:
            return found
        for each in sorted(running, key=lambda one: len(one.owners())):
            if each.path not in found and (index := each.assign(worker)) is not None:
                found[each.path] = index
                break
        return found

    def worker_lost(self, worker: str) -> None:
        """What a worker was writing is for others now."""
        for each in self.all():
            each.worker_lost(worker)

    def all(self) -> list[Snapshot]:
        """Every snapshot, in the order in which they were begun."""
        with self._lock:
            return list(self._by_path.values())
