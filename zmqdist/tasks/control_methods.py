"""Methods by which a client learns the identity of a task and stops it. Only peers that may send
code may call them.

"server.shutdown" stops every task of the cluster that is up. The task that serves this call stops
itself last, after the replies of the other tasks, which may not have ended by then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any

from zmqdist import clock as time
from zmqdist.background import logged
from zmqdist.coordination.replies import task_name
from zmqdist.errors import FailedPreconditionError, UnavailableError
from zmqdist.limits import GRACE_S
from zmqdist.rpc.service import PendingCall
from zmqdist.tasks.node import TASKS, Node, grace_s


class ControlMethods:
    """The control methods of one server. `server` is a weak reference, so that the program can drop
    the server."""

    def __init__(self, node: Node, server: weakref.ReferenceType[Any]) -> None:
        self._node = node
        self._server = server
        node.service.register("server.about", self._identity, inline=True, roles=TASKS)
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
            stopping = [
                (task, node.start(task, "server.stop", limit_s, due=due))
                for task in node.up(node.other_tasks)
            ]
            problems = [
                f"{task_name(task)}: {result.get_error()[1]}"
                for task, result in stopping
                if result.get_error()[0]
            ]
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
            call.reply([task_name(task) for task, _ in stopping] + [task_name(node.me)])
        except BaseException as error:
            call.fail(error)
        with contextlib.suppress(FailedPreconditionError):
            # the loop has ended: this server was stopped meanwhile
            # the loop sends the reply before it calls `_stop`
            node.loop.call_soon(self._stop, limit_s)
