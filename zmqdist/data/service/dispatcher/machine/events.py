"""The events and effects of the data service's dispatcher machine.

Most events are requests of clients and workers. A request carries a token, which identifies its caller; the machine gives the token back
with the reply. In the docstrings below, `->` gives the value of the reply.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqdist.data.service.dispatcher.machine.records import Terms
from zmqdist.events import Ticked

Token: TypeAlias = Hashable
"""Identifies the caller of a request. The runtime chooses it, and the machine returns it with the reply."""


# -- events without a reply -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker has registered, for the first time or again.

    Attributes:
      name: its job and index.
      address: the address at which readers connect to it.
      incarnation: the number of its process.
      named: True if the worker was started with its index; False if a dispatcher, this one or an earlier one, assigned the index.
    """

    name: str
    address: str
    incarnation: int
    tags: tuple[str, ...] = ()
    named: bool = True


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The connection or the process of a worker has ended. `left`: the worker has stopped in good order and will not come back."""

    incarnation: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class CallerGone:
    """The caller of a request waits for the reply no longer."""

    token: Token


@dataclass(frozen=True, slots=True)
class JournalCommitted:
    """The records of the last CommitJournal are durable."""


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """None of the records of the last CommitJournal is durable; `DataDispatcherMachine.restore` brings back the journal's state."""

    code: int
    message: str


# -- requests of clients ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """Register a dataset. -> (id, whether another pipeline was registered under this id before and is kept)."""

    token: Token
    request: int
    id: str | None
    fingerprint: str
    metadata: str
    on_conflict: str = "keep"


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """The saved position of a reader of portions.

    Attributes:
      state, iteration, client: the numbers of the dispatcher's state, the iteration and the client that saved it.
      cut, lanes: (positions, repetitions, length of a portion) and number of lanes of its iteration. The machine refuses a reader whose
        iteration has other values.
      done: runs of finished steps of its lane.
      open: (number of the portion, elements received) of each unfinished portion.
    """

    state: int
    iteration: int
    client: int
    cut: tuple[int, int, int]
    lanes: int
    done: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Read a dataset once: join the iteration that exists, or create job, iteration and tasks.

    -> (client, iteration, state number, cut); `cut` is None, or (positions, repetitions, length of a portion, lowest unfinished portion) if
    the job is read in portions.

    Attributes:
      request: a number that the client repeats after a lost reply.
      sources: the number of positions of each source in a repetition, for a DYNAMIC job.
      consumer: the client's index among `terms.num_consumers`.
      grain: (positions, repetitions, grain), for a job that is read in portions.
      saved: the position to continue from.
    """

    token: Token
    request: int
    job_name: str | None
    repetition: int
    terms: Terms
    sources: tuple[int, ...] = ()
    unnamed: str = ""
    """The name of the job if `job_name` is None. No other job has it."""
    consumer: int = -1
    grain: tuple[int, int, int] | None = None
    saved: SavedRequest | None = None


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """Wait for news of an iteration's tasks. The machine replies at once if the client's version is old, otherwise at the next change or
    after a while.

    -> (version, tasks, finished, hold, ended, failed). A task is (id, worker's address, address that serves the task, incarnation, tags,
    starting round). `failed` says why the iteration cannot continue. `hold` and `ended` are set in coordinated reads only: `hold` tells the
    consumer to stop, and `ended` is task -> the first round in which the task takes no part. See rounds.py.

    Attributes:
      version: the version of the news that the client has.
      stopped: in coordinated reads, the round that the consumer does not begin before the reply arrives; -1: none.
      lost: in coordinated reads, each task that does not reply -> the first of its rounds that the consumer has not received.
    """

    token: Token
    state: int
    client: int
    version: int
    stopped: int = -1
    lost: dict[int, int] = field(default_factory=dict)
    target_s: float = 0.0
    """The seconds after which the reader could take another element; 0: unknown."""


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    token: Token
    state: int
    client: int


@dataclass(frozen=True, slots=True)
class AcknowledgeRequest:
    """A client's consumer has finished elements. -> None. A mark is (portion, number of elements, whether that is the whole portion)."""

    token: Token
    state: int
    client: int
    marks: tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True, slots=True)
class MissedRequest:
    """A reply of this incarnation of a worker to this client was lost: its elements must be computed again. -> None."""

    token: Token
    state: int
    client: int
    incarnation: int


# -- requests of workers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """Wait for a change of a worker's tasks. The machine replies at once if the worker's tasks differ from those that it should have.

    -> (state number, new tasks, tasks to drop).

    Attributes:
      has: task -> the address at which the worker serves it; "" until the worker serves it.
      done: the tasks that have ended.
    """

    token: Token
    state: int
    incarnation: int
    has: dict[int, str]
    done: tuple[int, ...]
    figures: dict[int, Any] = field(default_factory=dict)
    """Task -> its TaskReport (figures.py)."""


@dataclass(frozen=True, slots=True)
class SplitsRequest:
    """Get up to `count` positions of a source. -> (start, length); length 0: this repetition has none left.

    `request` is a number that the worker repeats after a lost reply.
    """

    token: Token
    state: int
    task: int
    incarnation: int
    source: int
    request: int
    repetition: int
    count: int


@dataclass(frozen=True, slots=True)
class PortionsRequest:
    """Get up to `count` portions to compute for a client. The reply waits until there is a portion.

    -> [(number, repetition, start, length, elements to skip)]; an empty list: no further portion will come.
    """

    token: Token
    state: int
    task: int
    incarnation: int
    client: int
    request: int
    count: int


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The process in which a worker ran a task has died, and its elements are lost. The next process starts after the reply. -> None.

    `how` describes the death. It is "" if the pipeline is not at fault; then no portion is charged.
    """

    token: Token
    state: int
    task: int
    incarnation: int
    how: str


@dataclass(frozen=True, slots=True)
class HandBackRequest:
    """Return positions that a leaving worker has not used. -> None."""

    token: Token
    state: int
    task: int
    incarnation: int
    source: int
    request: int
    repetition: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """A worker finishes its tasks and then leaves for good: it gets no new ones. -> None."""

    token: Token
    incarnation: int


@dataclass(frozen=True, slots=True)
class CompressionRequest:
    """Decide whether compression "AUTO" is off for a dataset. -> the decision, which is `off` of the first request for this dataset."""

    token: Token
    dataset: str
    off: bool


@dataclass(frozen=True, slots=True)
class NoteSnapshotRequest:
    """Record in the journal that a folder holds a distributed snapshot. -> None."""

    token: Token
    path: str


Request: TypeAlias = (
    RegisterRequest
    | OpenRequest
    | WatchRequest
    | ReleaseRequest
    | AcknowledgeRequest
    | MissedRequest
    | WorkRequest
    | SplitsRequest
    | PortionsRequest
    | CrashReport
    | HandBackRequest
    | LeaveRequest
    | CompressionRequest
    | NoteSnapshotRequest
)
Event: TypeAlias = Request | WorkerJoined | WorkerGone | CallerGone | JournalCommitted | JournalFailed | Ticked


# -- effects ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplyToRequest:
    """Reply to a request. `news`: the request waited for any change, so that its caller sends it again when the journal has failed."""

    token: Token
    value: Any
    news: bool = False


@dataclass(frozen=True, slots=True)
class FailRequest:
    token: Token
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class CommitJournal:
    """Write these records, and report JournalCommitted or JournalFailed. The machine returns no other CommitJournal before the report."""

    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Reload:
    """Read the journal, and call `restore` with its content."""


Effect: TypeAlias = ReplyToRequest | FailRequest | CommitJournal | Reload
