"""A network with ZeroMQ's own failures, and processes that can be killed and frozen.

What holds: order within a connection. What is lost: the tail of a connection, when an end dies or the link is cut. A send to a peer
that has just died succeeds. Each side notices the end of a connection at its own time, and a reconnect is a new connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from zmqdist.messages import Message
from zmqdist.testing.simulation.clock import SimClock
from zmqdist.wire.headers import decode, encode


class SimProcess:
    """Something that runs, is frozen (SIGSTOP), or is dead. What reaches a frozen process waits for its thaw."""

    def __init__(self) -> None:
        self.alive = True
        self.frozen = False
        self._backlog: deque[Callable[[], object]] = deque()

    def post(self, fn: Callable[[], object]) -> None:
        """Something happens to this process."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(fn)
        else:
            fn()

    def thaw(self) -> None:
        self.frozen = False
        while self._backlog and self.alive and not self.frozen:
            self._backlog.popleft()()

    def kill(self) -> None:
        self.alive = False
        self._backlog.clear()


def through_headers(message: Message) -> Message:
    """A message as its receiver decodes it: a copy of its own, as on a real wire."""
    return decode(encode(message), "a peer")


class SimConnection:
    """One connection of a client to a server, such as a dispatcher, which knows it as a Peer.

    Args:
      up: called with each message that reaches the server.
      down: called with each that reaches the client.
      wire: what the way does to a message.
    """

    def __init__(
        self,
        clock: SimClock,
        random: Random,
        name: str,
        up: Callable[[SimConnection, Any], object],
        down: Callable[[Any], object],
        wire: Callable[[Any], Any] = through_headers,
    ) -> None:
        self.name = name
        self.open = True
        self._clock = clock
        self._random = random
        self._deliver = (up, down)
        self._wire = wire
        self._last = [0.0, 0.0]

    def __repr__(self) -> str:
        return f"<{self.name}{'' if self.open else ', ended'}>"

    def send_up(self, message: Any) -> None:
        """From the client to the server."""
        self._send(0, message)

    def send_down(self, message: Any) -> None:
        """From the server to the client."""
        self._send(1, message)

    def end(self) -> None:
        """What is on the way in either direction is lost."""
        self.open = False

    def _send(self, direction: int, message: Any) -> None:
        copy = self._wire(message)
        at = max(self._clock.now + self._random.expovariate(2000.0), self._last[direction])
        self._last[direction] = at
        self._clock.at(at, lambda: self._arrive(direction, copy))

    def _arrive(self, direction: int, message: Any) -> None:
        if not self.open:
            return
        up, down = self._deliver
        if direction == 0:
            up(self, message)
        else:
            down(message)
