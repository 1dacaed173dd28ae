"""The queues of work that needs resources, or whose large inputs are at a worker: which item goes to
which worker, and what is told about work that no worker can run. No I/O.

Rules
    Work of one session that needs the same resources, and is pinned to the same worker or to none,
    has one queue. Queues take turns, one item each; a queue for which a worker is kept free
    (resources.py) comes first. An item goes to a worker only if the resources are free there, and
    at most one such item for each slot, so that nothing is reserved for work that could not begin.
    It runs before other work of that worker. Workers with an idle slot are preferred.
    A queue that becomes ready looks at all workers that have resources, once; then it looks only at
    those that have changed. So an event costs the same with many workers and with few.
    Work whose large inputs a worker holds has a queue for this holder. Its items go to workers of
    the holder's host, which map the inputs. When none has gone for as long as it takes to move the
    inputs to another host, one item joins the work that any worker may run; all do when the holder
    is away. So the wait costs at most as much as the move that it may save. Work that needs resources as
    well does not wait: it only prefers the holder's host. If all workers are on one host, work has
    no such queue.
    If no member could satisfy a request even with nothing in use, the session is told so at once.
    The work still waits, because a worker may join: until `growth_limit_s` after a worker has last
    joined or was lost. Then it fails. In a cluster that has not changed for so long it fails at
    once. A member that is away within its grace, or leaves, counts like the others. Work that is
    pinned to an absent worker, and all work while there is no member, waits for as long as the
    coordinator says (its P6 and P11).

Not here: what the workers have (resources.py), and the leases (placement.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zmqdist.events import Send
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import Unsatisfied
from zmqdist.scheduling.dispatcher.records import SessionQueue, WorkerLoad
from zmqdist.scheduling.dispatcher.resources import Stocks
from zmqdist.scheduling.shared.quantities import Grant, amounts_text

ROWS_MAX = 32
"""The largest number of queues in a snapshot."""

NO_WORKER_HAS = "no worker has so much"
"""Why work waits that needs more of a resource than any worker has."""

TOLD_WORKS_MAX = 8
"""The largest number of waiting items that a message names when no worker can run them."""


@dataclass(frozen=True, slots=True)
class DemandRow:
    """The work of one session that waits for the same resources, in a snapshot.

    Attributes:
      request: what each item needs, as text.
      worker: the worker to which the work is pinned, or "".
      waiting: the number of items.
      why: why they wait.
    """

    request: str
    worker: str
    waiting: int
    why: str


class Demands:
    """The ready queues of work that needs resources; the module's docstring has the rules.

    Attributes:
      resources: what the workers have and what of it is in use.
      queued: the number of waiting items in the queues.
      ready: the queues with work, in the order of turns.
    """

    def __init__(self, growth_limit_s: float) -> None:
        self.stocks = Stocks()
        self.queued = 0
        self.ready: OrderedDict[SessionQueue, None] = OrderedDict()
        self._growth_limit_s = growth_limit_s
        self._loads: dict[str, WorkerLoad] = {}
        self._having: dict[str, WorkerLoad] = {}
        """The workers that have resources."""
        self._unseen: dict[SessionQueue, Iterator[WorkerLoad]] = {}
        """The workers at which a queue that has become ready has yet to look."""
        self._smallest: dict[str, list[tuple[int, int, SessionQueue]]] = {}
        """For each resource a heap of what the ready queues need of it, with entries of queues that
        are not ready any more. "" stands for queues that need none."""
        self._entries = itertools.count()
        self._hosts: Counter[str] = Counter()
        """The number of workers on each host."""
        self._far_at: dict[SessionQueue, float] = {}
        """The time at which an item of a queue may leave the holder's host."""
        self._unmet: dict[SessionQueue, None] = {}
        """The queues of whose request their sessions know that no worker can satisfy it."""
        self._unjudged: dict[SessionQueue, None] = {}
        """The queues that are new, or all if a worker has joined or was lost."""

    @property
    def deadline(self) -> float | None:
        """The time at which `overdue` and `judge` must next be called; None means never."""
        times = [*self._far_at.values()]
        if self._unmet:
            times.append(self.stocks.final_at)
        return min(times, default=None)

    def is_worth_near(self, worker: str, near: str) -> bool:
        """Return whether it matters on which host work runs that may run at any worker (`worker` is
        empty) and has inputs at the worker `near`."""
        return not worker and near in self._loads and len(self._hosts) > 1

    # -- queues ------------------------------------------------------------------------------------

    def add(self, queue: SessionQueue) -> None:
        """Add a queue that now has work."""
        self.ready[queue] = None
        self._unseen[queue] = self._candidates(queue)
        for name, amount in queue.request or (("", 0),):
            entry = (amount, next(self._entries), queue)
            heapq.heappush(self._smallest.setdefault(name, []), entry)
        self._unjudged[queue] = None

    def _candidates(self, queue: SessionQueue) -> Iterator[WorkerLoad]:
        """Yield the workers that could run the work of a queue, the best ones first. Some are
        yielded again."""
        loads = self._having if queue.request else self._loads
        if queue.worker:
            loads = {name: loads[name] for name in (queue.worker,) if name in loads}
        for is_near in (True, False) if queue.near else (False,):
            for is_idle in (True, False):
                for load in list(loads.values()):
                    if (not is_idle or load.outstanding < load.member.slots) and (
                        not is_near or self._is_near(load, queue)
                    ):
                        yield load

    def remove(self, queue: SessionQueue) -> None:
        """Remove a queue without work."""
        del self.ready[queue]
        self._unseen.pop(queue, None)
        self._unmet.pop(queue, None)
        self._unjudged.pop(queue, None)
        self._far_at.pop(queue, None)
        self.stocks.drop_claim(queue)

    # -- workers -----------------------------------------------------------------------------------

    def add_worker(self, load: WorkerLoad) -> None:
        self._loads[load.name] = load
        self._hosts[load.member.host] += 1
        if load.member.resources:
            self._having[load.name] = load
        self.stocks.add_worker(load.name, load.member.resources)
        self._note_change(load.member.joined_at)

    def remove_worker(self, load: WorkerLoad, now: float) -> None:
        del self._loads[load.name]
        self._hosts -= Counter([load.member.host])
        self._having.pop(load.name, None)
        self.stocks.remove_worker(load.name)
        self._note_change(now)

    def release_ended(self, load: WorkerLoad) -> None:
        """Release the resources of leases that have ended."""
        for number in list(load.grants):
            if not (number in load.leases or number in load.stale_leases or number in load.strays):
                self.stocks.release(load.name, load.grants.pop(number))

    def _note_change(self, now: float) -> None:
        self.stocks.final_at = now + self._growth_limit_s
        self._unjudged.update(self.ready)

    # -- decisions ---------------------------------------------------------------------------------

    def next_grant(self, now: float) -> tuple[WorkerLoad, SessionQueue, Grant] | None:
        """Reserve resources for one item. Return the worker, the queue of the item and the grant;
        None if no item can be handed out now."""
        stocks = self.stocks
        stocks.keep_free(now)
        changed = [
            load
            for name in stocks.changed
            if (load := self._loads.get(name)) is not None
            and load.has_place
            and self._may_fit(stocks.free(name))
        ]
        # Thousands of queues may wait, so look at all of them only if that may lead to something.
        first = [queue for queue in stocks.kept.values() if queue in self.ready]
        for queue in (*first, *self.ready) if changed else [*self._unseen]:
            assert isinstance(queue, SessionQueue)
            for load in self._unseen.get(queue, ()):
                if (grant := self._reserve(load, queue)) is not None:
                    return load, queue, grant
            for load in changed:
                if (grant := self._reserve(load, queue)) is not None:
                    return load, queue, grant
            if queue.request:
                stocks.claim(queue, queue.request, now, queue.worker)
            elif queue not in self._far_at:
                self._far_at[queue] = now + queue.near_s
        self._unseen.clear()
        stocks.changed.clear()
        return None

    def _may_fit(self, free: Mapping[str, int]) -> bool:
        """Return whether a worker has enough of one resource for a ready queue."""
        for name, heap in self._smallest.items():
            while heap and heap[0][2] not in self.ready:
                heapq.heappop(heap)
            if heap and free.get(name, 0) >= heap[0][0]:
                return True
        return False

    def _reserve(self, load: WorkerLoad, queue: SessionQueue) -> Grant | None:
        if queue.worker not in ("", load.name) or not load.has_place:
            return None
        if not load.admits(queue.session.depth):
            return None
        # Work with large inputs waits for an idle slot, because it is not requested back.
        is_idle = load.outstanding < load.member.slots
        if not queue.request and not (is_idle and self._is_near(load, queue)):
            return None
        grant = self.stocks.reserve(load.name, queue.request, queue)
        if grant is not None:
            self.stocks.drop_claim(queue)
            self.ready.move_to_end(queue)
            # The queue must claim resources again for its next item.
            self._unseen[queue] = self._unseen.pop(queue, iter(()))
            self._far_at.pop(queue, None)
        return grant

    def _is_near(self, load: WorkerLoad, queue: SessionQueue) -> bool:
        holder = self._loads.get(queue.near)
        return holder is not None and load.member.host == holder.member.host

    def overdue(self, now: float) -> list[tuple[SessionQueue, int]]:
        """Return the queues of which some items must join the work that any worker may run, and how
        many."""
        overdue = []
        for queue, at in list(self._far_at.items()):
            if not self._is_here(queue.near):
                overdue.append((queue, queue.count))
            elif at <= now:
                overdue.append((queue, 1))
                self._far_at[queue] = now + queue.near_s
        return overdue

    def judge(self, now: float) -> tuple[list[Send], list[SessionQueue]]:
        """Return what to tell sessions of requests that no worker can satisfy, and the queues whose
        work must end for that reason."""
        effects: list[Send] = []
        unjudged, self._unjudged = self._unjudged, {}
        for queue in unjudged:
            if self.stocks.can_ever(queue.request, queue.worker):
                self._unmet.pop(queue, None)
            elif queue not in self._unmet:
                self._unmet[queue] = None
                effects += self._told(queue, TOLD_WORKS_MAX, final=False)
        ended = []
        if self._unmet and now >= self.stocks.final_at:
            ended = list(self._unmet)
            effects = [
                effect for queue in ended for effect in self._told(queue, queue.count, final=True)
            ]
        return effects, ended

    def rows(self) -> tuple[DemandRow, ...]:
        """Return a row for each of the first ready queues."""
        return tuple(
            DemandRow(
                amounts_text(queue.request) or "nothing", queue.worker, queue.count, self.why(queue)
            )
            for queue in [*self.ready][:ROWS_MAX]
        )

    def why(self, queue: SessionQueue) -> str:
        """Return why the work of a queue waits."""
        if queue in self._unmet:
            return NO_WORKER_HAS
        keeper = next((worker for worker, kept in self.stocks.kept.items() if kept is queue), "")
        if keeper:
            return f"{keeper} is kept free for it"
        if queue.worker and not self._is_here(queue.worker):
            return f"{queue.worker} is away"
        return "all is in use" if queue.request else f"{queue.near} has its inputs"

    def lack_text(self, queue: SessionQueue) -> str:
        """Return what the work of a queue needs, and what workers have in its place."""
        return self.stocks.lack_text(queue.request, queue.worker)

    def _is_here(self, worker: str) -> bool:
        load = self._loads.get(worker)
        return load is not None and load.reachable and not load.member.leaving

    def _told(self, queue: SessionQueue, count: int, *, final: bool) -> list[Send]:
        works = [
            (item[0], item[1])
            for band in reversed(queue.bands)
            for item in (*band.report_before_start, *band.items)
        ][:count]
        text = self.lack_text(queue)
        return [
            Send(queue.session.peer, Unsatisfied(works[at : at + BATCH_ITEMS_MAX], text, final))
            for at in range(0, len(works), BATCH_ITEMS_MAX)
        ]
