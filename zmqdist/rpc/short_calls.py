"""Calls of short methods, which the loop's thread runs between reading and replying, so that no other
thread need wake up for them.

Rules
    A call runs here if its method is short (admission_machine.py), it came in one message, and no
    call waits for a thread of the pool. The loop's thread then counts as one of the pool's threads,
    and runs the calls without the turn (`Loop.run_apart`): a call may wait for anything.
    The loop reads no further message before these calls have ended. So they need no record in the
    table of calls, like inline ones, until one takes too long. Then the loop gets another thread,
    which makes a record for that call and has the pool run those that have not begun.

Not here: what a call runs, and how its reply is sent (service.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.errors import FailedPreconditionError
from zmqdist.messages import Call, Reply
from zmqdist.rpc.admission_machine import CREDIT_S
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.methods import Method
from zmqdist.transport.calls_machine import ServedCall
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer
from zmqdist.transport.transfers import Source

TURN_S: Final = 0.002
"""Seconds after which the loop sends the replies of the calls that have ended."""


class ShortCall:
    """One call.

    Attributes:
      arrived, due: when it arrived, and when the caller stops waiting.
      reply, sources: the reply; None without one.
      served: its record, once it has taken too long.
    """

    __slots__ = (
        "arrived", "call", "due", "frames", "is_overdue", "method", "peer", "reply", "served", "sources"
    )  # fmt: skip

    def __init__(
        self, peer: Peer, method: Method, call: Call, frames: list[Any], arrived: float
    ) -> None:
        self.peer, self.method, self.call, self.frames = peer, method, call, frames
        self.arrived = arrived
        self.due = arrived + call.left_ms / 1000 if call.left_ms else inf
        self.reply: Reply | None = None
        self.sources: Sequence[Source] = ()
        self.served: ServedCall | None = None
        self.is_overdue = False

    def is_unwanted(self) -> bool:
        """Return whether the caller no longer waits for the reply."""
        served, now = self.served, time.monotonic()
        return now >= self.due if served is None else not served.is_wanted(now)


class ShortCalls:
    """The short calls of one service. Only the loop uses it.

    Args:
      run: runs a call and sets its reply. Any thread may call it, the others only the loop.
      finish: sends the reply of a call.
      record: makes the record of a call, `served`.
      begin: has the pool run a call.
    """

    def __init__(
        self,
        pool: HandlerPool,
        run: Callable[[ShortCall], object],
        finish: Callable[[ShortCall], object],
        record: Callable[[ShortCall], object],
        begin: Callable[[ShortCall], object],
    ) -> None:
        self._pool = pool
        self._run, self._finish, self._record, self._begin = run, finish, record, begin
        self._lock = threading.Lock()
        self._waiting: deque[ShortCall] = deque()
        self._ended: deque[ShortCall] = deque()
        self._current: ShortCall | None = None
        self._occupied = False

    def attach(self, loop: Loop) -> None:
        """Set the loop whose thread runs the calls."""
        self._loop = loop

    def add(self, call: ShortCall) -> bool:
        """Have the loop's thread run a call in this turn. Return False if the pool has to run it."""
        if not call.method.short.holds(call.arrived):
            return False
        if not self._occupied:
            if not self._pool.occupy():
                return False
            self._occupied = True
            self._loop.run_apart(self._run_waiting, self._end, self._overdue)
        self._waiting.append(call)
        return True

    def _run_waiting(self) -> None:
        """Run calls for TURN_S, in the loop's thread but without the turn."""
        waiting, lock = self._waiting, self._lock
        now = time.monotonic()
        until = now + TURN_S
        while now < until:
            with lock:
                if not waiting:
                    return
                call = self._current = waiting.popleft()
            self._run(call)
            before, now = now, time.monotonic()
            with lock:
                self._ended.append(call)
                if not call.is_overdue:
                    self._current = None
            if call.is_overdue:
                self._pool.release(call)
                with contextlib.suppress(FailedPreconditionError):  # the loop has ended
                    self._loop.call_soon(self._finish_ended)
                return
            call.method.short.ran(now - before, now)

    def _end(self) -> None:
        self._finish_ended()
        if self._waiting:
            self._loop.run_apart(self._run_waiting, self._end, self._overdue)
        else:
            self._occupied = False
            self._pool.release()

    def _overdue(self) -> None:
        """Leave the call that runs to its thread, and the others to the pool."""
        with self._lock:
            current, calls = self._current, tuple(self._waiting)
            self._waiting.clear()
            self._current = None
            if current is not None:
                current.is_overdue = True
        self._occupied = False
        if current is None:
            self._pool.release()
        else:
            current.method.short.ran(CREDIT_S, time.monotonic())
            self._record(current)
            self._pool.note_overdue(current)
        self._finish_ended()
        for call in calls:
            self._begin(call)

    def _finish_ended(self) -> None:
        ended = self._ended
        while ended:
            self._finish(ended.popleft())
