"""Calls of short methods, which the loop's thread runs between reading and replying, so that no other
thread need wake up for them.

Rules
    A call runs here if its method is short (admission_machine.py), it came in one message, and the
    pool has room for one thread more. The loop's thread then counts as one of the pool's threads,
    and runs the calls without the turn (`Loop.run_apart`): a call may wait for anything.
    After TURN_S the loop takes its next turn, and goes on with these calls in it. When a call takes
    too long, the loop gets another thread, and the pool runs the calls that have not begun. It also
    runs those whose method no longer counts as short.

Not here: what a call runs, and how its reply is sent (service.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from zmqdist import clock as time
from zmqdist.errors import FailedPreconditionError
from zmqdist.messages import Reply
from zmqdist.rpc.admission_machine import CREDIT_S
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.methods import Method
from zmqdist.transport.calls_machine import ServedCall
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer
from zmqdist.transport.transfers import Source

TURN_S: Final = 0.005
"""Seconds after which the loop reads its sockets again."""
WAITING_MAX: Final = 1024
"""Calls that wait for the loop's thread. In the pool, which has the others, clients take turns."""


class ShortCall(NamedTuple):
    """One call: the arguments of the pool's work, too."""

    served: ServedCall
    peer: Peer
    method: Method
    body: bytes
    frames: list[Any]


Outcome = tuple[Reply | None, Sequence[Source]]
Ran = tuple[ServedCall, Peer, Reply | None, Sequence[Source]]


class ShortCalls:
    """The short calls of one service.

    Args:
      run: runs a call. Any thread may call it, the others only the loop.
      finish: ends a call with its reply.
      begin: has the pool run a call.
    """

    def __init__(
        self,
        pool: HandlerPool,
        run: Callable[..., Outcome],
        finish: Callable[..., object],
        begin: Callable[..., object],
    ) -> None:
        self._pool = pool
        self._run, self._finish, self._begin = run, finish, begin
        self._lock = threading.Lock()
        self._waiting: deque[ShortCall] = deque()
        self._occupied = False
        # under the lock: the loop's thread runs calls as long as this is its own round
        self._round = 0
        self._current: ShortCall | None = None
        self._ran: list[Ran] = []

    def attach(self, loop: Loop) -> None:
        """Set the loop whose thread runs the calls."""
        self._loop = loop

    # -- in the loop -------------------------------------------------------------------------------

    def add(self, call: ShortCall, nbytes: int) -> bool:
        """Have the loop's thread run a call. Return False if the pool has to run it. `nbytes` is the
        size of its arguments if it counts: only the pool bounds the bytes that wait."""
        waiting = len(self._waiting)
        if waiting >= WAITING_MAX or (nbytes and waiting):
            return False
        if not call.method.short.holds(call.served.arrived):
            return False
        if not self._occupied:
            if not self._pool.occupy():
                return False
            self._occupied = True
            self._loop.run_apart(self._run_waiting, self._end, self._overdue)
        self._waiting.append(call)
        return True

    def take_waiting(self) -> list[ShortCall]:
        """Remove the calls that have not begun, and return them."""
        with self._lock:
            calls = list(self._waiting)
            self._waiting.clear()
            return calls

    def _end(self) -> None:
        self._finish_ran()
        if self._waiting and not self._waiting[0].method.short.holds(time.monotonic()):
            self._begin_all()
        if self._waiting:
            self._loop.run_apart(self._run_waiting, self._end, self._overdue)
        else:
            self._occupied = False
            self._pool.release()

    def _overdue(self) -> None:
        """Leave the call that runs to its thread, and the others to the pool."""
        with self._lock:
            self._round += 1
            current, self._current = self._current, None
            if current is not None:
                self._pool.note_overdue(self._run, current)
        self._finish_ran()
        self._occupied = False
        if current is not None:
            current.method.short.ran(CREDIT_S, time.monotonic())
        self._begin_all()
        if current is None:
            self._pool.release()

    def _finish_ran(self) -> None:
        ran, self._ran = self._ran, []
        for outcome in ran:
            try:
                self._finish(*outcome)
            except Exception:
                self._loop.fault("the reply of a short call")

    def _begin_all(self) -> None:
        for call in self.take_waiting():
            try:
                self._begin(*call)
            except Exception:
                self._loop.fault(f"the call of {call.method.name}")

    # -- in the loop's thread, without the turn ----------------------------------------------------

    def _run_waiting(self) -> None:
        """Run calls for about TURN_S."""
        lock, this_round = self._lock, self._round
        now = time.monotonic()
        until = now + TURN_S
        while now < until:
            with lock:
                if self._round != this_round or not self._waiting:
                    return
                if not self._waiting[0].method.short.holds(now):
                    return
                call = self._current = self._waiting.popleft()
            reply, sources = self._run(*call)
            ran = (call.served, call.peer, reply, sources)
            before, now = now, time.monotonic()
            with lock:
                is_overdue = self._round != this_round
                if not is_overdue:
                    self._current = None
                    self._ran.append(ran)
            if is_overdue:
                with contextlib.suppress(FailedPreconditionError):  # the loop has ended meanwhile
                    self._loop.call_soon(self._finish, *ran)
                self._pool.release(call)
                return
            call.method.short.ran(now - before, now)
