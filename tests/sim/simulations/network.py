"""A simulated network that fails as ZeroMQ does, and simulated processes that can be killed and
frozen.

Messages of a connection arrive in order. When a process of a connection dies or the link is cut,
the last messages are lost. A send to a peer that has just died succeeds. Each side notices the end
of a connection at a random time, and a reconnect makes a new connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

from tests.sim.simulations.clock import SimClock
from zmqdist.messages import Message
from zmqdist.wire.headers import decode, encode


class SimProcess:
    """A process that runs, is frozen (SIGSTOP), or is dead. Events that reach a frozen process wait
    until it thaws."""

    def __init__(self) -> None:
        self.alive = True
        self.frozen = False
        self.was_frozen = False
        self._backlog: deque[Callable[[], object]] = deque()

    def post(self, fn: Callable[[], object]) -> None:
        """Call `fn`, which is an event in this process. If the process is frozen, call `fn` after
        the thaw. If the process is dead, do nothing."""
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
    """Encode and decode a message, as a real network does. Return the copy that the receiver gets,
    and its number of bytes."""
    data = encode(message)
    return decode(data, "a peer"), len(data)


class SimConnection:
    """One connection of a client to a server. The server's machine knows the client by this object,
    as its peer.

    Args:
      up: `up(connection, message, *frames)` is called with each message that reaches the server,
        and the payload frames of the message.
      down: `down(message, *frames)` is called with each message that reaches the client.
      bytes_per_s: the bandwidth of the link in each direction.
      wire: a function that returns the copy of a message that its receiver gets, and its number of
        bytes.
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
        """Send a message from the client to the server."""
        self._send(0, message, frames)

    def send_down(self, message: Any, *frames: bytes) -> None:
        """Send a message from the server to the client."""
        self._send(1, message, frames)

    def in_order(self, direction: int, nbytes: int, fn: Callable[[], object]) -> None:
        """Send `nbytes` bytes, and call `fn` when they have arrived, after all earlier messages in
        this direction. If the connection ends before that, `fn` is not called. Direction 0 is to
        the server, direction 1 to the client.
        """
        at = (
            max(self._clock.now + self._random.expovariate(2000.0), self._last[direction])
            + nbytes / self.bytes_per_s
        )
        self._last[direction] = at
        self._clock.at(at, lambda: fn() if self.open else None)

    def end(self) -> None:
        """End the connection. Messages in flight are lost, in both directions."""
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
