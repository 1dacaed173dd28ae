"""Coordinated reads: at which round a task begins and before which it ends, the same for all consumers.

Theory
    Consumers read the tasks of an iteration in turn: each round all tasks that are in it, in the order of their numbers. So they stay in
    step as long as they agree which tasks are in a round. With its question for news a client says where it stands:
        stopped     it does not begin this round
        lost        tasks that do not answer -> the first round of each that it has not received
    and it keeps to that until the question is answered. A question that waits is a promise, then, and when the questions of all consumers
    wait at the same time the machine decides, from promises only:
        a task of a new worker (pending) begins at the highest `stopped`, which nobody has begun
        a task that all have lost ends before the lowest of their rounds: a client shows an element only when it knows that all have
        received it, so nobody has shown any of a later round
    A dispatcher that was started again is told all of it again. Only decisions are in the journal.

    A task belongs to one life of a worker: another life would give other elements for rounds that some have received.

Promises, checked by tests/machines/splits/test_rounds.py
    R1  all consumers are told the same first and last round of a task
    R2  no task begins at a round that a consumer has begun, or ends before one that a consumer has shown
    R3  an iteration that is read by rounds does not end by itself: it waits for workers
"""

from __future__ import annotations

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.coordinated import is_coordinated, is_held, is_pending, is_runnable
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal
from zmqdist.data.service.dispatcher.machine.workers import WorkerTable


class CoordinatedRounds:
    """See the module's docstring."""

    def __init__(self, tables: DispatcherTables, clients: Clients, workers: WorkerTable) -> None:
        self._tables = tables
        self._clients = clients
        self._workers = workers

    def check(self, call: ev.WatchRequest) -> None:
        """Refuse what makes no sense, before anything is done."""
        client = self._tables.state.clients.get(call.client)
        if client is None or not (call.lost or call.stopped >= 0):
            return
        if not is_coordinated(self._tables, self._tables.state.iterations[client.iteration]):
            raise Refusal(errors.FAILED_PRECONDITION, f"client {call.client} does not take part in coordinated reads")

    def decide(self, number: int) -> None:
        """A client has said where it stands."""
        client = self._tables.state.clients.get(number)
        if client is None or number not in self._tables.watches:
            return
        iteration = self._tables.state.iterations[client.iteration]
        if not is_coordinated(self._tables, iteration):
            return
        standing = self._standing(iteration)
        if not standing:
            return
        tasks = self._tables.state.tasks
        lost = set(standing[0].lost).intersection(*(each.lost for each in standing)).intersection(iteration.tasks)
        ended = {task: min(each.lost[task] for each in standing) for task in lost if not tasks[task].finished}
        begun: list[int] = []
        if is_held(self._tables, iteration) and all(each.stopped >= 0 for each in standing):
            begun = [
                task for task in iteration.tasks if is_pending(tasks[task]) and is_runnable(self._tables, tasks[task])
            ]
        for task, end_round in ended.items():
            self._tables.change(r.FinishTask(task, end_round=end_round))
            self._tables.tasks_of.get(tasks[task].worker, {}).pop(task, None)
            self._tables.serving.pop(task, None)
        for task in begun:
            self._tables.change(r.StartTask(task, max(each.stopped for each in standing)))
        for task in (*ended, *begun):
            self._workers.notify(tasks[task].worker)
        if ended or begun:
            self._clients.notify(iteration.id)

    def _standing(self, iteration: r.Iteration) -> list[ev.WatchRequest]:
        """The questions of all consumers, if all wait."""
        clients = self._tables.state.clients
        count = self._tables.state.jobs[iteration.job].terms.num_consumers
        there = [self._tables.watches[number][0] for number in iteration.clients if number in self._tables.watches]
        whole = len(there) == len(iteration.clients) and len({clients[each.client].consumer for each in there}) == count
        return there if whole else []
