"""The rows of a data service's durable state, and the records that change them.

Theory
    A job reads a dataset, which is a registered pipeline. Each pass of a job over its dataset is an
    iteration, and each worker has one task of an iteration. A client is an iterator in a program
    that reads an iteration. With a journal, the state survives a restart of the dispatcher. Only
    `DurableState.apply(record)` changes the state, so that applying the journal's records in order
    gives the same state again.

    A newer version of zmqdist has to read the journal of an older version. Therefore new fields are
    added at the end, with a default, and tags of records are never reused.

Not here: the decisions (machine.py), and facts that are not durable, such as connections, pending
requests and times (tables.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from itertools import chain
from math import inf
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.transitions import enter

FIRST_DATASET, FIRST_ITERATION, FIRST_CLIENT, FIRST_TASK, FIRST_JOB = 1000, 2000, 3000, 4000, 5000

OFF, DYNAMIC = 0, 1
"""The numbers of two processing modes. All other modes assign static shards."""

AT_MOST_ONCE, EXACTLY_ONCE = "at_most_once", "exactly_once"
"""Delivery modes. With AT_MOST_ONCE, the elements that a worker held when it died are lost. With
EXACTLY_ONCE, each element is delivered once."""

MODES = ("OFF", "DYNAMIC", "FILE", "DATA", "FILE_OR_DATA", "HINT")
"""The names of the processing modes, by number."""

INFINITE = -1

PORTIONS_WANTED: Final = 256
LENGTH_MAX: Final = 1024
"""The largest number of positions in a portion, unless the grain is larger. With longer portions,
more work would have to be done again after the loss of a worker."""

ENDLESS_LENGTH: Final = 256


Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""A count or an identifying number that a peer sends. -1 means no number or no end."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class IterationState(enum.Enum):
    """The state of an iteration. The numbers are in journals."""

    OPEN = 0
    """Clients read it, or may come."""
    FINISHED = 1
    """All its elements were given to clients."""
    COLLECTED = 2
    """The dispatcher has dropped it, because it had no client."""


ITERATION_TRANSITIONS: Final[Mapping[IterationState, frozenset[IterationState]]] = {
    IterationState.OPEN: frozenset({IterationState.FINISHED, IterationState.COLLECTED}),
    # a client continues from a state that it has saved before the end
    IterationState.FINISHED: frozenset({IterationState.OPEN}),
    IterationState.COLLECTED: frozenset(),
}


class DataTaskState(enum.Enum):
    """The state of a data task in the dispatcher. The numbers are in journals."""

    PENDING = 0
    """In coordinated reads, its consumers have not agreed on its first round yet."""
    RUNNING = 1
    """Its worker computes its elements."""
    FINISHED = 2
    """Its last element was given to a client."""
    INTERRUPTED = 3
    """It ended early, because its worker left. Other tasks compute the rest."""


DATA_TASK_TRANSITIONS: Final[Mapping[DataTaskState, frozenset[DataTaskState]]] = {
    DataTaskState.PENDING: frozenset({DataTaskState.RUNNING, DataTaskState.INTERRUPTED}),
    DataTaskState.RUNNING: frozenset({DataTaskState.FINISHED, DataTaskState.INTERRUPTED}),
    DataTaskState.FINISHED: frozenset(),
    DataTaskState.INTERRUPTED: frozenset(),
}

ENDED_TASKS: Final = frozenset({DataTaskState.FINISHED, DataTaskState.INTERRUPTED})


class PortionState(enum.Enum):
    """The state of a portion that was given out and is not done."""

    FREE = enum.auto()
    """Its client was released: any client of its lane may get it."""
    WAITING = enum.auto()
    """It belongs to a client, and a worker has to compute it."""
    COMPUTED = enum.auto()
    """A worker computes it for its client."""


PORTION_TRANSITIONS: Final[Mapping[PortionState, frozenset[PortionState]]] = {
    PortionState.FREE: frozenset({PortionState.COMPUTED}),
    # another client may take over a waiting portion
    PortionState.WAITING: frozenset(PortionState),
    PortionState.COMPUTED: frozenset({PortionState.FREE, PortionState.WAITING}),
}


# gc=False: rows hold no cycles, and msgspec before 0.21 ends the process where a `__post_init__` of
# a tracked struct sets a field while the struct is decoded.
class Row(msgspec.Struct, array_like=True, gc=False):
    """Base class of the rows of the durable state."""


class Record(msgspec.Struct, array_like=True):
    """Base class of the records. A record is one change of the durable state."""


# -- parts of the state ----------------------------------------------------------------------------


class DatasetEntry(Row):
    """A registered pipeline. `metadata` is JSON for the pipeline's readers. The description of the
    pipeline is in the store (store.py)."""

    id: str
    fingerprint: str
    metadata: str
    request: int = 0


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """The terms on which a job is read. All readers of a job have to pass equal terms, except for
    the dataset. Their datasets must have elements of the same structure and compression, and may
    differ otherwise.
    """

    dataset: str
    mode: int
    num_consumers: int = 0
    target_workers: str = "AUTO"
    cache: bool = False
    delivery: str = AT_MOST_ONCE
    ordered: bool = False

    @property
    def portioned(self) -> bool:
        """Whether the job is read in portions (portions.py)."""
        return self.delivery == EXACTLY_ONCE or self.ordered

    @property
    def coordinated(self) -> bool:
        """Whether the job is a coordinated read, in which consumers read round by round
        (rounds.py)."""
        return self.num_consumers > 0 and not self.portioned


class JobEntry(Row):
    """A job: the reading of a dataset under a name. If `anonymous`, the dispatcher invented the
    name, so that only one client can read the job. Otherwise all readers that use the name join the
    job.
    """

    id: int
    name: str
    terms: Terms
    anonymous: bool = False


class Cursor(Row):
    """The next position of one source of a DYNAMIC iteration.

    Attributes:
      count: the number of positions in a repetition; INFINITE if the source has no end.
      returned: runs (start, length) of the current repetition that leaving workers have returned.
    """

    count: int
    repetition: int = 0
    position: int = 0
    returned: list[tuple[int, int]] = msgspec.field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        """Whether the current repetition of the source has no positions left to give out."""
        return self.position == self.count and not self.returned


class Portion(Row):
    """A portion that was given out and is not done.

    Attributes:
      client: the client to which the portion belongs; 0 if its client was released.
      incarnation: the incarnation of the worker that computes the portion; 0 if the portion has to
        be given out.
      acked: the number of elements of the portion that the client has acknowledged.
      request: the number of the request for portions whose reply contained this portion.
      deaths: the names of processes that died while they computed the portion, although their
        workers stayed alive.
      lost: maps each incarnation that was lost while it computed the portion to the worker's name.
        An incarnation that registers again has not died, and is removed.
      missed: the incarnations from which the portion was freed because a reply of theirs was lost,
        and which may still be computing it. The portion is charged when one of them dies.
      unused: a field of earlier versions.
    """

    client: int
    incarnation: int = 0
    acked: int = 0
    request: int = 0
    deaths: list[str] = msgspec.field(default_factory=list)
    unused: int = 0
    lost: dict[int, str] = msgspec.field(default_factory=dict)
    missed: list[int] = msgspec.field(default_factory=list)

    @property
    def state(self) -> PortionState:
        if self.incarnation:
            return PortionState.COMPUTED
        return PortionState.WAITING if self.client else PortionState.FREE

    def pass_to(self, client: int, incarnation: int = 0, request: int = 0) -> None:
        """Give the portion to a client, and to the worker that computes it. 0 is none."""
        before = self.state
        self.client, self.incarnation, self.request = client, incarnation, request
        enter(PORTION_TRANSITIONS, before, self.state, "a portion of client", client)

    @property
    def charged(self) -> list[str]:
        """The names of all processes and workers whose deaths are charged to the portion."""
        return [*self.deaths, *self.lost.values()]


class PortionsEntry(Row):
    """The portions of an iteration.

    A portion is a run of positions of one repetition of the only source. Portions are numbered 0,
    1, 2, ... in the order of the data. The length of a portion depends on the dataset alone, so
    that the number of workers changes neither the order of the elements nor the share of each
    consumer.

    With consumers, portion `n` is step `n // consumers` of lane `n % consumers`. Without consumers
    there is one lane. A client reads one lane. The finished steps of a lane are stored as runs,
    because a client that reads its lane alone finishes steps almost in order, and so there are few
    runs.

    Attributes:
      positions, repetitions: the number of positions of the source, and the number of its
        repetitions; INFINITE if there is no end.
      length: the length of a portion, in positions.
      next: for each lane, the first step that was not given out yet.
      skip: for each lane, runs of steps that `next` passes over: steps that an earlier iteration
        has delivered, and steps whose portions were put into `open` from a saved state of an
        earlier iteration.
      open: the portions that were given out and are not done, by number.
      finished_runs: maps each client, also a released client, to runs of the steps of its lane that it has
        acknowledged as done.
      left: maps each released client to (number, acknowledged elements) of its unfinished portions.
      failed: the reason why the iteration cannot continue; empty if it can.
      readers: maps each client, also a released client, to `ClientEntry.reader`.
    """

    positions: int
    repetitions: int
    length: int
    next: list[int]
    skip: list[list[tuple[int, int]]]
    open: dict[int, Portion] = msgspec.field(default_factory=dict)
    finished_runs: dict[int, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    left: dict[int, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    failed: str = ""
    readers: dict[int, int] = msgspec.field(default_factory=dict)

    @classmethod
    def cut(cls, positions: int, repetitions: int, grain: int, lanes: int) -> PortionsEntry:
        """Return the row for the portions of a new iteration. The length of a portion is a multiple
        of `grain`."""
        goal = (
            ENDLESS_LENGTH
            if positions == INFINITE
            else min(LENGTH_MAX, positions // PORTIONS_WANTED)
        )
        length = max(1, goal // grain) * grain
        return cls(positions, repetitions, length, [0] * lanes, [[] for _ in range(lanes)])

    def total(self) -> float:
        """Return the number of portions; `inf` if the data has no end."""
        if 0 in (self.positions, self.repetitions):
            return 0
        if INFINITE in (self.positions, self.repetitions):
            return inf
        return self._in_repetition() * self.repetitions

    def _in_repetition(self) -> int:
        return -(-self.positions // self.length)

    def place_of(self, number: int) -> tuple[int, int, int]:
        """Return (repetition, first position, number of positions) of a portion."""
        if self.positions == INFINITE:
            return 0, number * self.length, self.length
        repetition, within = divmod(number, self._in_repetition())
        start = within * self.length
        return repetition, start, min(self.length, self.positions - start)

    def positions_left(self) -> int | None:
        """Return how many positions have not been given out yet; None if the data has no end."""
        # endless data have no end to count from
        last = self.total()
        if last in (0, inf):
            return None if last else 0
        lanes, count = len(self.next), self._in_repetition()

        def size(lane: int, start: int, end: int) -> int:
            """Return the number of positions in a run of steps."""
            # The last portion of a repetition may be shorter. It is in the same lane again after
            # `lanes` repetitions, which are `count` steps.
            shorter = (
                tail // lanes
                for tail in range(count - 1, count * lanes, count)
                if tail % lanes == lane
            )
            cut_off = sum(
                len(range(step, end, count)) - len(range(step, start, count)) for step in shorter
            )
            return (end - start) * self.length - cut_off * (count * self.length - self.positions)

        left = 0
        for lane, step in enumerate(self.next):
            left += size(lane, step, max(step, len(range(lane, int(last), lanes))))
            left -= sum(
                size(lane, max(start, step), end) for start, end in self.skip[lane] if end > step
            )
        return left

    def lane_of(self, client: ClientEntry) -> int:
        return max(0, client.consumer) % len(self.next)

    def first_open(self, lane: int) -> int:
        """Return the number of the first portion of a lane that is not done."""
        lanes = len(self.next)
        mine = (number for number in self.open if number % lanes == lane)
        return min(mine, default=self.next[lane] * lanes + lane)

    def is_lane_over(self, lane: int) -> bool:
        """Return whether all portions of a lane are acknowledged as done."""
        return self.first_open(lane) >= self.total()

    def is_over(self) -> bool:
        return all(self.is_lane_over(lane) for lane in range(len(self.next)))

    def give(self, client: int, incarnation: int, request: int, numbers: list[int]) -> None:
        """Give portions to a worker. The worker asks for more only after it has computed all
        portions that it had for this client, so its death is not charged to these any more.
        """
        for portion in self.open.values():
            if portion.client == client and incarnation in portion.missed:
                portion.missed.remove(incarnation)
        for number in numbers:
            known = self.open.setdefault(number, Portion(client))
            known.pass_to(client, incarnation, request)
            step, lane = divmod(number, len(self.next))
            # a portion of a released client may be given out after later ones
            if step == self.next[lane]:
                self.next[lane] = step + 1
                self._advance(lane)

    def _advance(self, lane: int) -> None:
        """Move the next step of a lane past the steps in `skip`, which are not given out as new
        portions."""
        while (end := sets.end_of(self.skip[lane], self.next[lane])) is not None:
            self.next[lane] = end

    def acknowledge(self, client: int, marks: list[tuple[int, int, bool]]) -> None:
        for number, elements, is_complete in marks:
            portion = self.open.get(number)
            # promise E1: another client has the portion now
            if portion is None or portion.client != client:
                continue
            portion.acked = max(portion.acked, elements)
            if is_complete:
                self._finish(client, number)

    def _finish(self, client: int, number: int) -> None:
        del self.open[number]
        step = number // len(self.next)
        sets.add(self.finished_runs.setdefault(client, []), step, step + 1)

    def lose(self, incarnation: int, client: int, died: str, crashed: bool) -> None:
        """Free the portions that an incarnation of a worker was computing. `died` names the worker
        or process whose death is charged to each of these portions. It is "" if no death is
        charged.

        With a client, a reader has reported that a reply of the worker was lost. The reader may do
        so before the dispatcher learns that the worker has died. When the dispatcher learns of the
        death, the portions of that reply are therefore charged as well, although they are free by
        then, or other workers compute them.
        """
        for portion in self.open.values():
            was_computed = portion.incarnation == incarnation and client in (0, portion.client)
            if was_computed:
                portion.pass_to(portion.client)
            # a lost reply is no death yet; charge the portion when its worker dies
            if client:
                if was_computed and incarnation not in portion.missed:
                    portion.missed.append(incarnation)
                continue
            if incarnation in portion.missed:
                portion.missed.remove(incarnation)
            elif not was_computed:
                continue
            if died and crashed:
                portion.deaths.append(died)
            elif died:
                portion.lost[incarnation] = died

    def leave(self, client: int) -> None:
        """Make the unfinished portions of a client free for other clients."""
        for number, portion in self.open.items():
            if portion.client == client:
                portion.pass_to(0)
                # promise E5: remember the elements that a saved state may lack
                if portion.acked:
                    self.left.setdefault(client, []).append((number, portion.acked))

    def take_over(self, client: int, old: int) -> None:
        for table in (self.finished_runs, self.left):
            if old in table:
                table[client] = table.pop(old)
        self.readers.pop(old, None)
        for portion in self.open.values():
            if portion.client == old:
                portion.pass_to(client)

    def restore_saved(
        self, client: ClientEntry, done_runs: sets.Runs, open_: list[tuple[int, int]]
    ) -> None:
        """Set a client back to its saved state. The portions that it acknowledged after the state
        was saved become open again, without the elements that another client had acknowledged
        before.
        """
        lanes, lane = len(self.next), self.lane_of(client)
        left = dict(self.left.pop(client.id, []))
        elements = dict(open_)
        # promise E5: elements that other clients had acknowledged are not delivered again
        for number, acked in chain(*self.left.values()):
            elements[number] = max(acked, elements.get(number, 0))
        had = self.finished_runs.pop(client.id, [])
        since = sets.without(had, done_runs)
        remaining = self.finished_runs[client.id] = sets.without(had, since)
        for step in sets.members(since):
            number = step * lanes + lane
            self.open[number] = Portion(client.id, acked=elements.get(number, 0))
        for number, portion in list(self.open.items()):
            # promise E1: leave the portions of other clients to them
            if portion.client != client.id and (portion.client or number not in left):
                continue
            step = number // lanes
            if sets.end_of(done_runs, step) is not None:
                del self.open[number]
                sets.add(remaining, step, step + 1)
            else:
                self.open[number] = Portion(client.id, acked=elements.get(number, 0))
        self.failed = ""

    def skip_saved(
        self, client: ClientEntry, done_runs: sets.Runs, open_: list[tuple[int, int]]
    ) -> None:
        """Have a client continue from a saved state of another iteration: skip the portions that
        are finished in that state, and give the client those that are unfinished in it. Do not
        change portions of other clients.
        """
        lanes, lane = len(self.next), self.lane_of(client)
        first_step = self.next[lane]
        mine = self.finished_runs.setdefault(client.id, [])
        for start, stop in done_runs:
            sets.add(mine, max(start, first_step), stop)
            sets.add(self.skip[lane], start, stop)
        for number, portion in list(self.open.items()):
            step = number // lanes
            if (
                number % lanes == lane
                and not portion.client
                and sets.end_of(done_runs, step) is not None
            ):
                del self.open[number]
                sets.add(mine, step, step + 1)
        for number, elements in open_:
            step = number // lanes
            earlier = self.open.get(number)
            if (earlier is None and step >= first_step) or (
                earlier is not None and not earlier.client
            ):
                self.open[number] = Portion(
                    client.id, acked=max(elements, earlier.acked if earlier else 0)
                )
                sets.add(self.skip[lane], step, step + 1)
        self._advance(lane)


class Iteration(Row):
    """One pass of a job over its dataset. `unused` is a field of earlier versions, in which `state`
    was a bool, `finished`, and `unused` was `collected`.
    """

    id: int
    job: int
    repetition: int
    cursors: list[Cursor]
    tasks: list[int] = msgspec.field(default_factory=list)
    clients: list[int] = msgspec.field(default_factory=list)
    state: IterationState | bool = IterationState.OPEN
    unused: bool = False
    portions: PortionsEntry | None = None

    def __post_init__(self) -> None:
        if isinstance(self.state, bool):
            end_state = IterationState.COLLECTED if self.unused else IterationState.FINISHED
            self.state = end_state if self.state or self.unused else IterationState.OPEN

    def enter(self, state: IterationState) -> None:
        assert isinstance(self.state, IterationState)
        self.state = enter(ITERATION_TRANSITIONS, self.state, state, "iteration", self.id)


class TaskEntry(Row):
    """One worker's part of an iteration.

    Attributes:
      starting_round: in coordinated reads, the first round in which the task takes part, set when
        the consumers have agreed on it.
      unused: a field of earlier versions, in which `state` was a bool, `finished`, `unused` was
        `interrupted`, and a negative `starting_round` meant that the task was pending.
      handed_back: the numbers of the requests that returned positions, so that a repeated request
        changes nothing.
      last_replies: maps a source to (request, repetition, start, length) of the last reply. A
        repeated request gets this reply again.
      incarnation: in coordinated reads, the incarnation of the worker to which the task is bound; 0
        in other reads.
      end_round: in coordinated reads, the first round in which the task takes no part, set when the
        task has ended.
    """

    id: int
    iteration: int
    worker: int
    state: DataTaskState | bool = DataTaskState.RUNNING
    starting_round: int = 0
    last_replies: dict[int, tuple[int, int, int, int]] = msgspec.field(default_factory=dict)
    unused: bool = False
    handed_back: list[int] = msgspec.field(default_factory=list)
    incarnation: int = 0
    end_round: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.state, bool):
            end_state = DataTaskState.INTERRUPTED if self.unused else DataTaskState.FINISHED
            start_state = (
                DataTaskState.PENDING if self.starting_round < 0 else DataTaskState.RUNNING
            )
            self.state = end_state if self.state else start_state

    def enter(self, state: DataTaskState) -> None:
        assert isinstance(self.state, DataTaskState)
        self.state = enter(DATA_TASK_TRANSITIONS, self.state, state, "data task", self.id)

    @property
    def is_over(self) -> bool:
        return self.state in ENDED_TASKS


class ClientEntry(Row):
    """A client of an iteration. `reader` is the same random number for all clients by which one
    dataset object, or one that continues from its saved state, reads the passes of a job.
    """

    id: int
    iteration: int
    request: int
    consumer: int = -1
    reader: int = 0


class WorkerEntry(Row):
    """The place of a worker. After a restart of its process a worker has its earlier place again.

    Attributes:
      incarnation: the incarnation of the process that has the place, or had it last.
      index: the worker's index in the fixed list of workers; -1 if the worker has no entry.
    """

    number: int
    name: str
    address: str
    incarnation: int
    tags: tuple[str, ...] = ()
    index: int = -1


# -- changes ---------------------------------------------------------------------------------------


class RegisterDataset(Record, tag=1):
    dataset: DatasetEntry


class PlaceWorker(Record, tag=2):
    """A new worker gets a place, or another incarnation takes over an existing place."""

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
    """The dispatcher drops an iteration without clients, with its tasks. A later client of the job
    begins a new iteration."""

    iteration: int


class GiveSplits(Record, tag=12):
    """A task gets positions of a source. A `length` of 0 means that the source has no positions
    left in this repetition."""

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
    """The first request of a dataset has decided whether compression "AUTO" is off for the
    dataset.
    """

    dataset: str
    off: bool


class GivePortions(Record, tag=30):
    """An incarnation of a worker computes these portions for a client, in this order."""

    client: int
    incarnation: int
    request: int
    numbers: list[int]


class Acknowledge(Record, tag=31):
    """A client's consumer has finished elements. Each mark is (number of the portion, number of
    finished elements, whether the portion is done).
    """

    client: int
    marks: list[tuple[int, int, bool]]


class LosePortions(Record, tag=32):
    """The portions that an incarnation of a worker was computing have to be given out again.

    Attributes:
      client: the client whose portions are lost; 0 means the portions of all clients.
      died: the name of the dead worker or process, with whose death the portions are charged; empty
        if they are not charged.
      crashed: whether only a process of the worker has died, and the worker itself is alive.
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
    """A client continues from a saved state of this iteration. `done_runs` has the runs of its finished
    steps, and `open` has (number of the portion, elements received) for each unfinished portion.
    """

    client: int
    done_runs: list[tuple[int, int]]
    open: list[tuple[int, int]]


class SkipSaved(Record, tag=36):
    """A client continues from a saved state of another iteration. Its own iteration skips the
    elements that were finished in that state."""

    client: int
    done_runs: list[tuple[int, int]]
    open: list[tuple[int, int]]


class RevokeDeath(Record, tag=37):
    """A lost incarnation has registered again. It had only lost its connection, so its portions are
    no longer charged with its death."""

    iteration: int
    incarnation: int


class BeginSnapshot(Record, tag=50):
    """A distributed snapshot has begun. The journal has only the path of its folder, because the
    folder contains everything else about the snapshot.
    """

    path: str


PortionsChange: TypeAlias = (
    GivePortions
    | Acknowledge
    | LosePortions
    | FailPortions
    | TakeOver
    | RestoreSaved
    | SkipSaved
    | RevokeDeath
)
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
    | StartTask
    | BeginSnapshot
    | PortionsChange
)


def encode(value: Any) -> bytes:
    """Return a record or a whole state as bytes for the journal."""
    return msgspec.msgpack.encode(value)


_changes = msgspec.msgpack.Decoder(Change)


def decode(data: bytes) -> Change:
    """Return the record that `encode` encoded. Raises msgspec.DecodeError if the bytes are no
    record."""
    change: Change = _changes.decode(data)
    return change
