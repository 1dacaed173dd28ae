"""Watches of other tasks: whether each is alive, as far as this task has noticed.

This task watches another task from the first time that it waits for it. The watch is a call that gets no reply: it ends when the other
process ends, because the connection ends or ZeroMQ's heartbeats stop, and no other message is sent meanwhile. A task that was never seen
may not have started yet, so callers wait for it. A task that was seen and has gone counts as gone until its next incarnation is seen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import UNAVAILABLE, OpError
from zmqdist.rpc import StatusOrResult
from zmqdist.rpc.pending_call import PendingCall
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.snapshot import WatchRow
from zmqdist.transport.peer import Peer

log = logging.getLogger("zmqdist.tasks")

METHOD = "zmqdist.watch"


class Watches:
    """The watches of one task. Any thread may call the methods."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._watched: set[Task] = set()
        self._incarnations: dict[Task, int] = {}
        self._last_speaker: dict[Task, int] = {}
        self._gone_messages: dict[Task, str] = {}
        self._on_incarnation: list[Callable[[Task, int], object]] = []
        self._on_gone: list[Callable[[Task, str], object]] = []
        node.service.register_later(METHOD, self._watch_call, roles=TASKS)
        node.router.on_gone.append(self._connection_ended)

    def listen(self, on_incarnation: Callable[[Task, int], object], on_gone: Callable[[Task, str], object]) -> None:
        """Register callbacks, one for each new incarnation of a watched task, and one for its end.

        The callbacks run in threads of zmqdist. Call this method before `Node.serve`.
        """
        self._on_incarnation.append(on_incarnation)
        self._on_gone.append(on_gone)

    def watch(self, task: Task) -> None:
        """Begin to watch a task, unless this task watches it already. Does not block.

        Raises:
          FailedPreconditionError: this task's server was stopped.
        """
        if task == self._node.me or task in self._watched:
            return
        with self._lock:
            if task in self._watched:
                return
            self._watched.add(task)
        self._start_watch(task, 0)

    def rows(self) -> dict[str, WatchRow]:
        """Return the state of each watched task, by name."""
        rows = {}
        for task in sorted(self._watched.copy()):
            incarnation, message = self._incarnations.get(task, 0), self.gone_message(task)
            state = "gone" if message else "up" if incarnation else "unseen"
            rows[task_name(task)] = WatchRow(task_name(task), state, incarnation, message)
        return rows

    def gone_message(self, task: Task) -> str:
        """Return the error text for a task that has gone; "" for a task that is up or was never seen."""
        return self._gone_messages.get(task, "")

    def heard_from(self, task: Task, incarnation: int, peer: Peer | None = None) -> None:
        """Note that a message of this incarnation of a task has arrived, so the task is up, even if its watch has not noticed that yet.

        A message of an incarnation that has gone is ignored, because the last messages may be processed late. If a task goes before its
        watch has learned its incarnation, the incarnation that has gone is taken to be the last one that sent a message over its own
        connection. If there was no such message, the task that passes this message on is believed: it has heard from this incarnation
        directly, and notifies all members when that incarnation goes.

        Args:
          peer: the connection of the message if the task itself has sent it; None if another task passes the news on.
        """
        with self._lock:  # a peer is marked as gone before `_connection_ended` runs, so one of the two sees the end
            seen = self._incarnations.get(task)
            if peer is None:
                seen = seen or self._last_speaker.get(task)
            elif peer.gone:
                return
            else:
                self._last_speaker[task] = incarnation
            if seen != incarnation and self._gone_messages.pop(task, ""):
                # Until the new watch has arrived, `_connection_ended` learns of the task's end.
                self._incarnations.pop(task, None)

    def _connection_ended(self, peer: Peer) -> None:
        """Act on the end of a connection that another task had opened to this one. If that task is watched and has not replied to its
        watch, it was up and has gone.

        If this task is also connected to the other one, the end of that connection counts, because replies may still arrive on it.
        """
        if self._node.closed:  # the peers disconnect because this task stops, not because they end
            return
        for task in self._watched.copy():
            if (
                peer.role == "worker"
                and peer.hello is not None
                and peer.hello.name == task_name(task)
                and task not in self._incarnations
            ):
                if self._node.is_connected(task):
                    self._probe(task)
                else:
                    self._task_gone(task, UNAVAILABLE, "")

    def _probe(self, task: Task) -> None:
        """Call a task whose watch may wait for the task's next incarnation. This call fails with the connection, and waits for no other."""
        try:
            result = self._node.start(task, METHOD, 0, waits_for_server=False)
        except OpError:  # the server of this task was stopped
            return
        result.add_done_callback(partial(self._probed, task))

    def _probed(self, task: Task, result: StatusOrResult) -> None:
        code, message = result.get_error()
        # A reply shows that the watch, which was sent earlier, has arrived, so the end of the watch will report the end of the task.
        if code and task not in self._incarnations and not self._node.closed:
            self._task_gone(task, code, message)

    def _watch_call(self, call: PendingCall, incarnation: int) -> None:
        """Keep the call of a watching task without a reply until this process ends, if the caller knows the current incarnation."""
        if incarnation != self._node.incarnation:
            call.reply(self._node.incarnation)

    def _start_watch(self, task: Task, incarnation: int) -> None:
        # A watch of a known incarnation must not wait for a server: it would wait for the next incarnation and miss the end of this one.
        result = self._node.start(task, METHOD, incarnation, waits_for_server=not incarnation)
        result.add_done_callback(partial(self._watch_ended, task, incarnation))

    def _watch_ended(self, task: Task, incarnation: int, result: StatusOrResult) -> None:
        code, message = result.get_error()
        if self._node.closed:  # this task's stop ended the watch, which shows nothing about the other task
            return
        if not code:
            self._task_seen(task, result.get_value())
        else:  # even a first watch: it was in flight when it ended, so the other task was up
            self._task_gone(task, code, message)
        try:
            if code in (0, UNAVAILABLE):
                self._start_watch(task, 0 if code else result.get_value())
            else:
                self._watched.discard(task)
        except OpError:
            pass  # the server of this task was stopped; the last state of the other task remains

    def _task_seen(self, task: Task, incarnation: Any) -> None:
        self._incarnations[task] = incarnation
        self._gone_messages.pop(task, None)
        for fn in self._on_incarnation:
            fn(task, incarnation)

    def _task_gone(self, task: Task, code: int, message: str) -> None:
        incarnation = self._incarnations.get(task, 0)
        subject = f"its incarnation {incarnation:016x}" if incarnation else "it"
        reason = f"{subject} has ended, or cannot be reached any more" if code == UNAVAILABLE else message
        gone_message = f"{task_name(task)} at {self._node.spec.task_address(*task)} has gone: {reason}"
        with self._lock:
            self._gone_messages[task] = gone_message
        log.info("%s", gone_message)
        for fn in self._on_gone:
            fn(task, gone_message)
