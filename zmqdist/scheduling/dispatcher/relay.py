"""Pieces of payloads, read by the dispatcher for whoever cannot reach their holder, over the holder's own connection.

The bytes are passed on as they came. Each piece is one question with one answer: what its holder does not answer in time, or
with its connection, is an error for whoever asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np
from numpy.typing import NDArray

from zmqdist import errors
from zmqdist.messages import Read, ReadDone
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router

REPLY_TIMEOUT_S = 15.0
"""A holder that does not answer for so long is taken for gone."""


class Relay:
    """See the module's docstring.

    Args:
      holder: the connection of whoever has a store, by its number.

    Attributes:
      pieces: that were asked for.
    """

    def __init__(self, loop: Loop, router: Router, holder: Callable[[int], Hashable]) -> None:
        self._loop = loop
        self._router = router
        self._holder = holder
        self._numbers = itertools.count(1)
        self.pieces = 0
        self._pending: dict[int, tuple[Peer, Future[NDArray[np.uint8]]]] = {}
        router.on(ReadDone, self._handle_reply, frozenset({"submit", "worker"}))
        router.on_gone.append(self._peer_gone)

    def read(self, store: int, bulk: int, offset: int, length: int) -> NDArray[np.uint8]:
        """In a thread of the service: see `RELAY` in fetch.py.

        Raises:
          NotFoundError: the holder has freed it.
          UnavailableError: the holder is not connected here, or went, or does not answer.
        """
        reply: Future[NDArray[np.uint8]] = Future()
        number = next(self._numbers)
        self._loop.call_soon(self._forward, number, store, Read(number, bulk, offset, length), reply)
        try:
            return reply.result(REPLY_TIMEOUT_S)
        except FutureTimeoutError:
            self._loop.call_soon(self._pending.pop, number, None)
            raise errors.UnavailableError(f"the holder did not answer within {REPLY_TIMEOUT_S:g} s") from None

    # -- in the loop ----------------------------------------------------------------------------------------------

    def _forward(self, number: int, store: int, read: Read, reply: Future[NDArray[np.uint8]]) -> None:
        self.pieces += 1
        peer = self._holder(store)
        if not isinstance(peer, Peer) or not self._router.send(peer, read):
            reply.set_exception(errors.UnavailableError("its holder is not connected to the dispatcher"))
            return
        self._pending[number] = (peer, reply)

    def _handle_reply(self, peer: Peer, done: ReadDone, frames: list[memoryview]) -> None:
        holder, reply = self._pending.get(done.request, (None, None))
        if holder is not peer or reply is None:
            return  # late, or of somebody who was not asked
        del self._pending[done.request]
        if done.code or len(frames) != 1:
            reply.set_exception(errors.from_code(done.code or errors.INTERNAL, done.message or "no bytes came"))
        else:
            reply.set_result(np.frombuffer(frames[0], np.uint8))

    def _peer_gone(self, peer: Peer) -> None:
        for number, (holder, reply) in list(self._pending.items()):
            if holder is peer:
                del self._pending[number]
                reply.set_exception(errors.UnavailableError("its holder has gone"))
