"""Which tasks of the data service a worker has: what it asks the dispatcher, what it begins and drops, what it says has ended.

Promises
    T1  One question for work is with the dispatcher all the time while there is a connection; the answer to an older one counts for
        nothing. A question that was refused is asked again a little later.
    T2  Each question says which tasks the worker has and which of them have ended; a task stays, ended or not, until the dispatcher
        drops it.
    T3  A task is begun once and dropped once. A dispatcher that has lost its state (another state number) has none of our tasks: it
        names them among those to drop.
    T4  A worker that leaves takes no more positions: of its DYNAMIC tasks those that compute portions have ended, since others compute
        what is not acknowledged, and so have those that nobody reads; the others hand back what they have not begun, and end then. A
        task that has the whole dataset for itself goes on to its end.
    T5  After `leave` nothing is asked any more: the dispatcher has let this worker go.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from zmqdist.data.service.dispatcher.machine.records import DYNAMIC, Terms

PROGRESS: Final = 3
"""How many numbers say what a task is at (runners/base.py)."""


class WorkerTask:
    """One task as the dispatcher defined it.

    Attributes:
      told: the definition as it came.
      progress: what it is at, for whoever names its errors (runners/base.py).
      failed: it goes on from, or has ended with, the death of its process.
      runner, pipeline: of whoever runs it: what answers its readers, what is run over each portion.
    """

    def __init__(self, definition: Sequence[Any], progress: MutableSequence[int] | None = None) -> None:
        self.definition = definition
        self.id, self.iteration, self.dataset, self.fingerprint, terms, self.sources, self.starting_round, *rest = (
            definition
        )
        self.num_workers, self.index, self.job = rest
        self.terms = Terms(*terms)
        self.progress = [0] * PROGRESS if progress is None else progress
        self.failed: Any = None
        self.runner: Any = None
        self.pipeline: Any = None
        self.done = False
        self.deleted = False

    def where(self, worker: str) -> str:
        """For errors."""
        return f"dataset {self.dataset} (job {self.job!r}, task {self.id} of worker {worker})"


@dataclass(frozen=True, slots=True)
class AskForWork:
    """Ask the dispatcher.

    Attributes:
      asking: the number of the question, for `told` and `refused`.
      has: the tasks that this worker has.
      done: those of them that have ended.
    """

    request: int
    tasks: tuple[int, ...]
    done: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskLater:
    """Call `ask` a little later, while there is a connection."""


@dataclass(frozen=True, slots=True)
class BeginTask:
    """Serve a task from now on."""

    task: WorkerTask


@dataclass(frozen=True, slots=True)
class DropTask:
    """A task is nobody's any more."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveBackPositions:
    """Have a task give back the positions that it has not begun, and call `finished` then, or at once where nobody reads it."""

    number: int


WorkerTasksEffect: TypeAlias = AskForWork | AskLater | BeginTask | DropTask | GiveBackPositions


class WorkerTasks:
    """See the module's docstring.

    Attributes:
      tasks: by number.
      state: number of the dispatcher's state that they belong to.
    """

    def __init__(self) -> None:
        self.tasks: dict[int, WorkerTask] = {}
        self.state = 0
        self._request = 0
        self._left = False

    @property
    def num_tasks(self) -> int:
        """Tasks that the dispatcher wants from this worker and that have not ended."""
        return sum(not (task.done or task.deleted) for task in self.tasks.values())

    def ask(self) -> list[WorkerTasksEffect]:
        """Ask for work, with what is the case now: the worker was registered, now or again, or something has changed."""
        if self._left:
            return []
        self._request += 1
        done = tuple(number for number, task in self.tasks.items() if task.done)
        return [AskForWork(self._request, tuple(self.tasks), done)]

    def told(self, request: int, reply: Sequence[Any] | None) -> list[WorkerTasksEffect]:
        """The dispatcher has answered: its state, the tasks to begin, those to drop. None: a later question of this worker came to it."""
        if request != self._request:
            return []
        if reply is None:  # one of an earlier connection came behind it
            return self.ask()
        self.state, new, drop = reply
        dropped = [number for number in drop if self.tasks.pop(number, None) is not None]
        begun = [WorkerTask(definition) for definition in new]
        self.tasks.update((task.id, task) for task in begun)
        return [*map(DropTask, dropped), *map(BeginTask, begun), *self.ask()]

    def refused(self, request: int) -> list[WorkerTasksEffect]:
        """The dispatcher did not answer, or with an error."""
        return [AskLater()] if request == self._request else []

    def finished(self, number: int) -> list[WorkerTasksEffect]:
        """The last element of a task was taken, or it has handed back what it had not begun."""
        task = self.tasks.get(number)
        if task is None or task.deleted:
            return []  # who asks for it is told so; the dispatcher collects what nobody reads
        task.done = True
        return self.ask()

    def drain(self) -> list[WorkerTasksEffect]:
        """The worker leaves as soon as nothing is left to do."""
        dynamic = [task for task in self.tasks.values() if task.terms.mode == DYNAMIC and not task.done]
        for task in dynamic:
            task.done = task.terms.portioned
        return [*(GiveBackPositions(task.id) for task in dynamic if not task.done), *self.ask()]

    def leave(self) -> None:
        """The dispatcher has let this worker go."""
        self._left = True
        self._request += 1
