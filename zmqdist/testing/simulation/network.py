"""A network with ZeroMQ's own failures, and processes that can be killed and frozen.

What holds: order within a connection. What is lost: the tail of a connection, when an end dies or the link is cut. A send to a peer
that has just died succeeds. Each side notices the end of a connection at its own time, and a reconnect is a new connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
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
        self.was_frozen = False
        self._backlog: deque[Callable[[], object]] = deque()

    def post(self, fn: Callable[[], object]) -> None:
        """Something happens to this process."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(fn)
        else:
            fn()

    def freeze(self) -> None:
        self.frozen = self.was_frozen = True

    def thaw(self) -> None:
        self.frozen = False
        while self._backlog and self.alive and not self.frozen:
            self._backlog.popleft()()

    def kill(self) -> None:
        self.alive = False
        self._backlog.clear()


def through_headers(message: Message) -> tuple[Message, int]:
    """A message as its receiver decodes it: a copy of its own, as on a real wire; and its bytes there."""
    data = encode(message)
    return decode(data, "a peer"), len(data)


class SimConnection:
    """One connection of a client to a server, such as a dispatcher, which knows it as a Peer.

    Args:
      up: called with each message that reaches the server, and its payload frames.
      down: called with each that reaches the client.
      bytes_per_s: what the link carries in each direction.
      wire: what the way does to a message, and how many bytes that is.
    """

    def __init__(
        self,
        clock: SimClock,
        random: Random,
        name: str,
        up: Callable[..., object],
        down: Callable[..., object],
        bytes_per_s: float = inf,
        wire: Callable[[Any], tuple[Any, int]] = through_headers,
    ) -> None:
        self.name = name
        self.open = True
        self._clock = clock
        self._random = random
        self._deliver = (up, down)
        self._wire = wire
        self._last = [0.0, 0.0]
        self.bytes_per_s = bytes_per_s

    def __repr__(self) -> str:
        return f"<{self.name}{'' if self.open else ', ended'}>"

    def send_up(self, message: Any, *frames: bytes) -> None:
        """From the client to the server."""
        self._send(0, message, frames)

    def send_down(self, message: Any, *frames: bytes) -> None:
        """From the server to the client."""
        self._send(1, message, frames)

    def in_order(self, direction: int, nbytes: int, fn: Callable[[], object]) -> None:
        """Call `fn` when so many bytes, behind what was sent before, are at the server (0) or the client (1), unless they are lost."""
        at = max(self._clock.now + self._random.expovariate(2000.0), self._last[direction]) + nbytes / self.bytes_per_s
        self._last[direction] = at
        self._clock.at(at, lambda: fn() if self.open else None)

    def end(self) -> None:
        """What is on the way in either direction is lost."""
        self.open = False

    def _send(self, direction: int, message: Any, frames: tuple[bytes, ...]) -> None:
        copy, nbytes = self._wire(message)
        nbytes += sum(map(len, frames))
        self.in_order(direction, nbytes, lambda: self._arrive(direction, copy, frames))

    def _arrive(self, direction: int, message: Any, frames: tuple[bytes, ...]) -> None:
        up, down = self._deliver
        if direction == 0:
            up(self, message, *frames)
        else:
            down(message, *frames)
