"""Watches of other tasks. This module makes the calls and runs the callbacks that
watches_machine.py decides on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import OK, OpError
from zmqdist.rpc import StatusOrResult
from zmqdist.rpc.client import outcome_of
from zmqdist.rpc.service import PendingCall
from zmqdist.tasks.node import TASKS, Node
from zmqdist.tasks.snapshot import WatchRow
from zmqdist.tasks.watches_machine import (
    ProbeTask,
    ReportGone,
    ReportSeen,
    WatchedTasks,
    WatchEffect,
    WatchTask,
)
from zmqdist.transport.router import Peer

log = logging.getLogger("zmqdist.tasks")

METHOD = "zmqdist.watch"


class Watches:
    """The watches by which one task notices whether other tasks are up. Any thread may call the
    methods."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._machine = WatchedTasks(node.me)
        self._on_incarnation: list[Callable[[Task, int], object]] = []
        self._on_loss: list[Callable[[Task, str], object]] = []
        node.service.register_later(METHOD, self._watch_call, roles=TASKS)
        node.router.on_gone.append(self._connection_ended)

    def listen(
        self, on_incarnation: Callable[[Task, int], object], on_loss: Callable[[Task, str], object]
    ) -> None:
        """Register two callbacks: for new incarnations of watched tasks, and for the ends of
        watched tasks.

        The callbacks run in threads of zmqdist. Call `listen` before `Node.serve`.
        """
        self._on_incarnation.append(on_incarnation)
        self._on_loss.append(on_loss)

    def watch(self, task: Task) -> None:
        """Watch a task from now on. This does not block.

        Raises:
          FailedPreconditionError: this task's server was stopped.
        """
        if self._machine.is_watched(task):
            # This check needs no lock, which makes it cheap: each wait for a task calls this
            # method.
            return
        self._node.client(task)  # this call raises if this server was stopped
        with self._lock:
            effects = self._machine.watched(task, self._node.spec.task_address(*task))
        self._perform(effects)

    def rows(self) -> dict[str, WatchRow]:
        """Return the state of each watched task, by name."""
        rows = {}
        with self._lock:
            for task in self._machine.tasks:
                incarnation, message = (
                    self._machine.incarnation(task),
                    self._machine.gone_message(task),
                )
                state = "gone" if message else "up" if incarnation else "unseen"
                rows[task_name(task)] = WatchRow(task_name(task), state, incarnation, message)
        return rows

    def gone_message(self, task: Task) -> str:
        """Return the error text for a task that has gone; "" for a task that is up or was never
        seen."""
        return self._machine.gone_message(task)

    def heard_from(self, task: Task, incarnation: int, peer: Peer | None = None) -> None:
        """Record that a message of this incarnation of a task has arrived.

        Args:
          peer: the connection on which the message arrived from the task itself; None if another
            task reported the incarnation.
        """
        with self._lock:
            # the router marks a peer as gone before it calls `_connection_ended`, so either this
            # check or that method notices the end
            self._machine.heard_from(task, incarnation, None if peer is None else not peer.gone)

    def _connection_ended(self, peer: Peer) -> None:
        if self._node.closed:
            # the peers disconnect because this task stops, not because they have ended
            return
        if peer.role != "worker" or peer.hello is None:
            return
        with self._lock:
            tasks = [task for task in self._machine.tasks if task_name(task) == peer.hello.name]
        for task in tasks:
            connected = self._node.is_connected(task)
            self._apply(self._machine.connection_ended, task, connected)

    def _watch_call(self, call: PendingCall, incarnation: int) -> None:
        """Serve a watch of this task. If the caller knows the current incarnation, do not reply, so
        that the call ends with this process. Otherwise reply with the incarnation.
        """
        if incarnation != self._node.incarnation:
            call.reply(self._node.incarnation)

    def _perform(self, effects: list[WatchEffect]) -> None:
        for effect in effects:
            match effect:
                case WatchTask(task, incarnation):
                    # A watch of a known incarnation must fail if no server is connected. If the
                    # watch waited for a server, it would reach the next incarnation, and miss the
                    # end of the known incarnation.
                    self._call(task, incarnation, not incarnation, self._watch_ended)
                case ProbeTask(task):
                    self._call(task, 0, False, self._probe_ended)
                case ReportSeen(task, incarnation):
                    for report in self._on_incarnation:
                        report(task, incarnation)
                case ReportGone(task, message):
                    log.info("%s", message)
                    for listener in self._on_loss:
                        listener(task, message)

    def _call(
        self, task: Task, incarnation: int, waits_for_server: bool, then: Callable[..., object]
    ) -> None:
        with suppress(OpError):
            # The call raises if this task's server was stopped. Then the last states of the other
            # tasks stay as they are.
            call = self._node.start(task, METHOD, incarnation, waits_for_server=waits_for_server)
            call.add_done_callback(partial(then, task))

    def _watch_ended(self, task: Task, result: StatusOrResult) -> None:
        incarnation, error = outcome_of(result)
        code, message = (OK, "") if error is None else (error.error_code, error.message)
        self._apply(self._machine.watch_ended, task, code, message, incarnation or 0)

    def _probe_ended(self, task: Task, result: StatusOrResult) -> None:
        self._apply(self._machine.probe_ended, task, *result.get_error())

    def _apply(self, event: Callable[..., list[WatchEffect]], *args: Any) -> None:
        # This task's own stop ends its calls, too, which shows nothing about other tasks.
        if not self._node.closed:
            with self._lock:
                effects = event(*args)
            self._perform(effects)
