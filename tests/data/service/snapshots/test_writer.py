"""Writing a stream: chunks, commits, and going on after an end at any point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.examples import EXAMPLES
from tests.data.helpers import plain, read
from tests.data.service.snapshots.helpers import (
    always,
    ask_of,
    begin,
    names,
    numbers,
    save,
    write,
    writer_of,
)
from zmqdist.data import INFINITE_CARDINALITY, Dataset, snapshot_layout, storage
from zmqdist.data.service.snapshots.machine import SnapshotMode
from zmqdist.data.service.snapshots.writer import StreamWriter, commit_interval_s
from zmqdist.data.snapshot_layout import snapshot_done_path, snapshot_error_path
from zmqdist.data.splits import open_split, open_stream, split_providers
from zmqdist.errors import CancelledError, InternalError, InvalidArgumentError, UnimplementedError


class Crash(BaseException):
    """What no handler catches: as far as the folder goes, the process was killed."""


def crashing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the `at`-th change of the folder from now on be the last one, until `undo`: what would be
    tidied up stays, too."""
    left = [at]

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return function(*args)

        return call

    for name in ("rename", "remove", "remove_tree", "open_write", "make_folder"):
        monkeypatch.setattr(storage, name, counted(getattr(storage, name)))


def test_stream_becomes_chunks_of_requested_size(tmp_path: Path) -> None:
    save(Dataset.range(10), tmp_path / "s", chunk_bytes_max=32)
    assert names(tmp_path / "s") == ["chunk_0_0_4", "chunk_0_1_4", "chunk_0_2_2"]
    assert numbers(
        Dataset.load(
            str(tmp_path / "s"), reader_func=lambda chunks: chunks.flat_map(lambda one: one)
        )
    ) == list(range(10))


def test_finished_stream_leaves_only_done(tmp_path: Path) -> None:
    save(Dataset.range(10), tmp_path / "s", chunk_bytes_max=8, interval_s=always)
    stream = tmp_path / "s" / "streams" / "stream_0"
    assert sorted(os.listdir(stream)) == ["DONE", "owner_worker", "splits", "uncommitted_chunks"]
    assert os.listdir(stream / "uncommitted_chunks") == []
    assert sorted(os.listdir(tmp_path / "s")) == [
        "DONE",
        "chunks",
        "dataset_def.json",
        "dataset_spec.json",
        "snapshot.metadata",
        "streams",
    ]


def test_empty_stream_has_no_chunks(tmp_path: Path) -> None:
    save(Dataset.range(0), tmp_path / "s", workers=2)
    assert names(tmp_path / "s") == []
    assert numbers(Dataset.load(str(tmp_path / "s"))) == []


def test_commits_come_more_rarely_as_chunks_grow_in_number() -> None:
    assert [commit_interval_s(index) / 60 for index in (0, 1, 10, 50, 1000)] == [5, 5.5, 10, 30, 30]


def test_chunks_appear_at_a_commit_and_not_before(tmp_path: Path) -> None:
    seen: list[int] = []
    path = tmp_path / "s"
    dataset = Dataset.range(6).map(lambda x: x)
    snapshot = begin(path, dataset)
    stream = snapshot.assign("w")
    assert stream == 0

    def watched(source: int, repetition: int, taken: int, count: int) -> range:
        seen.append(len(names(path)))
        start, _ = snapshot.hand_out("w", 0, source, repetition, taken, 1)
        return range(start, start + (taken < 6))

    StreamWriter(str(path), 0, watched, chunk_bytes_max=8).run()
    assert seen == [0] * 7
    assert len(names(path)) == 6


# -- after an end at any point ---------------------------------------------------------------------

PIPELINES = {
    "numbers": lambda: Dataset.range(12),
    "shuffled": lambda: Dataset.range(12).shuffle(5, seed=3).map(lambda x: (x, str(int(x)))),
    "batches": lambda: Dataset.range(12).batch(5).prefetch(2),
    "repeated": lambda: Dataset.range(4).repeat(3),
    "zipped": lambda: Dataset.zip(Dataset.range(4).repeat(2), Dataset.range(8)).repeat(2),
}


def content(path: Path) -> list[Any]:
    return sorted(
        map(
            repr,
            map(
                plain,
                Dataset.load(
                    str(path), reader_func=lambda chunks: chunks.flat_map(lambda one: one)
                ),
            ),
        )
    )


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("step", [1, 7])
def test_crash_at_any_point_keeps_elements_once(
    kind: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_and_go_on(kind, step, range(1, 60, 23), tmp_path, monkeypatch)


def crash_and_go_on(
    kind: str, step: int, firsts: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step` changes of the folder at a time, each life begins where the one before it was cut
    off.
    """
    wanted = sorted(map(repr, map(plain, PIPELINES[kind]())))
    for first in firsts:
        path = tmp_path / str(first)
        snapshot = begin(path, PIPELINES[kind]())
        stream = snapshot.assign("w")
        assert stream == 0
        lives, at = 0, first
        while snapshot.machine.mode is not SnapshotMode.DONE:
            with monkeypatch.context() as patch:
                writer = writer_of(snapshot, "w", 0, chunk_bytes_max=30, interval_s=always)
                crashing(patch, at)
                try:
                    writer.run()
                    snapshot.finished("w", 0)
                except Crash:
                    lives += 1
                    at = first + step * lives  # else a life that only cleans up would never end
        assert content(path) == wanted, f"first {first}, {lives} lives"


def test_stream_of_living_writer_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a commit of a writer that is thought dead another one takes its stream over."""
    path = tmp_path / "s"
    snapshot = begin(path, Dataset.range(30))
    assert snapshot.assign("old") == 0
    old = writer_of(snapshot, "old", 0, chunk_bytes_max=24, interval_s=always)
    write_json, lives = snapshot_layout.write_json, ["old"]

    def overtaken(*args: Any) -> None:
        write_json(*args)  # the checkpoint is there, its chunks are not yet
        if "checkpoint" in args[0] and len(names(path)) >= 3 and lives == ["old"]:
            lives.append("new")
            snapshot.worker_lost("old")
            write(snapshot, "new", chunk_bytes_max=24, interval_s=always)

    monkeypatch.setattr(snapshot_layout, "write_json", overtaken)
    with pytest.raises(CancelledError, match="has another writer now"):
        old.run()
    assert snapshot.machine.mode is SnapshotMode.DONE
    assert numbers(
        Dataset.load(str(path), reader_func=lambda chunks: chunks.flat_map(lambda one: one))
    ) == list(range(30))
    assert not storage.exists(snapshot_error_path(str(path / "streams" / "stream_0")))


def test_missing_committed_chunk_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    snapshot = begin(path, Dataset.range(9))
    assert snapshot.assign("w") == 0
    writer = writer_of(snapshot, "w", 0, chunk_bytes_max=8, interval_s=always)
    _stop_at_done(writer, monkeypatch)
    (path / "chunks" / "chunk_0_3_1").unlink()
    with pytest.raises(InternalError, match=r"chunks \[3\] of stream 0 are missing"):
        write(snapshot, "w")
    error = snapshot_layout.read_error(str(path))
    assert isinstance(error, InternalError)


def _stop_at_done(writer: StreamWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a writer that is interrupted when all is committed and only its DONE is missing."""
    write_json = snapshot_layout.write_json

    def stop(path: str, *args: Any) -> None:
        if path.endswith("DONE"):
            raise KeyboardInterrupt
        write_json(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_layout, "write_json", stop)
        with pytest.raises(KeyboardInterrupt):
            writer.run()


def test_chunks_after_checkpoint_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    snapshot = begin(path, Dataset.range(6))
    assert snapshot.assign("w") == 0
    writer = writer_of(snapshot, "w", 0, chunk_bytes_max=8, interval_s=always)
    _stop_at_done(writer, monkeypatch)
    work = path / "streams" / "stream_0" / "uncommitted_chunks" / "earlier"
    work.mkdir(parents=True)
    (path / "chunks" / "chunk_0_2_1").rename(work / "chunk_0_2_1")
    (work / "chunk_0_9_1").write_bytes(b"never committed")
    write(snapshot, "w")
    assert names(path) == [f"chunk_0_{index}_1" for index in range(6)]
    assert not work.exists()


def test_stateless_pipeline_commits_at_end(tmp_path: Path) -> None:
    dataset = (
        Dataset.range(6).window(2).prefetch(2).flat_map(lambda window: window.map(lambda x: x + 1))
    )
    save(dataset, tmp_path / "s", chunk_bytes_max=8, interval_s=always)
    assert content(tmp_path / "s") == sorted(map(repr, map(plain, dataset)))


# -- errors and ends -------------------------------------------------------------------------------


def fails_at_five(x: Any) -> Any:
    if x == 5:
        raise InvalidArgumentError(None, None, "element is NaN")
    return x


def test_pipeline_error_fails_stream(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10).map(fails_at_five))
    with pytest.raises(InvalidArgumentError, match="element is NaN"):
        write(snapshot)
    assert snapshot.machine.mode is SnapshotMode.ERROR
    for folder in (tmp_path / "s", tmp_path / "s" / "streams" / "stream_0"):
        told = json.loads((folder / "ERROR").read_text())
        assert told == {"code": 3, "message": "element is NaN"}
    assert names(tmp_path / "s") == []
    assert os.listdir(tmp_path / "s" / "streams" / "stream_0" / "uncommitted_chunks") == []


def test_refusal_of_dispatcher_is_no_stream_error(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    assert snapshot.assign("other") == 0
    with pytest.raises(InternalError, match="does not belong to it"):
        writer_of(snapshot, "w", 0).run()
    assert not (tmp_path / "s" / "streams" / "stream_0" / "ERROR").exists()


def test_cancelled_writer_leaves_no_files(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(1000))
    assert snapshot.assign("w") == 0
    ask = ask_of(snapshot, "w", 0)

    def cancelled(source: int, repetition: int, taken: int, count: int) -> Any:
        if taken > 10:
            writer.cancel()
        return ask(source, repetition, taken, 1)

    writer = StreamWriter(snapshot.path, 0, cancelled, chunk_bytes_max=8)
    with pytest.raises(CancelledError, match="was cancelled"):
        writer.run()
    stream = tmp_path / "s" / "streams" / "stream_0"
    assert sorted(os.listdir(stream)) == ["owner_worker", "splits", "uncommitted_chunks"]
    assert os.listdir(stream / "uncommitted_chunks") == []


def test_leaving_writer_commits(tmp_path: Path) -> None:
    path = tmp_path / "s"
    snapshot = begin(path, Dataset.range(100))
    assert snapshot.assign("w") == 0
    ask = ask_of(snapshot, "w", 0)

    def leaving(source: int, repetition: int, taken: int, count: int) -> Any:
        if taken == 10:
            writer.leave()
        return ask(source, repetition, taken, 1)

    writer = StreamWriter(snapshot.path, 0, leaving)
    with pytest.raises(CancelledError, match="is left to other workers"):
        writer.run()
    assert names(path) == ["chunk_0_0_11"]
    snapshot.worker_lost("w")
    write(snapshot, "other")
    assert names(path) == ["chunk_0_0_11", "chunk_0_1_89"]


def test_full_disk_is_error_of_stream(tmp_path: Path) -> None:
    """A process that may write files of 20,000 bytes, as on a disk that has no more."""
    program = """
import resource, signal, sys
import numpy as np
from tests.data.service.snapshots.helpers import always, ask_of, begin, write
from zmqdist.data import Dataset
from zmqdist.errors import ResourceExhaustedError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
snapshot = begin(sys.argv[1], Dataset.range(100).map(lambda x: np.random.default_rng(x).bytes(100 if x < 50 else 30_000)))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write(snapshot, chunk_bytes_max=1000, interval_s=always)
except ResourceExhaustedError as error:
    print(error)
"""
    path = tmp_path / "s"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "File too large" in done.stdout
    assert snapshot_layout.read_error(str(path)).error_code == 8  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="The save job failed to write it"):
        Dataset.load(str(path))
    os.unlink(snapshot_error_path(str(path)))
    Path(snapshot_done_path(str(path))).write_text("")
    whole = list(
        Dataset.load(str(path), reader_func=lambda chunks: chunks.flat_map(lambda one: one))
    )
    assert [np.random.default_rng(x).bytes(100) for x in range(50)] == whole
    assert os.listdir(path / "streams" / "stream_0" / "uncommitted_chunks") == []


# -- iterators over what is dealt out --------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_iterator_over_positions_continues_from_state(name: str, tmp_path: Path) -> None:
    reasons = []
    for number, example in enumerate(EXAMPLES[name]):
        folder = tmp_path / str(number)
        try:
            providers = split_providers(example.build(folder))
        except UnimplementedError as error:
            reasons.append(str(error))
            continue
        try:
            goes_on_from_any_state(
                lambda: open_stream(example.build(folder), partial(deal, providers))  # noqa: B023
            )
        except Exception as error:
            raise AssertionError(f"{name}, example {number}: {error}") from error
    if len(reasons) == len(EXAMPLES[name]):
        pytest.skip(reasons[0])


def deal(providers: Any, source: int, repetition: int, taken: int) -> range:
    """Two positions at a time, to the end of the source."""
    provider = providers[source]
    if provider.repetitions != INFINITE_CARDINALITY and repetition >= provider.repetitions:
        return range(0)
    stop = taken + 2 if provider.count == INFINITE_CARDINALITY else min(provider.count, taken + 2)
    return range(taken, stop)


def goes_on_from_any_state(opened: Any) -> None:
    whole = read(opened())
    for place in range(len(whole) + 1):
        first = opened()
        wanted = read(first, place)
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
        second = opened()
        read(second, min(1, len(whole)))
        second.load_state_dict(state)
        assert wanted + read(second, len(whole) - place) == whole, f"behind {place}"
        second.close()


def test_failed_position_request_keeps_position(tmp_path: Path) -> None:
    with pytest.raises(UnimplementedError, match="gives out the positions"):
        open_split(Dataset.random(), lambda source, repetition: 0).state_dict()


def test_source_wait_ends_when_closed(tmp_path: Path) -> None:
    begin(tmp_path / "s", Dataset.range(3))
    iterator = iter(Dataset.load(str(tmp_path / "s")))
    # by then it waits, most times: either way nothing comes
    threading.Timer(0.2, iterator.close).start()
    with pytest.raises(StopIteration):  # nothing comes of an iterator that was closed
        next(iterator)


def test_writer_ending_during_take_over_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    list_names = storage.list_names

    def listed(path: str) -> list[str]:
        # removed just after it was listed
        gone = ["0123456789abcdef"] if path.endswith("uncommitted_chunks") else []
        return [*list_names(path), *gone]

    monkeypatch.setattr(storage, "list_names", listed)
    write(snapshot)
    assert names(tmp_path / "s") == ["chunk_0_0_10"]


def test_stream_completed_during_take_over_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    stream = snapshot.assign("w")
    assert stream is not None
    make_folder = storage.make_folder

    def complete(path: str) -> None:
        monkeypatch.setattr(storage, "make_folder", make_folder)
        writer_of(snapshot, "w", stream, chunk_bytes_max=32).run()  # by the earlier writer
        make_folder(path)

    monkeypatch.setattr(storage, "make_folder", complete)
    writer_of(snapshot, "w", stream).run()
    assert names(tmp_path / "s") == ["chunk_0_0_4", "chunk_0_1_4", "chunk_0_2_2"]
