"""Helpers for the tasks of coordinated reads. rounds.py decides when these tasks begin and end."""

from __future__ import annotations

from typing import Any

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables


def is_coordinated(tables: DispatcherTables, iteration: r.Iteration) -> bool:
    """Return whether an iteration is a coordinated read, in which its consumers read round by
    round."""
    return tables.state.jobs[iteration.job].terms.coordinated


def is_runnable(tables: DispatcherTables, task: r.TaskEntry) -> bool:
    """Return whether a task can run: it has not ended and, if it is bound to an incarnation, its
    worker is in that incarnation."""
    worker = tables.state.workers.get(task.worker)
    return not task.ended and (
        not task.incarnation or (worker is not None and worker.incarnation == task.incarnation)
    )


def is_held(tables: DispatcherTables, iteration: r.Iteration) -> bool:
    """Return whether the consumers of an iteration have to stop at their next round, because a
    pending task of the iteration can begin."""
    tasks = (tables.state.tasks[number] for number in iteration.tasks)
    return any(
        task.state is r.DataTaskState.PENDING
        and is_runnable(tables, task)
        and task.worker not in tables.missing
        for task in tasks
    )


def news_for_consumer(
    tables: DispatcherTables, iteration: r.Iteration, call: ev.WatchRequest
) -> tuple[list[Any], bool, dict[int, int]]:
    """Return the news for a consumer as (tasks, hold, ended). `hold` tells the consumer to stop at
    its next round. `ended` maps each ended task in `call.lost` to the first round in which the task
    takes no part.

    In `tasks`, a task has incarnation -1 while its worker is lost, and has no address until its
    worker serves it.
    """
    tasks: list[Any] = []
    for number in iteration.tasks:
        task = tables.state.tasks[number]
        if task.state is not r.DataTaskState.RUNNING:
            continue
        worker = tables.state.workers.get(task.worker)
        incarnation, address = tables.serving.get(number, (0, ""))
        if (
            worker is None
            or worker.incarnation != task.incarnation
            or task.worker in tables.missing
        ):
            tasks.append((number, "", "", -1, (), task.starting_round))
        else:
            where = address if incarnation == task.incarnation else ""
            tasks.append(
                (number, worker.address, where, task.incarnation, worker.tags, task.starting_round)
            )
    ended = {
        number: tables.state.tasks[number].end_round
        for number in call.lost
        if number in iteration.tasks and tables.state.tasks[number].ended
    }
    return tasks, is_held(tables, iteration), ended
