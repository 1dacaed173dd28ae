"""Calls over a connection that a loop already owns. A worker calls its dispatcher in this way,
without opening a second connection.

All methods run in the loop. A call ends once, either with its reply or, when the connection ends,
with UNAVAILABLE. The arguments of a call must fit into the header of a message, so large arrays
cannot be sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from zmqdist.errors import OpError, UnavailableError, from_code
from zmqdist.messages import Call, Message, Replies, Reply
from zmqdist.rpc import payload
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.transport.dealer import DealerConnection

Then = Callable[[Any, OpError | None], None]
"""A function that is called with (value, None) or, if the call ended with an error, with (None,
error)."""


class LoopClient:
    """Calls to the server at the other end of a DealerConnection. The connection's owner reports
    its events and messages to this object."""

    def __init__(self, dealer: DealerConnection) -> None:
        self._dealer = dealer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._incarnation = 0

    @property
    def connected(self) -> bool:
        return self._dealer.up

    def up(self, incarnation: int) -> None:
        """Record that the connection is up, and which incarnation of the server it leads to."""
        self._incarnation = incarnation

    def down(self) -> None:
        """End all waiting calls with UNAVAILABLE, because the connection has ended."""
        waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            then(None, UnavailableError(f"the connection to {self._dealer.address} ended"))

    def call(self, method: str, args: tuple[Any, ...], then: Then) -> None:
        """Call a method of the server, without a deadline. The loop calls `then` with the
        outcome.
        """
        body, parts = payload.pack(args)
        assert not parts, "arguments that do not fit into a header need a ZmqClient"
        number = next(self._numbers)
        self._waiting[number] = then
        if not self._dealer.send(Call(number, method, self._incarnation, 0, body)):
            del self._waiting[number]
            then(None, UnavailableError(f"not connected to {self._dealer.address}"))

    def handle_message(self, message: Message) -> bool:
        """Process a message if it has replies, and return whether it has any."""
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
        except Exception as error:  # for example, there is no memory for the value
            then(None, error if isinstance(error, OpError) else from_code(*code_and_message(error)))
        else:
            then(value, None)
