"""The journal: what was acknowledged comes back, in order; what cannot be kept is told; damage is
never taken for an empty state."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from subprocess import Popen

import pytest

from zmqdist.data.service.dispatcher import journal as module
from zmqdist.data.service.dispatcher.journal import FORMAT, Journal
from zmqdist.errors import DataLossError, FailedPreconditionError, InternalError, OpError

Child = Callable[..., "Popen[str]"]


class Waiting:
    """A `done` that can be waited for."""

    def __init__(self) -> None:
        self._called = threading.Event()
        self.error: OpError | None = None
        self.thread = ""

    def __call__(self, error: OpError | None) -> None:
        self.error = error
        self.thread = threading.current_thread().name
        self._called.set()

    def wait(self) -> None:
        assert self._called.wait(30), "`done` was never called"
        if self.error is not None:
            raise self.error


def append(journal: Journal, *records: bytes) -> None:
    done = Waiting()
    journal.append(records, done)
    done.wait()


def compact(journal: Journal, snapshot: bytes) -> None:
    done = Waiting()
    journal.compact(snapshot, done)
    done.wait()


def load(folder: Path | str) -> tuple[bytes | None, list[bytes]]:
    journal = Journal(str(folder))
    try:
        return journal.load()
    finally:
        journal.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "work" / "journal")


@pytest.fixture
def journal(folder: str) -> Iterator[Journal]:
    made = Journal(folder)
    yield made
    made.close()


# -- what was appended comes back ------------------------------------------------------------------


def test_new_folder_is_empty_journal(folder: str) -> None:
    assert load(folder) == (None, [])
    assert load(folder) == (None, [])


def test_many_records_come_back_in_order_whatever_bytes_they_are(folder: str) -> None:
    records = [
        b"",
        b"\0",
        bytes(range(256)),
        b"x" * 200_000,
        *(str(number).encode() for number in range(3000)),
    ]
    journal = Journal(folder)
    append(journal, *records)
    assert journal.load() == (None, records)
    journal.close()
    assert load(folder) == (None, records)


def test_reopened_journal_keeps_snapshot_and_records(folder: str) -> None:
    for record in (b"one", b"two"):
        journal = Journal(folder)
        append(journal, record)
        journal.close()
    assert load(folder) == (None, [b"one", b"two"])


def test_callbacks_run_once_in_order_of_appends(
    journal: Journal,
) -> None:
    told: list[tuple[int, OpError | None, str]] = []
    last = Waiting()
    for number in range(50):
        records = [b"x"] * (number % 3)  # none, too
        journal.append(
            records,
            lambda error, n=number: told.append((n, error, threading.current_thread().name)),
        )  # type: ignore[misc]
    journal.append([], last)
    last.wait()
    assert told == [(number, None, "zmqdist-journal") for number in range(50)]


def test_appends_of_threads_keep_their_order(journal: Journal) -> None:
    def appending(name: int) -> None:
        for number in range(30):
            append(journal, b"%d %d" % (name, number), b"and its neighbour")

    threads = [threading.Thread(target=appending, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, records = journal.load()
    assert len(records) == 4 * 30 * 2
    for name in range(4):
        assert [r for r in records if r.startswith(b"%d " % name)] == [
            b"%d %d" % (name, n) for n in range(30)
        ]
    assert all(neighbour == b"and its neighbour" for neighbour in records[1::2])


def commits(folder: str) -> int:
    """Transactions in the database's log: its frames whose header says how large the database is
    afterwards."""
    log = wal(Path(folder)).read_bytes()
    page = int.from_bytes(log[8:12], "big")
    headers = (log[at : at + 24] for at in range(32, len(log) - 23, 24 + page))
    return sum(header[16:24] == log[16:24] and header[4:8] != bytes(4) for header in headers)


def test_appends_during_commit_form_one_commit(folder: str, journal: Journal) -> None:
    before = commits(folder)
    waiting = [Waiting() for _ in range(101)]
    with closing(sqlite3.connect(database(Path(folder)), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the first commit is held until this one ends
        for done in waiting:
            journal.append([b"record"], done)
        other.execute("ROLLBACK")
    for done in waiting:
        done.wait()
    assert commits(folder) - before <= 2, "the first one, and all that came while it ran"


def test_close_writes_pending_records(folder: str) -> None:
    journal = Journal(folder)
    done = Waiting()
    journal.append([b"late"], done)
    journal.close()
    journal.close()
    done.wait()
    with pytest.raises(FailedPreconditionError, match="closed"):
        journal.append([b"too late"], done)
    assert load(folder) == (None, [b"late"])


def test_raising_callback_harms_no_other(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.append([b"one"], lambda error: 1 / 0)  # type: ignore[arg-type, return-value]
    append(journal, b"two")
    assert journal.load() == (None, [b"one", b"two"])
    assert "ZeroDivisionError" in caplog.text


def test_database_synchronises_each_commit(journal: Journal) -> None:
    connection = (
        journal._database
    )  # reach: how it synchronises is a setting of the connection, which no file shows
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


# -- snapshots -------------------------------------------------------------------------------------


def test_snapshot_replaces_only_earlier_records(folder: str) -> None:
    journal = Journal(folder)
    append(journal, b"old")
    waiting = [Waiting() for _ in range(5)]
    journal.append([b"old, too"], waiting[0])
    journal.compact(b"first", waiting[1])
    journal.append([b"between"], waiting[2])
    journal.compact(b"second", waiting[3])
    journal.append([b"new", b"newer"], waiting[4])
    for done in waiting:
        done.wait()
    assert journal.load() == (b"second", [b"new", b"newer"])
    journal.close()
    assert load(folder) == (b"second", [b"new", b"newer"])


def test_empty_snapshot_is_kept(journal: Journal) -> None:
    compact(journal, b"")
    assert journal.load() == (b"", [])


def test_files_stay_bounded(journal: Journal, folder: str) -> None:
    """The pages of what a snapshot replaced are used again."""

    def round_of_life() -> int:
        for _ in range(10):
            append(journal, *[os.urandom(1000)] * 100)
        compact(journal, os.urandom(300_000))
        return sum(entry.stat().st_size for entry in os.scandir(folder))

    sizes = [round_of_life() for _ in range(12)]
    assert max(sizes[6:]) <= max(sizes[:6])


# -- one dispatcher at a time ----------------------------------------------------------------------


HOLDER = """
import os, sys
from zmqdist.data.service.dispatcher.journal import Journal
journal = Journal(sys.argv[1])
print(os.getpid(), flush=True)
if "fork" in sys.argv and not os.fork():
    print("forked", os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


def test_second_journal_learns_owner_of_folder(folder: str, child: Child) -> None:
    holder = child(HOLDER, folder)
    assert holder.stdout is not None
    pid = holder.stdout.readline().strip()
    with pytest.raises(FailedPreconditionError, match=rf"process {pid} has this journal.*work_dir"):
        Journal(folder)
    holder.kill()
    holder.wait()
    assert load(folder) == (None, [])


def test_second_journal_of_process_is_refused(journal: Journal, folder: str) -> None:
    with pytest.raises(FailedPreconditionError, match=f"process {os.getpid()} has this journal"):
        Journal(folder)
    append(journal, b"and the first one goes on")


def test_forked_child_keeps_no_lock(folder: str, child: Child) -> None:
    holder = child(HOLDER, folder, "fork")
    assert holder.stdout is not None
    lines = [holder.stdout.readline(), holder.stdout.readline()]
    assert any(line.startswith("forked") for line in lines)
    holder.kill()
    holder.wait()
    assert load(folder) == (None, [])


def test_closed_journal_frees_its_lock_in_children_too(folder: str) -> None:
    journal = Journal(folder)
    lock_path = os.path.realpath(os.path.join(folder, "journal.lock"))
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}") == lock_path:
            inherited = os.dup(int(name))  # as a child has it between fork and exec
    journal.close()
    assert load(folder) == (None, [])
    os.close(inherited)


# -- killed, and nothing is lost -------------------------------------------------------------------


WRITER = """
import itertools, sys
from zmqdist.data.service.dispatcher.journal import Journal
journal = Journal(sys.argv[1])
snapshot, records = journal.load()
first = int((records or [snapshot or b"0"])[-1])
print("begins", flush=True)

def told(error, number):
    assert error is None, error
    sys.stdout.write(f"{number}\\n")  # one write: what arrived was acknowledged
    sys.stdout.flush()

import threading
window = threading.Semaphore(20)
for number in itertools.count(first + 1):
    window.acquire()
    def done(error, number=number):
        told(error, number)
        window.release()
    if number % 97 == 0:
        journal.compact(b"%d" % number, done)
    else:
        journal.append([b"%d" % number], done)
"""


@pytest.mark.processes("journal")
@pytest.mark.killed("journal")
def test_kills_lose_no_acknowledged_record(folder: str, child: Child) -> None:
    draw = random.Random(7)
    acknowledged = 0
    for _ in range(6):
        writer = child(WRITER, folder)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begins\n"
        for _ in range(draw.randrange(1, 300)):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        rest = [line for line in writer.stdout.read().split("\n")[:-1] if line]
        writer.wait()
        acknowledged = int(rest[-1]) if rest else acknowledged
        snapshot, records = load(folder)
        numbers = [int(record) for record in records]
        begin = int(snapshot or b"0")
        assert numbers == list(range(begin + 1, begin + 1 + len(numbers)))
        assert acknowledged <= begin + len(numbers) <= acknowledged + 20


# -- no room ---------------------------------------------------------------------------------------


FULL = """
import logging, resource, signal, sys, threading
from zmqdist.data.service.dispatcher.journal import Journal
from zmqdist.errors import ResourceExhaustedError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.disable()
journal = Journal(sys.argv[1])

def wait(call, *args):
    called, errors = threading.Event(), []
    call(*args, lambda error: (errors.append(error), called.set()))
    assert called.wait(30)
    return errors[0]

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

limit(200_000)
kept, failed = [], None
while failed is None:
    record = b"%d" % len(kept) * 5000
    failed = wait(journal.append, [b"rides along", record])
    if failed is None:
        kept += [b"rides along", record]
assert isinstance(failed, ResourceExhaustedError), failed
assert journal.load() == (None, kept) and kept
assert isinstance(wait(journal.append, [b"x" * 300_000]), ResourceExhaustedError)
assert isinstance(wait(journal.compact, b"x" * 300_000), ResourceExhaustedError)
assert journal.load() == (None, kept)
limit(resource.RLIM_INFINITY)
assert wait(journal.append, [b"room again"]) is None
assert journal.load() == (None, [*kept, b"room again"])
if "close" in sys.argv:
    journal.close()
print("told:", failed)
print(len(kept), flush=True)
if "close" not in sys.argv:
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_full_disk_loses_no_acknowledged_record(folder: str, child: Child, end: str) -> None:
    writer = child(FULL, folder, end)
    assert writer.stdout is not None
    told = writer.stdout.readline()
    assert told.startswith(
        f"told: {folder}/journal.sqlite: the dispatcher cannot write its journal ("
    ), told
    assert "make room on that disk" in told
    kept = int(writer.stdout.readline())
    if end == "kill":
        writer.kill()
    writer.wait()
    _, records = load(folder)
    assert (len(records), records[-1]) == (kept + 1, b"room again")


def test_invalid_record_fails_only_its_commit(journal: Journal) -> None:
    with pytest.raises(InternalError, match="TypeError"):
        append(journal, b"goes with it", "text")  # type: ignore[arg-type]
    append(journal, b"fine")
    assert journal.load() == (None, [b"fine"])


def test_unusable_folder_is_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        FailedPreconditionError, match=r"file/journal.*cannot keep its journal here.*work_dir"
    ):
        Journal(str(tmp_path / "file" / "journal"))


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def killed(folder: str, tmp_path: Path) -> Path:
    """What kill -9 leaves of a journal with 200 records: most of them in the log."""
    journal = Journal(folder)
    append(journal, *[b"%d" % number * 100 for number in range(100)])
    run(Path(folder), "PRAGMA wal_checkpoint(PASSIVE)")
    append(journal, *[b"%d" % number * 100 for number in range(100, 200)])
    copy = tmp_path / "killed"
    shutil.copytree(folder, copy)
    journal.close()
    return copy


@pytest.fixture
def closed(folder: str) -> Path:
    """A journal with 200 records that was closed."""
    journal = Journal(folder)
    append(journal, *[b"record %d " % number * 100 for number in range(200)])
    journal.close()
    return Path(folder)


def database(folder: Path) -> Path:
    return folder / "journal.sqlite"


def wal(folder: Path) -> Path:
    return folder / "journal.sqlite-wal"


def flip(path: Path, what: bytes) -> None:
    """One bit of the first place where these bytes are."""
    content = bytearray(path.read_bytes())
    content[content.index(what)] ^= 1
    path.write_bytes(content)


def run(folder: Path, *statements: str) -> None:
    connection = sqlite3.connect(database(folder))
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def garbage(path: Path) -> None:
    path.write_text("this is no journal\n" * 500)


DAMAGE_AFTER_KILL: list[tuple[str, Callable[[Path], object]]] = [
    ("the log is lost", lambda f: wal(f).unlink()),
    ("the log is empty", lambda f: wal(f).write_bytes(b"")),
    ("the log is cut", lambda f: os.truncate(wal(f), wal(f).stat().st_size - 5000)),
    ("the log is text", lambda f: garbage(wal(f))),
    ("a bit of the log", lambda f: flip(wal(f), b"150" * 20)),
    ("the database is lost", lambda f: database(f).unlink()),
    ("all is lost but the log", lambda f: (database(f).unlink(), (f / "journal.lock").unlink())),
    ("the database is empty", lambda f: database(f).write_bytes(b"")),
    ("the database is text", lambda f: garbage(database(f))),
]

DAMAGE_AFTER_CLOSE: list[tuple[str, Callable[[Path], object]]] = [
    ("the database is lost", lambda f: database(f).unlink()),
    ("the database is empty", lambda f: database(f).write_bytes(b"")),
    ("cut to half", lambda f: os.truncate(database(f), database(f).stat().st_size // 2)),
    ("cut to a page", lambda f: os.truncate(database(f), 4096)),
    ("cut to some bytes", lambda f: os.truncate(database(f), 50)),
    ("the last page is cut", lambda f: os.truncate(database(f), database(f).stat().st_size - 4096)),
    ("text", lambda f: garbage(database(f))),
    ("text, and no lock", lambda f: (garbage(database(f)), (f / "journal.lock").unlink())),
    ("empty, and no lock", lambda f: (database(f).write_bytes(b""), (f / "journal.lock").unlink())),
    ("a bit of a record", lambda f: flip(database(f), b"record 77 record 77")),
    (
        "other bytes in a record",
        lambda f: run(f, "UPDATE records SET body = x'00' WHERE number = 8"),
    ),
    ("a record's place", lambda f: run(f, "UPDATE records SET number = 900 WHERE number = 8")),
    ("a record is missing", lambda f: run(f, "DELETE FROM records WHERE number = 8")),
    ("the first is missing", lambda f: run(f, "DELETE FROM records WHERE number = 1")),
    ("the last are missing", lambda f: run(f, "DELETE FROM records WHERE number > 150")),
    ("all are missing", lambda f: run(f, "DELETE FROM records")),
    ("a table is missing", lambda f: run(f, "DROP TABLE records")),
    ("another program's", lambda f: run(f, "PRAGMA application_id = 7")),
    ("zeros in the middle", lambda f: zeros(database(f), 3 * 4096, 4096)),
]


def zeros(path: Path, begin: int, count: int) -> None:
    content = bytearray(path.read_bytes())
    content[begin : begin + count] = bytes(count)
    path.write_bytes(content)


def told_damage(folder: Path) -> str:
    with pytest.raises(DataLossError, match="corrupted record") as caught:
        load(folder)
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "damage"), DAMAGE_AFTER_KILL, ids=[name for name, _ in DAMAGE_AFTER_KILL]
)
def test_damage_after_a_kill_is_data_loss_and_stays_one(
    killed: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(killed)
    told = told_damage(killed)
    assert told.startswith(f"{database(killed)}: ")
    assert f"Put back an intact copy of {killed}" in told
    assert told_damage(killed)  # to look did not mend it


@pytest.mark.parametrize(
    ("name", "damage"), DAMAGE_AFTER_CLOSE, ids=[name for name, _ in DAMAGE_AFTER_CLOSE]
)
def test_damage_after_a_close_is_data_loss_and_stays_one(
    closed: Path, name: str, damage: Callable[[Path], object]
) -> None:
    damage(closed)
    told = told_damage(closed)
    assert told.startswith(f"{database(closed)}: ")
    assert told_damage(closed)


def test_undamaged_journal_is_complete(killed: Path) -> None:
    assert load(killed) == (None, [b"%d" % number * 100 for number in range(200)])


def test_damaged_log_is_left_unchanged(killed: Path) -> None:
    os.truncate(wal(killed), 5000)
    files = {path: path.read_bytes() for path in (database(killed), wal(killed))}
    told_damage(killed)
    assert {path: path.read_bytes() for path in files} == files


def test_damaged_snapshot_is_data_loss(folder: str, journal: Journal) -> None:
    compact(journal, b"the snapshot")
    append(journal, b"and more")
    journal.close()
    flip(database(Path(folder)), b"the snapshot")
    assert "record 1 differs from its checksum" in told_damage(Path(folder))


def test_older_database_is_data_loss(folder: str) -> None:
    journal = Journal(folder)
    append(journal, b"one")
    journal.close()
    copy = database(Path(folder)).read_bytes()
    journal = Journal(folder)
    append(journal, b"two")
    journal.close()
    database(Path(folder)).write_bytes(copy)
    assert "records 2 to 2 are missing" in told_damage(Path(folder))


@pytest.mark.parametrize("content", [b"", b"\0" * 42, b"text", b"1 2 3"])
def test_empty_lock_file_is_no_damage(closed: Path, content: bytes) -> None:
    (closed / "journal.lock").write_bytes(content)
    assert len(load(closed)[1]) == 200


def test_interrupted_creation_is_repeated(tmp_path: Path) -> None:
    for name in ("journal.sqlite.new", "journal.sqlite.new-journal", "journal.lock"):
        (tmp_path / name).write_bytes(b"" if name == "journal.lock" else b"half of it")
    assert load(tmp_path) == (None, [])


def test_newer_format_is_refused(closed: Path) -> None:
    run(closed, f"PRAGMA user_version = {FORMAT + 1}")
    content = database(closed).read_bytes()
    with pytest.raises(
        FailedPreconditionError,
        match=rf"has format {FORMAT + 1}, this zmqdist writes format {FORMAT}: start",
    ):
        Journal(str(closed))
    assert database(closed).read_bytes() == content


def test_damage_found_by_commit_is_data_loss(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(folder)

    def malformed(group: Sequence[object]) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(journal, "_commit", malformed)
    with pytest.raises(DataLossError, match="corrupted record"):
        append(journal, b"x")
    journal.close()


def test_journal_is_private(closed: Path) -> None:
    assert database(closed).stat().st_mode & 0o077 == 0
    assert (closed / "journal.lock").stat().st_mode & 0o077 == 0


def test_refused_journals_leave_no_descriptor(closed: Path) -> None:
    garbage(database(closed))
    told_damage(closed)  # whatever SQLite keeps open is there now
    before = len(os.listdir("/proc/self/fd"))
    told_damage(closed)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not module._locks  # reach: a number that stays here would close another file in a child
