"""The events and effects of the data service's dispatcher machine.

Most events are requests of clients and workers. A request has a token, which identifies the caller.
The effect that replies to the request has the same token. In the docstrings below, the value of the
reply follows `->`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from zmqdist.data.service.dispatcher.machine.records import Number, Seconds, Terms
from zmqdist.events import Ticked

Token: TypeAlias = Hashable
"""Identifies the caller of a request. The runtime chooses the token, and the machine puts it into
the effect that replies to the request."""


# -- events without a reply ------------------------------------------------------------------------


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker has registered, for the first time or again.

    Attributes:
      name: the worker's job and index, "worker:0".
      address: the address at which readers connect to it.
      incarnation: the incarnation of its process.
      named: True if the worker was started with its index. False if this dispatcher or an earlier
        dispatcher assigned the index.
    """

    name: str
    address: str
    incarnation: int
    tags: tuple[str, ...] = ()
    named: bool = True


class WorkerGone(msgspec.Struct, frozen=True):
    """The connection or the process of a worker has ended. `left` tells whether the worker has
    stopped in good order and will not come back.
    """

    incarnation: int
    left: bool = False


class CallerGone(msgspec.Struct, frozen=True):
    """The caller of a request no longer waits for the reply."""

    token: Token


class JournalCommitted(msgspec.Struct, frozen=True):
    """The records of the last CommitJournal are durable."""


class JournalFailed(msgspec.Struct, frozen=True):
    """None of the records of the last CommitJournal is durable. The runtime then calls
    `DataDispatcherMachine.restore` with the journal's content.
    """

    code: int
    message: str


# -- requests of clients ---------------------------------------------------------------------------


class CallerRequest(msgspec.Struct, frozen=True):
    """Base class of all requests."""

    token: Token


class ClientRequest(CallerRequest, frozen=True):
    """Base class of the requests of one client, for the durable state with the number `state`."""

    state: Number
    client: Number


class RegisterRequest(CallerRequest, frozen=True):
    """Register a dataset. -> (id, whether another pipeline has this id already and keeps it because
    `on_conflict` is "keep")."""

    request: int
    id: str | None
    fingerprint: str
    metadata: str
    on_conflict: str = "keep"


class SavedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The saved position of a reader of portions. A client sends it in an OpenRequest, to continue
    from this position.

    Attributes:
      state: the random number of the durable state of the dispatcher that served the reader.
      iteration, client: the numbers of the iteration, and of the client that saved the position.
      cut: (positions, repetitions, length of a portion) of the iteration.
      lanes: the number of lanes of the iteration. The machine refuses a reader whose iteration has
        another `cut` or `lanes`.
      done_runs: the finished portions of the client's lane, as runs of steps (records.py).
      open: (number of the portion, number of elements received) of each unfinished portion.
    """

    state: Number
    iteration: Number
    client: Number
    cut: tuple[Number, Number, Number]
    lanes: Number
    done_runs: tuple[tuple[Number, Number], ...]
    open: tuple[tuple[Number, Number], ...]


class OpenRequest(CallerRequest, frozen=True):
    """Begin to read one repetition of a dataset. The machine has the client join the existing
    iteration, or creates the job, the iteration and its tasks.

    -> (client, iteration, random number of the dispatcher's durable state, cut). If the job is read
    in portions, `cut` is (positions, repetitions, length of a portion, lowest unfinished portion of
    the client's lane); otherwise `cut` is None.

    Attributes:
      request: the number of the request. The client sends the same number again after a lost reply.
      sources: for a DYNAMIC job, the number of positions of each source in a repetition.
      consumer: the client's index, which is less than `terms.num_consumers`.
      grain: (positions, repetitions, grain) for a job that is read in portions.
      saved: the position to continue from.
      reader: see `ClientEntry.reader`.
      again: whether the client continues, in a later pass, after a position that was saved in an
        earlier pass. It then gets again what earlier clients of the same reader have acknowledged
        in this pass.
    """

    request: int
    job_name: str | None
    repetition: int
    terms: Terms
    sources: tuple[int, ...] = ()
    unnamed: str = ""
    """The name that the job gets if `job_name` is None. No other job has this name."""
    consumer: int = -1
    grain: tuple[int, int, int] | None = None
    saved: SavedRequest | None = None
    reader: int = 0
    again: bool = False


class WatchRequest(ClientRequest, frozen=True):
    """Wait for news of an iteration's tasks. The machine replies at once if there is news since
    `version`, and otherwise at the next change or after `watch_s` seconds (clients.py).

    -> (version, tasks, finished, hold, ended, failed). A task is (id, worker's address, address
    that serves the task, incarnation, tags, starting round). `finished` tells whether the
    iteration, or for a reader of portions the client's lane, has ended. `failed` is the reason why
    the iteration cannot continue, or empty. `hold` and `ended` are set in coordinated reads only
    (rounds.py): `hold` tells the consumer to stop at its next round, and `ended` maps a task to the
    first round in which the task takes no part.

    Attributes:
      version: the version of the news that the client received last.
      stop_round: in coordinated reads, the round that the consumer does not begin before the reply
        arrives; -1 if the consumer does not stop.
      lost: in coordinated reads, a dict: for each task that does not reply, the first round that
        the consumer has not received from it.
    """

    version: Number
    target_s: Seconds = 0.0
    """The seconds that the reader's program needs for an element; 0 if unknown."""
    stop_round: Number = -1
    lost: dict[Number, Number] = {}


class ReleaseRequest(ClientRequest, frozen=True):
    """Release a client whose reader was closed. -> None."""


class AcknowledgeRequest(ClientRequest, frozen=True):
    """Report which elements a client's consumer has finished. `marks` has, for each portion,
    (number of the portion, number of finished elements, whether the portion is done). -> None.
    """

    marks: tuple[tuple[Number, Number, bool], ...]


class MissedRequest(ClientRequest, frozen=True):
    """Report that a worker's reply to a client was lost, so that the elements in the reply must be
    computed again. -> None."""

    incarnation: Number


# -- requests of workers ---------------------------------------------------------------------------


class TaskRequest(CallerRequest, frozen=True):
    """Base class of the requests of one task, for the durable state with the number `state`.
    `incarnation` is that of the task's worker."""

    state: Number
    task: Number
    incarnation: Number


class TaskReport(NamedTuple):
    """The figures of one task since it began.

    Attributes:
      elements, nbytes: the number of elements that readers have taken, and the sum of their bytes.
      buffered, room: the number of elements that wait for readers, and the largest number that may
        wait.
      element_s: seconds of work for one element; 0 if unknown.
      room_wait_s: seconds for which the task has waited for readers to take elements.
      element_wait_s: seconds for which readers have waited for an element of the task.
    """

    elements: int = 0
    nbytes: int = 0
    buffered: int = 0
    room: int = 0
    element_s: float = 0.0
    room_wait_s: float = 0.0
    element_wait_s: float = 0.0


class WorkRequest(CallerRequest, frozen=True):
    """Wait for a change of a worker's tasks. The machine replies at once if the worker lacks a task
    or has to drop one.

    -> (random number of the dispatcher's durable state, new tasks, tasks to drop).

    Attributes:
      has: maps each task of the worker to the address at which the worker serves the task; "" until
        the worker serves it.
      finished: the tasks that have ended.
    """

    state: Number
    incarnation: Number
    has: dict[Number, str]
    finished: tuple[Number, ...]
    figures: dict[Number, TaskReport] = {}


class SplitsRequest(TaskRequest, frozen=True):
    """Get up to `count` positions of a source. -> (start, length). A length of 0 means that this
    repetition has no positions left.

    `request` is the number of the request. The worker sends the same number again after a lost
    reply.
    """

    source: Number
    request: Number
    repetition: Number
    count: Number


class PortionsRequest(TaskRequest, frozen=True):
    """Get up to `count` portions to compute for a client. The machine replies when it has a portion
    for the client.

    -> [(number, repetition, start, length, elements to skip)]. An empty list means that no further
    portion will come for the client, or that a newer request of this worker for the client has
    replaced this request.
    """

    client: Number
    request: Number
    count: Number


class CrashReport(TaskRequest, frozen=True):
    """Report that the process in which a worker ran a task has died, and that the elements in the
    process are lost. The worker starts the next process after the reply. -> None.

    `how` describes the death of the process. It is "" if the pipeline did not cause the death. Then
    no portion is charged with the death.
    """

    how: str


class HandBackRequest(TaskRequest, frozen=True):
    """Hand back positions that a leaving worker has not used. -> None."""

    source: Number
    request: Number
    repetition: Number
    runs: tuple[tuple[Number, Number], ...]


class LeaveRequest(CallerRequest, frozen=True):
    """Announce that a worker finishes its tasks and then leaves for good. The machine gives it no
    further tasks. -> None."""

    incarnation: Number


class CompressionRequest(CallerRequest, frozen=True):
    """Ask whether compression "AUTO" is off for a dataset. The field `off` of the first request for
    a dataset decides for all later requests. -> whether "AUTO" is off.
    """

    dataset: str
    off: bool


class NoteSnapshotRequest(CallerRequest, frozen=True):
    """Record in the journal that a folder holds a distributed snapshot. -> None."""

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
Event: TypeAlias = (
    Request | WorkerJoined | WorkerGone | CallerGone | JournalCommitted | JournalFailed | Ticked
)


# -- effects ---------------------------------------------------------------------------------------


class ReplyToRequest(msgspec.Struct, frozen=True):
    """Reply to a request. `news` is True for the reply to a WatchRequest or WorkRequest. If the
    journal fails before such a reply is sent, the caller has to send its request again.
    """

    token: Token
    value: Any
    news: bool = False


class FailRequest(msgspec.Struct, frozen=True):
    token: Token
    code: int
    message: str


class CommitJournal(msgspec.Struct, frozen=True):
    """Write these records to the journal, and then pass the machine JournalCommitted or
    JournalFailed. Until then the machine returns no other CommitJournal.
    """

    records: tuple[bytes, ...]


class Reload(msgspec.Struct, frozen=True):
    """Read the journal, and call `DataDispatcherMachine.restore` with its content."""


Effect: TypeAlias = ReplyToRequest | FailRequest | CommitJournal | Reload
