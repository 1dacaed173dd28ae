"""A task that computes portions in virtual time. See data_service.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zmqdist.data.service.machine import questions as q
from zmqdist.errors import RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.testing.simulation.data_links import Ticket
from zmqdist.testing.simulation.data_parts import FULL_S, SimDataWorker, SimTask

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
