"""The workers and parameter servers of a cluster file. `Tasks` has a launcher start them, and
restarts them when they crash.

Which tasks are restarted
    A worker or ps that crashed is restarted as often as the `restarts` of its job allows, with
    growing pauses.
    A task is not restarted if it stopped in good order, or if a new process would be refused again
    (exit codes USAGE and REFUSED). A worker that was told to leave (`Tasks.retire`) is
    not restarted, however it ends.
    A restarted worker has the same index, and other workers run its work in the meantime. A
    restarted ps has the same address, but its variables are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from zmqdist import clock as time
from zmqdist import errors, limits
from zmqdist.launch.agent_link import RemoteRole
from zmqdist.launch.children import Child, Children
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.launch.hosts import Hosts
from zmqdist.launch.roles import TaskConfig
from zmqdist.scheduling.shared.config import WorkerConfig

Say = Callable[[str], object]
RunningRole: TypeAlias = Child | RemoteRole
"""A role that a launcher has started (launcher_interface.py)."""
Launcher: TypeAlias = Children | Hosts
ExitHandler = Callable[[RunningRole], object]
WorkerExitHandler = Callable[[int, RunningRole | None, bool], object]
PsGoneHandler = Callable[[str, str], object]
"""A function that is called with the index of a worker, the process of the worker that has ended,
and whether the worker is restarted. The process is None if it could not be started.
"""
MakeLauncher = Callable[[ExitHandler], Launcher]
"""A function that makes a launcher. Its argument is the `on_exit` of the launcher."""


class Restarts:
    """Counts the restarts of one task, and decides whether and when the task is restarted.

    Attributes:
      allowed: how often the task may be restarted. The count begins again after an incarnation that
        ran for RESTARTS_FORGOTTEN_S.
      used: how often the task was restarted since the count began. *Invariant*: used <= allowed.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.used = 0
        self._since = 0.0

    def began(self, now: float) -> None:
        """Record that a new incarnation of the task starts."""
        self._since = now

    def pause_after(self, code: int | None, now: float) -> float | None:
        """Return the pause in seconds before the task, which has ended with this exit code, is
        restarted. None means that the task is not restarted.
        """
        if now - self._since >= limits.RESTARTS_FORGOTTEN_S:
            self.used = 0
        if self.used >= self.allowed or code in (ExitCode.OK, ExitCode.USAGE, ExitCode.REFUSED):
            return None
        self.used += 1
        return float(min(limits.RESTART_PAUSE_S * 2 ** (self.used - 1), limits.RESTART_PAUSE_S_MAX))


@dataclass(eq=False)
class _Task:
    """A worker or ps that a launcher starts and restarts.

    Attributes:
      pause: the timer that restarts the task. None means that no restart is due.
    """

    config: WorkerConfig | TaskConfig
    environment: Mapping[str, str]
    restarts: Restarts
    pause: threading.Timer | None = None
    retired: bool = False
    """Whether the task was told to leave."""
    role: RunningRole | None = None
    """The current incarnation of the task, or the last one."""


class Tasks:
    """The workers and parameter servers of one launcher.

    Args:
      on_worker_exit: a function that is called when a worker has ended, before the worker is
        restarted.
      say: a function that is called with each line that a task prints, after a prefix with the
        task's name, and with a line when a task ends.
      launcher: the function that makes the launcher of the tasks. By default the tasks are child
        processes of this process.
    """

    def __init__(
        self,
        on_worker_exit: WorkerExitHandler,
        on_ps_lost: PsGoneHandler,
        say: Say,
        launcher: MakeLauncher = Children,
    ) -> None:
        self._on_worker_exit = on_worker_exit
        self._on_ps_lost = on_ps_lost
        self._say = say
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._stopping = False
        self._launcher = launcher(self._exited)

    def start(
        self, config: WorkerConfig | TaskConfig, environment: Mapping[str, str], restarts: int
    ) -> None:
        """Start a worker or a ps."""
        self._start(_Task(config, environment, Restarts(restarts)))

    def retire(self, name: str) -> bool:
        """Record that this worker was told to leave, so that it is never restarted. Return True if
        the worker has a process. Return False if it was waiting for a restart, which is now
        cancelled.
        """
        with self._lock:
            task = self._tasks[name]
            task.retired = True
            waits = task.pause is not None
            if task.pause is not None:
                task.pause.cancel()
                task.pause = None
        if waits:
            self._launcher.release(name)
        return not waits

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the process of this task, if it has one."""
        with self._lock:
            role = self._tasks[name].role
        if role is not None:
            role.signal(number)

    def close(self, grace_s: float) -> None:
        """Stop all tasks, and kill each task that takes longer than `grace_s` seconds to stop. A
        second call does nothing."""
        with self._lock:
            self._stopping = True
            pauses = [task.pause for task in self._tasks.values() if task.pause is not None]
        for pause in pauses:
            pause.cancel()
            pause.join()
        self._launcher.close(grace_s)

    def _start(self, task: _Task) -> None:
        name = f"{task.config.job}:{task.config.index}"
        with self._lock:
            # the timer of a restart may have fired just before `retire` or `close`
            if self._stopping or task.retired:
                return
            self._tasks[name] = task
            task.restarts.began(time.monotonic())
            task.pause = None
            try:
                task.role = self._launcher.start_role(
                    task.config, task.environment, lambda line: self._line(task, line)
                )
                return
            except (OSError, errors.OpError) as error:
                # an OpError if the working directory was removed meanwhile
                self._say(f"[{name.replace(':', '-')}] cannot be started: {error}")
        if task.config.job == "worker":
            self._on_worker_exit(task.config.index or 0, None, False)

    def _line(self, task: _Task, line: str) -> None:
        with self._lock:
            # wait until `_start` has stored the role, because the label needs the host of the role
            role = task.role
        assert role is not None
        self._say(f"[{_label(role)}] {line}")

    def _exited(self, role: RunningRole) -> None:
        """Handle the end of a role. A thread of the launcher calls this."""
        job = role.name.partition(":")[0]
        with self._lock:
            stopping, task = self._stopping, self._tasks[role.name]
            stranded = self._launcher.stranded(role.name)
            restart = (
                ""
                if stopping or task.retired or stranded
                else self._plan_restart(task, role.exit_code)
            )
        if task.retired:
            self._launcher.release(role.name)
        if job == "worker":
            self._on_worker_exit(task.config.index or 0, role, bool(restart))
        if stopping:
            return
        if task.retired:
            self._say(f"[{_label(role)}] has left")
            return
        # A worker ends with code 0 if `zmqdist drain` or a program has requested its end.
        if job == "worker" and role.pid and role.exit_code == 0:
            self._say(f"[{_label(role)}] has left; {self._workers_left(job)}")
            return
        how = stranded or (errors.describe_exit(role.exit_code or 0) if role.pid else role.tail)
        if job == "ps" and not restart:
            # programs would wait for the variables of a ps that never returns
            self._on_ps_lost(
                role.name, f"it ended ({how}), and `zmqdist launch` does not start it again"
            )
        lost = "its variables are lost; " if job == "ps" else ""
        self._say(f"[{_label(role)}] ended ({how}); {lost}{restart or self._workers_left(job)}")

    def _plan_restart(self, task: _Task, code: int | None) -> str:
        """Start the timer for a restart, if the task may be restarted. Return a phrase about the
        restart, or "" if there is none."""
        pause_s = task.restarts.pause_after(code, time.monotonic())
        if pause_s is None:
            return ""
        task.pause = threading.Timer(pause_s, self._start, (task,))
        task.pause.name, task.pause.daemon = "zmqdist-restart", True
        task.pause.start()
        return f"it is started again ({task.restarts.used} of {task.restarts.allowed})"

    def _workers_left(self, job: str) -> str:
        if job == "ps":
            return "it is not started again"
        count = sum(role.name.startswith("worker:") for role in self._launcher.running)
        with self._lock:
            count += sum(
                task.pause is not None
                for name, task in self._tasks.items()
                if name.startswith("worker:")
            )
        if not count:
            return "no worker is left: scheduled functions fail after a while"
        return f"its work runs elsewhere, {'1 worker is' if count == 1 else f'{count} workers are'} left"


def _label(role: RunningRole) -> str:
    """Return the name of a role as it stands before each line of its output: "worker-1", or
    "worker-1@host"."""
    name = role.name.replace(":", "-")
    return f"{name}@{role.host}" if role.host else name
