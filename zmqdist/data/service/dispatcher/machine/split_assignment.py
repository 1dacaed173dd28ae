"""Positions: what a task gets of the sources of its pipeline."""

from __future__ import annotations

from math import inf
from typing import Final

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import questions as q
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.tables import Book, Refusal

SHARES: Final = 4
"""A worker gets at most the remaining positions by (workers x this) at once: near the end all have some."""


class Dealing:
    """See the module's docstring."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def _task(self, asked: q.SplitsRequest | q.HandBack) -> tuple[r.TaskEntry, r.Iteration]:
        task = self._book.state.tasks.get(asked.task)
        if asked.state != self._book.state.number or task is None or task.finished:
            raise Refusal(errors.NOT_FOUND, f"task {asked.task} is not there, or has ended")
        iteration = self._book.state.iterations[task.iteration]
        if self._book.state.jobs[iteration.job].terms.mode != r.DYNAMIC:
            raise Refusal(errors.FAILED_PRECONDITION, f"task {asked.task} does not read what is dealt out")
        worker = self._book.state.workers.get(task.worker)
        if worker is None or worker.life != asked.life:
            raise Refusal(errors.UNAVAILABLE, taken(asked.task))
        if not 0 <= asked.source < len(iteration.cursors):
            raise Refusal(errors.INVALID_ARGUMENT, f"task {asked.task} has no source {asked.source}")
        return task, iteration

    def splits(self, asked: q.SplitsRequest) -> None:
        task, iteration = self._task(asked)
        given = task.given.get(asked.source)
        if given is not None and given[0] == asked.request:
            self._book.answer(asked.token, given[2:])
            return
        if task.worker in self._book.gone:
            # The question came by another connection than the one that broke. Nobody reads the task now: others can have the positions.
            raise Refusal(errors.UNAVAILABLE, f"the worker of task {task.id} has no connection")
        start, length = next_run(
            iteration.cursors[asked.source], asked.repetition, self._share(iteration, asked.source, asked.count)
        )
        self._book.change(r.GiveSplits(task.id, asked.source, asked.request, asked.repetition, start, length))
        self._book.answer(asked.token, (start, length))

    def _share(self, iteration: r.Iteration, source: int, count: int) -> int:
        """How many positions at once: one where sources are read in step, since what one worker has too many another lacks."""
        cursor = iteration.cursors[source]
        if len(iteration.cursors) > 1:
            return 1
        if cursor.count != r.INFINITE:
            count = min(count, (cursor.count - cursor.position) // (SHARES * len(iteration.tasks)))
        return max(1, count)

    def hand_back(self, asked: q.HandBack) -> None:
        task, iteration = self._task(asked)
        if asked.request in task.handed:
            self._book.answer(asked.token, None)
            return
        cursor = iteration.cursors[asked.source]
        sane = all(start >= 0 and length > 0 and start + length <= cursor.position for start, length in asked.runs)
        if not sane:
            raise Refusal(errors.INVALID_ARGUMENT, f"task {asked.task} hands back what was never given out")
        self._book.change(r.ReturnSplits(task.id, asked.source, asked.repetition, list(asked.runs), asked.request))
        self._book.answer(asked.token, None)


def taken(task: int) -> str:
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
