"""Positions: what a task gets of the sources of its pipeline."""

from __future__ import annotations

from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables, Refusal

SHARES: Final = 4
"""A worker gets at most the remaining positions by (workers x this) at once: near the end all have some."""


class SplitAssignment:
    """See the module's docstring."""

    def __init__(self, tables: DispatcherTables) -> None:
        self._tables = tables

    def _task(self, call: ev.SplitsRequest | ev.HandBackRequest) -> tuple[r.TaskEntry, r.Iteration]:
        task = self._tables.state.tasks.get(call.task)
        if call.state != self._tables.state.number or task is None or task.finished:
            raise Refusal(errors.NOT_FOUND, f"task {call.task} is not there, or has ended")
        iteration = self._tables.state.iterations[task.iteration]
        if self._tables.state.jobs[iteration.job].terms.mode != r.DYNAMIC:
            raise Refusal(errors.FAILED_PRECONDITION, f"task {call.task} does not read what is dealt out")
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
            # The question came by another connection than the one that broke. Nobody reads the task now: others can have the positions.
            raise Refusal(errors.UNAVAILABLE, f"the worker of task {task.id} has no connection")
        start, length = next_run(
            iteration.cursors[call.source], call.repetition, self._share(iteration, call.source, call.count)
        )
        self._tables.change(r.GiveSplits(task.id, call.source, call.request, call.repetition, start, length))
        self._tables.reply(call.token, (start, length))

    def _share(self, iteration: r.Iteration, source: int, count: int) -> int:
        """How many positions at once: one where sources are read in step, since what one worker has too many another lacks."""
        cursor = iteration.cursors[source]
        if len(iteration.cursors) > 1:
            return 1
        if cursor.count != r.INFINITE:
            count = min(count, (cursor.count - cursor.position) // (SHARES * len(iteration.tasks)))
        return max(1, count)

    def hand_back(self, call: ev.HandBackRequest) -> None:
        task, iteration = self._task(call)
        if call.request in task.handed_back:
            self._tables.reply(call.token, None)
            return
        cursor = iteration.cursors[call.source]
        sane = all(start >= 0 and length > 0 and start + length <= cursor.position for start, length in call.runs)
        if not sane:
            raise Refusal(errors.INVALID_ARGUMENT, f"task {call.task} hands back what was never given out")
        self._tables.change(r.ReturnSplits(task.id, call.source, call.repetition, list(call.runs), call.request))
        self._tables.reply(call.token, None)


def reassigned_text(task: int) -> str:
    """Why a worker is given nothing for a task whose place another has now.

    That may pass: the worker is told to drop the task as soon as it is registered, or it has the place once more. If it took this for the
    end of the task, it would then say that the task is done, though nothing of it is.
    """
    return f"task {task} is another worker's now"


def next_run(cursor: r.Cursor, repetition: int, count: int) -> tuple[int, int]:
    """The next positions of a source: (start, length), length 0 where this repetition has none.

    A later repetition starts over; an earlier one is over: so the short side of a zip goes on while the long one is in the pass before.
    """
    if repetition < cursor.repetition:
        return 0, 0
    position, returned = (0, []) if repetition > cursor.repetition else (cursor.position, cursor.returned)
    if returned:
        start, length = returned[0]
        return start, min(count, length)
    left = inf if cursor.count == r.INFINITE else cursor.count - position
    return (position, int(min(count, left))) if left > 0 else (position, 0)
