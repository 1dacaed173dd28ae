"""Calls over a connection that a loop owns already: questions of a worker to its dispatcher, without a second connection.

Everything here runs in the loop. A call ends once: with its answer, or with UNAVAILABLE when the connection does. Only what fits into a
header travels: no large arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from zmqdist.errors import OpError, UnavailableError, from_code
from zmqdist.messages import Call, Message, Replies, Reply
from zmqdist.rpc import payload
from zmqdist.transport.dealer import DealerConnection

Then = Callable[[Any, OpError | None], None]
"""Gets the value, or the error."""


class LoopCalls:
    """Calls to the server at the other end of a DealerConnection, which tells it what it hears."""

    def __init__(self, dealer: DealerConnection) -> None:
        self._dealer = dealer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._incarnation = 0

    @property
    def connected(self) -> bool:
        return self._dealer.up

    def up(self, incarnation: int) -> None:
        """The connection is there, to this life of the server."""
        self._incarnation = incarnation

    def down(self) -> None:
        """The connection has gone: so have the answers."""
        waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            then(None, UnavailableError(f"the connection to {self._dealer.address} ended"))

    def ask(self, method: str, args: tuple[Any, ...], then: Then) -> None:
        """Call a method of the server, with no deadline."""
        body, parts = payload.pack(args)
        assert not parts, "what is too large for a header needs a client of its own"
        number = next(self._numbers)
        self._waiting[number] = then
        if not self._dealer.send(Call(number, method, self._incarnation, 0, body)):
            del self._waiting[number]
            then(None, UnavailableError(f"not connected to {self._dealer.address}"))

    def heard(self, message: Message) -> bool:
        """Whether the message was an answer."""
        if isinstance(message, Reply):
            self._ended(message)
        elif isinstance(message, Replies):
            for reply in message.items:
                self._ended(reply)
        else:
            return False
        return True

    def _ended(self, reply: Reply) -> None:
        then = self._waiting.pop(reply.id, None)
        if then is None:
            return
        if reply.code:
            then(None, from_code(reply.code, reply.message))
            return
        try:
            value = payload.unpack(reply.body, [], self._dealer.address)
        except OpError as error:
            then(None, error)
        else:
            then(value, None)
