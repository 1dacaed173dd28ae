"""The records of the dispatcher's machine: sessions of coordinators, leases, and the load of each worker.

A queued work item is stored as the tuple from the message, without any other object, because there may be a million of them. Only work
that was handed out has a record of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from zmqdist.events import Peer
from zmqdist.messages import Forget, Item, Leased
from zmqdist.scheduling.dispatcher.credit import WorkWindow
from zmqdist.scheduling.dispatcher.membership import Member

_priority = attrgetter("priority")


@dataclass(slots=True, eq=False)
class PriorityBand:
    """The waiting work items of one priority in one queue.

    Attributes:
      items: the items that no worker has begun, as far as the dispatcher knows.
      report_before_start: the items whose start the worker must report before it happens; they are handed out first.
    """

    session_queue: SessionQueue
    priority: int = 0
    items: deque[Item] = field(default_factory=deque)
    report_before_start: deque[Item] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.items) + len(self.report_before_start)


class SessionQueue:
    """The work of one session that waits for one worker, or for any worker.

    Attributes:
      worker: the name of that worker; empty for any worker.
      bands: one band for each priority that has work, the highest priority last.
      is_ready: whether the queue takes part in the turns of `Placement`. Invariant: then it has work.
    """

    __slots__ = ("_plain_band", "bands", "is_ready", "session", "worker")

    def __init__(self, session: CoordinatorSession, worker: str) -> None:
        self.session = session
        self.worker = worker
        self.bands: list[PriorityBand] = []
        self.is_ready = False
        self._plain_band = PriorityBand(self)

    def band(self, priority: int) -> PriorityBand:
        """Return the band of a priority, to which the caller is about to add work."""
        bands = self.bands
        at = bisect_left(bands, priority, key=_priority) if bands else 0
        if at < len(bands) and bands[at].priority == priority:
            return bands[at]
        band = PriorityBand(self, priority) if priority else self._plain_band
        bands.insert(at, band)
        return band


@dataclass(slots=True, eq=False)
class CoordinatorSession:
    """One connection of one coordinator. A coordinator that reconnects gets a new session; the old one only waits for its leases.

    Detached work has a session of its own over the same connection. The round of that session never ends.

    Attributes:
      queues: the queues that have work, by worker name ("" for any worker).
      functions: pickled functions by number.
      held: bulk results that workers hold, kept ones as well: (work, attempt) -> (worker, lease).
      watches_members: whether the coordinator gets Members.
      reports_starts: whether the coordinator gets Begun.
      detached: the session of the detached work; None until there is such work.
      outstanding: the number of leases that may be executing.
      round_ended: the last round whose end was requested; work of it that arrives later is ignored.
      ending_round: the round whose end was requested and has not been reported; None for none.
      unsettled_until: the time until which a lost process may still execute work of this session.
      submitted, left_queue: how many work items were ever queued, and how many have left the queue. Invariant: left_queue <= submitted.
      progress_reported: the `left_queue` that was last reported to the coordinator.
      closed: whether the connection has ended.
      finished: the number of work items that have ended.
    """

    coordinator: int
    peer: Peer
    queue_max: int
    queues: dict[str, SessionQueue] = field(default_factory=dict)
    functions: dict[int, bytes] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[WorkerLoad, int]] = field(default_factory=dict)
    watches_members: bool = False
    reports_starts: bool = False
    detached: CoordinatorSession | None = None
    outstanding: int = 0
    round_ended: int = -1
    ending_round: int | None = None
    unsettled_until: float = 0.0
    submitted: int = 0
    left_queue: int = 0
    progress_reported: int = 0
    closed: bool = False
    finished: int = 0

    @property
    def queued(self) -> int:
        return self.submitted - self.left_queue

    @property
    def with_detached(self) -> tuple[CoordinatorSession, ...]:
        """This session, and the session of its detached work if there is one."""
        return (self,) if self.detached is None else (self, self.detached)

    def queue_for(self, worker: str) -> SessionQueue:
        queue = self.queues.get(worker)
        if queue is None:
            queue = self.queues[worker] = SessionQueue(self, worker)
        return queue

    def is_quiet(self, now: float) -> bool:
        """Return whether no work of this session can be executing."""
        return self.outstanding == 0 and now >= self.unsettled_until


@dataclass(slots=True, eq=False)
class Lease:
    """One hand-out of one work item.

    Attributes:
      band: the band in which the item waited, and will wait again if the lease ends without an outcome.
      item: the work item as it was queued.
      started: whether a slot has begun it, as far as the dispatcher knows.
      cancelled: whether it was cancelled: however the lease ends, the work does not run again.
      cancelled_unless_begun: as `cancelled`, until a start is reported.
      kept: whether its bulk result was received and stays with the worker.
    """

    session: CoordinatorSession
    band: PriorityBand
    item: Item
    started: bool = False
    cancelled: bool = False
    cancelled_unless_begun: bool = False
    kept: bool = False

    def keep(self) -> None:
        """Note that the result stays with the worker. The work does not run again, so its payload is dropped."""
        self.kept = True
        self.item = (*self.item[:4], b"")

    @property
    def work(self) -> int:
        return self.item[0]

    @property
    def attempt(self) -> int:
        return self.item[1]

    @property
    def lost(self) -> int:
        """The number of starts of this work that were lost."""
        return self.item[2]

    def charge_lost_start(self) -> None:
        """Count a lost start."""
        work, attempt, lost, fn, payload = self.item
        self.item = (work, attempt, lost + 1, fn, payload)

    def next_item(self) -> Item:
        """Return the item for the next hand-out, with a new attempt number."""
        work, attempt, lost, fn, payload = self.item
        return (work, attempt + 1, lost, fn, payload)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """The leases and results of one worker, and the figures that the placement computes for it.

    Attributes:
      window: how many leases it may have.
      leases: its leases that have not ended, by number.
      held: its leases that have ended and whose bulk results it holds, by number.
      stale_leases: functions of an earlier dispatcher that run in its threads: lease -> coordinator.
      known_functions: the functions that were sent to it, as (coordinator, number).
      steal_requested: leases that the dispatcher has requested back and about which the worker has not replied.
      undelivered_forgets: the Forgets for all workers that were sent while this one was away.
      done: the number of leases that ended with an outcome.
      slot_deaths: the number of its slot processes that crashed.
      free_slots, returning, steal_at: computed by the placement: slots without work, leases that are expected back, and the time from
        which on it is worth requesting work back (`inf` for never, or at once).
    """

    member: Member
    window: WorkWindow
    name: str
    leases: dict[int, Lease] = field(default_factory=dict)
    held: dict[int, Lease] = field(default_factory=dict)
    stale_leases: dict[int, int] = field(default_factory=dict)
    known_functions: set[tuple[int, int]] = field(default_factory=set)
    steal_requested: set[int] = field(default_factory=set)
    undelivered_forgets: list[Forget] = field(default_factory=list)
    reachable: bool = True
    done: int = 0
    slot_deaths: int = 0
    free_slots: int = 0
    returning: int = 0
    steal_at: float = math.inf

    @property
    def outstanding(self) -> int:
        return len(self.leases) + len(self.stale_leases)


@dataclass(slots=True)
class Handout:
    """The work that one turn hands out to one worker: new functions, items, and items whose start must be reported before it happens."""

    functions: list[tuple[int, int, bytes]] = field(default_factory=list)
    items: list[Leased] = field(default_factory=list)
    report_before_start: list[Leased] = field(default_factory=list)


@dataclass(slots=True)
class WorkerHoldings:
    """What one worker has, each as (connection of the coordinator, work item).

    Attributes:
      kept: the values that it keeps.
      running: what it has begun. What it has not begun goes to other workers, and is not listed.
      pinned: what waits for this worker alone.
    """

    worker: str
    kept: list[tuple[Peer, int]] = field(default_factory=list)
    running: list[tuple[Peer, int]] = field(default_factory=list)
    pinned: list[tuple[Peer, int]] = field(default_factory=list)
