"""Reading in portions in virtual time: a task that computes them, a reader that acknowledges what it has had. See data_service.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zmqdist.data.service.machine import questions as q
from zmqdist.data.service.machine import records as r
from zmqdist.errors import RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.testing.simulation.data_links import Ticket
from zmqdist.testing.simulation.data_parts import FULL_S, SimDataWorker, SimReader, SimTask

if TYPE_CHECKING:
    from zmqdist.testing.simulation.data_service import DataSim

ACK_S, SLOW_ACK_S = 0.03, 0.3
"""A quick and a slow consumer: what waits for the slow one is met by more faults."""
LANE_MAX = 8
AGAIN = (UNAVAILABLE, RESOURCE_EXHAUSTED)


class SimPortionTask(SimTask):
    """A lane for each reader. What is in a buffer is (portion, offset at which it was begun, offset, element, whether it is the
    last of the portion)."""

    def __init__(self, worker: SimDataWorker, told: list[Any], state: int) -> None:
        super().__init__(worker, told, state)
        self.lanes: dict[int, list[Any]] = {}
        self.wait: dict[int, list[Callable[[list[Any], bool], None]]] = {}
        self.over: set[int] = set()
        self._full: dict[int, tuple[float, list[Any]]] = {}
        """Lanes that are full, since when, and what comes when there is room."""

    def ask(self, client: int, then: Callable[[list[Any], bool], None]) -> None:
        self.wait.setdefault(client, []).append(then)
        if client not in self.lanes:
            self.lanes[client] = []
            self._get(client, self.worker.sim.random.getrandbits(40))
        self._serve_lane(client)

    def _get(self, client: int, request: int) -> None:
        worker, sim = self.worker, self.worker.sim
        count = sim.random.choice((1, 2, 5))

        def question(ticket: Ticket) -> q.Question:
            return q.AskPortions(ticket, self.state, self.number, worker.life, client, request, count)

        def then(value: Any, code: int) -> None:
            if self.dropped or not worker.alive:
                return
            if code in AGAIN:
                sim.clock.after(0.02, lambda: self._get(client, request))
            elif code or not value:
                self.over.add(client)
                self._serve_lane(client)
            else:
                made = [
                    (number, skip, offset, start + offset, offset == length - 1)
                    for number, _, start, length, skip in value
                    for offset in range(skip, length)
                ]
                self._make(client, made)

        worker.dispatcher.ask(worker.calls(), question, then)

    def _make(self, client: int, coming: list[Any]) -> None:
        """One element after the other, then the next portions."""
        sim = self.worker.sim
        if self.dropped or not self.worker.alive:
            return
        if not coming:
            self._get(client, sim.random.getrandbits(40))
        elif len(self.lanes[client]) >= LANE_MAX:
            self._full[client] = sim.clock.now, coming
        else:
            self.lanes[client].append(coming[0])
            self._serve_lane(client)
            sim.clock.after(sim.random.expovariate(400), lambda: self._make(client, coming[1:]))

    def _serve_lane(self, client: int) -> None:
        waiting = self.wait.get(client, [])
        while waiting and (self.lanes[client] or client in self.over or self.dropped):
            batch, self.lanes[client] = self.lanes[client][:4], self.lanes[client][4:]
            waiting.pop(0)(batch, not batch)
        if client in self._full and len(self.lanes[client]) < LANE_MAX:
            clock = self.worker.sim.clock
            since_s, coming = self._full.pop(client)
            clock.at(clock.next_look(since_s, FULL_S), lambda: self._make(client, coming))

    def _serve(self) -> None:
        for client in list(self.lanes):
            self._serve_lane(client)


class SimPortionReader(SimReader):
    """Acknowledges what it has had some time ago.

    Attributes:
      confirmed, told: elements whose acknowledgement was answered, and which were told.
    """

    def __init__(self, sim: DataSim, job: str | None, ordered: bool) -> None:
        self.ordered = ordered
        self.confirmed: list[int] = []
        self.told: list[int] = []
        self._arrived: dict[int, int] = {}
        self._whole: set[int] = set()
        self._fresh: list[tuple[int, int, int, bool]] = []
        self._later: dict[int, list[tuple[int, int, int, bool]]] = {}
        self._turn = 0
        self._acking = False
        self._ack_s = sim.random.choice((ACK_S, SLOW_ACK_S))
        super().__init__(sim, job, r.DYNAMIC, 0)

    def opening(self, ticket: Ticket, request: int) -> q.Open:
        terms = r.Terms("data", r.DYNAMIC, delivery="exactly_once", ordered=self.ordered)
        count = self.sim.count
        return q.Open(ticket, request, self.job, 0, terms, (count,), grain=(count, 1, 1))

    def missed(self, life: int) -> None:
        if self.alive and not self.ended:
            link = self._dispatcher_link()
            self.sim.dispatcher.ask(
                link,
                lambda ticket: q.Missed(ticket, self.state, self.client, life),
                lambda value, code: self._told_missed(life, code),
            )

    def _told_missed(self, life: int, code: int) -> None:
        if code in AGAIN:
            self.sim.clock.after(0.05, lambda: self.missed(life))

    def taken(self, batch: list[Any]) -> None:
        for number, skip, offset, element, last in batch:
            if number in self._whole or offset != self._arrived.get(number, skip):
                continue  # seen before, or behind a lost answer
            self._arrived[number] = offset + 1
            if last:
                self._whole.add(number)
            self._later.setdefault(number, []).append((number, offset, element, last))
        self._hand_over()
        self._acknowledge_soon()

    def _hand_over(self) -> None:
        """To the consumer: in order, only what is next."""
        if self.ordered:
            while self._later.get(self._turn):
                ready = self._later.pop(self._turn)
                self._consume(ready)
                if ready[-1][3]:
                    self._turn += 1
        else:
            later, self._later = self._later, {}
            for ready in later.values():
                self._consume(ready)

    def _consume(self, ready: list[tuple[int, int, int, bool]]) -> None:
        self.got += [each[2] for each in ready]
        self._fresh += ready

    def _acknowledge_soon(self) -> None:
        if not self._acking and self._fresh:
            self._acking = True
            self.sim.clock.after(self._ack_s if self.sim.faulty() else ACK_S, self._acknowledge)

    def _acknowledge(self, again: list[tuple[int, int, int, bool]] | None = None) -> None:
        if not self.alive or self.ended:
            return
        ripe = again
        if ripe is None:  # the consumer may be in the middle of a portion
            whole = self.sim.random.random() < 0.5
            had = len(self._fresh) if whole else self.sim.random.randint(1, len(self._fresh))
            ripe, self._fresh = self._fresh[:had], self._fresh[had:]
        marks: dict[int, tuple[int, bool]] = {}
        for number, offset, _, last in ripe:
            marks[number] = (offset + 1, last)
        told = tuple((number, *mark) for number, mark in marks.items())
        elements = [each[2] for each in ripe]
        if again is None:
            self.told += elements

        def then(_: Any, code: int) -> None:
            if code in AGAIN:
                self.sim.clock.after(0.05, lambda: self._acknowledge(ripe))
                return
            self._acking = False
            if not code:
                self.confirmed += elements
            self._acknowledge_soon()

        self.sim.dispatcher.ask(
            self._dispatcher_link(), lambda ticket: q.AcknowledgeRequest(ticket, self.state, self.client, told), then
        )

    def _look(self) -> None:
        if self._finished:
            self.ended = True
