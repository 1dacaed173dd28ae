"""Which of the other tasks are alive, as far as this one has asked.

A task is watched from the first time that somebody waits for it on. The watch is a call that is never answered: it ends with the process at
the other end, by its connection or by ZeroMQ's heartbeats, without anything being sent meanwhile. A task that was never seen may not have
started yet, so it is waited for; one that was seen and has gone is gone until its next life is there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from zmqdist.coordination.answers import Task, named
from zmqdist.errors import UNAVAILABLE, OpError
from zmqdist.rpc import StatusOrResult
from zmqdist.rpc.pending_call import Asked
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.snapshot import WatchRow
from zmqdist.transport.router import Peer

log = logging.getLogger("zmqdist.tasks")

METHOD = "zmqdist.watch"


class Watches:
    """The watches of one task. From any thread."""

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
        """Have these called, in a thread of zmqdist, with each new life of a watched task and with its end. Before `serve`."""
        self._on_incarnation.append(on_incarnation)
        self._on_gone.append(on_gone)

    def watch(self, task: Task) -> None:
        """From now on. Does not wait.

        Raises:
          FailedPreconditionError: the own server was stopped.
        """
        if task == self._node.me or task in self._watched:
            return
        with self._lock:
            if task in self._watched:
                return
            self._watched.add(task)
        self._start_watch(task, 0)

    def rows(self) -> dict[str, WatchRow]:
        """What is known of the tasks that are watched."""
        rows = {}
        for task in sorted(self._watched.copy()):
            incarnation, message = self._incarnations.get(task, 0), self.gone_message(task)
            state = "gone" if message else "up" if incarnation else "unseen"
            rows[named(task)] = WatchRow(named(task), state, incarnation, message)
        return rows

    def gone_message(self, task: Task) -> str:
        """What is to be said of a task that was there and has gone; empty for one that is there or was never seen."""
        return self._gone_messages.get(task, "")

    def heard_from(self, task: Task, incarnation: int, peer: Peer | None = None) -> None:
        """Something has come from a life of a task: that is there, also where its watch has not noticed yet.

        Unless it is the one that has gone: its last words may be handled late. A task may go before its watch has learned its life; then
        the life that last spoke itself is the one that has gone. Where none did, the word of the task that passes this on counts: that
        one has heard this life itself, and tells everybody when it goes.

        Args:
          peer: the connection that they came by, if they came from the task itself.
        """
        with self._lock:  # a connection is marked as gone before `_left` hears of it, so it is one or the other
            seen = self._incarnations.get(task)
            if peer is None:
                seen = seen or self._last_speaker.get(task)
            elif peer.gone:
                return
            else:
                self._last_speaker[task] = incarnation
            if seen != incarnation and self._gone_messages.pop(task, ""):
                self._incarnations.pop(
                    task, None
                )  # until the watch is there, its connection to us says when it ends (_left)

    def _connection_ended(self, peer: Peer) -> None:
        """A connection to us has ended. Where it is from a task that we have only begun to watch, that one was there and has gone.

        Where we are connected to it, too, that connection says so, after what the task has answered before its end.
        """
        if self._node.closed:  # they let go of us because we stop, not because they end
            return
        for task in self._watched.copy():
            if (
                peer.role == "worker"
                and peer.hello is not None
                and peer.hello.name == named(task)
                and task not in self._incarnations
            ):
                if self._node.is_connected(task):
                    self._probe(task)
                else:
                    self._task_gone(task, UNAVAILABLE, "")

    def _probe(self, task: Task) -> None:
        """Ask a task whose watch may wait for its next life: this question fails with the connection, and waits for no other."""
        try:
            result = self._node.start(task, METHOD, 0, waits_for_server=False)
        except OpError:  # the own server was stopped
            return
        result.add_done_callback(partial(self._probed, task))

    def _probed(self, task: Task, result: StatusOrResult) -> None:
        code, message = result.get_error()
        # An answer says that the watch, which was sent before, has arrived, too: its end will say when the task goes.
        if code and task not in self._incarnations and not self._node.closed:
            self._task_gone(task, code, message)

    def _watch_call(self, call: Asked, incarnation: int) -> None:
        """A task watches us: who knows our life learns no more until it ends."""
        if incarnation != self._node.incarnation:
            call.answer(self._node.incarnation)

    def _start_watch(self, task: Task, incarnation: int) -> None:
        # About a life that was there nothing is to be waited for: one that has just said goodbye would be missed for good.
        result = self._node.start(task, METHOD, incarnation, waits_for_server=not incarnation)
        result.add_done_callback(partial(self._watch_ended, task, incarnation))

    def _watch_ended(self, task: Task, incarnation: int, result: StatusOrResult) -> None:
        code, message = result.get_error()
        if self._node.closed:  # it has ended with the own server: that says nothing of the task
            return
        if not code:
            self._task_seen(task, result.get_value())
        else:  # also a first question: it was on the way, so there was somebody
            self._task_gone(task, code, message)
        try:
            if code in (0, UNAVAILABLE):
                self._start_watch(task, 0 if code else result.get_value())
            else:
                self._watched.discard(task)
        except OpError:
            pass  # the own server was stopped; what was known of the task stays

    def _task_seen(self, task: Task, incarnation: Any) -> None:
        self._incarnations[task] = incarnation
        self._gone_messages.pop(task, None)
        for fn in self._on_incarnation:
            fn(task, incarnation)

    def _task_gone(self, task: Task, code: int, message: str) -> None:
        incarnation = self._incarnations.get(task, 0)
        subject = f"its life {incarnation:016x}" if incarnation else "it"
        reason = f"{subject} has ended, or cannot be reached any more" if code == UNAVAILABLE else message
        gone_message = f"{named(task)} at {self._node.spec.task_address(*task)} has gone: {reason}"
        with self._lock:
            self._gone_messages[task] = gone_message
        log.info("%s", gone_message)
        for fn in self._on_gone:
            fn(task, gone_message)
