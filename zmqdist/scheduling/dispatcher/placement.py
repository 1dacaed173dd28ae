"""What waits, and which worker gets which of it next: idle ones first, then those with room, coordinators in turn; and what is called back.

Work that is pinned to a worker waits in a line of that worker, and is served before any other work as soon as the worker has room; it never
goes elsewhere, and is not called back. Within a session's line the higher priority goes first, and of one priority the oldest.

The lists of workers are kept true by `place`, which is called whenever what a worker holds has changed, so that nothing here looks at all
workers: an event costs the same with two of them and with ten thousand. They are OrderedDicts because a set has no order, and the machine
must be repeatable, and because looking for the first key of a dict walks over all that were deleted before it.

Of workers that have more than they can begin, each waits for the time from which on it is worth calling work back: in a heap, under the
time that was worked out when it had last changed. Entries that are no longer true are dropped when they come up.

Not here: why work is queued or given back (machine.py).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator

from zmqdist.batches import split
from zmqdist.events import Send
from zmqdist.messages import Assign, Item, Leased, Recall
from zmqdist.scheduling.dispatcher.records import (
    CoordinatorSession,
    Handout,
    Lease,
    PriorityBand,
    SessionQueue,
    WorkerLoad,
)

RECALL_WORTH_S = 0.01
"""Work that its worker will reach sooner than this is not called back: the messages would cost more."""


class Placement:
    """The sessions that have waiting work, and the workers that can take some.

    Attributes:
      queued: pieces of work that wait, of all sessions.
    """

    def __init__(self, first_lease: int) -> None:
        self.queued = 0
        self._next_lease = first_lease
        self._rota: deque[SessionQueue] = deque()
        self._pinned: dict[str, deque[SessionQueue]] = {}
        """The same for each worker that has work of its own."""
        self._pinned_count = 0
        self._named: dict[str, WorkerLoad] = {}
        self._called: OrderedDict[WorkerLoad, None] = OrderedDict()
        """Workers that have room and work of their own."""
        self._idle: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._roomy: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._changed: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._later: list[tuple[float, int, WorkerLoad]] = []
        self._entries = itertools.count()
        self._free = 0
        self._coming = 0

    @property
    def deadline(self) -> float | None:
        """When a recall may next become worth while by the passing of time alone; true after `assign`."""
        if self._rota or self._free <= self._coming:
            return None
        later = self._later
        while later and not self._waits(later[0]):
            heapq.heappop(later)
        return later[0][0] if later else None

    # -- what waits -----------------------------------------------------------------------------------------------

    def enqueue(self, session: CoordinatorSession, worker: str, priority: int, items: list[Item]) -> None:
        """Work to the end of its rank."""
        line = session.line(worker)
        line.rank(priority).queue.extend(items)
        session.submitted += len(items)
        self._count(line, len(items))
        self._enrol(line)

    def put_back(self, lease: Lease, *, careful: bool) -> None:
        """What a lease was for, to the front of where it came from; to its end where starts of it were lost: others first."""
        line = lease.session.line(lease.rank.line.worker)
        rank = line.rank(lease.rank.priority)
        if lease.lost:
            rank.queue.append(lease.again())
        else:
            (rank.careful if careful else rank.queue).appendleft(lease.again())
        lease.session.left_queue -= 1
        self._count(line, 1)
        self._enrol(line)

    def take_out(self, session: CoordinatorSession, wanted: set[int]) -> list[Item]:
        """Of these works what waits; it waits no more."""
        taken: list[Item] = []
        for line in list(session.lines.values()):
            before = len(taken)
            for rank in line.ranks:
                for name in ("queue", "careful"):
                    old: deque[Item] = getattr(rank, name)
                    if any(item[0] in wanted for item in old):
                        taken += [item for item in old if item[0] in wanted]
                        setattr(rank, name, deque(item for item in old if item[0] not in wanted))
            if len(taken) > before:
                line.ranks = [rank for rank in line.ranks if len(rank)]
                self._count(line, before - len(taken))
                if not line.ranks:
                    self._leave(line)
        session.left_queue += len(taken)
        return taken

    def drop(self, session: CoordinatorSession) -> None:
        """Nothing of it waits any more."""
        for line in list(session.lines.values()):
            self._count(line, -sum(map(len, line.ranks)))
            for rank in line.ranks:
                rank.queue.clear()
                rank.careful.clear()
            line.ranks.clear()
            self._leave(line)
        session.left_queue = session.submitted

    def _count(self, line: SessionQueue, more: int) -> None:
        self.queued += more
        if line.worker:
            self._pinned_count += more

    def _enrol(self, line: SessionQueue) -> None:
        """A line has work."""
        if line.in_rota:
            return
        line.in_rota = True
        if not line.worker:
            self._rota.append(line)
            return
        self._pinned.setdefault(line.worker, deque()).append(line)
        if line.worker in self._named:
            self._call(self._named[line.worker])

    def _leave(self, line: SessionQueue) -> None:
        """A line has none any more."""
        if line.in_rota:
            (self._pinned[line.worker] if line.worker else self._rota).remove(line)
            self._left(line)

    def _left(self, line: SessionQueue) -> None:
        """It stands in its rota no more."""
        line.in_rota = False
        worker = line.worker
        if worker:
            del line.session.lines[worker]
            if not self._pinned[worker]:
                del self._pinned[worker]
                if worker in self._named:
                    self._called.pop(self._named[worker], None)

    # -- who takes it ---------------------------------------------------------------------------------------------

    def came(self, hands: WorkerLoad) -> None:
        """A worker is there."""
        self._named[hands.name] = hands
        self.place(hands)

    def went(self, hands: WorkerLoad) -> None:
        """It will not be back; another one may come under its name."""
        hands.reachable = False
        self.place(hands)
        del self._named[hands.name]

    def place(self, hands: WorkerLoad) -> None:
        """Keep the lists of workers, and the sums over them, true for one of them."""
        count = hands.outstanding
        slots = hands.member.slots
        usable = _usable(hands)
        surplus = hands.reachable and count > slots
        _set(self._idle, hands, usable and count < slots)
        _set(self._roomy, hands, usable and count < hands.window.limit)
        _set(self._changed, hands, surplus and not hands.recalled)
        if self._pinned or self._called:
            self._call(hands)
        hands.recall_at = math.inf
        free = slots - count if usable and count < slots else 0
        coming = len(hands.recalled) if surplus else 0
        self._free += free - hands.free
        self._coming += coming - hands.coming
        hands.free, hands.coming = free, coming

    def assign(self, now: float) -> list[Send]:
        """Hand out what waits. Called once at the end of each event."""
        rota = self._rota
        if not rota and not self._called:
            return self._recall(now)
        pinned: dict[WorkerLoad, Handout] = {}
        batches: dict[WorkerLoad, Handout] = {}
        while self._called:
            hands = next(iter(self._called))
            self._give(hands, _room_for_its_own(hands), self._pinned[hands.name], pinned, now)
        recalls = [] if rota else self._recall(now)
        while rota and self._idle:
            hands = next(iter(self._idle))
            self._give(hands, hands.member.slots - hands.outstanding, rota, batches, now)
        while rota and self._roomy:
            hands = next(iter(self._roomy))
            share = max(1, (self.queued - self._pinned_count) // len(self._roomy))
            self._give(hands, min(share, hands.window.limit - hands.outstanding), rota, batches, now)
            if hands in self._roomy:  # to the end of the line
                self._roomy.move_to_end(hands)
        effects = [
            Send(hands.member.peer, message)
            for given in (pinned, batches)
            for hands, batch in given.items()
            for message in self._messages(batch, first=given is pinned)
        ]
        return effects + recalls

    def _call(self, hands: WorkerLoad) -> None:
        waits = _usable(hands) and hands.name in self._pinned
        _set(self._called, hands, waits and _room_for_its_own(hands) > 0)

    def _give(
        self, hands: WorkerLoad, count: int, rota: deque[SessionQueue], batches: dict[WorkerLoad, Handout], now: float
    ) -> None:
        batch = batches.get(hands)
        if batch is None:
            batch = batches[hands] = Handout()
        hands.window.given(now)
        while count > 0 and rota:
            line = rota[0]
            rank = line.ranks[-1]
            take = min(count, max(1, count // len(rota)))
            careful = min(take, len(rank.careful))
            others = min(take - careful, len(rank.queue))
            if careful:
                self._lease(hands, rank, rank.careful, careful, batch, batch.careful)
            if others:
                self._lease(hands, rank, rank.queue, others, batch, batch.items)
            count -= careful + others
            if not rank.queue and not rank.careful:
                line.ranks.pop()
            if line.ranks:
                rota.rotate(-1)
            else:
                rota.popleft()
                self._left(line)
        self.place(hands)

    def _lease(
        self,
        hands: WorkerLoad,
        rank: PriorityBand,
        queue: deque[Item],
        count: int,
        batch: Handout,
        into: list[Leased],
    ) -> None:
        """Hand out the first `count` of a queue. This is done for each piece of work that there is: it has to be quick."""
        session = rank.line.session
        coordinator, known, leases = session.coordinator, hands.known, hands.leases
        number = first = self._next_lease
        checked = -1
        for _ in range(count):
            item = queue.popleft()
            _, attempt, lost, fn, payload = item
            if fn != checked:
                if (coordinator, fn) not in known:
                    pickled = session.functions.get(fn)
                    if (
                        pickled is None
                    ):  # forgotten: its coordinator had the result before the worker that made it was lost
                        continue
                    known.add((coordinator, fn))
                    batch.functions.append((coordinator, fn, pickled))
                checked = fn
            leases[number] = Lease(session, rank, item)
            (batch.careful if lost else into).append((number, coordinator, attempt, fn, payload))
            number += 1
        self._next_lease = number
        session.outstanding += number - first
        session.left_queue += count
        self._count(rank.line, -count)

    def _recall(self, now: float) -> list[Send]:
        """Somebody is idle and nothing waits: take from those who will need long for what they have not begun."""
        effects: list[Send] = []
        while self._free > self._coming and (hands := self._next_surplus(now)) is not None:
            spare = _spare(hands)
            if spare:
                take = spare[-max(self._free - self._coming, (len(spare) + 1) // 2) :]
                hands.recalled.update(take)
                effects.append(Send(hands.member.peer, Recall(take)))
                self.place(hands)
        return effects

    def _next_surplus(self, now: float) -> WorkerLoad | None:
        """A worker from which work may be called back now; it is not given again before it has changed."""
        while self._changed:
            hands, _ = self._changed.popitem(last=False)
            at = _worth_recalling_at(hands)
            if at <= now:
                return hands
            if at < math.inf:
                hands.recall_at = at
                heapq.heappush(self._later, (at, next(self._entries), hands))
        while self._later and self._later[0][0] <= now:
            entry = heapq.heappop(self._later)
            if self._waits(entry):
                entry[2].recall_at = math.inf
                return entry[2]
        return None

    def _messages(self, batch: Handout, *, first: bool) -> Iterator[Assign]:
        """Functions go before the work that uses them: in its message, or in messages of their own where they are too many."""
        functions: list[tuple[int, int, bytes]] = []
        for part in split(batch.functions):
            if functions:
                yield Assign(functions, [])
            functions = part
        for items, careful in ((batch.items, False), (batch.careful, True)):
            if items:
                for share in split(items):
                    yield Assign(functions, share, careful, len(self._named), first)
                    functions = []

    @staticmethod
    def _waits(entry: tuple[float, int, WorkerLoad]) -> bool:
        """Whether an entry of the heap is still true: its worker has not changed since."""
        return entry[2].recall_at == entry[0]


def _spare(hands: WorkerLoad) -> list[int]:
    """Leases that its slots will not have begun and others may: the newest, but for one a slot."""
    spare = [number for number, lease in hands.leases.items() if not lease.started and not lease.rank.line.worker]
    return spare[max(0, hands.member.slots - (hands.outstanding - len(spare))) :]


def _usable(hands: WorkerLoad) -> bool:
    return hands.reachable and not hands.member.leaving


def _room_for_its_own(hands: WorkerLoad) -> int:
    """How much pinned work it may be given now: also where others fill its window, one for each slot, so that it can go before them."""
    room = hands.window.limit - hands.outstanding
    return (
        room if room > 0 else hands.member.slots - sum(bool(lease.rank.line.worker) for lease in hands.leases.values())
    )


def _worth_recalling_at(hands: WorkerLoad) -> float:
    """From when on it is better to take back what a worker has not begun than to leave it there."""
    held, window = hands.outstanding, hands.window
    done_before_told_s = window.trip_s
    if window.remaining_s(held) >= done_before_told_s + RECALL_WORTH_S:
        return 0.0
    return window.overdue_at(held) + RECALL_WORTH_S


def _set(line: OrderedDict[WorkerLoad, None], hands: WorkerLoad, wanted: bool) -> None:
    if wanted:
        line.setdefault(hands, None)
    elif hands in line:
        del line[hands]
