"""The workers and parameter servers of a cluster file, as children of the launcher: started again when they die.

What is started again
    A worker or ps that a signal has ended, or its own failure: so often as its job's `restarts` says, with pauses that grow. Not one
    that ended in good order (it was told to), nor one that would meet the same refusal again (exit codes USAGE and REFUSED of roles.py).
    A worker comes back under its index, and its work has run elsewhere; a ps comes back at its address, with nothing: its variables
    are lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zmqdist import errors, limits
from zmqdist.dispatch.config import WorkerConfig
from zmqdist.launch.children import Child, Children
from zmqdist.launch.roles import OK, REFUSED, USAGE, TaskConfig

Say = Callable[[str], object]
Exited = Callable[[Child], object]


@dataclass(eq=False)
class _Task:
    """One of them.

    Attributes:
      restarts: how often it may be started again.
      used: how often it was.
      since: when its present life began, on `time.monotonic`.
    """

    config: WorkerConfig | TaskConfig
    environment: Mapping[str, str]
    restarts: int
    used: int = 0
    since: float = 0.0
    pause: threading.Timer | None = None


class Tasks:
    """See the module's docstring.

    Args:
      on_worker_exit: gets the child of a worker that has ended, before it is started again.
      say: gets each line that they write, with a prefix, and what happens to them.
    """

    def __init__(self, on_worker_exit: Exited, say: Say) -> None:
        self._on_worker_exit = on_worker_exit
        self._say = say
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._stopping = False
        self._children = Children(self._exited)

    def start(self, config: WorkerConfig | TaskConfig, environment: Mapping[str, str], restarts: int) -> None:
        """Start a worker or a ps."""
        self._start(_Task(config, environment, restarts))

    def close(self, grace_s: float) -> None:
        """End all in good order, those that take longer than `grace_s` by force. Idempotent."""
        with self._lock:
            self._stopping = True
            pauses = [task.pause for task in self._tasks.values() if task.pause is not None]
        for pause in pauses:
            pause.cancel()
            pause.join()
        self._children.close(grace_s)

    def _start(self, task: _Task) -> None:
        job, index = task.config.job, task.config.index
        with self._lock:
            if self._stopping:
                return
            self._tasks[f"{job}:{index}"] = task
            task.since, task.pause = time.monotonic(), None
            try:
                self._children.start_role(task.config, task.environment, self._prefixed(f"[{job}-{index}]"))
            except OSError as error:
                self._say(f"[{job}-{index}] cannot be started: {error}")

    def _prefixed(self, name: str) -> Say:
        return lambda line: self._say(f"{name} {line}")

    def _exited(self, child: Child) -> None:
        """In the thread of the children."""
        job, _, index = child.name.partition(":")
        if job == "worker":
            self._on_worker_exit(child)
        with self._lock:
            if self._stopping:
                return
            again = self._again(self._tasks[child.name], child.exit_code)
        how = errors.describe_exit(child.exit_code or 0)
        lost = "its variables are lost; " if job == "ps" else ""
        self._say(f"[{job}-{index}] ended ({how}); {lost}{again or self._left(job)}")

    def _again(self, task: _Task, code: int | None) -> str:
        """Have it started again after a pause, and say so; "" where it is not."""
        now = time.monotonic()
        if now - task.since >= limits.RESTARTS_FORGOTTEN_S:
            task.used = 0
        if task.used >= task.restarts or code in (OK, USAGE, REFUSED):
            return ""
        pause_s = min(limits.RESTART_PAUSE_S * 2**task.used, limits.RESTART_PAUSE_S_MAX)
        task.used += 1
        task.pause = threading.Timer(pause_s, self._start, (task,))
        task.pause.name, task.pause.daemon = "zmqdist-restart", True
        task.pause.start()
        return f"it is started again ({task.used} of {task.restarts})"

    def _left(self, job: str) -> str:
        if job == "ps":
            return "it is not started again"
        count = sum(child.name.startswith("worker:") for child in self._children.running)
        with self._lock:
            count += sum(task.pause is not None for name, task in self._tasks.items() if name.startswith("worker:"))
        if not count:
            return "no worker is left: what is scheduled fails after a while"
        return f"its work runs elsewhere, {'1 worker is' if count == 1 else f'{count} workers are'} left"
