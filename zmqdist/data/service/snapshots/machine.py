"""The machine for one snapshot at the dispatcher. It decides which worker writes which stream,
which positions each stream gets, and when the snapshot is over, which means complete or failed.

Theory
    A decision is a reply, together with the records that must be written before the reply is sent.
    The manager writes each record into the snapshot's folder, and then has the machine apply the
    record. If a record cannot be written, it is not applied, and the worker or user that sent the
    request gets the error. Therefore the folder has every change that a reply shows, and a
    restarted dispatcher can restore the machine from the folder.

Rules
    A stream belongs to the address of a worker. The stream of a lost worker is an orphan. The
    machine assigns an orphan to its earlier owner or to a worker without an unfinished stream of
    this snapshot, whichever requests a stream first. That worker continues at the orphan's
    checkpoint. The machine begins new streams until the first stream has ended. After that no
    positions are left for a new stream.

    The machine gives out the positions of a source in a repetition in order, to the stream that
    requests them. Within a stream, the positions of each source and repetition are numbered by a
    local index. A repeated request for the same local index gets the same positions, so that a
    writer that starts again at its checkpoint gets the same data.

    Each repetition is given out separately. A stream that is still in an earlier repetition gets
    the positions that are left in that repetition.

Promises
    P1  Each position of a source and repetition is given to only one stream, in order. If the
        stream repeats its request, it gets the position again.
    P2  At one time, a worker writes at most one stream of a snapshot, and streams of at most
        `concurrent_max` snapshots.
    P3  The file DONE is written when all streams are done, and the file ERROR when a stream has
        failed or a user has cancelled the snapshot. After that, no positions are given out.
    P4  The records of every reply are in the folder before the reply is sent.
    P5  As long as workers request streams, every snapshot ends eventually, because another worker
        gets the stream of a lost worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from zmqdist.errors import (
    CancelledError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OpError,
)
from zmqdist.transitions import enter


class SnapshotMode(Enum):
    """The state of a snapshot. In WINDING_DOWN a stream has ended, and no new streams begin."""

    ACTIVE = "active"
    WINDING_DOWN = "winding down"
    DONE = "done"
    ERROR = "error"


SNAPSHOT_TRANSITIONS: Final[Mapping[SnapshotMode, frozenset[SnapshotMode]]] = {
    SnapshotMode.ACTIVE: frozenset(
        {SnapshotMode.WINDING_DOWN, SnapshotMode.DONE, SnapshotMode.ERROR}
    ),
    SnapshotMode.WINDING_DOWN: frozenset({SnapshotMode.DONE, SnapshotMode.ERROR}),
    SnapshotMode.DONE: frozenset(),
    SnapshotMode.ERROR: frozenset(),
}


class StreamState(Enum):
    """The state of a stream. An ORPHAN is a stream whose worker is lost and that no other worker
    has taken over yet."""

    ASSIGNED = 1
    DONE = 2
    ORPHAN = 3


STREAM_TRANSITIONS: Final[Mapping[StreamState, frozenset[StreamState]]] = {
    StreamState.ASSIGNED: frozenset({StreamState.DONE, StreamState.ORPHAN}),
    # DONE: the worker was only thought lost, and has ended the stream
    StreamState.ORPHAN: frozenset({StreamState.ASSIGNED, StreamState.DONE}),
    StreamState.DONE: frozenset(),
}


class PositionRun(msgspec.Struct, frozen=True):
    """The positions that a stream got in one reply: `count` positions from `start` on. The first of
    them has the local index `local`."""

    local: int
    start: int
    count: int


class StreamAssignment(msgspec.Struct):
    """One stream. `owner` is the address of its worker. `runs` maps (source, repetition) to the
    runs of positions that the stream got, in order.
    """

    index: int
    owner: str
    state: StreamState = StreamState.ASSIGNED
    runs: dict[tuple[int, int], list[PositionRun]] = {}

    def enter(self, state: StreamState) -> None:
        """Change the state, if it is another one."""
        if state is not self.state:
            self.state = enter(STREAM_TRANSITIONS, self.state, state, "stream", self.index)


# -- records: changes that are written into the folder ---------------------------------------------


class OwnerChanged(msgspec.Struct, frozen=True):
    """A worker has got a stream. A new stream begins with this record."""

    stream: int
    worker: str


class PositionsGiven(msgspec.Struct, frozen=True):
    """A stream has got a run of positions."""

    stream: int
    source: int
    repetition: int
    run: PositionRun


class StreamCompleted(msgspec.Struct, frozen=True):
    """A stream has ended. Its writer had written DONE into the stream's folder before it reported
    the end to the dispatcher."""

    stream: int


class SnapshotCompleted(msgspec.Struct, frozen=True):
    """All streams are complete."""


class SnapshotFailed(msgspec.Struct, frozen=True):
    """The snapshot has failed, or a user has cancelled it."""

    error: OpError


Record = OwnerChanged | PositionsGiven | StreamCompleted | SnapshotCompleted | SnapshotFailed


class SnapshotMachine:
    """The machine for one snapshot. The docstring of the module gives the rules and promises.

    Args:
      path: the path of the snapshot, for error texts.
      counts: for each source, the number of its positions; -1 if it has no end.
      repetitions: for each source, how often it is read; -1 if without end.

    Attributes:
      streams: all streams. *Invariant*: `streams[i].index == i`.
    """

    def __init__(self, path: str, counts: Sequence[int], repetitions: Sequence[int]) -> None:
        self.path = path
        self.mode = SnapshotMode.ACTIVE
        self.error: OpError | None = None
        self.streams: list[StreamAssignment] = []
        self._counts = counts
        self._repetitions = repetitions
        self._next: dict[tuple[int, int], int] = {}

    def restore(
        self,
        streams: list[StreamAssignment],
        is_complete: bool,
        error: OpError | None,
        failures: Sequence[OpError],
    ) -> list[Record]:
        """Take over the state that was read from the folder. If the streams show that the snapshot
        is over, and the folder does not say so yet, return the record that says so.

        Args:
          done: whether the file DONE exists.
          error: the content of the file ERROR; None if the file does not exist.
          failures: the errors of the streams whose writers have written a file ERROR.
        """
        self.streams = streams
        for stream in streams:
            for key, runs in stream.runs.items():
                if runs:
                    self._next[key] = max(self._next.get(key, 0), runs[-1].start + runs[-1].count)
        if error is not None:
            self.apply(SnapshotFailed(error))
        elif is_complete:
            self._enter(SnapshotMode.DONE)
        elif any(stream.state is StreamState.DONE for stream in streams):
            self._enter(SnapshotMode.WINDING_DOWN)
        if self.over:
            return []
        if failures:
            return [SnapshotFailed(failures[0])]
        return [SnapshotCompleted()] if streams and not self._unfinished() else []

    @property
    def over(self) -> bool:
        """Whether the snapshot is complete or has failed."""
        return self.mode in (SnapshotMode.DONE, SnapshotMode.ERROR)

    def _enter(self, mode: SnapshotMode) -> None:
        self.mode = enter(SNAPSHOT_TRANSITIONS, self.mode, mode, "snapshot", self.path)

    def _unfinished(self) -> list[StreamAssignment]:
        return [stream for stream in self.streams if stream.state is not StreamState.DONE]

    # -- decisions ---------------------------------------------------------------------------------

    def assign(self, worker: str, may_begin: bool = True) -> tuple[int | None, list[Record]]:
        """Return the stream that a worker should write: the stream that it has, else an orphan,
        else a new stream. Return None if the worker should not write a stream.

        Args:
          may_begin: whether the worker may get a stream that it does not have yet.
        """
        if self.over:
            return None, []
        # promise P2: one stream at a time, also when the worker repeats its request
        for stream in self._unfinished():
            if stream.owner == worker:
                stream.enter(StreamState.ASSIGNED)
                return stream.index, []
        if not may_begin:
            return None, []
        for stream in self._unfinished():
            if stream.state is StreamState.ORPHAN:
                return stream.index, [OwnerChanged(stream.index, worker)]
        # a stream has ended, so no positions are left for a new one
        if self.mode is not SnapshotMode.ACTIVE:
            return None, []
        return len(self.streams), [OwnerChanged(len(self.streams), worker)]

    def hand_out(
        self, worker: str, stream: int, source: int, repetition: int, local: int, count: int
    ) -> tuple[tuple[int, int], list[Record]]:
        """Return positions for a stream as (first position, number). A number of 0 means that the
        repetition has no positions left.

        Args:
          local: the number of positions that the stream has used. If the stream has got more
            positions than these, it gets the later positions again.

        Raises:
          InternalError: another worker has the stream.
          FailedPreconditionError: the snapshot is over.
          InvalidArgumentError: there is no such source, or the stream has got fewer than `local`
            positions.
        """
        if not 0 <= source < len(self._counts) or repetition < 0:
            raise InvalidArgumentError(
                f"{self.path}: there is no source {source}, or it has no repetition {repetition}"
            )
        runs = self._owned(worker, stream).runs.get((source, repetition), [])
        had = runs[-1].local + runs[-1].count if runs else 0
        # promise P1: a writer that starts again at its checkpoint gets the same positions
        if local < had:
            run = next(run for run in runs if local < run.local + run.count)
            return (run.start + local - run.local, run.local + run.count - local), []
        if local > had:
            raise InvalidArgumentError(
                f"{self.path}: stream {stream} has got {had} positions of source {source}, fewer "
                f"than the {local} that it reports as used"
            )
        start, number = self._more(source, repetition, count)
        if not number:
            return (start, 0), []
        return (start, number), [
            PositionsGiven(stream, source, repetition, PositionRun(local, start, number))
        ]

    def _more(self, source: int, repetition: int, count: int) -> tuple[int, int]:
        """Return the next positions of a source. Their number is at most a quarter of a stream's
        share of the positions that are left, so that all streams end at about the same time.
        """
        start = self._next.get((source, repetition), 0)
        total = self._counts[source]
        if 0 <= self._repetitions[source] <= repetition:
            return start, 0
        # an endless source has no share to divide
        if total < 0:
            return start, max(1, count)
        left = total - start
        return start, min(left, max(1, min(count, left // (4 * max(1, len(self.streams))))))

    def _owned(self, worker: str, index: int) -> StreamAssignment:
        if self.over:
            text = f"{self.path}: the snapshot is over: {self.error or 'it is complete'}"
            raise FailedPreconditionError(text)
        if not 0 <= index < len(self.streams) or self.streams[index].owner != worker:
            raise InternalError(
                f"{self.path}: worker {worker} writes stream {index}, which does not belong to it"
            )
        return self.streams[index]

    def finished(self, worker: str, stream: int) -> list[Record]:
        """Record that a worker has written a stream to its end and has written DONE. Does nothing
        if the snapshot is over.

        Raises:
          InternalError: another worker has the stream.
        """
        if self.over:
            return []
        self._owned(worker, stream)
        has_others = any(unfinished.index != stream for unfinished in self._unfinished())
        return (
            [StreamCompleted(stream)]
            if has_others
            else [StreamCompleted(stream), SnapshotCompleted()]
        )

    def failed(self, worker: str, stream: int, error: OpError) -> list[Record]:
        """Fail the snapshot, because a worker cannot write its stream. Does nothing if the worker
        no longer has the stream."""
        if self.over or not 0 <= stream < len(self.streams) or self.streams[stream].owner != worker:
            return []
        return [SnapshotFailed(error)]

    def cancel(self) -> list[Record]:
        """Fail the snapshot with the code CANCELLED. Committed chunks stay in the folder. Does
        nothing if the snapshot is over."""
        return (
            []
            if self.over
            else [SnapshotFailed(CancelledError(f"{self.path}: the snapshot was cancelled"))]
        )

    def worker_lost(self, worker: str) -> None:
        """Mark the stream that a worker was writing as an orphan."""
        for stream in self.streams:
            if stream.owner == worker and stream.state is StreamState.ASSIGNED:
                stream.enter(StreamState.ORPHAN)

    # -- records -----------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Apply a record that has been written into the folder."""
        match record:
            case OwnerChanged(index, worker) if index == len(self.streams):
                self.streams.append(StreamAssignment(index, worker))
            case OwnerChanged(index, worker):
                self.streams[index].owner = worker
                self.streams[index].enter(StreamState.ASSIGNED)
            case PositionsGiven(index, source, repetition, run):
                self.streams[index].runs.setdefault((source, repetition), []).append(run)
                self._next[source, repetition] = run.start + run.count
            case StreamCompleted(index):
                self.streams[index].enter(StreamState.DONE)
                if self.mode is SnapshotMode.ACTIVE:
                    self._enter(SnapshotMode.WINDING_DOWN)
            case SnapshotCompleted():
                self._enter(SnapshotMode.DONE)
            case SnapshotFailed(error):
                self._enter(SnapshotMode.ERROR)
                self.error = error

    def not_written(self, record: Record, error: OpError) -> list[Record]:
        """Return the records to write in place of a record that could not be written.

        The end of a snapshot takes effect even if it cannot be written into the folder, because no
        worker will report the last stream again, and because waiting users have to learn of the end
        even if the disk is full.
        """
        match record:
            # the users who wait have to learn of an end, even if the disk is full
            case SnapshotCompleted():
                failed = SnapshotFailed(error)
                self.apply(failed)
                return [failed]
            case SnapshotFailed():
                self.apply(record)
        return []

    # -- figures -----------------------------------------------------------------------------------

    def owners(self) -> set[str]:
        """Return the addresses of the workers to which streams are assigned."""
        return {stream.owner for stream in self.streams if stream.state is StreamState.ASSIGNED}

    def figures(self) -> dict[str, Any]:
        """Return the figures of the snapshot: `state`, `error`, `streams`, `streams_done`, the
        number of positions that were `handed_out`, and the number of `positions` of all sources and
        repetitions (-1 if they have no end).
        """
        pairs = list(zip(self._counts, self._repetitions, strict=True))
        return {
            "state": self.mode.value,
            "error": None
            if self.error is None
            else {"code": self.error.error_code, "message": str(self.error)},
            "streams": len(self.streams),
            "streams_done": len(self.streams) - len(self._unfinished()),
            "handed_out": sum(self._next.values()),
            "positions": -1
            if any(min(pair) < 0 for pair in pairs)
            else sum(count * times for count, times in pairs),
        }


def begin_order(
    owners: Mapping[str, set[str]], has: Mapping[str, int], concurrent_max: int
) -> list[str]:
    """Return the snapshots of which a worker may get a new stream, those with the fewest workers
    first.

    Args:
      owners: for each snapshot that is not over, the workers to which its streams are assigned.
      has: the streams that the worker has already, by snapshot.
      concurrent_max: the largest number of streams that a worker may have. The result is empty for
        a worker with so many streams.
    """
    if len(has) >= concurrent_max:
        return []
    return sorted((path for path in owners if path not in has), key=lambda path: len(owners[path]))
