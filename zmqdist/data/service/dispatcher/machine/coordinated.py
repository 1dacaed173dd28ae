"""What the tasks of coordinated reads are to dispatcher, workers and clients. What is decided about them: rounds.py."""

from __future__ import annotations

from typing import Any

from zmqdist.data.service.dispatcher.machine import questions as q
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.tables import Book


def is_coordinated(book: Book, iteration: r.Iteration) -> bool:
    """Whether consumers read it in step."""
    return book.state.jobs[iteration.job].terms.coordinated


def is_pending(task: r.TaskEntry) -> bool:
    """Whether it waits for a round to begin at."""
    return task.starting_round == r.PENDING and not task.finished


def runs(book: Book, task: r.TaskEntry) -> bool:
    """Whether its worker is in the life that the task belongs to, if it belongs to one."""
    worker = book.state.workers.get(task.worker)
    return not task.finished and (not task.life or (worker is not None and worker.life == task.life))


def is_held(book: Book, iteration: r.Iteration) -> bool:
    """Whether consumers shall stop, so that a task can begin."""
    tasks = (book.state.tasks[number] for number in iteration.tasks)
    return any(is_pending(task) and runs(book, task) and task.worker not in book.missing for task in tasks)


def told(book: Book, iteration: r.Iteration, asked: q.Watch) -> tuple[list[Any], bool, dict[int, int]]:
    """What a consumer is told of: (tasks, whether it shall stop, the end of each task that it has lost).

    A task that is lost to the dispatcher, too, has life -1; one that does not serve yet has no address.
    """
    tasks: list[Any] = []
    for number in iteration.tasks:
        task = book.state.tasks[number]
        if task.finished or is_pending(task):
            continue
        worker = book.state.workers.get(task.worker)
        life, address = book.serving.get(number, (0, ""))
        if worker is None or worker.life != task.life or task.worker in book.missing:
            tasks.append((number, "", "", -1, (), task.starting_round))
        else:
            where = address if life == task.life else ""
            tasks.append((number, worker.address, where, task.life, worker.tags, task.starting_round))
    ended = {
        number: book.state.tasks[number].end_round
        for number in asked.lost
        if number in iteration.tasks and book.state.tasks[number].finished
    }
    return tasks, is_held(book, iteration), ended
