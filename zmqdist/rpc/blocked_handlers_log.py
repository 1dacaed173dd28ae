"""A warning when all handler threads are blocked, for instance because each handler calls its own
server and waits for a free thread.

Not here: when the warning is due (admission_machine.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from zmqdist.rpc.admission_machine import STALL_S, StallDetector
from zmqdist.rpc.batching import Batched
from zmqdist.rpc.handler_pool import HandlerPool

log = logging.getLogger("zmqdist.rpc")


class BlockedHandlersLog:
    """The warning for one pool of handler threads.

    Attributes:
      deadline: when to call `look` again. None means that a thread is free or no call waits.
    """

    def __init__(self, pool: HandlerPool) -> None:
        self.deadline: float | None = None
        self._pool = pool
        self._detector = StallDetector()

    def look(self, now: float, where: str) -> float | None:
        """Log a warning if all handler threads have been blocked for too long.

        Args:
          where: the name of the server in the log line.

        Returns:
          The new `deadline`.
        """
        stuck, ended, running = self._pool.progress()
        if self._detector.look(stuck, ended, now):
            methods = Counter(_name_of(*work) for work in running).most_common(10)
            log.warning(
                "%s: all %d handler threads have been busy for %.0f s, none of their calls has "
                "ended, and further calls wait. "
                "Running: %s. A handler that calls its own server, directly or through another, "
                "waits for a thread that it occupies "
                "itself: call the function instead, register it with inline=True, or give the "
                "server more threads "
                "(threads_max). If the handlers are only slow, add threads or reduce the number "
                "of callers",
                where,
                len(running),
                STALL_S,
                ", ".join(f"{name} ({count})" for name, count in methods),
            )
        self.deadline = self._detector.deadline
        return self.deadline


def _name_of(fn: Callable[..., None], args: tuple[Any, ...]) -> str:
    """Return the name of the method that a piece of the pool's work runs. The work is a call or a
    batch of calls."""
    batched = getattr(fn, "__self__", None)
    return batched.name if isinstance(batched, Batched) else str(args[2].name)
