"""What the dispatcher of a data service knows for good, and the records that change it.

Theory
    A dataset (a registered pipeline) is read by jobs, each time a job is read is an iteration, and each worker has one task of an
    iteration. A client is one reading iterator. Everything here survives a restart when there is a journal: `DurableState.apply(record)` is
    the only thing that changes it, so that the journal's records in their order give the same state again.

    A journal written by an older version is read by a newer one: fields are added at the end with a default, tags are never reused.

Not here: what is decided (machine.py), what is known of the moment only (connections, who waits, times).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

FIRST_DATASET, FIRST_ITERATION, FIRST_CLIENT, FIRST_TASK, FIRST_JOB = 1000, 2000, 3000, 4000, 5000

OFF, DYNAMIC = 0, 1
"""Numbers of two processing modes; the others share statically."""

AT_MOST_ONCE, EXACTLY_ONCE = "at_most_once", "exactly_once"
"""Of what a worker had when it died nothing comes any more; or each element comes once."""
MODES = ("OFF", "DYNAMIC", "FILE", "DATA", "FILE_OR_DATA", "HINT")
"""Names by number."""

INFINITE = -1

PENDING = -1


class Row(msgspec.Struct, array_like=True):
    """Part of the state."""


class Record(msgspec.Struct, array_like=True):
    """One change of the state."""


# -- parts of the state ---------------------------------------------------------------------------------------------------


class DatasetEntry(Row):
    """A registered pipeline. `metadata` is what readers need to know of it, JSON; the description itself is in a file."""

    id: str
    fingerprint: str
    metadata: str
    request: int = 0


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """How a job is read: a second one of the same name has to have the same."""

    dataset: str
    mode: int
    num_consumers: int = 0
    target_workers: str = "AUTO"
    cache: bool = False
    delivery: str = AT_MOST_ONCE
    ordered: bool = False

    @property
    def portioned(self) -> bool:
        """Whether it is read in portions: portions.py."""
        return self.delivery == EXACTLY_ONCE or self.ordered

    @property
    def coordinated(self) -> bool:
        """Whether it is read by rounds: rounds.py."""
        return self.num_consumers > 0 and not self.portioned


class JobEntry(Row):
    """`anonymous`: it got its name here, so that nobody else can join it."""

    id: int
    name: str
    terms: Terms
    anonymous: bool = False


class Cursor(Row):
    """Where dealing out the positions of one source has come to.

    Attributes:
      count: positions in a repetition; INFINITE without end.
      returned: runs (start, length) that a worker gave back, of the present repetition.
    """

    count: int
    repetition: int = 0
    position: int = 0
    returned: list[tuple[int, int]] = msgspec.field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        """Whether this repetition has nothing left."""
        return self.position == self.count and not self.returned


class Portion(Row):
    """A portion that somebody has begun and that is not done.

    Attributes:
      client: whose it is; 0: nobody's any more, it was left.
      life: of the worker that computes it; 0: nobody, it is to be given out.
      acked: elements of it that the client has acknowledged.
      request: the question that it was the answer to.
      deaths: processes of workers that ended while they computed it; the workers live on.
      missed: the life that computed it before, whose answer did not arrive: perhaps because it was about to be lost.
      lost: lives that were lost while they had it -> the worker's name. Only that of a life which does not come back was a death.
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
        """Names of what has died over it, as far as is known."""
        return [*self.deaths, *self.lost.values()]


class PortionsEntry(Row):
    """How an iteration is cut, and where it has come to: range_math.py.

    Attributes:
      positions, repetitions: of the source; INFINITE without end.
      length: of a portion, in positions.
      next: of each lane, the step that is given out next.
      skip: of each lane, later steps that are not given out: an earlier iteration had them.
      open: by number.
      done: client -> steps of its lane that it has acknowledged as done; of clients that have gone, too.
      left: client -> (number, acknowledged elements) of what it has left to others.
      failed: why the iteration cannot go on.
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
      starting_round: of coordinated reads; PENDING: a new worker's, which no round has yet.
      interrupted: its worker has left before its end: what was to come of it others do.
      handed: questions that handed positions back, for one that is repeated.
      last_given: what each source was given last: (request, repetition, start, length), for a question that is repeated.
      life: of the worker that it belongs to, in coordinated reads.
      end_round: the first round of coordinated reads that it is not in any more, once it has ended.
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
    """A place for a worker; `incarnation` is the process that has it or had it, `index` its place in the fixed list, -1 without one."""

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
    """A new worker, or another life at the place."""

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
    """Nobody has read it for long: its tasks are gone, and who comes later gets a new one."""

    iteration: int


class GiveSplits(Record, tag=12):
    """`length` 0: the source has no more in this repetition."""

    task: int
    source: int
    request: int
    repetition: int
    start: int
    length: int


class ReturnSplits(Record, tag=13):
    """A worker that leaves has not used these."""

    task: int
    source: int
    repetition: int
    runs: list[tuple[int, int]]
    request: int = 0


class StartTask(Record, tag=40):
    """All consumers have agreed at which round a pending task begins."""

    task: int
    round: int


class DecideCompression(Record, tag=14):
    """Whether compression "AUTO" is off for a dataset: the first who asked decided."""

    dataset: str
    off: bool


class GivePortions(Record, tag=30):
    """A worker's life computes these for a client, in this order."""

    client: int
    incarnation: int
    request: int
    numbers: list[int]


class Acknowledge(Record, tag=31):
    """A client has had so many elements of a portion: (number, elements, whether that is all)."""

    client: int
    marks: list[tuple[int, int, bool]]


class LosePortions(Record, tag=32):
    """What a life of a worker computed is to be given out again.

    Attributes:
      client: of this client only; 0: of all.
      died: the worker's name, where they are charged with its death.
      crashed: a process of the worker has died; the life goes on.
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
    """A client has all that was another's, which is released."""

    client: int
    old: int


class RestoreSaved(Record, tag=35):
    """What a client has is what a saved state says: steps that are done, and (number, elements) of those that are not."""

    client: int
    done: list[tuple[int, int]]
    open: list[tuple[int, int]]


class SkipSaved(Record, tag=36):
    """A client begins with what a saved state of another iteration says."""

    client: int
    done: list[tuple[int, int]]
    open: list[tuple[int, int]]


class RevokeDeath(Record, tag=37):
    """A life that was lost is there again: it lost its connection, and nothing was wrong with its portions."""

    iteration: int
    incarnation: int


class BeginSnapshot(Record, tag=50):
    """A snapshot's folder is there; what is in it tells the rest."""

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
    """A record or a whole state, for the journal."""
    return msgspec.msgpack.encode(value)


_changes = msgspec.msgpack.Decoder(Change)


def decode(data: bytes) -> Change:
    """A record of the journal. Raises msgspec.DecodeError."""
    change: Change = _changes.decode(data)
    return change
