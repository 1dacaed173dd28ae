"""A line in the log when all handler threads wait for what never comes, as those of handlers do that call their own server.

Not here: when that is said (admission_machine.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from zmqdist.rpc.admission_machine import STALL_S, StallDetector
from zmqdist.rpc.batching import Batched
from zmqdist.rpc.handler_pool import Pool

log = logging.getLogger("zmqdist.rpc")


class BlockedHandlersLog:
    """Looks at one pool.

    Attributes:
      deadline: when to `look` again; None: when the pool is full again.
    """

    def __init__(self, pool: Pool) -> None:
        self.deadline: float | None = None
        self._pool = pool
        self._detector = StallDetector()

    def look(self, now: float, where: str) -> float | None:
        """Say so, if it is time to.

        Args:
          where: the server, for people.

        Returns:
          The deadline.
        """
        stuck, ended, running = self._pool.progress()
        if self._detector.look(stuck, ended, now):
            methods = Counter(_name_of(*work) for work in running).most_common(10)
            log.warning(
                "%s: all %d handler threads have been busy for %.0f s, none of their calls has ended, and further calls wait. "
                "Running: %s. Handlers that call their own server, straight or through others, wait for a thread that they keep "
                "busy themselves: call the function instead, register it with inline=True, or give the server more threads "
                "(threads_max). Handlers that are only slow need more threads, or fewer callers",
                where,
                len(running),
                STALL_S,
                ", ".join(f"{name} ({count})" for name, count in methods),
            )
        self.deadline = self._detector.deadline
        return self.deadline


def _name_of(fn: Callable[..., None], args: tuple[Any, ...]) -> str:
    """The method that work of a pool is for: a batch, or a call."""
    batched = getattr(fn, "__self__", None)
    return batched.name if isinstance(batched, Batched) else str(args[2].name)
