"""What waits, and which worker gets which of it next: idle ones first, then those with room, coordinators in turn; and what is called back.

Work that is pinned to a worker waits in a line of that worker, and is served before any other work as soon as the worker has room; it never
goes elsewhere, and is not called back. Within a session's line the higher priority goes first, and of one priority the oldest.

The lists of workers are kept true by `reindex`, which is called whenever what a worker holds has changed, so that nothing here looks at all
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
from zmqdist.messages import Assign, Item, Leased, StealRequest
from zmqdist.scheduling.dispatcher.records import (
    CoordinatorSession,
    Handout,
    Lease,
    PriorityBand,
    SessionQueue,
    WorkerLoad,
)

STEAL_WORTH_S = 0.01
"""Work that its worker will reach sooner than this is not called back: the messages would cost more."""


class Placement:
    """The sessions that have waiting work, and the workers that can take some.

    Attributes:
      queued: pieces of work that wait, of all sessions.
    """

    def __init__(self, first_lease: int) -> None:
        self.queued = 0
        self._next_lease = first_lease
        self._ready_queues: deque[SessionQueue] = deque()
        self._ready_pinned: dict[str, deque[SessionQueue]] = {}
        """The same for each worker that has work of its own."""
        self._pinned_count = 0
        self._loads_by_name: dict[str, WorkerLoad] = {}
        self._with_pinned_work: OrderedDict[WorkerLoad, None] = OrderedDict()
        """Workers that have room and work of their own."""
        self._idle: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._with_capacity: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._overloaded: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._steal_times: list[tuple[float, int, WorkerLoad]] = []
        self._entry_numbers = itertools.count()
        self._free_slots = 0
        self._returning = 0

    @property
    def deadline(self) -> float | None:
        """When a recall may next become worth while by the passing of time alone; true after `assign`."""
        if self._ready_queues or self._free_slots <= self._returning:
            return None
        steal_times = self._steal_times
        while steal_times and not self._is_current(steal_times[0]):
            heapq.heappop(steal_times)
        return steal_times[0][0] if steal_times else None

    # -- what waits -----------------------------------------------------------------------------------------------

    def enqueue(self, session: CoordinatorSession, worker: str, priority: int, items: list[Item]) -> None:
        """Work to the end of its rank."""
        queue = session.queue_for(worker)
        queue.band(priority).items.extend(items)
        session.submitted += len(items)
        self._count(queue, len(items))
        self._add_ready(queue)

    def put_back(self, lease: Lease, *, report_before_start: bool) -> None:
        """What a lease was for, to the front of where it came from; to its end where starts of it were lost: others first."""
        queue = lease.session.queue_for(lease.band.session_queue.worker)
        band = queue.band(lease.band.priority)
        if lease.lost:
            band.items.append(lease.next_item())
        else:
            (band.report_before_start if report_before_start else band.items).appendleft(lease.next_item())
        lease.session.left_queue -= 1
        self._count(queue, 1)
        self._add_ready(queue)

    def take_out(self, session: CoordinatorSession, wanted: set[int]) -> list[Item]:
        """Of these works what waits; it waits no more."""
        taken: list[Item] = []
        for queue in list(session.queues.values()):
            before = len(taken)
            for band in queue.bands:
                for name in ("items", "report_before_start"):
                    items: deque[Item] = getattr(band, name)
                    if any(item[0] in wanted for item in items):
                        taken += [item for item in items if item[0] in wanted]
                        setattr(band, name, deque(item for item in items if item[0] not in wanted))
            if len(taken) > before:
                queue.bands = [band for band in queue.bands if len(band)]
                self._count(queue, before - len(taken))
                if not queue.bands:
                    self._remove_ready(queue)
        session.left_queue += len(taken)
        return taken

    def drop(self, session: CoordinatorSession) -> None:
        """Nothing of it waits any more."""
        for queue in list(session.queues.values()):
            self._count(queue, -sum(map(len, queue.bands)))
            for band in queue.bands:
                band.items.clear()
                band.report_before_start.clear()
            queue.bands.clear()
            self._remove_ready(queue)
        session.left_queue = session.submitted

    def _count(self, queue: SessionQueue, more: int) -> None:
        self.queued += more
        if queue.worker:
            self._pinned_count += more

    def _add_ready(self, queue: SessionQueue) -> None:
        """A line has work."""
        if queue.is_ready:
            return
        queue.is_ready = True
        if not queue.worker:
            self._ready_queues.append(queue)
            return
        self._ready_pinned.setdefault(queue.worker, deque()).append(queue)
        if queue.worker in self._loads_by_name:
            self._reindex_pinned(self._loads_by_name[queue.worker])

    def _remove_ready(self, queue: SessionQueue) -> None:
        """A line has none any more."""
        if queue.is_ready:
            (self._ready_pinned[queue.worker] if queue.worker else self._ready_queues).remove(queue)
            self._note_not_ready(queue)

    def _note_not_ready(self, queue: SessionQueue) -> None:
        """It stands in its rota no more."""
        queue.is_ready = False
        worker = queue.worker
        if worker:
            del queue.session.queues[worker]
            if not self._ready_pinned[worker]:
                del self._ready_pinned[worker]
                if worker in self._loads_by_name:
                    self._with_pinned_work.pop(self._loads_by_name[worker], None)

    # -- who takes it ---------------------------------------------------------------------------------------------

    def add_worker(self, load: WorkerLoad) -> None:
        """A worker is there."""
        self._loads_by_name[load.name] = load
        self.reindex(load)

    def remove_worker(self, load: WorkerLoad) -> None:
        """It will not be back; another one may come under its name."""
        load.reachable = False
        self.reindex(load)
        del self._loads_by_name[load.name]

    def reindex(self, load: WorkerLoad) -> None:
        """Keep the lists of workers, and the sums over them, true for one of them."""
        count = load.outstanding
        slots = load.member.slots
        usable = _takes_work(load)
        surplus = load.reachable and count > slots
        _set(self._idle, load, usable and count < slots)
        _set(self._with_capacity, load, usable and count < load.window.limit)
        _set(self._overloaded, load, surplus and not load.steal_requested)
        if self._ready_pinned or self._with_pinned_work:
            self._reindex_pinned(load)
        load.steal_at = math.inf
        free_slots = slots - count if usable and count < slots else 0
        returning = len(load.steal_requested) if surplus else 0
        self._free_slots += free_slots - load.free_slots
        self._returning += returning - load.returning
        load.free_slots, load.returning = free_slots, returning

    def assign(self, now: float) -> list[Send]:
        """Hand out what waits. Called once at the end of each event."""
        ready = self._ready_queues
        if not ready and not self._with_pinned_work:
            return self._steal(now)
        pinned: dict[WorkerLoad, Handout] = {}
        batches: dict[WorkerLoad, Handout] = {}
        while self._with_pinned_work:
            load = next(iter(self._with_pinned_work))
            self._hand_out(load, _pinned_capacity(load), self._ready_pinned[load.name], pinned, now)
        steals = [] if ready else self._steal(now)
        while ready and self._idle:
            load = next(iter(self._idle))
            self._hand_out(load, load.member.slots - load.outstanding, ready, batches, now)
        while ready and self._with_capacity:
            load = next(iter(self._with_capacity))
            share = max(1, (self.queued - self._pinned_count) // len(self._with_capacity))
            self._hand_out(load, min(share, load.window.limit - load.outstanding), ready, batches, now)
            if load in self._with_capacity:  # to the end of the line
                self._with_capacity.move_to_end(load)
        effects = [
            Send(load.member.peer, message)
            for handouts in (pinned, batches)
            for load, batch in handouts.items()
            for message in self._messages(batch, pinned=handouts is pinned)
        ]
        return effects + steals

    def _reindex_pinned(self, load: WorkerLoad) -> None:
        waits = _takes_work(load) and load.name in self._ready_pinned
        _set(self._with_pinned_work, load, waits and _pinned_capacity(load) > 0)

    def _hand_out(
        self, load: WorkerLoad, count: int, ready: deque[SessionQueue], batches: dict[WorkerLoad, Handout], now: float
    ) -> None:
        batch = batches.get(load)
        if batch is None:
            batch = batches[load] = Handout()
        load.window.note_handed_out(now)
        while count > 0 and ready:
            queue = ready[0]
            band = queue.bands[-1]
            take = min(count, max(1, count // len(ready)))
            reported_first = min(take, len(band.report_before_start))
            plain = min(take - reported_first, len(band.items))
            if reported_first:
                self._grant(load, band, band.report_before_start, reported_first, batch, batch.report_before_start)
            if plain:
                self._grant(load, band, band.items, plain, batch, batch.items)
            count -= reported_first + plain
            if not band.items and not band.report_before_start:
                queue.bands.pop()
            if queue.bands:
                ready.rotate(-1)
            else:
                ready.popleft()
                self._note_not_ready(queue)
        self.reindex(load)

    def _grant(
        self,
        load: WorkerLoad,
        band: PriorityBand,
        items: deque[Item],
        count: int,
        batch: Handout,
        into: list[Leased],
    ) -> None:
        """Hand out the first `count` of a queue. This is done for each piece of work that there is: it has to be quick."""
        session = band.session_queue.session
        coordinator, known, leases = session.coordinator, load.known_functions, load.leases
        number = first = self._next_lease
        checked = -1
        for _ in range(count):
            item = items.popleft()
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
            leases[number] = Lease(session, band, item)
            (batch.report_before_start if lost else into).append((number, coordinator, attempt, fn, payload))
            number += 1
        self._next_lease = number
        session.outstanding += number - first
        session.left_queue += count
        self._count(band.session_queue, -count)

    def _steal(self, now: float) -> list[Send]:
        """Somebody is idle and nothing waits: take from those who will need long for what they have not begun."""
        effects: list[Send] = []
        while self._free_slots > self._returning and (load := self._next_surplus(now)) is not None:
            stealable = _stealable(load)
            if stealable:
                take = stealable[-max(self._free_slots - self._returning, (len(stealable) + 1) // 2) :]
                load.steal_requested.update(take)
                effects.append(Send(load.member.peer, StealRequest(take)))
                self.reindex(load)
        return effects

    def _next_surplus(self, now: float) -> WorkerLoad | None:
        """A worker from which work may be called back now; it is not given again before it has changed."""
        while self._overloaded:
            load, _ = self._overloaded.popitem(last=False)
            at = _worth_stealing_at(load)
            if at <= now:
                return load
            if at < math.inf:
                load.steal_at = at
                heapq.heappush(self._steal_times, (at, next(self._entry_numbers), load))
        while self._steal_times and self._steal_times[0][0] <= now:
            entry = heapq.heappop(self._steal_times)
            if self._is_current(entry):
                entry[2].steal_at = math.inf
                return entry[2]
        return None

    def _messages(self, batch: Handout, *, pinned: bool) -> Iterator[Assign]:
        """Functions go before the work that uses them: in its message, or in messages of their own where they are too many."""
        functions: list[tuple[int, int, bytes]] = []
        for part in split(batch.functions):
            if functions:
                yield Assign(functions, [])
            functions = part
        for items, report_before_start in ((batch.items, False), (batch.report_before_start, True)):
            if items:
                for share in split(items):
                    yield Assign(functions, share, report_before_start, len(self._loads_by_name), pinned)
                    functions = []

    @staticmethod
    def _is_current(entry: tuple[float, int, WorkerLoad]) -> bool:
        """Whether an entry of the heap is still true: its worker has not changed since."""
        return entry[2].steal_at == entry[0]


def _stealable(load: WorkerLoad) -> list[int]:
    """Leases that its slots will not have begun and others may: the newest, but for one a slot."""
    spare = [
        number for number, lease in load.leases.items() if not lease.started and not lease.band.session_queue.worker
    ]
    return spare[max(0, load.member.slots - (load.outstanding - len(spare))) :]


def _takes_work(load: WorkerLoad) -> bool:
    return load.reachable and not load.member.leaving


def _pinned_capacity(load: WorkerLoad) -> int:
    """How much pinned work it may be given now: also where others fill its window, one for each slot, so that it can go before them."""
    room = load.window.limit - load.outstanding
    return (
        room
        if room > 0
        else load.member.slots - sum(bool(lease.band.session_queue.worker) for lease in load.leases.values())
    )


def _worth_stealing_at(load: WorkerLoad) -> float:
    """From when on it is better to take back what a worker has not begun than to leave it there."""
    held, window = load.outstanding, load.window
    unreported_s = window.trip_s
    if window.remaining_s(held) >= unreported_s + STEAL_WORTH_S:
        return 0.0
    return window.overdue_at(held) + STEAL_WORTH_S


def _set(workers: OrderedDict[WorkerLoad, None], load: WorkerLoad, wanted: bool) -> None:
    if wanted:
        workers.setdefault(load, None)
    elif load in workers:
        del workers[load]
