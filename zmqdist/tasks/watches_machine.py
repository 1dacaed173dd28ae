"""Decides which watched tasks are up, as far as the watching task knows. No I/O.

Theory of operation
    This task watches another task from the first time that it waits for that task. A watch is a
    call that carries the incarnation of the watched task and gets no reply. So the watch fails when
    that incarnation ends, because then the connection ends or ZeroMQ's heartbeats stop. The first
    watch, and each watch after such an end, carries no incarnation and waits for a server, because
    the watched task may not have started yet. The watched task replies to such a watch with its
    incarnation, which the next watch carries. A watched task may end before it has replied to the
    first watch. Then the end of its own connection to this task shows that it was up.

Promises, checked by tests/sim/simulations/watches.py
    W1  each watched task has one watch in flight, unless this task's server was stopped or the
        watched task has refused the watch
    W2  a task whose seen incarnation has ended counts as gone until another incarnation of it
        replies to a watch, or a message of another incarnation arrives, directly or through a third
        task
    W3  once this task has noticed the end of an incarnation, a late message of this incarnation
        does not make the watched task up again
    W4  a task is reported as gone only after its process or a connection between the two tasks has
        ended
    W5  without further faults each watched task that runs counts as up in its current incarnation

Not here: the calls themselves (liveness.py), and what the end of a task means for groups and
messages (collectives.py, mail.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import OK, UNAVAILABLE

ENDED_KEPT: Final = 8
"""Number of ended incarnations of a task that this task remembers, so that their late messages do
not count. A message of an older incarnation would have been on its way for as many restarts.
"""


@dataclass(frozen=True, slots=True)
class WatchTask:
    """Send a watch to a task. `incarnation` is the incarnation that this task knows. If it is 0,
    the call waits for a server to appear."""

    task: Task
    incarnation: int


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Call a task over the present connection. The call must fail with this connection instead of
    waiting for the next connection."""

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
    """The tasks that one task watches; the module's docstring has the rules. Each method is an
    event or a query."""

    def __init__(self, me: Task) -> None:
        self._me = me
        self._addresses: dict[Task, str] = {}
        self._incarnations: dict[Task, int] = {}
        """By task: the incarnation that last replied to a watch. It stays in this dict after its
        end."""
        self._last_speaker: dict[Task, int] = {}
        """By task: the incarnation that last sent a message over a connection of its own."""
        self._gone_messages: dict[Task, str] = {}
        self._past_incarnations: dict[Task, deque[int]] = {}
        """By task: the last incarnations whose end this task has noticed."""

    @property
    def tasks(self) -> list[Task]:
        """The watched tasks, sorted."""
        return sorted(self._addresses)

    def is_watched(self, task: Task) -> bool:
        """Return whether `task` needs no new watch, because it is watched already or is the
        watching task itself."""
        return task == self._me or task in self._addresses

    def incarnation(self, task: Task) -> int:
        """Return the incarnation of a task that last replied to a watch, even if it has ended; 0 if
        no incarnation has replied."""
        return self._incarnations.get(task, 0)

    def gone_message(self, task: Task) -> str:
        """Return the error text for a task that has gone; "" for a task that is up or was never
        seen."""
        return self._gone_messages.get(task, "")

    # -- events ------------------------------------------------------------------------------------

    def watched(self, task: Task, address: str) -> list[WatchEffect]:
        """Record that this task waits for another task, and watch that task from now on. A watch is
        a call to the watched task that fails when the task ends.
        """
        if self.is_watched(task):
            return []
        self._addresses[task] = address
        return [WatchTask(task, 0)]

    def heard_from(self, task: Task, incarnation: int, connected: bool | None) -> None:
        """Record that a message of this incarnation of a task has arrived. Unless this incarnation
        has ended, the task is up.

        Args:
          connected: whether the connection that carried the message is still open; None if another
            task has passed the message on.
        """
        if connected is None:
            # The task that passed the message on has heard from this incarnation directly, and will
            # report its end. So the message counts, unless this task itself has noticed that end.
            is_over = incarnation in self._past_incarnations.get(task, ())
        elif connected:
            self._last_speaker[task] = incarnation
            is_over = incarnation == self._incarnations.get(task)
        else:
            # `connection_ended` was called for the end of this connection, or is about to be called
            is_over = True
        if not is_over and self._gone_messages.pop(task, ""):
            # Forget the old incarnation, so that `connection_ended` also handles the end of a new
            # incarnation that has replied to no watch.
            self._incarnations.pop(task, None)

    def connection_ended(self, task: Task, connected: bool) -> list[WatchEffect]:
        """Record that the connection of another task to this task has ended.

        Args:
          connected: whether this task has a connection to the other task. If so, a probe over that
            connection shows whether the other task has ended. If the watch gets a reply, the reply
            arrives before the probe ends, because the watch was sent first.
        """
        if task not in self._addresses or task in self._incarnations:
            # Send no probe: this task does not watch the other task, or the other task has replied
            # to a watch. In the second case a watch is in flight, which ends when the other task
            # ends.
            return []
        return [ProbeTask(task)] if connected else self._report_loss(task, UNAVAILABLE, "")

    def probe_ended(self, task: Task, code: int, message: str) -> list[WatchEffect]:
        """Record that a probe of a task has ended. A probe is a call by which this task sees
        whether the other runs. A reply also shows that the other task has received the watch,
        because the watch was sent before the probe. No further probe is needed then, because the
        watch will end when the task ends.
        """
        return (
            []
            if code == OK or task in self._incarnations
            else self._report_loss(task, code, message)
        )

    def watch_ended(
        self, task: Task, code: int, message: str, incarnation: int
    ) -> list[WatchEffect]:
        """Record that the watch of a task has ended, by a reply or an error.

        Args:
          code, message: OK if the task has replied with `incarnation`, or the error of the call.
        """
        if code == OK:
            if (before := self._incarnations.get(task, incarnation)) != incarnation:
                self._note_end(task, before)
            self._incarnations[task] = incarnation
            self._gone_messages.pop(task, None)
            return [ReportSeen(task, incarnation), WatchTask(task, incarnation)]
        # The task has gone. This holds for a first watch, too, because the watch was sent only when
        # the task was up.
        effects = self._report_loss(task, code, message)
        # the next incarnation appears at the same address, so wait for it
        if code == UNAVAILABLE:
            return [*effects, WatchTask(task, 0)]
        # the task has refused the watch; the next wait for the task sends another watch
        del self._addresses[task]
        return effects

    def _report_loss(self, task: Task, code: int, message: str) -> list[WatchEffect]:
        incarnation = self._incarnations.get(task, 0)
        if last_incarnation := incarnation or self._last_speaker.get(task, 0):
            self._note_end(task, last_incarnation)
        subject = f"its incarnation {incarnation:016x}" if incarnation else "it"
        reason = (
            f"{subject} has ended, or cannot be reached any more"
            if code == UNAVAILABLE
            else message
        )
        text = f"{task_name(task)} at {self._addresses[task]} has gone: {reason}"
        self._gone_messages[task] = text
        return [ReportGone(task, text)]

    def _note_end(self, task: Task, incarnation: int) -> None:
        self._past_incarnations.setdefault(task, deque(maxlen=ENDED_KEPT)).append(incarnation)
