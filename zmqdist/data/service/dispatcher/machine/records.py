"""The rows of a data service's durable state, and the records that change them.

Theory
    Jobs read a dataset (a registered pipeline). Each pass of a job over its dataset is an iteration, and each worker has one task of an
    iteration. A client is one reading iterator. With a journal all of it survives a restart: only `DurableState.apply(record)` changes the
    state, so that the journal's records, applied in order, give the same state again.

    A newer version reads the journal of an older one: new fields come at the end, with a default, and tags are never reused.

Not here: the decisions (machine.py), the facts of the moment, such as connections, pending requests and times (tables.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

FIRST_DATASET, FIRST_ITERATION, FIRST_CLIENT, FIRST_TASK, FIRST_JOB = 1000, 2000, 3000, 4000, 5000

OFF, DYNAMIC = 0, 1
"""The numbers of two processing modes; all others assign static shards."""

AT_MOST_ONCE, EXACTLY_ONCE = "at_most_once", "exactly_once"
"""Delivery modes. AT_MOST_ONCE: the elements that a worker held when it died are lost. EXACTLY_ONCE: each element is delivered once."""

MODES = ("OFF", "DYNAMIC", "FILE", "DATA", "FILE_OR_DATA", "HINT")
"""The names of the processing modes, by number."""

INFINITE = -1

PENDING = -1


class Row(msgspec.Struct, array_like=True):
    """A part of the durable state."""


class Record(msgspec.Struct, array_like=True):
    """One change of the durable state."""


# -- parts of the state ---------------------------------------------------------------------------------------------------


class DatasetEntry(Row):
    """A registered pipeline. `metadata` is JSON for its readers; the description of the pipeline is in a file of its own (store.py)."""

    id: str
    fingerprint: str
    metadata: str
    request: int = 0


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """The way in which a job is read. All readers of a job have to give the same terms."""

    dataset: str
    mode: int
    num_consumers: int = 0
    target_workers: str = "AUTO"
    cache: bool = False
    delivery: str = AT_MOST_ONCE
    ordered: bool = False

    @property
    def portioned(self) -> bool:
        """Whether the job is read in portions: see portions.py."""
        return self.delivery == EXACTLY_ONCE or self.ordered

    @property
    def coordinated(self) -> bool:
        """Whether consumers read the job round by round: see rounds.py."""
        return self.num_consumers > 0 and not self.portioned


class JobEntry(Row):
    """A named reading of a dataset, which readers can join, or the reading of a single reader. `anonymous`: the dispatcher made up the
    name, so that no other client can join.
    """

    id: int
    name: str
    terms: Terms
    anonymous: bool = False


class Cursor(Row):
    """The next position of one source of a DYNAMIC iteration.

    Attributes:
      count: the number of positions in a repetition; INFINITE: no end.
      returned: runs (start, length) of the current repetition that leaving workers have returned.
    """

    count: int
    repetition: int = 0
    position: int = 0
    returned: list[tuple[int, int]] = msgspec.field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        """Whether this repetition has no positions left."""
        return self.position == self.count and not self.returned


class Portion(Row):
    """A portion that was given out and is not done.

    Attributes:
      client: the client that it belongs to; 0: none, because its client was released.
      incarnation: the incarnation of the worker that computes it; 0: the portion is to be given out.
      acked: the number of its elements that the client has acknowledged.
      request: number of the request for portions to which this portion was in the reply.
      deaths: processes of live workers that died while they computed it.
      missed: the incarnation that computed it before and whose reply was lost, perhaps because that worker was about to die.
      lost: incarnations that were lost while they computed it -> the worker's name. An incarnation that registers again has not died, and
        is removed.
    """

    client: int
    incarnation: int = 0
    acked: int = 0
    request: int = 0
    deaths: list[str] = msgspec.field(default_factory=list)
    missed: int = 0
    lost: dict[int, str] = msgspec.field(default_factory=dict)

    @property
    def charged(self) -> list[str]:
        """The names of all processes and workers that have died while they computed the portion, as far as the dispatcher knows."""
        return [*self.deaths, *self.lost.values()]


class PortionsEntry(Row):
    """The portions of an iteration; range_math.py says how they change.

    Attributes:
      positions, repetitions: the numbers of the source's positions and repetitions; INFINITE: no end.
      length: the length of a portion, in positions.
      next: for each lane, the step that is given out next.
      skip: for each lane, runs of later steps that are not given out, because an earlier iteration has delivered them.
      open: the portions that were given out and are not done, by number.
      done: client -> runs of the steps of its lane that it has acknowledged as done; also of released clients.
      left: released client -> (number, acknowledged elements) of its unfinished portions.
      failed: why the iteration cannot continue; empty: it can.
    """

    positions: int
    repetitions: int
    length: int
    next: list[int]
    skip: list[list[tuple[int, int]]]
    open: dict[int, Portion] = msgspec.field(default_factory=dict)
    done: dict[int, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    left: dict[int, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    failed: str = ""


class Iteration(Row):
    id: int
    job: int
    repetition: int
    cursors: list[Cursor]
    tasks: list[int] = msgspec.field(default_factory=list)
    clients: list[int] = msgspec.field(default_factory=list)
    finished: bool = False
    collected: bool = False
    portions: PortionsEntry | None = None


class TaskEntry(Row):
    """One worker's part of an iteration.

    Attributes:
      starting_round: in coordinated reads, the first round in which the task takes part; PENDING: the consumers have not agreed on it.
      interrupted: its worker left before the task's end; other tasks compute the rest.
      handed_back: the requests that returned positions, so that a repeated one changes nothing.
      last_given: source -> (request, repetition, start, length), the last reply, which a repeated request gets again.
      incarnation: in coordinated reads, the incarnation of the worker to which the task is bound; 0 in other reads.
      end_round: in coordinated reads, the first round in which the task, once ended, takes no part.
    """

    id: int
    iteration: int
    worker: int
    finished: bool = False
    starting_round: int = 0
    last_given: dict[int, tuple[int, int, int, int]] = msgspec.field(default_factory=dict)
    interrupted: bool = False
    handed_back: list[int] = msgspec.field(default_factory=list)
    incarnation: int = 0
    end_round: int = 0


class ClientEntry(Row):
    id: int
    iteration: int
    request: int
    consumer: int = -1


class WorkerEntry(Row):
    """The place of a worker, which it keeps over restarts of its process.

    Attributes:
      incarnation: the process that has the place, or had it last.
      index: the worker's index in the fixed list; -1 without one.
    """

    number: int
    name: str
    address: str
    incarnation: int
    tags: tuple[str, ...] = ()
    index: int = -1


# -- changes ------------------------------------------------------------------------------------------------------------


class RegisterDataset(Record, tag=1):
    dataset: DatasetEntry


class PlaceWorker(Record, tag=2):
    """A new worker gets a place, or another incarnation takes an existing one."""

    worker: WorkerEntry


class RemoveWorker(Record, tag=3):
    number: int


class CreateJob(Record, tag=4):
    job: JobEntry


class CreateIteration(Record, tag=5):
    iteration: Iteration


class CreateTask(Record, tag=6):
    task: TaskEntry


class FinishTask(Record, tag=7):
    task: int
    interrupted: bool = False
    end_round: int = 0


class FinishIteration(Record, tag=8):
    iteration: int


class AcquireClient(Record, tag=9):
    client: ClientEntry


class ReleaseClient(Record, tag=10):
    client: int


class CollectIteration(Record, tag=11):
    """An iteration without clients was given up: its tasks are dropped, and a later client of the job begins a new iteration."""

    iteration: int


class GiveSplits(Record, tag=12):
    """A task gets positions of a source. `length` 0: the source has none left in this repetition."""

    task: int
    source: int
    request: int
    repetition: int
    start: int
    length: int


class ReturnSplits(Record, tag=13):
    """A leaving worker has returned positions that it has not used."""

    task: int
    source: int
    repetition: int
    runs: list[tuple[int, int]]
    request: int = 0


class StartTask(Record, tag=40):
    """All consumers have agreed on the first round of a pending task."""

    task: int
    round: int


class DecideCompression(Record, tag=14):
    """Whether compression "AUTO" is off for a dataset, as the first request decided."""

    dataset: str
    off: bool


class GivePortions(Record, tag=30):
    """An incarnation of a worker computes these portions for a client, in this order."""

    client: int
    incarnation: int
    request: int
    numbers: list[int]


class Acknowledge(Record, tag=31):
    """A client's consumer has finished elements of portions: (number, elements, whether that is the whole portion)."""

    client: int
    marks: list[tuple[int, int, bool]]


class LosePortions(Record, tag=32):
    """The portions that an incarnation of a worker was computing are to be given out again.

    Attributes:
      client: only the portions of this client; 0: those of all clients.
      died: the name of the dead process, with which the portions are charged; empty: there is no charge.
      crashed: a process of the worker has died, and the worker is alive.
    """

    iteration: int
    incarnation: int
    client: int = 0
    died: str = ""
    crashed: bool = False


class FailPortions(Record, tag=33):
    iteration: int
    why: str


class TakeOver(Record, tag=34):
    """A client takes over all portions of another client, which is released."""

    client: int
    old: int


class RestoreSaved(Record, tag=35):
    """A client continues from a saved state of this iteration. `done`: runs of its finished steps. `open`: (number of the portion, elements
    received) of each unfinished portion.
    """

    client: int
    done: list[tuple[int, int]]
    open: list[tuple[int, int]]


class SkipSaved(Record, tag=36):
    """A client continues from a saved state of another iteration, whose finished elements are skipped."""

    client: int
    done: list[tuple[int, int]]
    open: list[tuple[int, int]]


class RevokeDeath(Record, tag=37):
    """A lost incarnation has registered again: it had only lost its connection, and its portions are charged no longer."""

    iteration: int
    incarnation: int


class BeginSnapshot(Record, tag=50):
    """The folder of a distributed snapshot exists. All else about the snapshot is in the folder."""

    path: str


Change: TypeAlias = (
    RegisterDataset
    | PlaceWorker
    | RemoveWorker
    | CreateJob
    | CreateIteration
    | CreateTask
    | FinishTask
    | FinishIteration
    | AcquireClient
    | ReleaseClient
    | CollectIteration
    | GiveSplits
    | ReturnSplits
    | DecideCompression
    | GivePortions
    | Acknowledge
    | LosePortions
    | FailPortions
    | TakeOver
    | RestoreSaved
    | SkipSaved
    | RevokeDeath
    | StartTask
    | BeginSnapshot
)


def encode(value: Any) -> bytes:
    """Return a record or a whole state as bytes for the journal."""
    return msgspec.msgpack.encode(value)


_changes = msgspec.msgpack.Decoder(Change)


def decode(data: bytes) -> Change:
    """Return the record that `encode` encoded. Raises msgspec.DecodeError."""
    change: Change = _changes.decode(data)
    return change
