"""`get_barrier`: a barrier at which the tasks of a run wait for each other; and the pipe between
the parent and the process of one task.

The parent counts the arrivals (`BarrierGate`), because only the parent knows which tasks have ended
and can never arrive. If a task can never arrive, the waiting tasks get an error at once instead of
waiting for ever. A task that was ended by `terminate` may still arrive, because the test may start
it again. So may a task that is restarted after a failure.

A message of the pipe is a word and facts, encoded as JSON. Pickled values are further parts of the
message. Only the parent and the process have the pipe, so a pickle that arrives through the pipe is
from a process of this run.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.clock import deadline, seconds
from zmqdist.limits import WAIT_LOG_S
from zmqdist.transport.pipe import BlockingPipe, PipeCodec

log = logging.getLogger("zmqdist.testing")

Task: TypeAlias = tuple[str, int]
"""(job, index)."""
Answer: TypeAlias = "Callable[[str, Any], object]"

TaskMessage: TypeAlias = tuple[str, Any]
"""(word, facts). The facts are None if the word has no facts."""

TaskPipe: TypeAlias = BlockingPipe[TaskMessage]


TASK_CODEC: Final[PipeCodec[TaskMessage]] = PipeCodec(
    lambda message: json.dumps(message).encode(),
    lambda data: tuple(json.loads(data)),
    "a function with its arguments, or its result",
)


def named(task: Task) -> str:
    """Return the name of a task in output and error texts: "worker-1" for ("worker", 1)."""
    return f"{task[0]}-{task[1]}"


class BarrierGate:
    """The parent's side of the barrier: it counts the tasks that have arrived. Threads may share
    it.

    Args:
      members: all tasks that have to arrive.
    """

    def __init__(self, members: Iterable[Task]) -> None:
        self._members = list(members)
        self._waiting: dict[Task, Answer] = {}
        self._end_reasons: dict[Task, str] = {}
        self._broken: tuple[int, str] | None = None
        self._lock = threading.Lock()

    def heard(self, task: Task, word: str, answer: Answer) -> None:
        """Handle a message of a task. The message says that the task has arrived ("arrive"), asks
        which tasks are missing ("who"), or says that the task's time-out has passed ("give up").
        `answer(word, facts)` sends a reply to the task, now or later.
        """
        with self._lock:
            if word == "arrive":
                self._arrive(task, answer)
            elif task in self._waiting and word == "who":
                answer("waiting", self._missing())
            elif task in self._waiting:
                text = f"the barrier was not complete when the time-out of {named(task)} passed: {self._missing()}"
                self._broken = (errors.DEADLINE_EXCEEDED, text)
                self._fail(*self._broken)

    def admit(self, task: Task) -> None:
        """Record that a task has started, for the first time or again. A barrier that failed
        because the task had ended can be used again, because the task may arrive now."""
        with self._lock:
            self._end_reasons.pop(task, None)
            self._broken = None

    def dismiss(self, task: Task, why: str | None) -> None:
        """Record that a task does not wait at the barrier any more. If `why` is given, it is the
        reason why the task can never arrive, and all waiting tasks get an error."""
        with self._lock:
            self._waiting.pop(task, None)
            # without a reason the task may come back: it was terminated, or is restarted
            if why is not None and task in self._members:
                self._end_reasons.setdefault(task, why)
                if self._waiting:
                    self._fail(errors.ABORTED, self._hopeless())

    def _arrive(self, task: Task, answer: Answer) -> None:
        if task not in self._members:
            members = ", ".join(map(named, self._members))
            answer(
                "fail",
                [
                    errors.INVALID_ARGUMENT,
                    f"{named(task)} is not one of the barrier's tasks: {members}",
                ],
            )
        elif self._broken is not None:
            # a task that comes late learns why the others have given up
            answer("fail", list(self._broken))
        elif self._end_reasons.keys() - {task}:
            answer("fail", [errors.ABORTED, self._hopeless()])
        else:
            self._waiting[task] = answer
            if len(self._waiting) == len(self._members):
                for number, reply in enumerate(self._waiting.values()):
                    reply("pass", number)
                self._waiting.clear()

    def _fail(self, code: int, text: str) -> None:
        for answer in self._waiting.values():
            answer("fail", [code, text])
        self._waiting.clear()

    def _missing(self) -> str:
        missing = ", ".join(named(task) for task in self._members if task not in self._waiting)
        return f"{len(self._waiting)}/{len(self._members)} tasks have arrived; missing: {missing}"

    def _hopeless(self) -> str:
        return "the barrier cannot be complete any more: " + "; ".join(
            f"{named(task)} {why}" for task, why in self._end_reasons.items()
        )


class Barrier:
    """The barrier that `get_barrier` returns in a task. If several threads of a task call `wait`,
    their calls run one after the other.

    A barrier that is unpickled in a task becomes the barrier of that task, so it may be an argument
    or a result of a function. The parent is not a task and cannot wait.

    Attributes:
      parties: the number of tasks that have to arrive.
    """

    def __init__(self, pipe: TaskPipe | None, parties: int) -> None:
        self.parties = parties
        self._pipe = pipe
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all tasks of the run have called `wait`. The barrier can be used again at
        once.

        Args:
          timeout: seconds; None means no limit. While the task waits, it logs every 10 s which
            tasks are missing.

        Returns:
          The number of tasks that had arrived before this one.

        Raises:
          DeadlineExceededError: the time-out of this or another task has passed. All waiting tasks
            get this error, and so do tasks that arrive later.
          AbortedError: a task has ended before it arrived.
          InvalidArgumentError: this task was added to the run later, so it does not belong to the
            barrier; or `timeout` is no number.
          ValueError: the caller is the parent.
        """
        limit_s = seconds(timeout)
        if self._pipe is None:
            raise ValueError(_NO_TASK)
        with self._lock:
            due = deadline(limit_s)
            self._pipe.send(("arrive", None))
            while True:
                left = WAIT_LOG_S if due is None else min(WAIT_LOG_S, due - time.monotonic())
                if self._pipe.poll(max(0.0, left)):
                    (word, facts), _ = self._pipe.receive()
                    if word == "pass":
                        return int(facts)
                    if word == "fail":
                        raise errors.from_code(*facts)
                    log.warning("waiting at the barrier: %s", facts)
                elif due is not None and time.monotonic() >= due:
                    # the parent may have let all tasks pass just now, so its answer decides
                    self._pipe.send(("give up", None))
                    due = None
                else:
                    self._pipe.send(("who", None))

    def __reduce__(self) -> Any:
        return _barrier_here, (self.parties,)


def _barrier_here(parties: int) -> Barrier:
    return Barrier(None, parties) if _here is None else _here


_here: Barrier | None = None
_NO_TASK: Final = (
    "get_barrier() is for the tasks of a run: call it in the function that the runner runs, not "
    "in the process that runs "
    "the test"
)


def get_barrier() -> Barrier:
    """Return the barrier of all tasks of this run. Call this in a task.

    >>> def meet():
    ...     zd.testing.get_barrier().wait(timeout=60)
    ...     return "met"
    >>> zd.testing.run(meet, zd.testing.create_cluster_spec(num_workers=2)).return_value
    ['met', 'met']

    Raises:
      ValueError: the caller is the parent, which is not a task.
    """
    if _here is None:
        raise ValueError(_NO_TASK)
    return _here


def set_barrier(barrier: Barrier | None) -> None:
    """Set the barrier that `get_barrier` returns in this process, which makes the process a task.
    With None, the process is not a task any more."""
    global _here
    _here = barrier
