"""The machine of a worker's data-service tasks. It decides when the worker requests work, which
tasks the worker begins and drops, and which tasks it reports as ended.

Promises
    T1  While the worker is connected, one request for work is pending at the dispatcher. The
        machine ignores the reply to an older request, and sends a failed request again a little
        later.
    T2  Each request lists the tasks that the worker has, and which of them have ended. A task stays
        on the list, ended or not, until the dispatcher drops it.
    T3  The worker begins each task once, and drops each task once. A dispatcher that has lost its
        state begins a new state with another number. Its next reply then tells the worker to drop
        all tasks of the earlier state.
    T4  A worker that leaves takes no more positions. A DYNAMIC task that computes portions ends at
        once, because other workers compute the unacknowledged elements. A DYNAMIC task without
        readers ends at once too. Every other DYNAMIC task gives back the positions that it has not
        begun, and then ends. A task in another mode continues to its end.
    T5  After `leave` the worker sends no request for work, because the dispatcher has released the
        worker.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from zmqdist.data.service.dispatcher.machine.records import DYNAMIC, Terms
from zmqdist.transitions import enter

PROGRESS: Final = 3
"""The length of a task's `progress`, a sequence of numbers."""

TAKEN, SOURCE, POSITION = range(PROGRESS)
"""Indexes into a task's progress. At TAKEN is the number of elements that readers have taken. At
POSITION is the last position that the task got, and at SOURCE is 1 + the number of its source, or 0
if the task has got no position yet."""


class WorkerTaskState(enum.Enum):
    """The state of a data task in its worker."""

    RUNNING = enum.auto()
    """Readers request its elements, or may come."""
    DONE = enum.auto()
    """It has ended, because its last element was taken or because the worker leaves."""
    DELETED = enum.auto()
    """Its only reader has deleted it."""


TRANSITIONS: Final[Mapping[WorkerTaskState, frozenset[WorkerTaskState]]] = {
    WorkerTaskState.RUNNING: frozenset({WorkerTaskState.DONE, WorkerTaskState.DELETED}),
    # the worker leaves before the dispatcher has dropped the task
    WorkerTaskState.DELETED: frozenset({WorkerTaskState.DONE}),
    WorkerTaskState.DONE: frozenset(),
}


class WorkerTask:
    """One task as the dispatcher defined it.

    Attributes:
      definition: the fields of the task as the dispatcher sent them.
      progress: numbers that show, in error texts, how much of the task is done.
      failed: the crash of an earlier process of this task (task_errors.TaskFailure), or None.
      runner: the Runner of the task, set by the TaskHost.
      pipeline: the pipeline that the TaskHost runs over each portion, set when it begins the first
        portion.
    """

    def __init__(
        self, definition: Sequence[Any], progress: MutableSequence[int] | None = None
    ) -> None:
        self.definition = definition
        (
            self.id,
            self.iteration,
            self.dataset,
            self.fingerprint,
            terms,
            self.sources,
            self.starting_round,
            *rest,
        ) = definition
        self.num_workers, self.index, self.job, self.repetition = rest
        self.terms = Terms(*terms)
        self.progress = [0] * PROGRESS if progress is None else progress
        self.failed: Any = None
        self.runner: Any = None
        self.pipeline: Any = None
        self.state = WorkerTaskState.RUNNING

    def enter(self, state: WorkerTaskState) -> None:
        self.state = enter(TRANSITIONS, self.state, state, "data task", self.id)

    def describe(self, worker: str) -> str:
        """Return a description of the task for error texts."""
        return f"dataset {self.dataset} (job {self.job!r}, task {self.id} of worker {worker})"


class RequestWork(msgspec.Struct, frozen=True):
    """Send a request for work to the dispatcher.

    Attributes:
      request: the number of the request, which the runtime passes to `work_received` or
        `request_failed`.
      tasks: the numbers of the tasks that this worker has.
      finished: the numbers of the tasks among these that have ended.
    """

    request: int
    tasks: tuple[int, ...]
    finished: tuple[int, ...]


class RequestWorkLater(msgspec.Struct, frozen=True):
    """Call `ask` a little later, if the dispatcher is then connected."""


class BeginTask(msgspec.Struct, frozen=True):
    """Serve a task from now on."""

    task: WorkerTask


class DropTask(msgspec.Struct, frozen=True):
    """End a task, because the dispatcher has dropped it."""

    number: int


class GiveBackPositions(msgspec.Struct, frozen=True):
    """Have a task give back the positions that it has not begun. When readers have taken its last
    element, the runtime calls `finished`. If the task has no readers, the runtime calls `finished`
    at once.
    """

    number: int


WorkerTasksEffect: TypeAlias = (
    RequestWork | RequestWorkLater | BeginTask | DropTask | GiveBackPositions
)


class WorkerTasks:
    """The tasks of one worker. The docstring of the module gives the promises.

    Attributes:
      tasks: the worker's tasks, by number.
      state: the random number that identifies the dispatcher's durable state, which has these
        tasks.
    """

    def __init__(self) -> None:
        self.tasks: dict[int, WorkerTask] = {}
        self.state = 0
        self._request = 0
        self._left = False

    @property
    def num_tasks(self) -> int:
        """Number of tasks that the dispatcher has assigned to this worker and that have not
        ended.
        """
        return sum(task.state is WorkerTaskState.RUNNING for task in self.tasks.values())

    def ask(self) -> list[WorkerTasksEffect]:
        """Request work, with the current list of tasks. Call this when the worker has been
        registered, and after a change of the list."""
        if self._left:
            return []
        self._request += 1
        finished = tuple(
            number for number, task in self.tasks.items() if task.state is WorkerTaskState.DONE
        )
        return [RequestWork(self._request, tuple(self.tasks), finished)]

    def work_received(self, request: int, reply: Sequence[Any] | None) -> list[WorkerTasksEffect]:
        """Record the dispatcher's reply: the random number that identifies its durable state, the
        definitions of tasks to begin, and the numbers of tasks to drop. The reply is None if a
        request of an earlier connection has replaced this request.
        """
        if request != self._request:
            return []
        if reply is None:
            # ask again: a request of an earlier connection arrived after this request and replaced
            # it
            return self.ask()
        self.state, new, drop = reply
        dropped = [number for number in drop if self.tasks.pop(number, None) is not None]
        tasks = [WorkerTask(definition) for definition in new]
        self.tasks.update((task.id, task) for task in tasks)
        return [*map(DropTask, dropped), *map(BeginTask, tasks), *self.ask()]

    def request_failed(self, request: int) -> list[WorkerTasksEffect]:
        """Record that a request has failed or got no reply."""
        return [RequestWorkLater()] if request == self._request else []

    def finished(self, number: int) -> list[WorkerTasksEffect]:
        """Record that a task has ended, because its last element was taken, or because it had no
        readers when the worker was drained."""
        task = self.tasks.get(number)
        if task is None or task.state is WorkerTaskState.DELETED:
            # do not report that a deleted task is done: the dispatcher drops it, because it has no
            # readers
            return []
        if task.state is WorkerTaskState.RUNNING:
            task.enter(WorkerTaskState.DONE)
        return self.ask()

    def drain(self) -> list[WorkerTasksEffect]:
        """End the DYNAMIC tasks as promise T4 says, so that the worker can leave when all tasks
        have ended."""
        dynamic = [
            task
            for task in self.tasks.values()
            if task.terms.mode == DYNAMIC and task.state is not WorkerTaskState.DONE
        ]
        for task in dynamic:
            if task.terms.portioned:
                task.enter(WorkerTaskState.DONE)
        return [
            *(GiveBackPositions(task.id) for task in dynamic if not task.terms.portioned),
            *self.ask(),
        ]

    def leave(self) -> None:
        """Send no further request, because the dispatcher has released this worker."""
        self._left = True
        self._request += 1
