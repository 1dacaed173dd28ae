"""The placement of work: the queues, which worker gets which item next, and which items are
requested back from overloaded workers.

Rules
    Idle workers get work first, then workers with room in their window. Coordinators take turns.
    Within a queue the highest priority is handed out first, and within one priority the oldest
    item.
    Work of the coordinators of functions (nested work) goes before other work, the deepest first. A
    worker at its bound of waiting functions gets no other work, apart from pinned work.
    Work pinned to a worker waits in a queue of its own. As soon as this worker has room, it gets
    the pinned work before any other work. Pinned work is never handed out to another worker, and
    the dispatcher does not request it back.
    Work that needs resources has queues of its own (demands.py), and gets its room with the pinned
    work, before work that any worker may run.
    There are lists of idle workers, of workers with capacity and of overloaded workers. `reindex`
    recomputes to which lists a worker belongs, and must be called after each change of the worker's
    load. No step looks at all workers, so an event costs the same with two workers and with ten
    thousand.
    The lists are OrderedDicts, because the machine must be repeatable and a set has no order. A
    plain dict would be slow, because a search for its first key walks over all keys that were
    deleted before that key.
    For each overloaded worker, a heap has the time from which on it is worth requesting work back.
    An entry that a later change has made obsolete is dropped when it becomes the first entry.

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
from zmqdist.messages import SUBMISSION_SHIFT, Assign, Item, Leased, StealRequest
from zmqdist.scheduling.dispatcher.demands import Demands
from zmqdist.scheduling.dispatcher.records import (
    CoordinatorSession,
    Handout,
    Lease,
    LeaseState,
    PriorityBand,
    SessionQueue,
    WorkerLoad,
)
from zmqdist.scheduling.shared.quantities import Quantities

MOVED_BYTES_PER_S = 1e9
"""How many bytes of inputs two hosts are taken to move in a second, about a network of 10 Gbit/s."""

STEAL_WORTH_S = 0.01
"""Seconds. Work that its worker will begin sooner than this is not requested back, because the
messages would take longer."""


class Placement:
    """The sessions that have waiting work, and the workers to which work can be handed out.

    Args:
      first_lease: the number of the first lease.
      growth_limit_s: as in DispatcherConfig.

    Attributes:
      demands: the queues of work that needs resources, and the resources of the workers.
      queued, queued_pinned: the number of waiting work items of all sessions, and the number of
        those that are pinned to a worker.
    """

    def __init__(self, first_lease: int, growth_limit_s: float) -> None:
        self.demands = Demands(growth_limit_s)
        self.queued = 0
        self.next_lease = first_lease
        self._ready_queues: deque[SessionQueue] = deque()
        self._ready_nested: dict[int, deque[SessionQueue]] = {}
        """The queues of nested work by depth. A depth without work has no entry."""
        self._ready_pinned: dict[str, deque[SessionQueue]] = {}
        """The queues of pinned work by worker name, each list in the order of turns. A worker
        without pinned work has no entry."""
        self.queued_pinned = 0
        self._loads_by_name: dict[str, WorkerLoad] = {}
        self._with_pinned_work: OrderedDict[WorkerLoad, None] = OrderedDict()
        """The workers that have room for pinned work, and for which pinned work waits."""
        self._idle: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._with_capacity: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._nested_only: OrderedDict[WorkerLoad, None] = OrderedDict()
        """The workers at their bound (nested_bound.py) with a free place."""
        self._overloaded: OrderedDict[WorkerLoad, None] = OrderedDict()
        self._steal_times: list[tuple[float, int, WorkerLoad]] = []
        self._entry_numbers = itertools.count()
        self._free_slots = 0
        self._returning = 0

    @property
    def deadline(self) -> float | None:
        """The time at which `assign` must next be called to request work back; None means never.
        Valid right after `assign`."""
        if self._ready_queues or self._ready_nested or self._free_slots <= self._returning:
            return None
        steal_times = self._steal_times
        while steal_times and not self._is_current(steal_times[0]):
            heapq.heappop(steal_times)
        return steal_times[0][0] if steal_times else None

    # -- waiting work ------------------------------------------------------------------------------

    def enqueue(
        self,
        session: CoordinatorSession,
        worker: str,
        priority: int,
        items: list[Item],
        request: Quantities = (),
        near: str = "",
        near_bytes: int = 0,
    ) -> None:
        """Queue work items behind the items of the same session, worker, resources and priority.

        Args:
          worker: the name of the worker to which the items are pinned; empty if any worker may run
            them.
          request: the resources that each item needs.
          near, near_bytes: the worker that holds inputs of the items, and their size.
        """
        if near and not self.demands.is_worth_near(worker, near):
            near = ""
        queue = session.queue_for(worker, request, near)
        if near:
            queue.near_s = near_bytes / MOVED_BYTES_PER_S
        queue.band(priority).items.extend(items)
        session.submitted += len(items)
        self._count(queue, len(items))
        self._add_ready(queue)

    def put_back(self, lease: Lease, *, report_before_start: bool) -> None:
        """Queue the work of a lease again. The work goes to the front of its queue, or to the end
        if it has lost starts, so that other items run first.

        Args:
          report_before_start: whether the work may have begun without a report, so that its next
            worker must report the start first.
        """
        former = lease.band.session_queue
        queue = lease.session.queue_for(former.worker, former.request)
        band = queue.band(lease.band.priority)
        if lease.lost:  # this work goes to the end, because it may crash its next process as well
            band.items.append(lease.next_item())
        else:
            (band.report_before_start if report_before_start else band.items).appendleft(
                lease.next_item()
            )
        lease.session.left_queue -= 1
        self._count(queue, 1)
        self._add_ready(queue)

    def take_out(
        self, session: CoordinatorSession, submissions: set[tuple[int, int]]
    ) -> list[Item]:
        """Remove the work items of these submissions (`Lease.submission`) that still wait, and
        return them."""
        removed_items: list[Item] = []
        works = {work for work, _ in submissions}  # millions may wait, so the cheap check is first

        def matches(item: Item) -> bool:
            return item[0] in works and (item[0], item[1] >> SUBMISSION_SHIFT) in submissions

        for queue in list(session.queues.values()):
            before = len(removed_items)
            for band in queue.bands:
                for name in ("items", "report_before_start"):
                    items: deque[Item] = getattr(band, name)
                    if any(map(matches, items)):
                        removed_items += filter(matches, items)
                        setattr(band, name, deque(itertools.filterfalse(matches, items)))
            if len(removed_items) > before:
                queue.bands = [band for band in queue.bands if len(band)]
                self._count(queue, before - len(removed_items))
                if not queue.bands:
                    self._remove_ready(queue)
        session.left_queue += len(removed_items)
        return removed_items

    def drop(self, session: CoordinatorSession) -> None:
        """Remove all waiting work of a session."""
        for queue in list(session.queues.values()):
            self.drop_queue(queue)

    def drop_queue(self, queue: SessionQueue) -> None:
        """Remove all waiting work of a queue."""
        count = queue.count
        self._count(queue, -count)
        for band in queue.bands:
            band.items.clear()
            band.report_before_start.clear()
        queue.bands.clear()
        self._remove_ready(queue)
        queue.session.left_queue += count

    def waiting_for(self, worker: str) -> Iterator[tuple[CoordinatorSession, Item]]:
        """Yield the work items that are pinned to this worker and still wait."""
        demands = [queue for queue in self.demands.ready if queue.worker == worker]
        for queue in (*self._ready_pinned.get(worker, ()), *demands):
            for band in queue.bands:
                for item in (*band.report_before_start, *band.items):
                    yield queue.session, item

    def _count(self, queue: SessionQueue, more: int) -> None:
        self.queued += more
        if queue.is_demand:
            self.demands.queued += more
        elif queue.worker:
            self.queued_pinned += more

    def _add_ready(self, queue: SessionQueue) -> None:
        """Add a queue that now has work to the queues that take turns."""
        if queue.is_ready:
            return
        queue.is_ready = True
        if queue.is_demand:
            self.demands.add(queue)
            return
        if not queue.worker:
            self._line_of(queue).append(queue)
            return
        self._ready_pinned.setdefault(queue.worker, deque()).append(queue)
        if queue.worker in self._loads_by_name:
            self._reindex_pinned(self._loads_by_name[queue.worker])

    def _remove_ready(self, queue: SessionQueue) -> None:
        """Remove a queue without work from the queues that take turns."""
        if queue.is_ready:
            if not queue.is_demand:
                (self._ready_pinned[queue.worker] if queue.worker else self._line_of(queue)).remove(
                    queue
                )
            self._note_not_ready(queue)

    def _line_of(self, queue: SessionQueue) -> deque[SessionQueue]:
        """Return the queues with which a queue of work for any worker takes turns."""
        depth = queue.session.depth
        return self._ready_nested.setdefault(depth, deque()) if depth else self._ready_queues

    def _note_not_ready(self, queue: SessionQueue) -> None:
        """Record that a queue no longer takes turns. Drop the queue if it was for pinned work, or
        for work that needs resources."""
        queue.is_ready = False
        worker, depth = queue.worker, queue.session.depth
        if queue.key:
            del queue.session.queues[queue.key]
        if queue.is_demand:
            self.demands.remove(queue)
        elif depth and not worker and not self._ready_nested[depth]:
            del self._ready_nested[depth]
        elif worker and not self._ready_pinned[worker]:
            del self._ready_pinned[worker]
            if worker in self._loads_by_name:
                self._with_pinned_work.pop(self._loads_by_name[worker], None)

    # -- workers -----------------------------------------------------------------------------------

    def add_worker(self, load: WorkerLoad) -> None:
        """Add a worker that has joined, so that work can be handed out to it."""
        self._loads_by_name[load.name] = load
        self.demands.add_worker(load)
        self.reindex(load)

    def remove_worker(self, load: WorkerLoad, now: float) -> None:
        """Remove a worker that is lost. Another worker may join under its name."""
        self.reindex(load)
        del self._loads_by_name[load.name]
        self.demands.remove_worker(load, now)

    def reindex(self, load: WorkerLoad) -> None:
        """Recompute which lists of workers this worker belongs to (idle, with capacity,
        overloaded), and the sums over all workers.

        Call `reindex` after every change of the worker's load. It makes the cost of `assign`
        independent of the number of workers.
        """
        if load.grants:
            self.demands.release_ended(load)
        if self.demands.ready:
            self.demands.stocks.changed[load.name] = None
        count = load.outstanding
        member = load.member
        slots = member.slots
        reachable = member.peer is not None
        usable = reachable and not member.leaving
        if load.waiting or load in self._nested_only:
            at_bound = load.at_bound
            _set(self._nested_only, load, usable and at_bound and count < load.places)
            usable = usable and not at_bound
        surplus = reachable and count > slots
        _set(self._idle, load, usable and count < slots)
        _set(self._with_capacity, load, usable and count < load.window.limit)
        _set(self._overloaded, load, surplus and not load.steals)
        if self._ready_pinned or self._with_pinned_work:
            self._reindex_pinned(load)
        load.steal_at = math.inf
        free_slots = slots - count if usable and count < slots else 0
        returning = load.steals if surplus else 0
        self._free_slots += free_slots - load.free_slots
        self._returning += returning - load.returning
        load.free_slots, load.returning = free_slots, returning

    def assign(self, now: float) -> list[Send]:
        """Hand out waiting work, or request work back for idle workers if no work waits. The caller
        must call this after each event."""
        ready, nested = self._ready_queues, self._ready_nested
        pinned: dict[tuple[WorkerLoad, int], Handout] = {}
        if self.demands.ready:
            self._hand_out_demands(pinned, now)
        elif not ready and not nested and not self._with_pinned_work:
            return self._steal(now)
        batches: dict[tuple[WorkerLoad, int], Handout] = {}
        # P12: no other worker may run pinned work, so it gets the room first.
        while self._with_pinned_work:
            load = next(iter(self._with_pinned_work))
            self._hand_out(load, _pinned_capacity(load), self._ready_pinned[load.name], pinned, now)
        steals = [] if ready or nested else self._steal(now)
        while nested and (free := self._free_below(deepest := max(nested))) is not None:
            self._hand_out(free, free.places - free.outstanding, nested[deepest], batches, now)
        # Fill the idle slots of all workers before any worker gets work ahead.
        while ready and self._idle:
            load = next(iter(self._idle))
            self._hand_out(load, load.member.slots - load.outstanding, ready, batches, now)
        while (ready or nested) and self._with_capacity:
            load = next(iter(self._with_capacity))
            plain = self.queued - self.queued_pinned - self.demands.queued
            share = max(1, plain // len(self._with_capacity))
            line = nested[max(nested)] if nested else ready
            self._hand_out(
                load, min(share, load.window.limit - load.outstanding), line, batches, now
            )
            # This worker goes to the end of the list, so that the workers with room take turns.
            if load in self._with_capacity:
                self._with_capacity.move_to_end(load)
        effects = [
            Send(load.member.peer, message)
            for handouts in (pinned, batches)
            for (load, depth), batch in handouts.items()
            for message in self._messages(batch, pinned=handouts is pinned, depth=depth)
        ]
        return effects + steals

    def _free_below(self, depth: int) -> WorkerLoad | None:
        """Return a worker with a free place for nested work of this depth."""
        for load in self._idle:
            return load
        return next((load for load in self._nested_only if load.admits(depth)), None)

    def _reindex_pinned(self, load: WorkerLoad) -> None:
        usable = load.reachable and not load.member.leaving
        waits = usable and load.name in self._ready_pinned
        _set(self._with_pinned_work, load, waits and _pinned_capacity(load) > 0)

    def _hand_out_demands(self, batches: dict[tuple[WorkerLoad, int], Handout], now: float) -> None:
        """Hand out work whose resources are free, item by item."""
        while (next_grant := self.demands.next_grant(now)) is not None:
            load, queue, grant = next_grant
            batch = batches.setdefault((load, queue.session.depth), Handout())
            load.window.note_handed_out(now)
            band = queue.bands[-1]
            number = self.next_lease
            if band.report_before_start:
                self._grant(
                    load, band, band.report_before_start, 1, batch, batch.report_before_start
                )
            else:
                self._grant(load, band, band.items, 1, batch, batch.items)
            # `reindex` releases the grant again if the item was skipped.
            if queue.request:
                load.grants[number] = grant
                batch.grants.append((number, *grant))
            self._drop_empty(queue)
            self.reindex(load)
        for queue, count in self.demands.overdue(now):
            self._let_go(queue, count)

    def _let_go(self, queue: SessionQueue, count: int) -> None:
        """Have the first items of a queue join the work that any worker may run, because moving
        their inputs would have taken as long as they have waited, or the holder is gone."""
        for _ in range(count):
            band = queue.bands[-1]
            plain = queue.session.queue_for("").band(band.priority)
            if band.report_before_start:
                plain.report_before_start.append(band.report_before_start.popleft())
            else:
                plain.items.append(band.items.popleft())
            self._count(queue, -1)
            self._count(plain.session_queue, 1)
            self._add_ready(plain.session_queue)
            self._drop_empty(queue)

    def _drop_empty(self, queue: SessionQueue) -> None:
        """Drop the band of the highest priority, and the queue, if they have no work."""
        if not len(queue.bands[-1]):
            queue.bands.pop()
        if not queue.bands:
            self._remove_ready(queue)

    def _hand_out(
        self,
        load: WorkerLoad,
        count: int,
        ready: deque[SessionQueue],
        batches: dict[tuple[WorkerLoad, int], Handout],
        now: float,
    ) -> None:
        load.window.note_handed_out(now)
        while count > 0 and ready:
            queue = ready[0]
            band = queue.bands[-1]
            key = (load, queue.session.depth)
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = Handout()
            # P10: each queue gets an equal share of the room, and then its next turn at the end.
            take = min(count, max(1, count // len(ready)))
            reported_first = min(take, len(band.report_before_start))
            plain = min(take - reported_first, len(band.items))
            if reported_first:
                self._grant(
                    load,
                    band,
                    band.report_before_start,
                    reported_first,
                    batch,
                    batch.report_before_start,
                )
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
        """Lease the first `count` items of a queue to a worker. The `for` loop has to be fast,
        because it runs for each work item."""
        session = band.session_queue.session
        coordinator, known_functions, leases = (
            session.coordinator,
            load.known_functions,
            load.leases,
        )
        number = first = self.next_lease
        checked = -1
        for _ in range(count):
            item = items.popleft()
            _, attempt, lost, fn, payload = item
            if fn != checked:
                if (coordinator, fn) not in known_functions:
                    pickled = session.functions.get(fn)
                    # Skip the item: its earlier worker was lost just after the coordinator had
                    # received the result of the item, and the coordinator has dropped the function.
                    if pickled is None:
                        continue
                    known_functions.add((coordinator, fn))
                    batch.functions.append((coordinator, fn, pickled))
                checked = fn
            leases[number] = Lease(session, band, item)
            (batch.report_before_start if lost else into).append(
                (number, coordinator, attempt, fn, payload)
            )
            number += 1
        self.next_lease = number
        session.outstanding += number - first
        session.left_queue += count
        self._count(band.session_queue, -count)

    def _steal(self, now: float) -> list[Send]:
        """Request work back for the idle slots, from workers that would not begin this work
        soon.
        """
        effects: list[Send] = []
        while self._free_slots > self._returning and (load := self._next_surplus(now)) is not None:
            stealable = _stealable(load)
            if stealable:
                take = stealable[
                    -max(self._free_slots - self._returning, (len(stealable) + 1) // 2) :
                ]
                load.steals = len(take)
                effects.append(Send(load.member.peer, StealRequest(take)))
                self.reindex(load)
        return effects

    def _next_surplus(self, now: float) -> WorkerLoad | None:
        """Return a worker from which work may be requested back now, or None if there is no such
        worker.

        Each worker is returned at most once after each change of its load.
        """
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

    def _messages(self, batch: Handout, *, pinned: bool, depth: int) -> Iterator[Assign]:
        """Yield the messages of a hand-out. Functions are in the message with the work that uses
        them, or in messages before it (P8)."""
        functions: list[tuple[int, int, bytes]] = []
        for part in split(batch.functions):
            if functions:
                yield Assign(functions, [])
            functions = part
        for items, report_before_start in ((batch.items, False), (batch.report_before_start, True)):
            if items:
                for share in split(items):
                    yield Assign(
                        functions,
                        share,
                        report_before_start,
                        len(self._loads_by_name),
                        pinned,
                        batch.grants,
                        depth,
                    )
                    functions = []

    @staticmethod
    def _is_current(entry: tuple[float, int, WorkerLoad]) -> bool:
        """Return whether an entry of the heap is current. An entry is obsolete if the load of its
        worker has changed since."""
        return entry[2].steal_at == entry[0]


def _stealable(load: WorkerLoad) -> list[int]:
    """Return the leases that a worker may give back: leases whose work has neither begun nor was
    it cancelled, and is neither pinned nor has resources.

    The oldest of these leases are left out if the worker needs them to have one lease for each
    slot.
    """
    spare = [
        number
        for number, lease in load.leases.items()
        if lease.state is LeaseState.ASSIGNED and not lease.band.session_queue.key
    ]
    return spare[max(0, load.member.slots - (load.outstanding - len(spare))) :]


def _pinned_capacity(load: WorkerLoad) -> int:
    """Return how many pinned items a worker may get now: the room in its window or, without room,
    enough for one pinned item per slot.

    A worker whose window is full of other work may still get pinned work, because pinned work runs
    before the other work (P6).
    """
    room = load.window.limit - load.outstanding
    return room if room > 0 else load.room_ahead


def _worth_stealing_at(load: WorkerLoad) -> float:
    """Return the time from which on it is worth requesting back the work that a worker has not
    begun; 0.0 means at once."""
    count, window = load.outstanding, load.window
    unreported_s = window.trip_s
    if window.remaining_s(count) >= unreported_s + STEAL_WORTH_S:
        return 0.0
    return window.overdue_at(count) + STEAL_WORTH_S


def _set(workers: OrderedDict[WorkerLoad, None], load: WorkerLoad, belongs: bool) -> None:
    if belongs:
        workers.setdefault(load, None)
    elif load in workers:
        del workers[load]
