"""The relay: the dispatcher reads a payload for a process that cannot connect to the process that
holds the payload.

The dispatcher reads a payload in ranges, over the holder's own connection to the dispatcher, and
passes the bytes on unchanged. Each range is one request with one reply. If the holder disconnects
or does not reply in time, the RPC call for this range ends with an error.
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
"""Seconds without a reply from the holder after which the request for a range fails."""


class Relay:
    """The relay of one dispatcher, with the requests for ranges that wait for a holder's reply.

    `read` runs in threads of the RPC service, and each other method runs in the loop.

    Args:
      holder: returns the connection of the process that has the store with this number; None if no
        such process is connected.

    Attributes:
      pieces: the number of ranges that were requested so far.
    """

    def __init__(self, loop: Loop, router: Router, holder: Callable[[int], Hashable]) -> None:
        self._loop = loop
        self._router = router
        self._holder = holder
        self._numbers = itertools.count(1)
        self.pieces = 0
        self._pending: dict[int, tuple[Peer, Future[NDArray[np.uint8]]]] = {}
        router.on(ReadDone, self._handle_reply, frozenset({"submit", "worker"}))
        router.on_gone.append(self._note_disconnect)

    def read(self, store: int, bulk: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Serve the RPC method `RELAY` of fetch.py: return a range of a payload. Blocks a thread of
        the service until the holder replies.

        Raises:
          NotFoundError: the holder has freed the payload.
          UnavailableError: the holder is not connected to the dispatcher, disconnects, or does not
            reply.
        """
        reply: Future[NDArray[np.uint8]] = Future()
        number = next(self._numbers)
        self._loop.call_soon(
            self._forward, number, store, Read(number, bulk, offset, length), reply
        )
        try:
            return reply.result(REPLY_TIMEOUT_S)
        except FutureTimeoutError:
            self._loop.call_soon(self._pending.pop, number, None)
            raise errors.UnavailableError(
                f"the holder did not reply within {REPLY_TIMEOUT_S:g} s"
            ) from None

    # -- in the loop -------------------------------------------------------------------------------

    def _forward(
        self, number: int, store: int, read: Read, reply: Future[NDArray[np.uint8]]
    ) -> None:
        self.pieces += 1
        peer = self._holder(store)
        if not isinstance(peer, Peer) or not self._router.send(peer, read):
            reply.set_exception(
                errors.UnavailableError("its holder is not connected to the dispatcher")
            )
            return
        # The reply counts only from this connection, because the numbers are easy to guess.
        self._pending[number] = (peer, reply)

    def _handle_reply(self, peer: Peer, message: ReadDone, frames: list[memoryview]) -> None:
        holder, reply = self._pending.get(message.request, (None, None))
        if holder is not peer or reply is None:
            return  # the reply is late, or its sender is not the holder
        del self._pending[message.request]
        if message.code or len(frames) != 1:
            reply.set_exception(
                errors.from_code(
                    message.code or errors.INTERNAL,
                    message.message or "the reply of the holder has no bytes",
                )
            )
        else:
            reply.set_result(np.frombuffer(frames[0], np.uint8))

    def _note_disconnect(self, peer: Peer) -> None:
        for number, (holder, reply) in list(self._pending.items()):
            if holder is peer:
                del self._pending[number]
                reply.set_exception(
                    errors.UnavailableError("its holder has disconnected from the dispatcher")
                )
