"""The records of the dispatcher's machine: sessions of coordinators, leases, and the load and the
window of each worker. No I/O.

A queued work item is stored as the tuple from the message, without any other object, because a
million work items may be queued. Only work that was handed out has a record of its own, a Lease.

A `WorkWindow` says how many work items a worker may have, counting those that are on their way to
or from it. It aims at the work that keeps a worker busy for `HORIZON_S` and one round trip. This
amount of work lasts until the next batch arrives. More would leave no work for a worker that joins.
The window starts small, because the duration of a function is not known, and then follows the rate
at which the worker ends work items. The rate counts only the time in which the worker had work. The
worker itself measures that time, because by the dispatcher's clock a distant worker that got little
work would seem slow.

Promises of a window, checked by tests/scheduling/dispatcher/test_credit.py and by the simulation
    P1  the limit stays within [2 x slots, per_slot_max x slots]
    P2  if a work item takes longer than `HORIZON_S` and one round trip, each slot gets at most two
        items: one item runs, one item waits
    P3  a worker whose window is always full is busy all the time, even with a long round trip,
        unless a bound of P1 limits the window
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, TypeAlias

from zmqdist.events import Peer
from zmqdist.limits import WORKER_WINDOW_MAX
from zmqdist.messages import SUBMISSION_SHIFT, Forget, Granted, Item, Leased, ProgramFacts
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.shared import nested_bound
from zmqdist.scheduling.shared.quantities import Grant, Quantities
from zmqdist.transitions import enter

HORIZON_S = 0.05
"""Seconds of work that a worker should have, in addition to a round trip."""
SAMPLE_S = 0.005
"""Seconds. A rate is measured over at least this much busy time, because single messages would
change a rate over less time too much."""
TRIP_S_MAX = 1.0
"""A round trip above this does not widen the window, because it shows that the dispatcher or the
worker reads its messages late."""


class WorkWindow:
    """The bound on the number of unfinished work items that one worker may have.

    Attributes:
      limit: the bound.
      rate: work items that the worker ends in a second while it has work; 0 while unknown.
      trip_s: the round-trip time to the worker.
      handed_out_at: when the worker last got work.
    """

    __slots__ = (
        "_busy_s",
        "_ceiling",
        "_count",
        "_floor",
        "_since",
        "handed_out_at",
        "limit",
        "rate",
        "trip_s",
    )

    def __init__(self, slots: int, per_slot_max: int = WORKER_WINDOW_MAX) -> None:
        self._floor = 2 * slots
        self._ceiling = per_slot_max * slots
        self.limit = self._floor
        self.rate = 0.0
        self.trip_s = 0.0
        self.handed_out_at = -math.inf
        self._count = 0
        self._busy_s = 0.0
        self._since: float | None = None
        """When the worker last ended an item, or got an item after having no work; None while it
        has no work."""

    def note_handed_out(self, now: float) -> None:
        """Record that work was handed out to the worker."""
        self.handed_out_at = now
        if self._since is None:
            self._since = now

    def note_returned(
        self, count: int, busy_s: float, trip_s: float, now: float, *, idle: bool
    ) -> None:
        """Record that `count` items have ended, and adapt the limit.

        Args:
          busy_s: the time for which the worker had work since its last report.
          trip_s: the round-trip time, as the worker measures it.
          idle: whether the worker has no item left.
        """
        if not count:
            return
        self._count += count
        self._busy_s += busy_s
        self.trip_s = min(trip_s, TRIP_S_MAX)
        self._since = None if idle else now
        if not self._is_sample:
            return
        sample = self._count / max(self._busy_s, 1e-6)
        # Adopt a lower rate at once, but only half of an increase. A rate that is too high takes
        # work from other workers, whereas a rate that is too low costs only a message.
        self.rate = sample if sample < self.rate else (self.rate + sample) / 2
        self.limit = max(
            self._floor, min(self._ceiling, int(self.rate * (HORIZON_S + self.trip_s)))
        )
        self._count = 0
        self._busy_s = 0.0

    @property
    def _is_sample(self) -> bool:
        """Whether enough busy time has passed since the last sample to compute a rate.

        With a long round trip a wrong rate costs more, so the rate is measured over more time, or
        over a whole window of work items.
        """
        if self.trip_s <= SAMPLE_S:
            return self._busy_s >= SAMPLE_S
        return self._busy_s >= max(SAMPLE_S, self.trip_s / 4) or self._count >= self.limit

    def remaining_s(self, count: int) -> float:
        """Return for how many seconds `held` items will probably keep the worker busy; infinite
        while the worker's rate is unknown."""
        return count / self.rate if self.rate > 0 else float("inf")

    def overdue_at(self, count: int) -> float:
        """Return the time at which all `held` items should have ended. If no item has ended by
        then, the worker runs a slow function."""
        return (
            float("inf")
            if self._since is None
            else self._since + self.trip_s + self.remaining_s(count)
        )


QueueKey: TypeAlias = "str | tuple[str, Quantities, str]"

_priority = attrgetter("priority")


@dataclass(slots=True, eq=False)
class PriorityBand:
    """The waiting work items of one priority in one queue.

    Attributes:
      report_before_start: the items that a lost worker may have begun without a report, unless a
        start of the item was lost before. The next worker must report the start of such an item
        before it starts the item. These items are handed out before `items`.
      items: all other items. As far as the dispatcher knows, each of them has not begun, or a
        reported start of it was lost.
    """

    session_queue: SessionQueue
    priority: int = 0
    items: deque[Item] = field(default_factory=deque)
    report_before_start: deque[Item] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.items) + len(self.report_before_start)


class SessionQueue:
    """One queue of a session: its waiting work that is pinned to one certain worker, or its waiting
    work that any worker may run. Work that needs resources has a queue for each request.

    Attributes:
      worker: the name of the worker to which the work is pinned; empty if any worker may run it.
      request: the resources that each item needs.
      near: the worker that holds large inputs of the items, or "".
      near_s: the seconds that it takes to move these inputs to another host.
      key: what the queue is called in `CoordinatorSession.queues`; empty for work that any worker
        may run, without resources.
      bands: one band for each priority that has work, the highest priority last.
      is_ready: whether this is one of the queues that take turns in `Placement`. Invariant: a queue
        that is ready has work.
    """

    __slots__ = (
        "_plain_band",
        "bands",
        "is_ready",
        "key",
        "near",
        "near_s",
        "request",
        "session",
        "worker",
    )

    def __init__(
        self,
        session: CoordinatorSession,
        worker: str,
        request: Quantities,
        near: str,
        key: QueueKey,
    ) -> None:
        self.session = session
        self.worker = worker
        self.request = request
        self.near = near
        self.near_s = 0.0
        self.key = key
        self.bands: list[PriorityBand] = []
        self.is_ready = False
        self._plain_band = PriorityBand(self)

    @property
    def is_demand(self) -> bool:
        """Whether the work needs resources, or has large inputs at a worker."""
        return bool(self.request or self.near)

    @property
    def count(self) -> int:
        """The number of items."""
        return sum(map(len, self.bands))

    def band(self, priority: int) -> PriorityBand:
        """Return the band of a priority; make it if it is missing. The caller must add work,
        because no band may be empty."""
        bands = self.bands
        at = bisect_left(bands, priority, key=_priority) if bands else 0
        if at < len(bands) and bands[at].priority == priority:
            return bands[at]
        band = PriorityBand(self, priority) if priority else self._plain_band
        bands.insert(at, band)
        return band


UNTOLD: Final = ProgramFacts(0, 0)
"""What a program has told of itself before it tells anything."""


@dataclass(slots=True, eq=False)
class CoordinatorSession:
    """The state of one coordinator's work, for one connection of the coordinator.

    A coordinator that reconnects gets a new session; the old session only waits until its leases
    have ended. Detached work has a session of its own over the same connection, in which no round
    ends.

    Attributes:
      queues: the queues by `SessionQueue.key`: "" for work that any worker may run, one for each
        worker with waiting pinned work, and one for each worker, request and holder of inputs of
        waiting work that needs resources or has large inputs.
      functions: pickled functions by number.
      held: bulk results that workers hold, including kept values: (work, attempt) -> (worker,
        lease).
      watches_members: whether the coordinator gets Members.
      reports_starts: whether the coordinator gets Begun.
      detached: the session of the detached work; None until the coordinator submits detached work.
      outstanding: the number of leases that may be executing.
      closed_round: the last round whose end the coordinator has requested. The dispatcher ignores
        work of this round that arrives later.
      unsettled_until: the time until which a lost process may still execute work of this session.
      submitted, left_queue: how many work items were ever queued, and how many have left the queue.
        Invariant: left_queue <= submitted.
      progress_reported: the `left_queue` that was last reported to the coordinator.
      closed: whether the connection has ended.
      finished: the number of work items that have ended, without those that were cancelled before
        they began.
      depth: 0 for a program; for the coordinator of a function, one more than for that of the
        function's work.
      above: the leases of the functions that have scheduled each other down to this session.
      fenced: whether the function of this coordinator has ended or was cancelled (children.py).
      program: what the program has told of itself.
    """

    coordinator: int
    peer: Peer
    queue_max: int
    queues: dict[QueueKey, SessionQueue] = field(default_factory=dict)
    functions: dict[int, bytes] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[WorkerLoad, int]] = field(default_factory=dict)
    watches_members: bool = False
    reports_starts: bool = False
    detached: CoordinatorSession | None = None
    outstanding: int = 0
    closed_round: int = -1
    unsettled_until: float = 0.0
    submitted: int = 0
    left_queue: int = 0
    progress_reported: int = 0
    closed: bool = False
    finished: int = 0
    depth: int = 0
    above: tuple[int, ...] = ()
    fenced: bool = False
    program: ProgramFacts = UNTOLD

    @property
    def queued(self) -> int:
        return self.submitted - self.left_queue

    @property
    def with_detached(self) -> tuple[CoordinatorSession, ...]:
        """This session, and the session of its detached work if it exists."""
        return (self,) if self.detached is None else (self, self.detached)

    def queue_for(self, worker: str, request: Quantities = (), near: str = "") -> SessionQueue:
        key = (worker, request, near) if request or near else worker
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = SessionQueue(self, worker, request, near, key)
        return queue

    def is_quiet(self, now: float) -> bool:
        """Return whether no work of this session can be executing."""
        return self.outstanding == 0 and now >= self.unsettled_until


class LeaseState(enum.Enum):
    """The state of a lease, which is one hand-out of one work item to one worker."""

    ASSIGNED = enum.auto()
    """As far as the dispatcher knows, no slot has begun the item."""
    UNWANTED = enum.auto()
    """As ASSIGNED, but the item was cancelled on the condition that it has not begun."""
    BEGUN = enum.auto()
    """A slot has begun the item."""
    CANCELLED = enum.auto()
    """As ASSIGNED, but the item was cancelled, so that its outcome does not count."""
    ABORTED = enum.auto()
    """As BEGUN, but the item was cancelled, so that its outcome does not count."""
    HELD = enum.auto()
    """The worker holds the bulk result, which the coordinator has not received."""
    UNNEEDED = enum.auto()
    """As HELD, but the item was cancelled, so that a lost result is not computed again."""
    KEPT = enum.auto()
    """The coordinator has received the bulk result, and the worker still holds it."""
    ENDED = enum.auto()
    """Nothing is left of the lease. The item may have gone back to its queue."""


_S = LeaseState
LEASE_TRANSITIONS: Final[Mapping[LeaseState, frozenset[LeaseState]]] = {
    _S.ASSIGNED: frozenset({_S.UNWANTED, _S.BEGUN, _S.CANCELLED, _S.HELD, _S.ENDED}),
    # a worker that is away cannot reply, so the program was told that the item has begun
    _S.UNWANTED: frozenset({_S.ASSIGNED, _S.UNWANTED, _S.BEGUN, _S.CANCELLED, _S.HELD, _S.ENDED}),
    _S.BEGUN: frozenset({_S.ABORTED, _S.HELD, _S.ENDED}),
    _S.CANCELLED: frozenset({_S.ABORTED, _S.ENDED}),
    _S.ABORTED: frozenset({_S.ENDED}),
    _S.HELD: frozenset({_S.UNNEEDED, _S.KEPT, _S.ENDED}),
    _S.UNNEEDED: frozenset({_S.KEPT, _S.ENDED}),
    _S.KEPT: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}

# These are tuples, because `in` finds a member of an enumeration sooner in a tuple than in a set.
RUNNING: Final = (_S.BEGUN, _S.ABORTED)
OUTCOME_IGNORED: Final = (_S.CANCELLED, _S.ABORTED)
NOT_RUN_AGAIN: Final = (_S.UNWANTED, _S.CANCELLED, _S.ABORTED, _S.UNNEEDED)
"""The states of cancelled items, which do not run again when their worker is lost or gives them
back."""
WITH_RESULT: Final = (_S.HELD, _S.UNNEEDED, _S.KEPT)


@dataclass(slots=True, eq=False)
class Lease:
    """One hand-out of one work item to one worker.

    Attributes:
      band: the band in which the item waited, and will wait again if the lease ends without an
        outcome.
      item: the work item with the number of its lost starts. Its payload is empty if the result is
        kept.
    """

    session: CoordinatorSession
    band: PriorityBand
    item: Item
    state: LeaseState = LeaseState.ASSIGNED

    def enter(self, state: LeaseState) -> None:
        self.state = enter(LEASE_TRANSITIONS, self.state, state, "the lease of work", self.work)

    def cancel(self) -> None:
        """Record that the item was cancelled, so that its outcome does not count."""
        if self.state not in OUTCOME_IGNORED:
            self.enter(_S.ABORTED if self.state is _S.BEGUN else _S.CANCELLED)

    def keep(self) -> None:
        """Record that the worker keeps the result, and drop the payload of the work, because the
        work does not run again."""
        # P11: the work does not run again, so its payload is not needed.
        self.enter(_S.KEPT)
        self.item = (*self.item[:4], b"")

    @property
    def work(self) -> int:
        return self.item[0]

    @property
    def attempt(self) -> int:
        return self.item[1]

    @property
    def submission(self) -> tuple[int, int]:
        """The work item and the range of its attempts, which the coordinator submitted together."""
        return self.item[0], self.item[1] >> SUBMISSION_SHIFT

    @property
    def lost(self) -> int:
        """How many times this work was started and then lost with its process."""
        return self.item[2]

    def charge_lost_start(self) -> None:
        """Add one to the lost starts of this work."""
        work, attempt, lost, fn, payload = self.item
        self.item = (work, attempt, lost + 1, fn, payload)

    def next_item(self) -> Item:
        """Return the item for the next hand-out, with a new attempt number."""
        # A new attempt number, so that a late result of this hand-out cannot count for the next.
        work, attempt, lost, fn, payload = self.item
        return (work, attempt + 1, lost, fn, payload)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """The leases and results of one worker, and the figures that the placement computes for it.

    Attributes:
      window: the bound on the number of leases that the worker may have.
      leases: the worker's leases that have not ended, by number.
      held: the worker's leases that have ended and whose bulk results it holds, by number.
      stale_leases: leases that the worker has dropped, but whose functions still run in its
        threads: lease -> coordinator.
      grants: the resources of the worker's leases that need some, by number, until the lease has
        ended and its function is known to run no more.
      waiting: those of `leases` whose functions wait for results of other work.
      strays: the leases that this member reported and the dispatcher has aborted, because they are
        of an earlier member, and that have resources. Each ends when the worker reports its end.
      known_functions: the functions that were sent to the worker, as (coordinator, number).
      steals: the number of leases that the dispatcher has requested back, until the worker
        replies.
      undelivered_forgets: the Forgets with `everywhere` that the dispatcher could not send to this
        worker while it was away.
      done_count: the number of leases that ended with an outcome.
      slot_deaths: the number of the worker's slot processes that crashed.
      free_slots, returning: the number of slots without work; the number of leases that the
        dispatcher expects back. The placement computes both.
      steal_at: the time in this worker's current entry of the placement's heap, from which on it is
        worth requesting work back from the worker; `inf` if the heap has no current entry of the
        worker.
    """

    member: Member
    window: WorkWindow
    name: str
    leases: dict[int, Lease] = field(default_factory=dict)
    held: dict[int, Lease] = field(default_factory=dict)
    stale_leases: dict[int, int] = field(default_factory=dict)
    grants: dict[int, Grant] = field(default_factory=dict)
    strays: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    known_functions: set[tuple[int, int]] = field(default_factory=set)
    steals: int = 0
    undelivered_forgets: list[Forget] = field(default_factory=list)
    done_count: int = 0
    slot_deaths: int = 0
    free_slots: int = 0
    returning: int = 0
    steal_at: float = math.inf

    @property
    def outstanding(self) -> int:
        return len(self.leases) + len(self.stale_leases) - len(self.waiting)

    @property
    def at_bound(self) -> bool:
        """Whether so many functions wait that the worker may get only work deeper than `floor`."""
        return nested_bound.at_bound(len(self.waiting), self.member.nested_slots_max)

    @property
    def floor(self) -> int:
        """The depth of the deepest function that waits at the worker."""
        return max((self.leases[number].session.depth for number in self.waiting), default=0)

    @property
    def places(self) -> int:
        """The number of functions that the worker runs at a time, not counting those that wait."""
        member = self.member
        return nested_bound.places(member.slots, len(self.waiting), member.nested_slots_max)

    def pop(self, number: int) -> Lease | None:
        """Remove a lease that has ended, and return it; None if there is no such lease."""
        self.waiting.discard(number)
        return self.leases.pop(number, None)

    @property
    def reachable(self) -> bool:
        return self.member.peer is not None

    @property
    def room_ahead(self) -> int:
        """How many more items may run before other work at this worker, because they are pinned or
        have resources, if there is one for each slot."""
        return self.member.slots - sum(
            bool(lease.band.session_queue.key) for lease in self.leases.values()
        )

    def admits(self, depth: int) -> bool:
        """Return whether the worker may begin work of this depth."""
        return not (self.waiting and self.at_bound) or depth > self.floor

    @property
    def has_place(self) -> bool:
        """Whether the worker may get an item that has resources."""
        return (
            self.reachable
            and not self.member.leaving
            and (self.outstanding < self.member.slots or self.room_ahead > 0)
        )


@dataclass(slots=True)
class Handout:
    """The work that one call of `assign` hands out to one worker: new functions, items, items whose
    start must be reported first, and the resources of these items."""

    functions: list[tuple[int, int, bytes]] = field(default_factory=list)
    items: list[Leased] = field(default_factory=list)
    report_before_start: list[Leased] = field(default_factory=list)
    grants: list[Granted] = field(default_factory=list)


@dataclass(slots=True)
class WorkerHoldings:
    """The values and work items of one worker, each as (connection of the coordinator, number of
    the work item).

    Attributes:
      kept: the values that the worker keeps.
      running: the work items that the worker has begun.
      pinned: the work items that wait for this worker alone.
      others: the work items that the worker has not begun, and the results that it holds until
        their programs say whether to keep them. A drain loses none of them, but each may become a
        kept value before its program has replied.
      lost_actors, actors: the actors that end with the worker, and those that begin again on
        another worker, each as its class and name.
    """

    worker: str
    kept: list[tuple[Peer, int]] = field(default_factory=list)
    running: list[tuple[Peer, int]] = field(default_factory=list)
    pinned: list[tuple[Peer, int]] = field(default_factory=list)
    others: list[tuple[Peer, int]] = field(default_factory=list)
    lost_actors: list[str] = field(default_factory=list)
    actors: list[str] = field(default_factory=list)
