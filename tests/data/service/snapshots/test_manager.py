"""The dispatcher's side of snapshots: who writes what, what is handed out, and what a folder is
read back as."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.service.snapshots.helpers import begin, names, save
from zmqdist.data import Dataset, snapshot_layout, storage
from zmqdist.data.chunks import spec_to_json
from zmqdist.data.service.snapshots.machine import SnapshotMode, StreamState
from zmqdist.data.service.snapshots.manager import SnapshotFolder, SnapshotManager
from zmqdist.data.snapshot_layout import snapshot_done_path, snapshot_error_path
from zmqdist.errors import (
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnimplementedError,
)


def several(tmp_path: Path, count: int, concurrent_max: int = 3) -> SnapshotManager:
    made = SnapshotManager(concurrent_max)
    for number in range(count):
        make(made, tmp_path / f"s{number}")
    return made


def make(snapshots: SnapshotManager, path: Path, request: str = "") -> None:
    dataset = Dataset.range(10)
    snapshots.add(
        snapshots.create(
            str(path), dataset.serialize(), spec_to_json(dataset.element_spec), None, request
        )
    )


def ask(
    snapshot: SnapshotFolder,
    worker: str,
    stream: int,
    local: int,
    source: int = 0,
    repetition: int = 0,
    count: int = 1,
) -> Any:
    return snapshot.hand_out(worker, stream, source, repetition, local, count)


# -- making one ------------------------------------------------------------------------------------


def test_new_folder_has_skeleton_and_metadata(tmp_path: Path) -> None:
    unknown = Dataset.zip(Dataset.range(3).filter(lambda x: True), Dataset.range(3))
    begin(tmp_path / "s", unknown.map(lambda x, y: x))
    assert sorted(os.listdir(tmp_path / "s")) == [
        "chunks",
        "dataset_def.json",
        "dataset_spec.json",
        "snapshot.metadata",
        "streams",
    ]
    recovered = SnapshotFolder.recover(str(tmp_path / "s"))
    assert (recovered.machine.mode, recovered.streams()) == (SnapshotMode.ACTIVE, [])
    assert recovered.progress()["positions"] == -1


def test_impossible_save_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="Saving an infinite dataset is not allowed"):
        begin(tmp_path / "s", Dataset.counter())
    with pytest.raises(UnimplementedError, match="Splitting is not implemented for from_generator"):
        begin(tmp_path / "s", Dataset.from_generator(lambda: [1]))
    with pytest.raises(UnimplementedError, match=r"batch\(\) or flat_map\(\)"):
        begin(tmp_path / "s", Dataset.range(4).window(2))
    with pytest.raises(
        ValueError, match=r"Must be one of \['AUTO', 'GZIP', 'SNAPPY', 'ZLIB'\] or None"
    ):
        begin(tmp_path / "s", Dataset.range(4), "LZMA")
    assert os.listdir(tmp_path) == []


def test_existing_path_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(AlreadyExistsError, match="already started or completed"):
        begin(tmp_path / "s", Dataset.range(4))
    assert os.listdir(tmp_path / "s") == []


def test_known_path_is_refused(tmp_path: Path) -> None:
    snapshots = several(tmp_path, 1)
    with pytest.raises(AlreadyExistsError, match="is already started or completed"):
        make(snapshots, tmp_path / "s0")
    with pytest.raises(NotFoundError, match="no snapshot"):
        snapshots["elsewhere"]


def test_repeated_request_is_same_snapshot(tmp_path: Path) -> None:
    snapshots = SnapshotManager()
    for _ in range(2):
        make(snapshots, tmp_path / "s", "wish 1")
    again = SnapshotManager()  # the dispatcher ended before it wrote down that there is a snapshot
    make(again, tmp_path / "s", "wish 1")
    assert len(again.all()) == 1
    with pytest.raises(AlreadyExistsError):
        make(SnapshotManager(), tmp_path / "s", "wish 2")


# -- who writes which stream -----------------------------------------------------------------------


def test_worker_has_one_stream_of_snapshot(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    assert [snapshot.assign(worker) for worker in ("a", "b", "a", "c")] == [0, 1, 0, 2]
    assert (tmp_path / "s" / "streams" / "stream_1" / "owner_worker").read_text() == "b"


def test_request_adds_at_most_one_stream(tmp_path: Path) -> None:
    snapshots = several(tmp_path, 3)
    assert [len(snapshots.assign("w")) for _ in range(5)] == [1, 2, 3, 3, 3]


def test_snapshot_with_fewest_workers_is_next(tmp_path: Path) -> None:
    snapshots = several(tmp_path, 2, concurrent_max=1)
    counts = [
        [len(each.owners()) for each in snapshots.all()]
        for worker in "abcdef"
        if snapshots.assign(worker)
    ]
    assert counts == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]


@pytest.mark.parametrize("most", [1, 2])
def test_workers_dont_exceed_max_stream_assignments(tmp_path: Path, most: int) -> None:
    snapshots = several(tmp_path, 10, most)
    for _ in range(12):
        assert max(len(snapshots.assign(worker)) for worker in "ab") <= most
    assert [len(snapshots.assign(worker)) for worker in "ab"] == [most, most]
    for path, stream in snapshots.assign("a").items():
        snapshots[path].finished("a", stream)
    for _ in range(3):
        found = snapshots.assign("a")
    assert len(found) == most


def test_first_ended_stream_stops_new_ones(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    assert [snapshot.assign("a"), snapshot.assign("b")] == [0, 1]
    snapshot.finished("a", 0)
    assert snapshot.machine.mode is SnapshotMode.WINDING_DOWN
    assert snapshot.assign("c") is None
    assert snapshot.assign("a") is None
    snapshot.finished("b", 1)
    snapshot.finished("b", 1)
    assert snapshot.machine.mode is SnapshotMode.DONE
    assert os.path.exists(snapshot_done_path(snapshot.path))


def test_orphan_goes_to_next_requesting_worker(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    assert [snapshot.assign(worker) for worker in "abc"] == [0, 1, 2]
    for worker in "ab":
        snapshot.worker_lost(worker)
    states = [stream.state for stream in snapshot.streams()]
    assert states == [StreamState.ORPHAN, StreamState.ORPHAN, StreamState.ASSIGNED]
    assert snapshot.assign("b") == 1
    assert snapshot.assign("c") == 2, "it has one"
    assert snapshot.assign("d") == 0
    with pytest.raises(
        InternalError, match="worker a writes stream 0, which does not belong to it"
    ):
        ask(snapshot, "a", 0, 0)
    (tmp_path / "s" / "streams" / "stream_2" / "DONE").write_text("")
    snapshot.finished("c", 2)
    snapshot.worker_lost("d")
    assert snapshot.assign("c") == 0, "its own is done"
    assert SnapshotFolder.recover(snapshot.path).streams()[0].owner == "c"


def test_owner_writes_until_stream_is_taken_over(
    tmp_path: Path,
) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    snapshot.assign("a")
    snapshot.worker_lost("a")
    assert ask(snapshot, "a", 0, 0) == (0, 1)


def test_failed_stream_fails_snapshot(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    assert [snapshot.assign(worker) for worker in "ab"] == [0, 1]
    snapshot.failed("elsewhere", 0, DataLossError(None, None, "not its own"))
    assert snapshot.machine.mode is SnapshotMode.ACTIVE
    snapshot.failed("b", 1, DataLossError(None, None, "a bad file"))
    assert snapshot.machine.mode is SnapshotMode.ERROR
    assert snapshot.assign("a") is None
    snapshot.finished("a", 0)
    with pytest.raises(FailedPreconditionError, match="a bad file"):
        ask(snapshot, "a", 0, 0)
    snapshot.cancel()
    assert isinstance(snapshot_layout.read_error(snapshot.path), DataLossError)


def test_cancelled_snapshot_has_its_error(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    snapshot.assign("a")
    snapshot.cancel()
    assert isinstance(snapshot_layout.read_error(snapshot.path), CancelledError)
    assert snapshot.progress()["error"] == {
        "code": 1,
        "message": f"{snapshot.path}: the snapshot was cancelled",
    }


def test_figures_of_progress(tmp_path: Path) -> None:
    snapshot = save(Dataset.range(10).repeat(2).batch(5), tmp_path / "s")
    assert snapshot.progress() == {
        "state": "done",
        "error": None,
        "streams": 1,
        "streams_done": 1,
        "chunks": 1,
        "elements": 4,
        "handed_out": 20,
        "positions": 20,
    }


# -- what is handed out ----------------------------------------------------------------------------


def test_positions_are_files_before_their_reply(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(3))
    assert [snapshot.assign(worker) for worker in "ab"] == [0, 1]
    assert [ask(snapshot, "a", 0, 0), ask(snapshot, "b", 1, 0), ask(snapshot, "a", 0, 1)] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert ask(snapshot, "b", 1, 1)[1] == 0
    folders = [
        tmp_path / "s" / "streams" / f"stream_{n}" / "splits" / "source_0" / "repetition_0"
        for n in (0, 1)
    ]
    assert [sorted(os.listdir(folder)) for folder in folders] == [
        ["split_0_0", "split_1_2"],
        ["split_0_1"],
    ]


def test_repeated_request_gives_same_positions(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(1000))
    assert [snapshot.assign(worker) for worker in "ab"] == [0, 1]
    first = [
        ask(snapshot, "a", 0, 0, count=50),
        ask(snapshot, "b", 1, 0),
        ask(snapshot, "a", 0, 50, count=10),
    ]
    assert first == [(0, 50), (50, 1), (51, 10)]
    again = SnapshotFolder.recover(snapshot.path)
    for one in (snapshot, again):
        assert ask(one, "a", 0, 0) == (0, 50)
        assert ask(one, "a", 0, 7) == (7, 43)
        assert ask(one, "a", 0, 55, count=99) == (56, 5)
    assert ask(again, "a", 0, 60) == (61, 1)
    with pytest.raises(
        InvalidArgumentError, match="has got 61 positions of source 0, fewer than the 99"
    ):
        ask(again, "a", 0, 99)
    with pytest.raises(InvalidArgumentError, match="no source 1"):
        ask(again, "a", 0, 0, source=1)


def test_runs_shrink_towards_end(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(1000))
    assert [snapshot.assign(worker) for worker in "ab"] == [0, 1]
    taken, counts = 0, []
    while (run := ask(snapshot, "a", 0, taken, count=1024))[1]:
        counts.append(run[1])
        taken += run[1]
    assert counts[0] == 125
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert sum(counts) == 1000
    assert len(counts) < 60


def test_repetitions_are_dealt_each_for_itself(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(2).repeat(2))
    assert [snapshot.assign(worker) for worker in "ab"] == [0, 1]
    assert ask(snapshot, "a", 0, 0) == (0, 1)
    assert ask(snapshot, "a", 0, 0, repetition=1) == (0, 1)
    assert ask(snapshot, "b", 1, 0) == (1, 1), "what is left of the first one"
    assert ask(snapshot, "b", 1, 0, repetition=1) == (1, 1)
    assert ask(snapshot, "b", 1, 0, repetition=2)[1] == 0


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 40),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 9), st.booleans()),
        max_size=60,
    ),
)
def test_positions_have_one_stream_at_random(
    tmp_path_factory: pytest.TempPathFactory, length: int, events: list[Any]
) -> None:
    snapshot = begin(tmp_path_factory.mktemp("any") / "s", Dataset.range(length).repeat(2))
    had: dict[Any, list[int]] = {}
    for worker, repetition, count, again in events:
        if again:
            snapshot = SnapshotFolder.recover(snapshot.path)
        stream = snapshot.assign(worker)
        assert stream is not None
        mine = had.setdefault((stream, repetition), [])
        start, number = ask(snapshot, worker, stream, len(mine), repetition=repetition, count=count)
        mine += range(start, start + number)
    for repetition in (0, 1):
        found = sorted(
            position for (_, one), mine in had.items() if one == repetition for position in mine
        )
        assert found == list(range(len(found)))
        assert len(found) <= length


# -- reading a folder back -------------------------------------------------------------------------


def folder(tmp_path: Path, *files: str) -> str:
    """A snapshot of two sources with files in its `streams`; what begins with a name and `=` has
    that content."""
    snapshot = begin(tmp_path / "s", Dataset.range(10).concatenate(Dataset.range(10)))
    for each in files:
        name, _, content = each.partition("=")
        file = tmp_path / "s" / "streams" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return snapshot.path


OWNED = "stream_0/owner_worker=a"
SPLITS = "stream_0/splits/source_0/repetition_0"

BAD = [
    *(
        [InternalError, "Can't parse", f"{name}/owner_worker=a"]
        for name in ("stream_", "stream_x", "stream_-1")
    ),
    *(
        [InternalError, "Can't parse", f"stream_0/splits/{name}/repetition_0/split_0_0"]
        for name in ("source_", "source_x", "source_-1")
    ),
    *(
        [InternalError, "Can't parse", f"stream_0/splits/source_0/{name}/split_0_0"]
        for name in ("repetition_", "repetition_x")
    ),
    [InternalError, "Found conflict", "stream_0/splits/source_2/repetition_0/split_0_0"],
    *(
        [
            InvalidArgumentError,
            "Expected split_<local_split_index>_<global_split_index>",
            f"{SPLITS}/{name}",
        ]
        for name in ("split_", "split_0", "split_0_x", "split_-1_0", "split_0_0_0", "piece_0_0")
    ),
    [
        InvalidArgumentError,
        "The local split index 1 exceeds the global split index 0",
        f"{SPLITS}/split_1_0",
    ],
    [InvalidArgumentError, "not a number of positions", f"{SPLITS}/split_0_0=many"],
    [InternalError, "Found missing global split index 0", f"{SPLITS}/split_0_1"],
    [
        InternalError,
        "Found missing global split index 4",
        f"{SPLITS}/split_0_0=4",
        f"{SPLITS}/split_4_5",
    ],
    [
        InternalError,
        "Found missing local split index 1",
        f"{SPLITS}/split_0_0",
        f"{SPLITS}/split_2_2",
    ],
    [
        InternalError,
        "Found duplicate global split index 1",
        f"{SPLITS}/split_0_1",
        f"{SPLITS}/split_1_1",
    ],
    [
        InternalError,
        "Found duplicate global split index 3",
        f"{SPLITS}/split_0_0=4",
        "stream_1/owner_worker=b",
        "stream_1/splits/source_0/repetition_0/split_0_3",
    ],
    [InternalError, "worker is already assigned to stream 0", "stream_1/owner_worker=a"],
    [InternalError, "a stream is missing", "stream_2/owner_worker=b"],
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[2].replace("/", " "))
def test_invalid_file_is_named(tmp_path: Path, case: list[Any]) -> None:
    error, text, *files = case
    path = folder(tmp_path, OWNED, *files)
    assert issubclass(error, ValueError if error is InvalidArgumentError else RuntimeError)
    with pytest.raises(error) as raised:
        SnapshotFolder.recover(path)
    assert text in str(raised.value)
    assert path in str(raised.value)


def test_folder_restores_snapshot(tmp_path: Path) -> None:
    path = folder(tmp_path, OWNED, f"{SPLITS}/split_0_0=3", f"{SPLITS}/split_3_4", f"{SPLITS}/split_4_9.tmp",
                  "stream_1/owner_worker=a", "stream_1/DONE", "stream_1/splits/source_0/repetition_0/split_0_3",
                  "stream_2/splits/.gitkeep.tmp")  # fmt: skip
    recovered = SnapshotFolder.recover(path)
    assert recovered.machine.mode is SnapshotMode.WINDING_DOWN
    assert [(one.owner, one.state) for one in recovered.streams()] == [
        ("a", StreamState.ASSIGNED),
        ("a", StreamState.DONE),
    ]
    # Positions 0 to 2 and 4 are stream 0's, in this order; number 4 of it is the next one.
    assert [ask(recovered, "a", 0, local, count=9)[0] for local in range(4)] == [0, 1, 2, 4]
    assert (ask(recovered, "a", 0, 0, count=9), ask(recovered, "a", 0, 3, count=9)) == (
        (0, 3),
        (4, 1),
    )
    assert ask(recovered, "a", 0, 4) == (5, 1)


def test_unfinished_stream_folder_is_reused(tmp_path: Path) -> None:
    path = folder(tmp_path, "stream_0/splits/.tmp")
    recovered = SnapshotFolder.recover(path)
    assert recovered.streams() == []
    assert recovered.assign("a") == 0


def test_streams_that_are_all_done_make_a_snapshot_that_is(tmp_path: Path) -> None:
    path = folder(tmp_path, OWNED, "stream_0/DONE")
    assert SnapshotFolder.recover(path).machine.mode is SnapshotMode.DONE
    assert os.path.exists(snapshot_done_path(path))
    assert SnapshotFolder.recover(path).machine.mode is SnapshotMode.DONE


def test_error_in_folder_persists(tmp_path: Path) -> None:
    path = folder(tmp_path, OWNED, 'stream_0/ERROR={"code": 15, "message": "a bad file"}')
    for _ in range(2):
        recovered = SnapshotFolder.recover(path)
        assert (recovered.machine.mode, type(recovered.machine.error)) == (
            SnapshotMode.ERROR,
            DataLossError,
        )
    assert os.path.exists(snapshot_error_path(path))
    Path(snapshot_error_path(path)).write_text("")
    assert "cannot be read" in str(SnapshotFolder.recover(path).machine.error)


def test_folder_of_later_version_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    metadata = Path(path) / "snapshot.metadata"
    metadata.write_text(metadata.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(FailedPreconditionError, match="of version 2"):
        SnapshotFolder.recover(path)
    metadata.write_text("{")
    with pytest.raises(DataLossError, match="corrupted record"):
        SnapshotFolder.recover(path)
    metadata.unlink()
    with pytest.raises(DataLossError, match=r"has no snapshot\.metadata"):
        SnapshotFolder.recover(path)


def test_recovery_blocks_overwrite(tmp_path: Path) -> None:
    snapshots = several(tmp_path, 1)
    again = SnapshotManager()
    again.add(SnapshotFolder.recover(snapshots.all()[0].path))
    with pytest.raises(AlreadyExistsError):
        make(again, tmp_path / "s0")
    assert names(tmp_path / "s0") == []


def test_streams_keep_their_workers_over_a_restart(tmp_path: Path) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    given = {worker: snapshot.assign(worker) for worker in "abcde"}
    recovered = SnapshotFolder.recover(snapshot.path)
    assert {worker: recovered.assign(worker) for worker in "edcba"} == given
    assert [stream.index for stream in recovered.streams()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("full", ["DONE", "ERROR"])
def test_full_disk_at_end_leaves_no_waiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    snapshot = begin(tmp_path / "s", Dataset.range(10))
    snapshot.assign("a")
    write = storage.write

    def refusing(path: str, *args: Any) -> None:
        if os.path.basename(path) == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *args)

    with monkeypatch.context() as broken:
        broken.setattr(storage, "write", refusing)
        failed = partial(snapshot.failed, "a", 0, InternalError(None, None, "broken"))
        end = failed if full == "ERROR" else partial(snapshot.finished, "a", 0)
        with pytest.raises(OSError, match="No space left"):
            end()
    assert snapshot.machine.mode is SnapshotMode.ERROR
    assert snapshot.machine.error is not None
    assert isinstance(
        snapshot.machine.error, ResourceExhaustedError if full == "DONE" else InternalError
    )
