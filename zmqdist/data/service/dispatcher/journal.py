"""The dispatcher's journal. Acknowledged records are on the disk, in order, and survive kill -9 and
a loss of power.

Promises
 1. The journal calls `then(None)` when the records are synchronised to the disk (SQLite's
    write-ahead log, synchronous=FULL), never before.
 2. Records that are appended while a commit runs form the next commit. A commit is one transaction,
    so that either all of its records are written or none. After `then(error)` the journal has no
    record of the failed commit, and continues from its earlier content.
 3. `load` returns all acknowledged records, or raises DataLossError. It never leaves out a record,
    and never returns an empty state instead.
 4. Only one process at a time uses a journal. That process holds a lock on `journal.lock`, and the
    kernel releases the lock when the process ends, however it ends.

The journal detects a loss as follows. Records are numbered without gaps, and no number is used
twice. Each record has a checksum over its number and bytes. `journal.lock` contains the number of
the last acknowledged record. The journal writes this number after each commit, so that the file
never names a record that is not on the disk. With this number the journal notices missing records
where SQLite alone would open the database without an error: after the write-ahead log was removed,
truncated or damaged, or the database was removed, emptied or replaced by an older copy. The number
is not synchronised to the disk. After a loss of power `journal.lock` may therefore have an older
number, and damage to the records after that number is not detected.

The database file never shrinks, but SQLite reuses the pages of records that a snapshot has
replaced.

Not here: the meaning of records, and a bound on the pending records, because the caller waits for
`then` before it appends more.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote

from zmqdist.conditions import Condition
from zmqdist.data.service.dispatcher.store import synchronise
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    InternalError,
    OpError,
    ResourceExhaustedError,
)
from zmqdist.limits import JOURNAL_LOG_BYTES_MAX
from zmqdist.platforms import register_at_fork

log = logging.getLogger("zmqdist.data.service")

Done: TypeAlias = Callable[["OpError | None"], None]

FORMAT: Final = 1
"""Version of the database's tables. Increase it when an older zmqdist would misread new tables."""

_APPLICATION: Final = 0x7A6D7164
"""SQLite's application id of zmqdist's files: "zmqd"."""

_LOCK_LINE: Final = b"%20d %20d\n"
"""The content of `journal.lock`: the id of the process that uses the journal, and the number of the
last acknowledged record."""

_TABLES: Final = """
    CREATE TABLE snapshot (number INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL);
    CREATE TABLE records (number INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL);
"""

_locks: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_locks() -> None:
    """Close the lock files in a forked child, where an open descriptor would hold the lock after
    the parent's death."""
    while _locks:
        os.close(_locks.pop())


register_at_fork(after_in_child=_close_locks)


class _Waiting(NamedTuple):
    """The arguments of one call of `append` or `compact`. `snapshot` is None for `append`."""

    records: Sequence[bytes]
    snapshot: bytes | None
    then: Done


class Journal:
    """A journal of records in a folder, in the order in which they were appended. Any thread may
    call its methods.

    Args:
      folder: created if it is missing. A new folder is an empty journal.

    Raises:
      FailedPreconditionError: another process uses this journal, a newer zmqdist wrote it, or the
        folder cannot be used.
      DataLossError: "corrupted record": the folder has fewer records than were acknowledged, or its
        files are no journal.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self.path = os.path.join(self._folder, "journal.sqlite")
        self._waiting: list[_Waiting] = []
        self._changed = Condition()
        self._closing = False
        self._lock = _take_lock(self._folder)
        try:
            if not os.path.exists(self.path) and not self._acknowledged():
                self._create()
            self._last = self._read_last()
            self._database = self._connect("rw")
        except sqlite3.Error as error:
            self._free_lock()
            raise self._unreadable(error) from error
        except OSError as error:
            self._free_lock()
            raise _unusable(self._folder, error) from error
        except OpError:
            self._free_lock()
            raise
        self._write_lock()
        self._thread = threading.Thread(target=self._write, name="zmqdist-journal", daemon=True)
        self._thread.start()

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Return the snapshot that was last passed to `compact`, or None, and the records that were
        committed after it, in order.

        Raises:
          DataLossError: "corrupted record": a part of the journal is damaged or missing.
        """
        # Read the acknowledged number before the records. If it were read after them, a record
        # committed in between would look lost.
        acknowledged = self._acknowledged()
        try:
            with closing(self._connect("ro")) as database:
                database.execute("BEGIN")
                snapshots = database.execute(
                    "SELECT number, checksum, body FROM snapshot"
                ).fetchall()
                rows = database.execute(
                    "SELECT number, checksum, body FROM records ORDER BY number"
                ).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        expected = snapshots[0][0] if snapshots else 1
        for number, checksum, body in (*snapshots, *rows):
            if number != expected:
                raise self._damaged(f"record {expected} is missing, record {number} is there")
            if checksum != _checksum(number, body):
                raise self._damaged(f"record {number} differs from its checksum")
            expected += 1
        # promise 3: SQLite alone opens a truncated log without an error
        if expected <= acknowledged:
            raise self._damaged(f"records {expected} to {acknowledged} are missing")
        return (snapshots[0][2] if snapshots else None), [body for _, _, body in rows]

    def append(self, records: Sequence[bytes], then: Done) -> None:
        """Queue records, which the journal's thread writes in the order of the calls. Does not
        block.

        Args:
          records: the caller must not change the records or the sequence afterwards.
          then: called in the journal's thread, with None when all these records are on the disk, or
            with an error if none of them was written. A ResourceExhaustedError means that there is
            no room or no permission, and that a later attempt may succeed. Any other error is a
            DataLossError or an InternalError. `then` must not block, and must not call `close`.

        Raises:
          FailedPreconditionError: the journal is closed.
        """
        self._put(_Waiting(records, None, then))

    def compact(self, snapshot: bytes, then: Done) -> None:
        """Replace all earlier records by `snapshot`, a copy of the whole state, in one transaction.
        Does not block. `then` is called as in `append`.
        """
        self._put(_Waiting((), snapshot, then))

    def close(self) -> None:
        """Write all appended records, call every `then`, and release the lock. Blocks meanwhile. A
        second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        with self._changed:
            if self._lock in _locks:
                # Close the database before releasing the lock: SQLite moves the log's content into
                # the database and removes the log, and no other process may use these files
                # meanwhile.
                self._database.close()
                self._free_lock()
                self._lock = -1

    def _put(self, waiting: _Waiting) -> None:
        with self._changed:
            if self._closing:
                raise FailedPreconditionError(f"{self.path}: the journal is closed")
            self._waiting.append(waiting)
            self._changed.notify()

    # -- the writer's thread -----------------------------------------------------------------------

    def _write(self) -> None:
        while group := self._next_group():
            failed: OpError | None = None
            try:
                self._commit(group)
            except BaseException as error:
                # catch every error, because the waiting callers have to get it
                failed = self._roll_back(error)
            for waiting in group:
                try:
                    waiting.then(failed)
                except BaseException:
                    log.exception("an error in a function that waited for the journal")

    def _next_group(self) -> list[_Waiting]:
        """Wait for a call of `append` or `compact`, and return all pending calls. Return an empty
        list when the journal is closed and no call is pending.
        """
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            group, self._waiting = self._waiting, []
            return group

    def _commit(self, group: list[_Waiting]) -> None:
        number = self._last
        execute = self._database.execute
        execute("BEGIN IMMEDIATE")
        for waiting in group:
            if waiting.snapshot is not None:
                number += 1
                execute("DELETE FROM records")
                execute("DELETE FROM snapshot")
                execute("INSERT INTO snapshot VALUES (?, ?, ?)", _row(number, waiting.snapshot))
            else:
                rows = [
                    _row(number + offset, body) for offset, body in enumerate(waiting.records, 1)
                ]
                self._database.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
                number += len(rows)
        execute("COMMIT")
        self._last = number
        # Ignore an error, because the records are durable without the new number. With the old
        # number the journal only detects fewer losses.
        with suppress(OSError):
            self._write_lock()

    def _roll_back(self, error: BaseException) -> OpError:
        """Restore the database after a failed commit. Return the error for the waiting callers."""
        with suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            # Remove the failed commit from the log, because it may stand there unsynchronised, and
            # must not reappear after a crash.
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        log.warning("%s: a commit failed: %s", self.path, error)
        if _is_damage(error):
            return self._damaged(str(error))
        if not isinstance(error, sqlite3.Error | OverflowError | MemoryError):
            return InternalError(f"{self.path}: {type(error).__name__}: {error}")
        return ResourceExhaustedError(
            f"{self.path}: the dispatcher cannot write its journal ({error}); this request has "
            f"changed nothing: make room on that "
            "disk, or let the dispatcher's user write there, and try again",
        )

    # -- the files ---------------------------------------------------------------------------------

    def _connect(self, mode: str, path: str | None = None) -> sqlite3.Connection:
        """Open the database in a mode of SQLite: "ro", "rw" or "rwc". A connection in mode "ro"
        leaves a damaged log unchanged."""
        name = quote(self.path if path is None else path)
        database = sqlite3.connect(
            f"file:{name}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
        )
        try:
            database.execute("PRAGMA synchronous=FULL")
            database.execute(f"PRAGMA journal_size_limit={JOURNAL_LOG_BYTES_MAX}")
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _create(self) -> None:
        """Create an empty journal under another name and rename it, so that it exists as a whole or
        not at all. An empty database file therefore always means damage.
        """
        if os.path.exists(self.path + "-wal"):
            raise self._damaged("the database is missing, and its log exists")
        new = self.path + ".new"
        for name in (new, new + "-wal", new + "-shm", new + "-journal"):
            with suppress(FileNotFoundError):
                os.remove(name)
        with closing(self._connect("rwc", new)) as database:
            database.executescript(
                f"PRAGMA application_id={_APPLICATION}; PRAGMA user_version={FORMAT}; {_TABLES}"
            )
            if database.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
                raise _unusable(self._folder, OSError("SQLite has no write-ahead log there"))
        os.chmod(new, 0o600)
        os.rename(new, self.path)
        synchronise(self._folder)

    def _read_last(self) -> int:
        """Return the number of the last record. First check that the files are a journal of
        zmqdist, and that no acknowledged record is missing at the journal's end.
        """
        acknowledged = self._acknowledged()
        if not os.path.exists(self.path):
            raise self._damaged(
                f"the database is missing, and {acknowledged} records were written to it"
            )
        if not os.path.getsize(self.path):
            raise self._damaged("the database is empty")
        with closing(self._connect("ro")) as database:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if application != _APPLICATION or version < 1:
                raise self._damaged("this is no journal of zmqdist")
            if version > FORMAT:
                raise FailedPreconditionError(
                    f"{self.path} has format {version}, this zmqdist writes format {FORMAT}: "
                    f"start the dispatcher with the zmqdist "
                    "that wrote it or a later one, or give it another work_dir",
                )
            query = "SELECT max(coalesce((SELECT max(number) FROM records), 0), coalesce((SELECT max(number) FROM snapshot), 0))"
            last = int(database.execute(query).fetchone()[0])
        # promise 3: the log was removed, or the database replaced by an older copy
        if last < acknowledged:
            raise self._damaged(f"records {last + 1} to {acknowledged} are missing")
        return last

    def _acknowledged(self) -> int:
        """Return the number of the last acknowledged record, read from `journal.lock`."""
        return _read_lock(self._lock)[1]

    def _write_lock(self) -> None:
        os.pwrite(self._lock, _LOCK_LINE % (os.getpid(), self._last), 0)

    def _free_lock(self) -> None:
        import fcntl

        # Closing is not enough: a child that another thread forks has the descriptor until the
        # child executes its program, and with it the lock (flock(2)).
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        _locks.discard(self._lock)
        os.close(self._lock)

    # -- errors ------------------------------------------------------------------------------------

    def _damaged(self, damage: str) -> DataLossError:
        return DataLossError(
            f"{self.path}: corrupted record: {damage}. Put back an intact copy of {self._folder}, "
            f"or move that folder away: the "
            "dispatcher then starts without its datasets and jobs",
        )

    def _unreadable(self, error: sqlite3.Error) -> OpError:
        return self._damaged(str(error)) if _is_damage(error) else _unusable(self._folder, error)


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(b"%d" % number))


def _row(number: int, body: bytes) -> tuple[int, int, bytes]:
    return number, _checksum(number, body), body


def _is_damage(error: BaseException) -> bool:
    """Return whether an error of SQLite means damage. For damage, Python raises DatabaseError and
    no subclass of it, or an error with "malformed" in its text. A missing table ("no such table")
    counts as damage too, because a lost page can be its cause.
    """
    return (
        type(error) is sqlite3.DatabaseError or "no such" in str(error) or "malformed" in str(error)
    )


def _unusable(folder: str, error: Exception) -> OpError:
    return FailedPreconditionError(
        f"{folder}: the dispatcher cannot keep its journal here ({error}): it needs a folder of a "
        f"local disk that has room and that its "
        "user may write to (work_dir)",
    )


def _take_lock(folder: str) -> int:
    """Return a descriptor of the locked `journal.lock`. Raises FailedPreconditionError if another
    process holds the lock."""
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(os.path.join(folder, "journal.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        _locks.add(lock)
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(lock, _LOCK_LINE % (os.getpid(), _read_lock(lock)[1]), 0)
        except OSError:
            owner = _read_lock(lock)[0]
            _locks.discard(lock)
            os.close(lock)
            raise
    except BlockingIOError as error:
        raise FailedPreconditionError(
            f"{folder}: process {owner or 'unknown'} has this journal: stop that dispatcher, or "
            f"give this one another work_dir",
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    return lock


def _read_lock(lock: int) -> tuple[int, int]:
    """Return (process id, number of the last acknowledged record) from `journal.lock`, or zeros if
    the file is new or unreadable."""
    try:
        process, number = map(int, os.pread(lock, 64, 0).split())
    except ValueError:
        return 0, 0
    return process, number
