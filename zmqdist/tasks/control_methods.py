"""Methods by which a client learns the identity of a task and stops it. Only peers that may send
code may call them.

"server.shutdown" stops every task of the cluster that is up. The task that serves this call stops
itself last, after the replies of the other tasks, which may not have ended by then.

By "server.reach" `zmqdist doctor` finds out which other tasks a task can reach, because only the
task itself can test its connections.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.background import logged
from zmqdist.coordination.replies import Task, task_name
from zmqdist.errors import (
    DEADLINE_EXCEEDED,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
)
from zmqdist.limits import GRACE_S
from zmqdist.rpc.methods import SERVER_INFO
from zmqdist.rpc.service import PendingCall
from zmqdist.tasks.node import TASKS, Node, grace_s
from zmqdist.transport import port_probe

REACH: Final = "server.reach"
REACH_S_MAX: Final = 30.0
"""Seconds. The longest time-out that a caller may set, because the method occupies a thread of the
task meanwhile."""

AT_A_TIME: Final = 16


class ControlMethods:
    """The control methods of one server. `server` is a weak reference, so that the program can drop
    the server."""

    def __init__(self, node: Node, server: weakref.ReferenceType[Any]) -> None:
        self._node = node
        self._server = server
        node.service.register("server.about", self._identity, inline=True, roles=TASKS)
        node.service.register(REACH, self._reach, roles=TASKS)
        node.service.register("server.stop", self._stop, inline=True, roles=TASKS)
        node.service.register_later("server.shutdown", self._shutdown, roles=frozenset({"submit"}))

    def _identity(self) -> dict[str, Any]:
        node = self._node
        return {
            "task": task_name(node.me),
            "address": node.address,
            "pid": os.getpid(),
            "incarnation": node.incarnation,
        }

    def _stop(self, grace: float) -> None:
        """Stop the server in another thread, so that the reply is sent first."""
        limit_s, server = grace_s(grace), self._server()
        if server is not None:
            name = "zmqdist-server-stop"
            threading.Thread(
                target=logged, args=(server.stop, limit_s), name=name, daemon=True
            ).start()

    def _shutdown(self, call: PendingCall, grace: float) -> None:
        """Stop all tasks of the cluster that are up, and reply with their names."""
        name = "zmqdist-server-shutdown"
        threading.Thread(
            target=self._shut_down, args=(call, grace_s(grace)), name=name, daemon=True
        ).start()

    def _shut_down(self, call: PendingCall, limit_s: float) -> None:
        node = self._node
        try:
            due = time.monotonic() + GRACE_S
            stopping, problems = node.call_tasks(node.other_tasks, "server.stop", limit_s, due=due)
            # The stop of this task has ended the calls, so a call that failed here may still have
            # reached its task.
            if problems and node.closed:
                raise UnavailableError(
                    f"{task_name(node.me)} was stopped by another caller meanwhile; not "
                    f"all other tasks have replied"
                )
            if problems:
                raise UnavailableError(
                    f"{task_name(node.me)} stops, but the call did not reach {'; '.join(problems)}"
                )
            call.reply([*stopping, task_name(node.me)])
        except BaseException as error:
            call.fail(error)
        with contextlib.suppress(FailedPreconditionError):
            # the loop has ended: this server was stopped meanwhile
            # the loop sends the reply before it calls `_stop`
            node.loop.call_soon(self._stop, limit_s)

    def _reach(self, timeout_s: float) -> list[str]:
        """Connect to every other task, and request the report of that task about itself.

        Returns:
          One flat list with three items for each task: its name, its address, and the problem,
          which is "" if the task was reached.

        Raises:
          InvalidArgumentError: `timeout_s` is not a number of seconds up to REACH_S_MAX.
          UnavailableError: this task was stopped meanwhile.
        """
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= REACH_S_MAX:
            raise InvalidArgumentError(f"timeout_s is {timeout_s!r}, wants up to {REACH_S_MAX:g} s")
        tasks = self._node.other_tasks
        with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="zmqdist-reach") as pool:
            troubles = pool.map(lambda task: self._trouble(task, timeout_s), tasks)
            return [
                text
                for task, trouble in zip(tasks, troubles, strict=True)
                for text in (task_name(task), self._node.spec.task_address(*task), trouble)
            ]

    def _trouble(self, task: Task, timeout_s: float) -> str:
        address = self._node.spec.task_address(*task)
        try:
            code, message = self._node.start(
                task, SERVER_INFO, due=time.monotonic() + timeout_s
            ).get_error()
            if code and self._node.closed:
                # this task's stop has ended the call, which shows nothing about the other task
                raise self._node.stopped
            if code != DEADLINE_EXCEEDED:
                return message
            probe = port_probe.probe(address, timeout_s)
        except OpError as error:
            if self._node.closed:
                raise UnavailableError(
                    f"{task_name(self._node.me)} is stopping, so it cannot test its connections"
                ) from None
            return error.message
        if probe.failure is None:
            return f"it takes connections, and does not reply within {timeout_s:g} s"
        return port_probe.explain_failure(address, probe, timeout_s)[0]
