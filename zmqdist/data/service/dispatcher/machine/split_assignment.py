"""The part of DataDispatcherMachine for DYNAMIC splits. It gives positions of the sources to tasks,
first come, first served, and takes back the positions that leaving workers return.
"""

from __future__ import annotations

from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal

SHARES: Final = 4
"""One reply gives a task at most the remaining positions divided by (SHARES x number of tasks), so
that near the end every task still gets positions."""


class SplitAssignment:
    """The part of the machine that gives the positions of DYNAMIC iterations to tasks."""

    def __init__(self, tables: DispatcherTables) -> None:
        self._tables = tables

    def _task(self, call: ev.SplitsRequest | ev.HandBackRequest) -> tuple[r.TaskEntry, r.Iteration]:
        task = self._tables.state.tasks.get(call.task)
        if call.state != self._tables.state.number or task is None or task.ended:
            raise Refusal(errors.NOT_FOUND, f"task {call.task} does not exist, or has ended")
        iteration = self._tables.state.iterations[task.iteration]
        if self._tables.state.jobs[iteration.job].terms.mode != r.DYNAMIC:
            raise Refusal(
                errors.FAILED_PRECONDITION,
                f"task {call.task} is not of a DYNAMIC job: it gets no positions from the "
                f"dispatcher",
            )
        worker = self._tables.state.workers.get(task.worker)
        if worker is None or worker.incarnation != call.incarnation:
            raise Refusal(errors.UNAVAILABLE, reassigned_text(call.task))
        if not 0 <= call.source < len(iteration.cursors):
            raise Refusal(errors.INVALID_ARGUMENT, f"task {call.task} has no source {call.source}")
        return task, iteration

    def splits(self, call: ev.SplitsRequest) -> None:
        task, iteration = self._task(call)
        given = task.last_given.get(call.source)
        if given is not None and given[0] == call.request:
            self._tables.reply(call.token, given[2:])
            return
        if task.worker in self._tables.confirmed_gone:
            # The worker's connection is broken, and this request came over the task's own
            # connection. No reader reads the task now, so other tasks get the positions.
            raise Refusal(errors.UNAVAILABLE, f"the worker of task {task.id} has no connection")
        start, length = next_run(
            iteration.cursors[call.source],
            call.repetition,
            self._share(iteration, call.source, call.count),
        )
        self._tables.change(
            r.GiveSplits(task.id, call.source, call.request, call.repetition, start, length)
        )
        self._tables.reply(call.token, (start, length))

    def _share(self, iteration: r.Iteration, source: int, count: int) -> int:
        """Return how many positions to give in one reply."""
        cursor = iteration.cursors[source]
        if cursor.count != r.INFINITE:
            count = min(count, (cursor.count - cursor.position) // (SHARES * len(iteration.tasks)))
        return max(1, count)

    def hand_back(self, call: ev.HandBackRequest) -> None:
        task, iteration = self._task(call)
        if call.request in task.handed_back:
            self._tables.reply(call.token, None)
            return
        cursor = iteration.cursors[call.source]
        sane = all(
            start >= 0 and length > 0 and start + length <= cursor.position
            for start, length in call.runs
        )
        if not sane:
            raise Refusal(
                errors.INVALID_ARGUMENT,
                f"task {call.task} returns positions that were never given out",
            )
        self._tables.change(
            r.ReturnSplits(task.id, call.source, call.repetition, list(call.runs), call.request)
        )
        self._tables.reply(call.token, None)


def reassigned_text(task: int) -> str:
    """Return the error text for a worker whose place another worker has taken.

    The error's code is UNAVAILABLE, because the worker may register again. Then it gets the place
    back, or the dispatcher tells it to drop the task. With NOT_FOUND the worker would conclude that
    the task has ended, and would wrongly report it as done.
    """
    return f"task {task} belongs to another worker now"


def next_run(cursor: r.Cursor, repetition: int, count: int) -> tuple[int, int]:
    """Return the next positions of a source as (start, length). A length of 0 means that the
    repetition has no positions left.

    A request for a later repetition starts at the source's first position again, and a request for
    an earlier repetition gets no positions. Each source has a repetition of its own.
    """
    if repetition < cursor.repetition:
        return 0, 0
    position, returned = (
        (0, []) if repetition > cursor.repetition else (cursor.position, cursor.returned)
    )
    if returned:
        start, length = returned[0]
        return start, min(count, length)
    left = inf if cursor.count == r.INFINITE else cursor.count - position
    return (position, int(min(count, left))) if left > 0 else (position, 0)
