"""Coordinated reads: decide on the first and the last round of each task, so that all consumers
agree.

Theory
    In each round, every consumer reads all tasks of that round in the order of their numbers.
    Therefore the consumers stay in step as long as they agree on the tasks of each round. In its
    watch request a consumer reports its position:
        stop_round  the round that the consumer does not begin
        lost        for each task that does not reply, the first round that the consumer has not received from this task
    The consumer stays at that position until it gets the reply. A pending watch request is
    therefore a promise. When the requests of all consumers are pending at the same time, the
    machine decides from these promises only:
        A pending task, which is a task of a new worker, begins at the highest `stop_round`, because no
        consumer has begun that round. If all consumers report a task in `lost`, the task ends
        before the lowest round that they report for it. A consumer delivers an element only when it
        knows that all consumers have received the round, so no consumer has delivered that round or
        a later round.
    After a restart of the dispatcher the consumers report their positions again, so the journal has
    only the decisions.

    A task is bound to one incarnation of a worker, because another incarnation would produce other
    elements for rounds that some consumers have already received.

Promises, checked by tests/data/service/dispatcher/machine/test_rounds.py
    R1  All consumers learn the same first and last round of a task.
    R2  No task begins at a round that a consumer has begun, or ends before a round that a consumer
        has delivered.
    R3  A coordinated read does not end when its last task ends, but waits for new workers.
"""

from __future__ import annotations

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.clients import Clients
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal
from zmqdist.data.service.dispatcher.machine.workers import WorkerTable


class CoordinatedRounds:
    """The part of the machine that decides on the first and last rounds of tasks. The docstring of
    the module says how."""

    def __init__(self, tables: DispatcherTables, clients: Clients, workers: WorkerTable) -> None:
        self._tables = tables
        self._clients = clients
        self._workers = workers

    def check(self, call: ev.WatchRequest) -> None:
        """Refuse a watch request that reports a position in rounds although its client takes no
        part in a coordinated read."""
        client = self._tables.state.clients.get(call.client)
        if client is None or not (call.lost or call.stop_round >= 0):
            return
        if not self._tables.terms_of(self._tables.state.iterations[client.iteration]).coordinated:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"client {call.client} does not take part in coordinated reads",
            )

    def decide(self, number: int) -> None:
        """If the watch requests of all consumers of this client's iteration are pending, begin the
        iteration's tasks that have no first round yet, and end the tasks that all consumers report
        as lost.
        """
        client = self._tables.state.clients.get(number)
        if client is None or number not in self._tables.watches:
            return
        iteration = self._tables.state.iterations[client.iteration]
        if not self._tables.terms_of(iteration).coordinated:
            return
        standing = self._standing(iteration)
        # promise R1: decide only from promises of all consumers
        if not standing:
            return
        tasks = self._tables.state.tasks
        lost = (
            set(standing[0].lost)
            .intersection(*(watch.lost for watch in standing))
            .intersection(iteration.tasks)
        )
        end_rounds = {
            task: min(watch.lost[task] for watch in standing)
            for task in lost
            if tasks[task].state is r.DataTaskState.RUNNING
        }
        starting: list[int] = []
        if self._tables.must_stop(iteration) and all(watch.stop_round >= 0 for watch in standing):
            starting = [
                task
                for task in iteration.tasks
                if tasks[task].state is r.DataTaskState.PENDING
                and self._tables.is_runnable(tasks[task])
            ]
        for task, end_round in end_rounds.items():
            self._tables.change(r.FinishTask(task, end_round=end_round))
            self._tables.end_task(tasks[task])
        for task in starting:
            # promise R2: no consumer has begun the highest of these rounds
            self._tables.change(r.StartTask(task, max(watch.stop_round for watch in standing)))
        for task in (*end_rounds, *starting):
            self._workers.notify(tasks[task].worker)
        if end_rounds or starting:
            self._clients.notify(iteration.id)

    def _standing(self, iteration: r.Iteration) -> list[ev.WatchRequest]:
        """Return the watch requests of all consumers if all are pending, otherwise an empty
        list.
        """
        clients = self._tables.state.clients
        count = self._tables.state.jobs[iteration.job].terms.num_consumers
        there = [
            self._tables.watches[number][0]
            for number in iteration.clients
            if number in self._tables.watches
        ]
        whole = (
            len(there) == len(iteration.clients)
            and len({clients[watch.client].consumer for watch in there}) == count
        )
        return there if whole else []
