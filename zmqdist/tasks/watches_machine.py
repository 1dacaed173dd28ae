"""Which of the watched tasks are up, as far as this task has noticed. No I/O.

Theory of operation
    A task is watched from the first time that this task waits for it. The watch is a call without a reply: it ends with the process at the
    other end, when the connection ends or ZeroMQ's heartbeats stop. The first watch of a task carries no incarnation and waits for a
    server, because the task may not have started yet; the task replies with its incarnation, and the next watch carries that one.
    A task may end before its first watch has shown its incarnation. Then the end of its own connection to this task shows that it was up.

Promises, checked by tests/sim/simulations/watches.py
    W1  each watched task has one watch in flight, unless this task's server was stopped or the task has refused the watch
    W2  a task whose seen incarnation has ended counts as gone until another incarnation replies to a watch or sends a message, which
        another task may pass on
    W3  a late message of an incarnation of which this task has noticed the end does not make the task up again
    W4  a task is reported as gone only after its process or a connection between the two tasks has ended
    W5  without further faults each watched task that runs is up in its current incarnation

Not here: the calls themselves (liveness.py), and what the end of a task means for groups and messages (collectives.py, mail.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import OK, UNAVAILABLE

ENDED_KEPT: Final = 8
"""Ended incarnations of a task that are remembered. A message of an earlier one would have been on its way for as many restarts."""


@dataclass(frozen=True, slots=True)
class WatchTask:
    """Send a watch to a task. `incarnation` is the one that this task knows; 0: none, so the call waits for a server to appear."""

    task: Task
    incarnation: int


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Call a task over the present connection. The call must fail with that connection instead of waiting for the next one."""

    task: Task


@dataclass(frozen=True, slots=True)
class ReportSeen:
    """Report that a task is up in this incarnation."""

    task: Task
    incarnation: int


@dataclass(frozen=True, slots=True)
class ReportGone:
    """Report that a task has gone. `message` names the task, its address and the reason."""

    task: Task
    message: str


WatchEffect: TypeAlias = WatchTask | ProbeTask | ReportSeen | ReportGone


class WatchedTasks:
    """The watched tasks of one task; the module's docstring has the rules. Each method is one event."""

    def __init__(self, me: Task) -> None:
        self._me = me
        self._addresses: dict[Task, str] = {}
        self._incarnations: dict[Task, int] = {}
        """The incarnation that last replied to a watch. It stays known after its end."""
        self._last_speaker: dict[Task, int] = {}
        """The incarnation that last sent a message over a connection of its own."""
        self._gone_messages: dict[Task, str] = {}
        self._ended: dict[Task, deque[int]] = {}
        """The last incarnations of which this task has noticed the end."""

    @property
    def tasks(self) -> list[Task]:
        """The watched tasks, sorted."""
        return sorted(self._addresses)

    def is_watched(self, task: Task) -> bool:
        """Return whether this task needs no watch: it is watched already, or it is the task that watches."""
        return task == self._me or task in self._addresses

    def incarnation(self, task: Task) -> int:
        """Return the incarnation that last replied to a watch, also after its end; 0 for none."""
        return self._incarnations.get(task, 0)

    def gone_message(self, task: Task) -> str:
        """Return the error text for a task that has gone; "" for one that is up or was never seen."""
        return self._gone_messages.get(task, "")

    # -- events -----------------------------------------------------------------------------------------------------------

    def watched(self, task: Task, address: str) -> list[WatchEffect]:
        """This task waits for another one, which is watched from now on."""
        if self.is_watched(task):
            return []
        self._addresses[task] = address
        return [WatchTask(task, 0)]

    def heard_from(self, task: Task, incarnation: int, connected: bool | None) -> None:
        """A message of this incarnation of a task has arrived, so the task is up, even if its watch has not noticed yet.

        Args:
          connected: whether the connection that carried the message is still open; None: another task has passed the message on.
        """
        if connected is None:
            # The task that passed it on has heard from this incarnation directly, and reports its end. Only an end that this task has
            # noticed itself counts for more.
            ended = incarnation in self._ended.get(task, ())
        elif connected:
            self._last_speaker[task] = incarnation
            ended = incarnation == self._incarnations.get(task)
        else:
            ended = True  # `connection_ended` has come, or is about to
        if not ended and self._gone_messages.pop(task, ""):
            # Until the new incarnation replies to the watch, the end of its connection to this task shows its end (connection_ended).
            self._incarnations.pop(task, None)

    def connection_ended(self, task: Task, connected: bool) -> list[WatchEffect]:
        """The connection of a task to this one has ended.

        Args:
          connected: whether this task is connected to the other one. Then that connection decides, after the replies that the task sent
            before its end.
        """
        if task not in self._addresses or task in self._incarnations:  # once it has replied, its watch shows its end
            return []
        return [ProbeTask(task)] if connected else self._gone(task, UNAVAILABLE, "")

    def probe_ended(self, task: Task, code: int, message: str) -> list[WatchEffect]:
        """A probe has ended. A reply shows that the watch, which was sent before, has arrived, so the watch shows the end of the task."""
        return [] if code == OK or task in self._incarnations else self._gone(task, code, message)

    def watch_ended(self, task: Task, code: int, message: str, incarnation: int) -> list[WatchEffect]:
        """The watch of a task has ended.

        Args:
          code, message: OK with the incarnation of the task, or the error of the call.
        """
        if code == OK:
            if (before := self._incarnations.get(task, incarnation)) != incarnation:
                self._note_end(task, before)
            self._incarnations[task] = incarnation
            self._gone_messages.pop(task, None)
            return [ReportSeen(task, incarnation), WatchTask(task, incarnation)]
        # This holds for a first watch, too: a call that is lost in flight had reached the task.
        effects = self._gone(task, code, message)
        if code == UNAVAILABLE:
            return [*effects, WatchTask(task, 0)]
        del self._addresses[task]  # it has refused the watch; the next wait for it sends another one
        return effects

    def _gone(self, task: Task, code: int, message: str) -> list[WatchEffect]:
        incarnation = self._incarnations.get(task, 0)
        if ended := incarnation or self._last_speaker.get(task, 0):
            self._note_end(task, ended)
        subject = f"its incarnation {incarnation:016x}" if incarnation else "it"
        reason = f"{subject} has ended, or cannot be reached any more" if code == UNAVAILABLE else message
        text = f"{task_name(task)} at {self._addresses[task]} has gone: {reason}"
        self._gone_messages[task] = text
        return [ReportGone(task, text)]

    def _note_end(self, task: Task, incarnation: int) -> None:
        self._ended.setdefault(task, deque(maxlen=ENDED_KEPT)).append(incarnation)
