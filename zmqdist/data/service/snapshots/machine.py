"""What the dispatcher decides of one snapshot: who writes which stream, which positions each stream gets, and when it is over.

Theory
    A decision is an answer with the records that make it true. The caller writes each record into the snapshot's folder and then
    applies it here; one that cannot be written is not applied, and its question is answered by the error. So the folder is never
    behind an answer, and a dispatcher that begins again restores the machine from the folder and goes on.

Rules
    A stream belongs to an address. A worker that is lost leaves an orphan: the first to ask gets it, its former owner or a worker that
    has no unfinished stream of this snapshot, and goes on at the checkpoint. New streams begin until one has come to its end, since
    then there is nothing left to hand out.

    Positions of a source and repetition are handed out in order, to whichever stream asks. What a stream got is known by its own numbers:
    (stream, source, repetition, local index). Asked again from a local index it gets the same again, so a writer that begins again
    behind its checkpoint sees the same data. One hand-out is a run of positions where there is one source; where there are several
    it is a position, because a zip pairs what it gets, and must not hold what another stream needs.

    Each repetition is dealt out for itself: a stream that is still in an earlier one finds there what is left of it.

Promises
    P1  each position of a source and repetition is handed out to one stream, in order; that stream gets it again where it asks again
    P2  one worker writes at most one stream of a snapshot, and streams of `concurrent_max` snapshots
    P3  DONE is written when all streams are done, ERROR when one has failed; nothing is handed out after either
    P4  whatever is answered was written before
    P5  while workers ask, every snapshot comes to its end: the stream of a lost worker gets another
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from zmqdist.errors import CancelledError, FailedPreconditionError, InternalError, InvalidArgumentError, OpError


class SnapshotMode(Enum):
    """Where a snapshot is."""

    ACTIVE = "active"
    WINDING_DOWN = "winding down"
    DONE = "done"
    ERROR = "error"


class StreamState(Enum):
    """Where a stream is. ORPHAN: its worker is lost, and no other has taken it over yet."""

    UNKNOWN = 0
    ASSIGNED = 1
    DONE = 2
    ORPHAN = 3


@dataclass(frozen=True)
class PositionRun:
    """One hand-out: `count` positions from `start` on, the first being the stream's number `local`."""

    local: int
    start: int
    count: int


@dataclass
class StreamAssignment:
    """One stream; `runs` by (source, repetition), in order."""

    index: int
    owner: str
    state: StreamState = StreamState.ASSIGNED
    runs: dict[tuple[int, int], list[PositionRun]] = field(default_factory=dict)


# -- records: what the folder says ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnerChanged:
    """A worker writes a stream from now on; a stream that is not there yet begins."""

    stream: int
    worker: str


@dataclass(frozen=True)
class PositionsGiven:
    """A stream got a run of positions."""

    stream: int
    source: int
    repetition: int
    run: PositionRun


@dataclass(frozen=True)
class StreamCompleted:
    """A stream has come to its end; its writer has said so in the folder before it told the dispatcher."""

    stream: int


@dataclass(frozen=True)
class SnapshotCompleted:
    """All streams are complete."""


@dataclass(frozen=True)
class SnapshotFailed:
    """The snapshot is over without being whole."""

    error: OpError


Record = OwnerChanged | PositionsGiven | StreamCompleted | SnapshotCompleted | SnapshotFailed


class SnapshotMachine:
    """See the module's docstring.

    Args:
      path: names the snapshot in errors.
      counts: the positions of each source, -1 without end.
      repetitions: how often each source is read, -1 without end.

    Attributes:
      streams: in order; their indexes are their places.
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
        self, streams: list[StreamAssignment], done: bool, error: OpError | None, failures: Sequence[OpError]
    ) -> list[Record]:
        """Begin where the folder is.

        Args:
          done, error: whether DONE is there, and what ERROR says.
          failures: of the streams whose writers left an ERROR.

        Returns:
          What the former dispatcher had not written yet.
        """
        self.streams = streams
        for stream in streams:
            for key, runs in stream.runs.items():
                if runs:
                    self._next[key] = max(self._next.get(key, 0), runs[-1].start + runs[-1].count)
        if error is not None:
            self.apply(SnapshotFailed(error))
        elif done:
            self.mode = SnapshotMode.DONE
        elif any(stream.state is StreamState.DONE for stream in streams):
            self.mode = SnapshotMode.WINDING_DOWN
        if self.over:
            return []
        if failures:
            return [SnapshotFailed(failures[0])]
        return [SnapshotCompleted()] if streams and not self._unfinished() else []

    @property
    def over(self) -> bool:
        """Whether it is whole or has failed."""
        return self.mode in (SnapshotMode.DONE, SnapshotMode.ERROR)

    def _unfinished(self) -> list[StreamAssignment]:
        return [stream for stream in self.streams if stream.state is not StreamState.DONE]

    # -- decisions ----------------------------------------------------------------------------------------------------------

    def assign(self, worker: str, may_begin: bool = True) -> tuple[int | None, list[Record]]:
        """The stream that a worker should write: the one it has, else an orphan, else a new one; None: none.

        Args:
          may_begin: whether it may get one that it does not have.
        """
        if self.over:
            return None, []
        for stream in self._unfinished():
            if stream.owner == worker:
                stream.state = StreamState.ASSIGNED
                return stream.index, []
        if not may_begin:
            return None, []
        for stream in self._unfinished():
            if stream.state is StreamState.ORPHAN:
                return stream.index, [OwnerChanged(stream.index, worker)]
        if self.mode is not SnapshotMode.ACTIVE:
            return None, []
        return len(self.streams), [OwnerChanged(len(self.streams), worker)]

    def hand_out(
        self, worker: str, stream: int, source: int, repetition: int, local: int, count: int
    ) -> tuple[tuple[int, int], list[Record]]:
        """Positions for a stream: (the first, how many), none at the end of the repetition.

        Args:
          local: how many the stream has had. Where it had more already, these come again.

        Raises:
          InternalError: the stream is another worker's. FailedPreconditionError: the snapshot is over. InvalidArgumentError: there is no
            such source, or the stream never had what is before `local`.
        """
        if not 0 <= source < len(self._counts) or repetition < 0:
            raise InvalidArgumentError(f"{self.path}: no source {source}, or no repetition {repetition}")
        runs = self._owned(worker, stream).runs.get((source, repetition), [])
        had = runs[-1].local + runs[-1].count if runs else 0
        if local < had:
            run = next(run for run in runs if local < run.local + run.count)
            return (run.start + local - run.local, run.local + run.count - local), []
        if local > had:
            raise InvalidArgumentError(
                f"{self.path}: stream {stream} had {had} positions of source {source}, not {local}"
            )
        start, number = self._more(source, repetition, count)
        if not number:
            return (start, 0), []
        return (start, number), [PositionsGiven(stream, source, repetition, PositionRun(local, start, number))]

    def _more(self, source: int, repetition: int, count: int) -> tuple[int, int]:
        """What comes next of a source: at most a quarter of what would be each stream's share."""
        start = self._next.get((source, repetition), 0)
        total = self._counts[source]
        if 0 <= self._repetitions[source] <= repetition:
            return start, 0
        if len(self._counts) > 1:
            count = 1
        if total < 0:
            return start, max(1, count)
        left = total - start
        return start, min(left, max(1, min(count, left // (4 * max(1, len(self.streams))))))

    def _owned(self, worker: str, index: int) -> StreamAssignment:
        if self.over:
            text = f"{self.path}: the snapshot is over: {self.error or 'it is complete'}"
            raise FailedPreconditionError(text)
        if not 0 <= index < len(self.streams) or self.streams[index].owner != worker:
            raise InternalError(f"{self.path}: worker {worker} writes stream {index}, which is not its own")
        return self.streams[index]

    def finished(self, worker: str, stream: int) -> list[Record]:
        """A worker has written a stream to its end and left DONE. Nothing comes of it when told again, or too late.

        Raises:
          InternalError: the stream is another worker's.
        """
        if self.over:
            return []
        self._owned(worker, stream)
        others = any(each.index != stream for each in self._unfinished())
        return [StreamCompleted(stream)] if others else [StreamCompleted(stream), SnapshotCompleted()]

    def failed(self, worker: str, stream: int, error: OpError) -> list[Record]:
        """A worker cannot write its stream: the snapshot has failed. Nothing where that stream is not its own any more."""
        if self.over or not 0 <= stream < len(self.streams) or self.streams[stream].owner != worker:
            return []
        return [SnapshotFailed(error)]

    def cancel(self) -> list[Record]:
        """A user gives it up: ERROR with the code CANCELLED. What was committed stays. Nothing comes of it when it is over."""
        return [] if self.over else [SnapshotFailed(CancelledError(f"{self.path}: the snapshot was cancelled"))]

    def worker_lost(self, worker: str) -> None:
        """What a worker was writing is an orphan."""
        for stream in self.streams:
            if stream.owner == worker and stream.state is StreamState.ASSIGNED:
                stream.state = StreamState.ORPHAN

    # -- records ------------------------------------------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """A record is in the folder."""
        match record:
            case OwnerChanged(index, worker) if index == len(self.streams):
                self.streams.append(StreamAssignment(index, worker))
            case OwnerChanged(index, worker):
                self.streams[index].owner, self.streams[index].state = worker, StreamState.ASSIGNED
            case PositionsGiven(index, source, repetition, run):
                self.streams[index].runs.setdefault((source, repetition), []).append(run)
                self._next[source, repetition] = run.start + run.count
            case StreamCompleted(index):
                self.streams[index].state = StreamState.DONE
                self.mode = SnapshotMode.WINDING_DOWN
            case SnapshotCompleted():
                self.mode = SnapshotMode.DONE
            case SnapshotFailed(error):
                self.mode, self.error = SnapshotMode.ERROR, error

    def not_written(self, record: Record, error: OpError) -> list[Record]:
        """A record could not be written; the records to try in its place.

        An end holds all the same: no worker will say again that the last stream is done, and users who wait must hear of it also where
        the disk is full.
        """
        match record:
            case SnapshotCompleted():
                failed = SnapshotFailed(error)
                self.apply(failed)
                return [failed]
            case SnapshotFailed():
                self.apply(record)
        return []

    # -- what it looks like -------------------------------------------------------------------------------------------------

    def owners(self) -> set[str]:
        """The workers that are writing, or should be."""
        return {stream.owner for stream in self.streams if stream.state is StreamState.ASSIGNED}

    def figures(self) -> dict[str, Any]:
        """`state`, `error`, `streams`, `streams_done`, `handed_out` and `positions`: those of all sources and repetitions, -1 without
        end."""
        pairs = list(zip(self._counts, self._repetitions, strict=True))
        return {
            "state": self.mode.value,
            "error": None if self.error is None else {"code": self.error.error_code, "message": str(self.error)},
            "streams": len(self.streams),
            "streams_done": len(self.streams) - len(self._unfinished()),
            "handed_out": sum(self._next.values()),
            "positions": -1 if any(min(pair) < 0 for pair in pairs) else sum(count * times for count, times in pairs),
        }


def begin_order(owners: Mapping[str, set[str]], has: Mapping[str, int], concurrent_max: int) -> list[str]:
    """The snapshots of which a worker may get a stream that it does not have, the best first: that with the fewest workers.

    Args:
      owners: the workers of each snapshot that is not over.
      has: the streams that the worker has.
    """
    if len(has) >= concurrent_max:
        return []
    return sorted((path for path in owners if path not in has), key=lambda path: len(owners[path]))
