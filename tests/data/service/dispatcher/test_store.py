"""The store of descriptions: each id has a file of its own, whole or not at all, and what is lost
is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from zmqdist.data.service.dispatcher import store as module
from zmqdist.data.service.dispatcher.store import DatasetStore, read
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
)

IDS = [
    "1000",
    "a",
    "A",
    "",
    " ",
    ".",
    "..",
    "/",
    "x/../y",
    "../../x",
    "/etc/passwd",
    "x\0y",
    "x\ny",
    "%41",
    "a.tmp",
    ".a",
    "~",
    "-",
]
IDS += [
    "é",
    "e\u0301",
    "\ud800",
    "漢" * 100,
    "x" * 64,
    "x" * 65,
    "x" * 100_000,
    "X" * 64,
    "con",
    "a" * 63 + "A",
]


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DatasetStore:
    return DatasetStore(str(tmp_path / "work") if request.param == "disk" else None)


def test_stored_text_is_found_by_other_store(tmp_path: Path) -> None:
    text = '{"a": "\\u00e9 \u6f22 \ud800"}\r\n' * 1000
    DatasetStore(str(tmp_path)).put("1000", text)
    assert DatasetStore(str(tmp_path)).get("1000") == text
    assert DatasetStore(None).path("1000") is None


def test_latest_text_counts(store: DatasetStore) -> None:
    store.put("1", "long " * 100)
    store.put("1", "")
    assert store.get("1") == ""


def test_ids_may_be_any_text(store: DatasetStore) -> None:
    for number, dataset_id in enumerate(IDS):
        store.put(dataset_id, str(number))
    assert [store.get(dataset_id) for dataset_id in IDS] == [
        str(number) for number in range(len(IDS))
    ]


def test_ids_stay_in_folder_whatever_their_case(tmp_path: Path) -> None:
    store = DatasetStore(str(tmp_path / "work"))
    for dataset_id in IDS:
        store.put(dataset_id, "x")
    names = os.listdir(tmp_path / "work" / "datasets")
    assert len({name.lower() for name in names}) == len(IDS)
    assert max(map(len, names)) <= 100
    assert os.listdir(tmp_path) == ["work"]
    assert os.listdir(tmp_path / "work") == ["datasets"]


def test_plain_id_is_file_name(tmp_path: Path) -> None:
    store = DatasetStore(str(tmp_path))
    store.put("1000", "text")
    path = store.path("1000")
    assert path == str(tmp_path / "datasets" / "1000")
    assert read(path) == "text"
    assert os.stat(path).st_mode & 0o077 == 0


def test_orphan_is_overwritten(tmp_path: Path) -> None:
    orphan = DatasetStore(str(tmp_path))
    orphan.put("1", "put, and killed before it was journaled")
    (tmp_path / "datasets" / "2").write_text("of no use")
    again = DatasetStore(str(tmp_path))
    for dataset_id in ("1", "2"):
        again.put(dataset_id, "registered again")
        assert again.get(dataset_id) == "registered again"


def test_unknown_id_in_memory_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="no dataset 'x' is registered"):
        DatasetStore(None).get("x")


def test_missing_file_is_data_loss(tmp_path: Path) -> None:
    store = DatasetStore(str(tmp_path))
    store.put("1", "x")
    (tmp_path / "datasets" / "1").unlink()
    with pytest.raises(
        DataLossError,
        match=f"{tmp_path}/datasets/1: corrupted record: it cannot be read.*Register the dataset "
        f"again",
    ):
        store.get("1")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"text garbage\n" * 100,
        b"00000000\nother text",
        b"\xff" * 50,
        b"cut",
        b"flipped",
    ],
)
def test_damaged_file_is_data_loss(tmp_path: Path, content: bytes) -> None:
    store = DatasetStore(str(tmp_path))
    store.put("1", "the text of it")
    path = tmp_path / "datasets" / "1"
    whole = path.read_bytes()
    path.write_bytes({b"cut": whole[:-1], b"flipped": whole[:-1] + b"T"}.get(content, content))
    with pytest.raises(DataLossError, match="corrupted record: it differs from its checksum"):
        store.get("1")


def test_failed_write_leaves_earlier_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DatasetStore(str(tmp_path))
    store.put("1", "before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        with pytest.raises(
            ResourceExhaustedError,
            match=r"datasets/1: .*No space left on device.*make room on that disk",
        ):
            store.put("1", "after")
    assert os.listdir(tmp_path / "datasets") == ["1"]
    assert store.get("1") == "before"
    store.put("1", "after")
    assert store.get("1") == "after"


def test_impossible_folder_is_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ResourceExhaustedError, match=r"file/datasets/1: .*let the dispatcher's user write there"
    ):
        DatasetStore(str(tmp_path / "file")).put("1", "x")


FILLING = """
import resource, signal, sys
from zmqdist.data.service.dispatcher.store import DatasetStore
from zmqdist.errors import ResourceExhaustedError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = DatasetStore(sys.argv[1])
store.put("1", "before")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    store.put("1", "x" * 100_000)
except ResourceExhaustedError as error:
    assert "ulimit -f" in error.message, error
    print(store.get("1"))
"""


def test_text_above_file_limit_is_error(tmp_path: Path, child: Callable[..., Popen[str]]) -> None:
    filling = child(FILLING, str(tmp_path))
    assert filling.communicate(timeout=50)[0] == "before\n"
    assert os.listdir(tmp_path / "datasets") == ["1"]


WRITING = """
import sys
from zmqdist.data.service.dispatcher.store import DatasetStore
store = DatasetStore(sys.argv[1])
while True:
    for letter in "ab":
        store.put("1", letter * 300_000)
        print(letter, flush=True)
"""


def test_killed_while_writing_the_old_or_the_new_text_is_there(
    tmp_path: Path, child: Callable[..., Popen[str]]
) -> None:
    for round_ in range(4):
        writing = child(WRITING, str(tmp_path))
        assert writing.stdout is not None
        for _ in range(3 + round_):
            assert writing.stdout.readline()
        writing.kill()
        writing.wait()
        text = DatasetStore(str(tmp_path)).get("1")
        assert (len(text), len(set(text))) == (300_000, 1)
        assert set(os.listdir(tmp_path / "datasets")) <= {"1", "1.tmp"}


# -- who may write there ---------------------------------------------------------------------------

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def make_writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


SPOILED = [
    pytest.param(
        make_writable,
        r"is open to other users \(mode 0\d\d\d\): make it private with `chmod",
        id="writable",
    ),
    pytest.param(
        give_away,
        f"belongs to user {STRANGER}, this process runs as 0",
        marks=needs_root,
        id="strangers",
    ),
]


@pytest.mark.parametrize(("spoil", "told"), SPOILED)
@pytest.mark.parametrize("name", [".", "datasets", "journal.db"])
def test_foreign_work_dir_is_refused(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], told: str
) -> None:
    DatasetStore(str(tmp_path)).put("1", "x")
    (tmp_path / "journal.db").touch(0o600)
    DatasetStore(str(tmp_path))
    spoil(tmp_path / name)
    with pytest.raises(
        FailedPreconditionError, match=rf"the dispatcher's (work_dir|journal) {tmp_path}.* {told}"
    ):
        DatasetStore(str(tmp_path))


@pytest.mark.parametrize(("spoil", "told"), SPOILED)
def test_foreign_dataset_is_not_run(
    tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    store = DatasetStore(str(tmp_path))
    store.put("1", "x")
    spoil(tmp_path / "datasets" / "1")
    with pytest.raises(FailedPreconditionError, match=rf"{tmp_path}/datasets/1 {told}"):
        store.get("1")


def test_pipe_in_place_of_dataset_blocks_nothing(tmp_path: Path) -> None:
    store = DatasetStore(str(tmp_path))
    os.mkfifo(tmp_path / "datasets" / "1", 0o600)
    with pytest.raises(DataLossError, match="it cannot be read: it is not a regular file"):
        store.get("1")


def test_readable_work_dir_is_accepted(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    DatasetStore(str(tmp_path)).put("1", "x")
    DatasetStore(str(tmp_path / "new"))
    assert [each.stat().st_mode & 0o777 for each in (tmp_path, tmp_path / "new")] == [0o755, 0o700]
