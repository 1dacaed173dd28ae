"""The runtime of the dispatcher's snapshots. It writes the decisions of each machine (machine.py)
into the snapshot's folder, and restores machines from folders.

Rules
    Each snapshot has a lock. A thread that holds the lock has the machine decide, writes the
    records, and has the machine apply them. A slow disk therefore delays only the snapshots whose
    folders are on that disk.

Any thread may call the methods. They block until the disk has written or read.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from zmqdist.data import snapshot_layout, storage
from zmqdist.data.chunks import spec_from_json, spec_to_json
from zmqdist.data.constants import INFINITE_CARDINALITY
from zmqdist.data.service.snapshots.machine import (
    OwnerChanged,
    PositionRun,
    PositionsGiven,
    Record,
    SnapshotCompleted,
    SnapshotFailed,
    SnapshotMachine,
    StreamAssignment,
    StreamState,
    begin_order,
)
from zmqdist.data.structure import invalid
from zmqdist.errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    OpError,
)


class SnapshotFolder:
    """One snapshot with its folder. `create` and `recover` return an instance. Most other methods
    call the method of SnapshotMachine with the same name, and write the records that it returns.

    Attributes:
      path: the folder.
      machine: decides on the streams. Any thread may read its `mode` and `error`.
    """

    def __init__(self, path: str, metadata: dict[str, Any]) -> None:
        if metadata["version"] > snapshot_layout.VERSION:
            raise FailedPreconditionError(
                f"{path} is a snapshot of version {metadata['version']}, but this zmqdist reads "
                f"version {snapshot_layout.VERSION}",
            )
        self.path = path
        self.machine = SnapshotMachine(path, metadata["sources"], metadata["repetitions"])
        self._sources = len(metadata["sources"])
        self._lock = threading.RLock()

    # -- creating a folder and reading it back --

    @classmethod
    def create(
        cls, path: str, dataset: str, spec: Any, compression: str | None = "AUTO", request: str = ""
    ) -> SnapshotFolder:
        """Create the folder of a snapshot, with the description of its dataset and its metadata.

        Args:
          dataset: the description of the dataset, from `Dataset.serialize`. Nothing in it is
            unpickled.
          spec: the spec of the dataset's elements, from `chunks.spec_to_json`.
          request: identifies the call. If the caller repeats the call after a lost reply, the
            repeated call gets the folder that the first call created.

        Raises:
          InvalidArgumentError: the dataset is infinite. AlreadyExistsError: the path exists.
            FailedPreconditionError: the file system has no atomic rename. UnimplementedError: a
            source cannot be split.
        """
        # imported here, as in dispatcher/runtime.py
        from zmqdist.data.dataset import deserialize
        from zmqdist.data.ops.snapshots import checked_compression
        from zmqdist.data.splits import split_providers

        pressed = checked_compression(compression)
        spec_to_json(spec_from_json(spec))
        tree = deserialize(dataset)
        if tree.cardinality() == INFINITE_CARDINALITY:
            raise invalid("Saving an infinite dataset is not allowed")
        providers = split_providers(tree)
        storage.check_renames(path)
        # the caller repeats a call whose reply was lost
        if request and _request_of(path) == request:
            return cls.recover(path)
        if storage.exists(path):
            raise AlreadyExistsError(
                f"{path} exists: a snapshot there is already started or completed, or the path is "
                f"something else"
            )
        metadata = {
            "version": snapshot_layout.VERSION,
            "request": request,
            "compression": pressed,
            "spec": spec,
            "sources": [provider.count for provider in providers],
            "repetitions": [provider.repetitions for provider in providers],
        }
        for folder in (snapshot_layout.chunks_path(path), storage.join(path, "streams")):
            storage.make_folder(folder)
        storage.write(storage.join(path, "dataset_def.json"), dataset.encode())
        snapshot_layout.write_json(storage.join(path, "dataset_spec.json"), spec)
        snapshot_layout.write_json(storage.join(path, snapshot_layout.METADATA), metadata)
        return cls(path, metadata)

    @classmethod
    def recover(cls, path: str) -> SnapshotFolder:
        """Return the snapshot that is in a folder.

        Raises:
          InvalidArgumentError (a ValueError), InternalError (a RuntimeError): a file in the folder
            is invalid. The error text names the file.
          DataLossError: the metadata is missing or unreadable.
        """
        try:
            metadata = json.loads(storage.read(storage.join(path, snapshot_layout.METADATA)))
            snapshot = cls(path, metadata)
        except FileNotFoundError:
            raise DataLossError(f"{path}: the snapshot has no {snapshot_layout.METADATA}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise DataLossError(
                f"{path}/{snapshot_layout.METADATA}: corrupted record: {error}"
            ) from None
        snapshot.restore()
        return snapshot

    def restore(self) -> None:
        """Restore the machine from the folder. Raises as `recover` does."""
        error = snapshot_layout.read_error(self.path)
        is_complete = storage.exists(snapshot_layout.snapshot_done_path(self.path))
        streams = _read_streams(self.path, self._sources)
        folders = [
            snapshot_layout.stream_path(self.path, stream.index)
            for stream in streams
            if stream.state is not StreamState.DONE
        ]
        failures = (
            []
            if error is not None
            else [failure for stream in folders if (failure := snapshot_layout.read_error(stream))]
        )
        with self._lock:
            self._write(self.machine.restore(streams, is_complete, error, failures))

    def _write(self, records: Sequence[Record]) -> None:
        """Write and apply the records of a decision, one after the other. Call this with the lock
        held. Raises the OSError of a record that cannot be written.
        """
        for record in records:
            try:
                self._write_record(record)
            except OSError as error:
                for replacement in self.machine.not_written(
                    record, storage.error_of(error, self.path)
                ):
                    self._write_record(replacement)
                raise
            self.machine.apply(record)

    def _write_record(self, record: Record) -> None:
        match record:
            case OwnerChanged(stream, worker):
                folder = snapshot_layout.stream_path(self.path, stream)
                storage.make_folder(storage.join(folder, "splits"))
                storage.write(storage.join(folder, "owner_worker"), worker.encode())
            case PositionsGiven(stream, source, repetition, run):
                folder = snapshot_layout.splits_path(self.path, stream, source, repetition)
                storage.make_folder(folder)
                count = b"" if run.count == 1 else b"%d" % run.count
                storage.write(storage.join(folder, f"split_{run.local}_{run.start}"), count)
            case SnapshotCompleted():
                storage.write(snapshot_layout.snapshot_done_path(self.path), b"{}")
            case SnapshotFailed(error):
                snapshot_layout.write_error(self.path, error)

    # -- requests of workers and users --

    def assign(self, worker: str, may_begin: bool = True) -> int | None:
        """Call `SnapshotMachine.assign`, and write the records that it returns."""
        with self._lock:
            stream, records = self.machine.assign(worker, may_begin)
            self._write(records)
            return stream

    def hand_out(
        self, worker: str, stream: int, source: int, repetition: int, local: int, count: int
    ) -> tuple[int, int]:
        """Call `SnapshotMachine.hand_out`, and write the records that it returns."""
        with self._lock:
            positions, records = self.machine.hand_out(
                worker, stream, source, repetition, local, count
            )
            self._write(records)
            return positions

    def finished(self, worker: str, stream: int) -> None:
        """Call `SnapshotMachine.finished`, and write the records that it returns."""
        with self._lock:
            self._write(self.machine.finished(worker, stream))

    def failed(self, worker: str, stream: int, error: OpError) -> None:
        """Call `SnapshotMachine.failed`, and write the records that it returns."""
        with self._lock:
            self._write(self.machine.failed(worker, stream, error))

    def cancel(self) -> None:
        """Call `SnapshotMachine.cancel`, and write the records that it returns."""
        with self._lock:
            self._write(self.machine.cancel())

    def worker_lost(self, worker: str) -> None:
        """Mark the stream that a worker was writing as an orphan. Write no record, because the
        state ORPHAN is not in the folder."""
        with self._lock:
            self.machine.worker_lost(worker)

    def owners(self) -> set[str]:
        """Return the addresses of the workers to which streams of this snapshot are assigned."""
        with self._lock:
            return self.machine.owners()

    def streams(self) -> list[StreamAssignment]:
        """Return copies of the streams in order, without their runs of positions."""
        with self._lock:
            return [
                StreamAssignment(stream.index, stream.owner, stream.state)
                for stream in self.machine.streams
            ]

    def progress(self) -> dict[str, Any]:
        """Return the figures of `SnapshotMachine.figures` and the numbers of committed `chunks` and
        `elements`, as JSON types. Reads the folder.
        """
        chunks = snapshot_layout.committed_chunks(self.path)
        with self._lock:
            figures = self.machine.figures()
        return figures | {"chunks": len(chunks), "elements": sum(chunk.count for chunk in chunks)}


# -- reading a folder back -------------------------------------------------------------------------


def _read_streams(path: str, sources: int) -> list[StreamAssignment]:
    """Return all streams in order. Raises InvalidArgumentError or InternalError if a file is
    invalid."""
    root = storage.join(path, "streams")
    indexes = sorted(_number(name, "stream", root) for name in storage.list_names(root))
    # Leave out a folder without the file of its owner: the dispatcher ended while it created
    # the folder, so no worker has the stream.
    streams = [
        _read_stream(path, index, sources) for index in indexes if _owner(path, index) is not None
    ]
    if [stream.index for stream in streams] != list(range(len(streams))):
        raise InternalError(
            f"{root}: a stream is missing: the folder has {[stream.index for stream in streams]}"
        )
    owners: dict[str, int] = {}
    for stream in streams:
        # promise P2 of machine.py
        if stream.state is not StreamState.DONE:
            if stream.owner in owners:
                raise InternalError(
                    f"{root}: stream {stream.index} is owned by {stream.owner}, but that "
                    f"worker is already assigned "
                    f"to stream {owners[stream.owner]}"
                )
            owners[stream.owner] = stream.index
    _check_positions(path, streams)
    return streams


def _owner(path: str, index: int) -> str | None:
    try:
        return storage.read(
            storage.join(snapshot_layout.stream_path(path, index), "owner_worker")
        ).decode()
    except FileNotFoundError:
        return None


def _read_stream(path: str, index: int, sources: int) -> StreamAssignment:
    folder = snapshot_layout.stream_path(path, index)
    is_complete = storage.exists(snapshot_layout.snapshot_done_path(folder))
    stream = StreamAssignment(
        index,
        _owner(path, index) or "",
        StreamState.DONE if is_complete else StreamState.ASSIGNED,
    )
    splits = storage.join(folder, "splits")
    for name in storage.list_names(splits):
        source = _number(name, "source", splits)
        if source >= sources:
            raise InternalError(
                f"{splits}: Found conflict between {name} and the dataset, which has "
                f"{sources} sources"
            )
        for inner in storage.list_names(storage.join(splits, name)):
            repetition = _number(inner, "repetition", storage.join(splits, name))
            stream.runs[source, repetition] = _read_runs(storage.join(splits, name, inner))
    return stream


def _read_runs(folder: str) -> list[PositionRun]:
    runs = sorted(
        (_read_run(folder, name) for name in storage.list_names(folder)),
        key=lambda run: run.local,
    )
    local = 0
    for run in runs:
        if run.local != local:
            raise InternalError(f"{folder}: Found missing local split index {local}")
        local += run.count
    return runs


def _read_run(folder: str, name: str) -> PositionRun:
    match = re.fullmatch(r"split_(\d+)_(\d+)", name, re.ASCII)
    if match is None:
        raise invalid(f"{folder}/{name}: Expected split_<local_split_index>_<global_split_index>")
    local, start = int(match[1]), int(match[2])
    if local > start:
        raise invalid(
            f"{folder}/{name}: The local split index {local} exceeds the global split index {start}"
        )
    text = storage.read(storage.join(folder, name))
    if text and not re.fullmatch(rb"[1-9]\d*", text):
        raise invalid(f"{folder}/{name}: not a number of positions: {text[:40]!r}")
    return PositionRun(local, start, int(text or b"1"))


def _check_positions(path: str, streams: Sequence[StreamAssignment]) -> None:
    by_source: dict[tuple[int, int], list[PositionRun]] = {}
    for stream in streams:
        for key, runs in stream.runs.items():
            by_source.setdefault(key, []).extend(runs)
    for (source, repetition), runs in by_source.items():
        name = f"{path}: source {source}, repetition {repetition}"
        runs.sort(key=lambda run: run.start)
        for run, after in pairwise(runs):
            if after.start < run.start + run.count:
                raise InternalError(f"{name}: Found duplicate global split index {after.start}")
        position = 0
        for run in runs:
            if run.start != position:
                raise InternalError(f"{name}: Found missing global split index {position}")
            position += run.count


def _request_of(path: str) -> str | None:
    try:
        return str(
            json.loads(storage.read(storage.join(path, snapshot_layout.METADATA)))["request"]
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _number(name: str, kind: str, folder: str) -> int:
    match = re.fullmatch(kind + r"_(\d+)", name, re.ASCII)
    if match is None:
        raise InternalError(f"Can't parse {name} in {folder}: expected {kind}_<index>")
    return int(match[1])


# -- all snapshots ---------------------------------------------------------------------------------


class SnapshotManager:
    """The snapshots of a dispatcher, by path.

    Args:
      concurrent_max: the largest number of streams that one worker writes at the same time.
    """

    def __init__(self, concurrent_max: int = 3) -> None:
        self._concurrent_max = concurrent_max
        self._by_path: dict[str, SnapshotFolder] = {}
        self._lock = threading.Lock()
        self._assigning = threading.Lock()

    def __getitem__(self, path: str) -> SnapshotFolder:
        with self._lock:
            if path not in self._by_path:
                raise NotFoundError(f"{path}: this dispatcher has no snapshot there")
            return self._by_path[path]

    def create(
        self, path: str, dataset: str, spec: Any, compression: str | None, request: str
    ) -> SnapshotFolder:
        """Create a snapshot. Workers get no stream of the snapshot before `add`. Call this for one
        snapshot at a time.

        Raises:
          AlreadyExistsError: another `request` has created a snapshot at this path. Otherwise as
            `SnapshotFolder.create`.
        """
        with self._lock:
            snapshot = self._by_path.get(path)
        if snapshot is None:
            return SnapshotFolder.create(path, dataset, spec, compression, request)
        if request and _request_of(path) == request:
            return snapshot
        raise AlreadyExistsError(f"{path}: a snapshot there is already started or completed")

    def add(self, snapshot: SnapshotFolder) -> None:
        """Let workers get the streams of a snapshot. Does nothing if the snapshot was added
        before.
        """
        with self._lock:
            self._by_path.setdefault(snapshot.path, snapshot)

    def assign(self, worker: str) -> dict[str, int]:
        """Return the streams that a worker should write, by path. At most one of these streams is
        new to the worker. The new stream belongs to the snapshot with the fewest workers, among the
        snapshots that have a stream for this worker.
        """
        # If a worker sends two requests at the same time, it gets only one new stream.
        with self._assigning:
            running = {
                snapshot.path: snapshot for snapshot in self.all() if not snapshot.machine.over
            }
            streams = {
                path: index
                for path, snapshot in running.items()
                if (index := snapshot.assign(worker, may_begin=False)) is not None
            }
            owners = {path: snapshot.owners() for path, snapshot in running.items()}
            for path in begin_order(owners, streams, self._concurrent_max):
                if (index := running[path].assign(worker)) is not None:
                    streams[path] = index
                    break
            return streams

    def worker_lost(self, worker: str) -> None:
        """Mark the streams that a worker was writing as orphans."""
        for snapshot in self.all():
            snapshot.worker_lost(worker)

    def all(self) -> list[SnapshotFolder]:
        """Return every snapshot, in the order in which they were begun."""
        with self._lock:
            return list(self._by_path.values())
