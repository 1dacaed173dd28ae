"""The machine of an actor's process: which calls it runs next, of which caller; no I/O.

Promises
    C1  the calls of one caller begin in the order in which they arrived
    C2  each call that was given to run ends once; a call that was dropped before never begins
    C3  callers take turns: while calls of another caller wait, one caller gets at most TURN_CALLS
    C4  at most `running_max` calls have been given to run and have not ended
    C5  a caller has at most CALLS_MAX calls and CALL_BYTES_MAX bytes waiting; what exceeds this is
        refused
    C6  after `close` no call begins
    C7  a program has one connection: before a call of a new one begins, those of the one before are
        dropped, even if its end was not noticed yet
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from zmqdist.limits import ACTOR_CALL_BYTES_MAX, ACTOR_CALLS_MAX
from zmqdist.transitions import enter

TURN_CALLS: Final = 64
"""The calls that one caller gets in its turn."""


class CallState(enum.Enum):
    """The state of a call in the actor's process."""

    WAITING = enum.auto()
    """It waits for its turn."""
    GIVEN = enum.auto()
    """It was given to run, and may have begun."""
    DROPPED = enum.auto()
    """It was given to run, and its caller does not want the result any more."""
    ENDED = enum.auto()


TRANSITIONS: Final[Mapping[CallState, frozenset[CallState]]] = {
    CallState.WAITING: frozenset({CallState.GIVEN, CallState.ENDED}),
    CallState.GIVEN: frozenset({CallState.DROPPED, CallState.ENDED}),
    CallState.DROPPED: frozenset({CallState.ENDED}),
    CallState.ENDED: frozenset(),
}


class ActorCall:
    """One call. `caller` is the connection from which it came."""

    __slots__ = ("attempt", "caller", "method", "payload", "state", "work")

    def __init__(
        self, caller: Hashable, work: int, attempt: int, method: str, payload: bytes
    ) -> None:
        self.caller, self.work, self.attempt = caller, work, attempt
        self.method, self.payload = method, payload
        self.state = CallState.WAITING

    def move(self, state: CallState) -> None:
        self.state = enter(TRANSITIONS, self.state, state, "call", self.work)


class _Caller:
    __slots__ = ("calls", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.calls: dict[tuple[int, int], ActorCall] = {}
        self.waiting: deque[ActorCall] = deque()
        self.waiting_bytes = 0


class ActorCallQueue:
    """The calls that have not ended. The module's docstring has the rules."""

    def __init__(self, running_max: int) -> None:
        self.running_max = running_max
        self._callers: dict[Hashable, _Caller] = {}
        self._turns: deque[Hashable] = deque()
        """The callers with waiting calls, in order of their turns."""
        self._connections: dict[int, Hashable] = {}
        """The latest connection of each program."""
        self._closed = False
        self.running = 0

    def __len__(self) -> int:
        """Return the number of connections with calls that have not ended."""
        return len(self._callers)

    @property
    def unended(self) -> int:
        """The number of calls that wait or run."""
        return sum(len(record.calls) for record in self._callers.values())

    def former(self, caller: Hashable, program: int) -> Hashable | None:
        """Return the earlier connection of a program that has sent calls over this one, for
        `caller_gone` (C7)."""
        former = self._connections.get(program)
        self._connections[program] = caller
        return None if former is caller else former

    def add(
        self, caller: Hashable, calls: Iterable[tuple[int, int, str, bytes]]
    ) -> list[tuple[int, int]]:
        """Add calls of a caller. Return the (work, attempt) of those that are refused (C5)."""
        record = self._callers.setdefault(caller, _Caller())
        refused: list[tuple[int, int]] = []
        if not record.waiting:
            self._turns.append(caller)
        for work, attempt, method, payload in calls:
            is_full = (
                len(record.waiting) >= ACTOR_CALLS_MAX
                or record.waiting_bytes > ACTOR_CALL_BYTES_MAX
            )
            # a repeated number would let one result end two calls
            if is_full or (work, attempt) in record.calls:
                refused.append((work, attempt))
                continue
            call = ActorCall(caller, work, attempt, method, payload)
            record.calls[work, attempt] = call
            record.waiting.append(call)
            record.waiting_bytes += len(payload)
        if not record.waiting:
            self._turns.remove(caller)
        self._forget_idle(caller)
        return refused

    def next_calls(self) -> list[ActorCall]:
        """Return the calls to run now, in order, which are then given (C1, C3, C4)."""
        calls: list[ActorCall] = []
        while self._turns and self.running < self.running_max and not self._closed:
            caller = self._turns.popleft()
            record = self._callers[caller]
            for _ in range(min(TURN_CALLS, self.running_max - self.running)):
                if not record.waiting:
                    break
                call = record.waiting.popleft()
                record.waiting_bytes -= len(call.payload)
                call.move(CallState.GIVEN)
                self.running += 1
                calls.append(call)
            if record.waiting:
                self._turns.append(caller)
        return calls

    def cancel(self, caller: Hashable, keys: Iterable[tuple[int, int]]) -> list[ActorCall]:
        """Drop calls of a caller. Return those that were given and should end early."""
        record = self._callers.get(caller)
        given: list[ActorCall] = []
        for key in keys:
            call = None if record is None else record.calls.get(key)
            if record is None or call is None:
                continue
            if call.state is CallState.GIVEN:
                call.move(CallState.DROPPED)
                given.append(call)
            elif call.state is CallState.WAITING:
                call.move(CallState.ENDED)
                del record.calls[key]
                record.waiting.remove(call)
                record.waiting_bytes -= len(call.payload)
                if not record.waiting:
                    self._turns.remove(caller)
                self._forget_idle(caller)
        return given

    def caller_gone(self, caller: Hashable) -> list[ActorCall]:
        """Drop all calls of a caller, as `cancel` does."""
        connections = self._connections.items()
        self._connections = {n: other for n, other in connections if other is not caller}
        record = self._callers.get(caller)
        if record is None:
            return []
        if record.waiting:
            self._turns.remove(caller)
        for call in record.waiting:
            call.move(CallState.ENDED)
            del record.calls[call.work, call.attempt]
        record.waiting.clear()
        record.waiting_bytes = 0
        given = self.cancel(caller, list(record.calls))
        self._forget_idle(caller)
        return given

    def ended(self, call: ActorCall) -> bool:
        """Record that a given call has ended. Return whether its caller wants the result (C2)."""
        is_needed = call.state is CallState.GIVEN
        call.move(CallState.ENDED)
        self.running -= 1
        del self._callers[call.caller].calls[call.work, call.attempt]
        self._forget_idle(call.caller)
        return is_needed

    def close(self) -> None:
        """Give no more calls to run (C6)."""
        self._closed = True

    def _forget_idle(self, caller: Hashable) -> None:
        if caller in self._callers and not self._callers[caller].calls:
            del self._callers[caller]
