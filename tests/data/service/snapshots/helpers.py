"""A service of threads for tests of snapshots: a dispatcher's `SnapshotFolder`, workers that write
streams, no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from zmqdist.data import Dataset, snapshot_layout
from zmqdist.data.chunks import spec_to_json
from zmqdist.data.service.snapshots.machine import SnapshotMode
from zmqdist.data.service.snapshots.manager import SnapshotFolder
from zmqdist.data.service.snapshots.writer import StreamWriter
from zmqdist.errors import OpError


def begin(path: Path | str, dataset: Dataset, compression: str | None = "AUTO") -> SnapshotFolder:
    """A snapshot that nobody writes yet."""
    return SnapshotFolder.create(
        str(path), dataset.serialize(), spec_to_json(dataset.element_spec), compression
    )


def ask_of(
    snapshot: SnapshotFolder, worker: str, stream: int
) -> Callable[[int, int, int, int], range]:
    """What a writer of a stream asks for positions with: the snapshot answers, as a worker's
    dispatcher does."""

    def ask(source: int, repetition: int, taken: int, count: int) -> range:
        start, number = snapshot.hand_out(worker, stream, source, repetition, taken, count)
        return range(start, start + number)

    return ask


def writer_of(snapshot: SnapshotFolder, worker: str, stream: int, **options: Any) -> StreamWriter:
    """The writer of a stream whose questions a snapshot answers."""
    return StreamWriter(snapshot.path, stream, ask_of(snapshot, worker, stream), **options)


def write(snapshot: SnapshotFolder, worker: str = "w", **options: Any) -> None:
    """Write the stream that a worker gets, to its end."""
    stream = snapshot.assign(worker)
    assert stream is not None
    try:
        writer_of(snapshot, worker, stream, **options).run()
    except OpError as error:
        snapshot.failed(worker, stream, error)
        raise
    snapshot.finished(worker, stream)


def save(
    dataset: Dataset,
    path: Path | str,
    workers: int = 1,
    compression: str | None = "AUTO",
    **options: Any,
) -> SnapshotFolder:
    """Write a snapshot by some workers at the same time."""
    snapshot = begin(path, dataset, compression)
    with writing(snapshot, workers, **options):
        pass
    assert snapshot.machine.mode is SnapshotMode.DONE
    return snapshot


@contextmanager
def writing(snapshot: SnapshotFolder, workers: int, **options: Any) -> Iterator[None]:
    """Workers at work meanwhile; each has its stream before any of them begins."""
    writers = [
        (f"worker-{number}", snapshot.assign(f"worker-{number}")) for number in range(workers)
    ]

    def run(worker: str, stream: int) -> None:
        try:
            writer_of(snapshot, worker, stream, **options).run()
            snapshot.finished(worker, stream)
        except OpError as error:
            snapshot.failed(worker, stream, error)

    threads = [threading.Thread(target=run, args=writer) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def numbers(elements: Any) -> list[Any]:
    """Elements as Python's numbers, in order."""
    return [np.asarray(x).tolist() for x in elements]


def always(_: int) -> float:
    """Seconds between commits: none."""
    return 0.0


def names(path: Path | str) -> list[str]:
    """The chunks of a snapshot, as readers read them."""
    return [chunk.name for chunk in snapshot_layout.committed_chunks(str(path))]
