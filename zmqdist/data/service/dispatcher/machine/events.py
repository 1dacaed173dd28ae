"""What the machine of a data service is told and asked, and what it has done about it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqdist.data.service.dispatcher.machine.records import Terms
from zmqdist.events import Ticked

Token: TypeAlias = Hashable
"""Who asks: given back with the answer."""


# -- what has happened ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """`incarnation` is the incarnation of its process, `name` its job and index, `address` where others find it.

    `named`: the index is the worker's own; else a dispatcher gave it, this one or one before.
    """

    name: str
    address: str
    incarnation: int
    tags: tuple[str, ...] = ()
    named: bool = True


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Its connection or its process has ended. `left`: in good order, and it will not be back."""

    incarnation: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class CallerGone:
    """Nobody waits for the answer any more."""

    token: Token


@dataclass(frozen=True, slots=True)
class JournalCommitted:
    """The records that were told last are durable."""


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """They are not, nor is anything of theirs; the state is what the journal has (`DataDispatcherMachine.restore`)."""

    code: int
    message: str


# -- questions of clients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """-> (id, whether the pipeline under this id is another one, which is kept)."""

    token: Token
    request: int
    id: str | None
    fingerprint: str
    metadata: str
    on_conflict: str = "keep"


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """Where a reader was that reads in portions: `done` steps of its lane, (number, elements) of `open` ones.

    `cut` and `lanes` are those of its iteration; a state of another data set does not fit.
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
    """Read a dataset once: joins the iteration that exists, or makes job, iteration and tasks.

    -> (client, iteration, state number, cut); `cut` is (positions, repetitions, length, lowest open number) where it is read in portions.

    Args:
      request: repeated after a lost answer.
      sources: positions of each source in a repetition, for a job that is dealt out.
      consumer: which of `terms.num_consumers`.
      grain: (positions, repetitions, grain), for a job that is read in portions.
      saved: go on there.
    """

    token: Token
    request: int
    job_name: str | None
    repetition: int
    terms: Terms
    sources: tuple[int, ...] = ()
    unnamed: str = ""
    """A name that nobody has, for a job without one."""
    consumer: int = -1
    grain: tuple[int, int, int] | None = None
    saved: SavedRequest | None = None


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """What a client reads from, when that is not what it knows, else when it changes or after a while.

    -> (version, tasks, finished, hold, ended, failed); a task is (id, worker's address, where it serves, life, tags, starting round),
    `failed` why the iteration cannot go on.
    `hold` and `ended` are of coordinated reads: whether to stop, and task -> the first round that it is not in. See rounds.py.

    Args:
      stopped: the round that it does not begin before this is answered.
      lost: tasks that do not answer -> the first round that it has not received.
    """

    token: Token
    state: int
    client: int
    version: int
    stopped: int = -1
    lost: dict[int, int] = field(default_factory=dict)
    target_s: float = 0.0
    """It could take an element each so many seconds; 0: not known."""


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    token: Token
    state: int
    client: int


@dataclass(frozen=True, slots=True)
class AcknowledgeRequest:
    """A client has had so many elements of portions: (number, elements, whether that is all)."""

    token: Token
    state: int
    client: int
    marks: tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True, slots=True)
class MissedRequest:
    """An answer of this life of a worker to this client was lost: what is missing must be computed again."""

    token: Token
    state: int
    client: int
    incarnation: int


# -- questions of workers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """What a worker should do, when that is not what it does, else when it changes.

    -> (state number, new tasks, tasks to drop). `has`: task -> where it serves, "" before it does.
    """

    token: Token
    state: int
    incarnation: int
    has: dict[int, str]
    done: tuple[int, ...]
    figures: dict[int, Any] = field(default_factory=dict)
    """Task -> its Report (figures.py)."""


@dataclass(frozen=True, slots=True)
class SplitsRequest:
    """Up to `count` next positions of a source. -> (start, length); length 0: none in this repetition."""

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
    """Up to `count` portions to compute for a client; answered when there are some.

    -> [(number, repetition, start, length, elements to leave out)]; empty: there will be none any more.
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
    """The process that a worker had for a task has died, and no other is there yet: what it computed is lost.

    -> None. `how` it died; "": through no fault of its own, and nothing is charged.
    """

    token: Token
    state: int
    task: int
    incarnation: int
    how: str


@dataclass(frozen=True, slots=True)
class HandBackRequest:
    """Positions that a worker which leaves was given and has not used."""

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
    """A worker ends what it has and goes for good: nothing new for it."""

    token: Token
    incarnation: int


@dataclass(frozen=True, slots=True)
class CompressionRequest:
    """-> whether AUTO is off for this dataset; `off` is what the asker would like."""

    token: Token
    dataset: str
    off: bool


@dataclass(frozen=True, slots=True)
class NoteSnapshotRequest:
    """-> None, when it is known for good that there is a snapshot."""

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


# -- what must be done ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplyToRequest:
    """`news`: the question stands for all that may change: when the journal fails it is asked again, and nobody is at fault."""

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
    """Write these down; then say JournalCommitted or JournalFailed. The next ones come after that."""

    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Reload:
    """Call `restore` with what the journal has."""


Effect: TypeAlias = ReplyToRequest | FailRequest | CommitJournal | Reload
