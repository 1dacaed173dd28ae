"""What the dispatch machine remembers: sessions of coordinators, leases, and what each worker has in its hands.

A queued piece of work is the tuple that came in the message and nothing else: a million of them have to fit. Only work that has
been handed out has a record of its own.
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
    """Waiting work of one priority in one line."""

    session_queue: SessionQueue
    priority: int = 0
    items: deque[Item] = field(default_factory=deque)
    report_before_start: deque[Item] = field(default_factory=deque)
    """Work that was with a worker that died before it said what it had begun; handed out one by one."""

    def __len__(self) -> int:
        return len(self.items) + len(self.report_before_start)


class SessionQueue:
    """What of one session waits for one worker, or for any of them.

    Attributes:
      worker: its name; empty for any.
      bands: those that have work, the highest priority last.
    """

    __slots__ = ("_plain_band", "bands", "is_ready", "session", "worker")

    def __init__(self, session: CoordinatorSession, worker: str) -> None:
        self.session = session
        self.worker = worker
        self.bands: list[PriorityBand] = []
        self.is_ready = False
        self._plain_band = PriorityBand(self)

    def band(self, priority: int) -> PriorityBand:
        """The rank of a priority, which the caller is about to put work into."""
        bands = self.bands
        at = bisect_left(bands, priority, key=_priority) if bands else 0
        if at < len(bands) and bands[at].priority == priority:
            return bands[at]
        band = PriorityBand(self, priority) if priority else self._plain_band
        bands.insert(at, band)
        return band


@dataclass(slots=True, eq=False)
class CoordinatorSession:
    """One connection of one coordinator. One that reconnects has a new session; the old one only waits for its leases.

    Work that is apart from the rounds has a session of its own over the same connection, whose generation never ends.
    """

    coordinator: int
    peer: Peer
    queue_max: int
    queues: dict[str, SessionQueue] = field(default_factory=dict)
    """Those that have work, by the worker's name, and always that for any worker."""
    functions: dict[int, bytes] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[WorkerLoad, int]] = field(default_factory=dict)
    """Bulk results that are with their worker, kept ones too: (work, attempt) -> (whose, lease)."""
    watches_members: bool = False
    """It is told which workers come and go."""
    reports_starts: bool = False
    """It is told what has begun."""
    detached: CoordinatorSession | None = None
    """Of the work that is apart, once there is some."""
    outstanding: int = 0
    """Leases that may be executing."""
    round_ended: int = -1
    ending_round: int | None = None
    """The generation whose end was asked for and has not come."""
    unsettled_until: float = 0.0
    """Until then a process that was lost from sight may still run work of this coordinator."""
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
        """It, and that of the work apart."""
        return (self,) if self.detached is None else (self, self.detached)

    def queue_for(self, worker: str) -> SessionQueue:
        queue = self.queues.get(worker)
        if queue is None:
            queue = self.queues[worker] = SessionQueue(self, worker)
        return queue

    def is_quiet(self, now: float) -> bool:
        """Nothing of this session can be executing."""
        return self.outstanding == 0 and now >= self.unsettled_until


@dataclass(slots=True, eq=False)
class Lease:
    """One handing-out of one piece of work."""

    session: CoordinatorSession
    band: PriorityBand
    """Where it waited, and waits again when it comes back."""
    item: Item
    """What it is, as it was queued."""
    started: bool = False
    cancelled: bool = False
    """Withdrawn: however it ends, it does not run again."""
    cancelled_unless_begun: bool = False
    """Withdrawn unless it has begun: it does not run again where it comes back before that is known."""
    kept: bool = False
    """Its bulk result was taken, and stays with the worker until it is taken for good."""

    def keep(self) -> None:
        """Its result stays with the worker: it does not run again, and what it ran on is needed no more."""
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
        """Starts of this work that were lost."""
        return self.item[2]

    def charge_lost_start(self) -> None:
        """Its start is lost."""
        work, attempt, lost, fn, payload = self.item
        self.item = (work, attempt, lost + 1, fn, payload)

    def next_item(self) -> Item:
        """The item for the next handing-out; the number of the attempt never repeats."""
        work, attempt, lost, fn, payload = self.item
        return (work, attempt + 1, lost, fn, payload)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """What one worker has in its hands."""

    member: Member
    window: WorkWindow
    name: str
    leases: dict[int, Lease] = field(default_factory=dict)
    held: dict[int, Lease] = field(default_factory=dict)
    stale_leases: dict[int, int] = field(default_factory=dict)
    """Functions of an earlier dispatcher that run in threads: lease -> coordinator."""
    known_functions: set[tuple[int, int]] = field(default_factory=set)
    steal_requested: set[int] = field(default_factory=set)
    undelivered_forgets: list[Forget] = field(default_factory=list)
    """What all were told while it was away."""
    reachable: bool = True
    done: int = 0
    slot_deaths: int = 0
    """Slot processes of it that died while they ran a function."""
    free_slots: int = 0
    """Slots without work, as the placement counts them."""
    returning: int = 0
    """Leases that are on their way back, as the placement counts them."""
    steal_at: float = math.inf
    """When calling work back from it becomes worth while, if that is known and lies ahead."""

    @property
    def outstanding(self) -> int:
        return len(self.leases) + len(self.stale_leases)


@dataclass(slots=True)
class Handout:
    """What one event gives to one worker: at most one Assign for each kind."""

    functions: list[tuple[int, int, bytes]] = field(default_factory=list)
    items: list[Leased] = field(default_factory=list)
    report_before_start: list[Leased] = field(default_factory=list)
