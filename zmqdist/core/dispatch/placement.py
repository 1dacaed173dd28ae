"""Which worker gets which work next: idle ones first, then those with room, coordinators in turn; and what is called back.

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

from zmqdist.core.batches import split
from zmqdist.core.dispatch.records import Batch, Hands, Lease, Session
from zmqdist.core.events import Send
from zmqdist.messages import Assign, Item, Leased, Recall

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
        self._rota: deque[Session] = deque()
        self._idle: OrderedDict[Hands, None] = OrderedDict()
        self._roomy: OrderedDict[Hands, None] = OrderedDict()
        self._changed: OrderedDict[Hands, None] = OrderedDict()
        self._later: list[tuple[float, int, Hands]] = []
        self._entries = itertools.count()
        self._free = 0
        self._coming = 0

    @property
    def deadline(self) -> float | None:
        """When a recall may next become worth while by the passing of time alone; true after `assign`."""
        if self.queued or self._free <= self._coming:
            return None
        later = self._later
        while later and not self._waits(later[0]):
            heapq.heappop(later)
        return later[0][0] if later else None

    def enrol(self, session: Session) -> None:
        """A session has waiting work."""
        if not session.in_rota and session.queued:
            session.in_rota = True
            self._rota.append(session)

    def leave(self, session: Session) -> None:
        """A session has none any more."""
        if session.in_rota:
            self._rota.remove(session)
            session.in_rota = False

    def place(self, hands: Hands) -> None:
        """Keep the lists of workers, and the sums over them, true for one of them."""
        count = hands.outstanding
        slots = hands.member.slots
        usable = hands.reachable and not hands.member.leaving
        surplus = hands.reachable and count > slots
        _set(self._idle, hands, usable and count < slots)
        _set(self._roomy, hands, usable and count < hands.window.limit)
        _set(self._changed, hands, surplus and not hands.recalled)
        hands.recall_at = math.inf
        free = slots - count if usable and count < slots else 0
        coming = len(hands.recalled) if surplus else 0
        self._free += free - hands.free
        self._coming += coming - hands.coming
        hands.free, hands.coming = free, coming

    def assign(self, now: float) -> list[Send]:
        """Hand out what waits. Called once at the end of each event."""
        if not self.queued:
            return self._recall(now)
        batches: dict[Hands, Batch] = {}
        while self._rota and self._idle:
            hands = next(iter(self._idle))
            self._give(hands, hands.member.slots - hands.outstanding, batches, now)
        while self._rota and self._roomy:
            hands = next(iter(self._roomy))
            share = max(1, self.queued // len(self._roomy))
            self._give(hands, min(share, hands.window.limit - hands.outstanding), batches, now)
            if hands in self._roomy:  # to the end of the line
                self._roomy.move_to_end(hands)
        return [Send(hands.member.peer, message) for hands, batch in batches.items() for message in _messages(batch)]

    def _give(self, hands: Hands, count: int, batches: dict[Hands, Batch], now: float) -> None:
        batch = batches.get(hands)
        if batch is None:
            batch = batches[hands] = Batch()
        hands.window.given(now)
        while count > 0 and self._rota:
            session = self._rota[0]
            take = min(count, max(1, count // len(self._rota)))
            careful = min(take, len(session.careful))
            others = min(take - careful, len(session.queue))
            if careful:
                self._lease(hands, session, session.careful, careful, batch.functions, batch.careful)
            if others:
                self._lease(hands, session, session.queue, others, batch.functions, batch.items)
            count -= careful + others
            if session.queued:
                self._rota.rotate(-1)
            else:
                self._rota.popleft()
                session.in_rota = False
        self.place(hands)

    def _lease(
        self,
        hands: Hands,
        session: Session,
        queue: deque[Item],
        count: int,
        functions: list[tuple[int, int, bytes]],
        into: list[Leased],
    ) -> None:
        """Hand out the first `count` of a queue. This is done for each piece of work that there is: it has to be quick."""
        coordinator, known, leases = session.coordinator, hands.known, hands.leases
        number = first = self._next_lease
        checked = -1
        for _ in range(count):
            item = queue.popleft()
            _, attempt, _, fn, payload = item
            if fn != checked:
                if (coordinator, fn) not in known:
                    pickled = session.functions.get(fn)
                    if (
                        pickled is None
                    ):  # forgotten: its coordinator had the result before the worker that made it was lost
                        continue
                    known.add((coordinator, fn))
                    functions.append((coordinator, fn, pickled))
                checked = fn
            leases[number] = Lease(session, item)
            into.append((number, coordinator, attempt, fn, payload))
            number += 1
        self._next_lease = number
        session.outstanding += number - first
        session.left_queue += count
        self.queued -= count

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

    def _next_surplus(self, now: float) -> Hands | None:
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

    @staticmethod
    def _waits(entry: tuple[float, int, Hands]) -> bool:
        """Whether an entry of the heap is still true: its worker has not changed since."""
        return entry[2].recall_at == entry[0]


def _messages(batch: Batch) -> Iterator[Assign]:
    """Functions go before the work that uses them: in its message, or in messages of their own where they are too many."""
    functions: list[tuple[int, int, bytes]] = []
    for part in split(batch.functions):
        if functions:
            yield Assign(functions, [])
        functions = part
    for items, careful in ((batch.careful, True), (batch.items, False)):
        if items:
            for share in split(items):
                yield Assign(functions, share, careful)
                functions = []


def _spare(hands: Hands) -> list[int]:
    """Leases that its slots will not have begun: the newest, but for one a slot."""
    spare = [number for number, lease in hands.leases.items() if not lease.started]
    return spare[max(0, hands.member.slots - (hands.outstanding - len(spare))) :]


def _worth_recalling_at(hands: Hands) -> float:
    """From when on it is better to take back what a worker has not begun than to leave it there."""
    held = hands.outstanding
    if hands.window.remaining_s(held) >= RECALL_WORTH_S:
        return 0.0
    return hands.window.overdue_at(held) + RECALL_WORTH_S


def _set(line: OrderedDict[Hands, None], hands: Hands, wanted: bool) -> None:
    if wanted:
        line.setdefault(hands, None)
    elif hands in line:
        del line[hands]
