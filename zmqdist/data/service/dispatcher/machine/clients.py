"""Clients: who reads an iteration, what they are told of it, and what becomes of it when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import questions as q
from zmqdist.data.service.dispatcher.machine import range_math
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.coordinated import is_coordinated, told
from zmqdist.data.service.dispatcher.machine.tables import Book, Refusal

WATCH_S_MAX: Final = 10.0
"""A client's question for news is answered after so long, news or not: asking again shows that it lives."""

WATCHES_PER_TIMEOUT: Final = 3


class Clients:
    """See the module's docstring."""

    def __init__(self, book: Book) -> None:
        self._book = book

    @property
    def watch_s(self) -> float:
        return min(WATCH_S_MAX, self._book.rules.client_timeout_s / WATCHES_PER_TIMEOUT)

    def client(self, state: int, number: int) -> r.ClientEntry:
        """The client that asks."""
        client = self._book.state.clients.get(number)
        if state == self._book.state.number and client is not None:
            return client
        if state == self._book.state.number and number in self._book.state.heirs:
            raise Refusal(
                errors.ABORTED,
                f"Another reader has taken over from iteration client {number}: it went on from a saved state of it, or reads with the "
                "same job name as the same consumer. One of the two is enough: stop one.",
            )
        text = f"Unknown iteration client id {number}."
        if not self._book.rules.fault_tolerant:
            text += " The dispatcher is not configured to be fault tolerant, so this could be caused by a dispatcher restart."
        if state != self._book.state.number:
            text += " The dispatcher lost its state: it is another one than this client has opened its iteration at."
        raise Refusal(errors.NOT_FOUND, text)

    def watch(self, asked: q.Watch, now: float) -> None:
        client = self.client(asked.state, asked.client)
        iteration = self._book.state.iterations[client.iteration]
        if iteration.collected:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"The iteration of client {client.id} has been garbage collected due to inactivity. Consider "
                "configuring the dispatcher with a higher `job_gc_timeout_ms`.",
            )
        self._book.heard[client.id] = now
        self._forget_watch(client.id)
        if asked.version != self.version(iteration.id):
            self._book.tell(asked.token, self._told(iteration, asked))
        else:
            self._book.watching[client.id] = (asked, now)

    def _forget_watch(self, client: int) -> None:
        before = self._book.watching.pop(client, None)
        if before is not None:
            self._book.tell(before[0].token, None)

    def version(self, iteration: int) -> int:
        return self._book.versions.setdefault(iteration, self._book.first_version)

    def _told(self, iteration: r.Iteration, asked: q.Watch) -> tuple[int, list[Any], bool, bool, dict[int, int], str]:
        if is_coordinated(self._book, iteration):
            tasks, hold, ended = told(self._book, iteration, asked)
            return self.version(iteration.id), tasks, iteration.finished, hold, ended, ""
        tasks = []
        for number in iteration.tasks:
            task = self._book.state.tasks[number]
            life, address = self._book.serving.get(number, (0, ""))
            worker = self._book.state.workers.get(task.worker)
            if task.finished or worker is None:
                continue
            if not address or worker.life != life:
                if task.worker in self._book.missing:
                    continue
                address = ""  # it is about to serve: who reads from this worker is not at the end before
            tasks.append((number, worker.address, address, worker.life, worker.tags, task.starting_round))
        portions = iteration.portions
        if portions is None:
            return self.version(iteration.id), tasks, iteration.finished, False, {}, ""
        lane = range_math.lane_of(portions, self._book.state.clients[asked.client])
        over = iteration.finished or range_math.is_lane_over(portions, lane)
        return self.version(iteration.id), tasks, over, False, {}, portions.failed

    def news(self, iteration_id: int) -> None:
        self._book.versions[iteration_id] = self.version(iteration_id) + 1
        iteration = self._book.state.iterations[iteration_id]
        for number in iteration.clients:
            watch = self._book.watching.pop(number, None)
            if watch is not None:
                self._book.heard[number] = self._book.now
                self._book.tell(watch[0].token, self._told(iteration, watch[0]))

    def release(self, asked: q.ReleaseRequest, now: float, end: Callable[[r.Iteration], None]) -> None:
        """A client has gone. What nobody else can join ends with its last one: its tasks would compute for nobody."""
        client = self._book.state.clients.get(asked.client)
        if asked.state == self._book.state.number and client is not None:
            self._let_go(client, now, end)
        self._book.answer(asked.token, None)

    def _let_go(self, client: r.ClientEntry, now: float, end: Callable[[r.Iteration], None]) -> None:
        iteration = self._book.state.iterations[client.iteration]
        anonymous = self._book.state.jobs[iteration.job].anonymous
        self._book.change(r.ReleaseClient(client.id))
        self.forget(client)
        if self._book.is_forgotten(iteration.id):
            return
        self._book.freed.add(iteration.id)
        if iteration.clients:
            return
        self._book.released[iteration.id] = now
        if anonymous and not (iteration.finished or iteration.collected):
            end(iteration)

    def forget(self, client: r.ClientEntry) -> None:
        """It is released: answer what waits for it."""
        self._book.requests.pop(client.request, None)
        self._book.heard.pop(client.id, None)
        self._forget_watch(client.id)
        for key in [key for key in self._book.wanting if key[0] == client.id]:
            self._book.answer(self._book.wanting.pop(key).token, [])

    def gone(self, token: q.Token) -> bool:
        """Nobody waits for this answer any more; whether it was one of these."""
        for number, (watch, _) in self._book.watching.items():
            if watch.token == token:
                del self._book.watching[number]
                self._book.heard[number] = self._book.now
                return True
        return False

    def tick(self, now: float) -> None:
        """Answer those who have waited for long."""
        for number, (watch, since) in list(self._book.watching.items()):
            if since + self.watch_s > now:
                break
            del self._book.watching[number]
            self._book.heard[number] = now
            iteration = self._book.state.iterations[self._book.state.clients[number].iteration]
            self._book.tell(watch.token, self._told(iteration, watch))

    def collect(self, now: float, end: Callable[[r.Iteration], None]) -> None:
        """Release clients that are silent, and end iterations that nobody reads."""
        book = self._book
        for number, heard in list(book.heard.items()):
            if number not in book.watching and heard + book.rules.client_timeout_s <= now:
                self._let_go(book.state.clients[number], now, end)
        for number, since in list(book.released.items()):
            iteration = book.state.iterations[number]
            if iteration.finished or iteration.collected:
                del book.released[number]
                continue
            dealt = book.state.jobs[iteration.job].terms.mode == r.DYNAMIC and not book.rules.gc_dynamic
            if since + book.rules.gc_timeout_s <= now and not dealt:
                del book.released[number]
                end(iteration)
