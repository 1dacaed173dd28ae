"""What anybody who may send code can ask of a task besides its sessions: who it is, and that it ends.

"server.shutdown" ends every task of the cluster that is up, the asked one last.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from zmqdist.errors import UnavailableError
from zmqdist.limits import GRACE_S
from zmqdist.server.node import TASKS, Node, named

if TYPE_CHECKING:
    from zmqdist.server.server import Server


class Remote:
    """A part of one server. `server` gives it, as long as it is there."""

    def __init__(self, node: Node, server: weakref.ReferenceType[Server]) -> None:
        self._node = node
        self._server = server
        node.service.register("server.about", self._about, inline=True, roles=TASKS)
        node.service.register("server.stop", self._stop, inline=True, roles=frozenset({"submit", "worker"}))
        node.service.register("server.shutdown", self._shutdown, roles=frozenset({"submit"}))

    def _about(self) -> dict[str, Any]:
        node = self._node
        return {"task": named(node.me), "address": node.address, "pid": os.getpid(), "incarnation": node.incarnation}

    def _stop(self, grace_s: float) -> None:
        """Answered before it happens."""
        server = self._server()
        if server is not None:
            threading.Thread(target=server.stop, args=(grace_s,), name="zmqdist-server-stop", daemon=True).start()

    def _shutdown(self, grace_s: float) -> list[str]:
        """Returns the names of those that end."""
        due = time.monotonic() + GRACE_S
        asked = [
            (task, self._node.start(task, "server.stop", grace_s, due=due)) for task in self._node.up(self._node.others)
        ]
        problems = [f"{named(task)}: {result.get_error()[1]}" for task, result in asked if result.get_error()[0]]
        self._stop(grace_s)
        if problems:
            raise UnavailableError(None, None, f"{named(self._node.me)} ends, but not {'; '.join(problems)}")
        return [named(task) for task, _ in asked] + [named(self._node.me)]
