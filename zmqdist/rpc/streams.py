"""The client's side of a stream: an iterator over the items that a generator at the server yields.

Theory of operation
    A stream consists of ordinary calls. `zmqdist.open` starts it and requests the first items;
    `zmqdist.next` requests more. Until the stream ends, one of these calls is always in flight,
    because the client sends the next call as soon as it takes the reply to the last call. So the
    server produces items while the client works on earlier items. When the client falls behind, the
    server pauses the generator as soon as a window (limits.py) is full.
    A reply has all items that are ready: a single item if the generator is slow, hundreds if it is
    fast.

Not here: the generator (generators.py).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Final

from zmqdist import errors
from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError, from_code
from zmqdist.rpc import payload
from zmqdist.rpc.future import ended
from zmqdist.rpc.snapshots import snapshot
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.wire.stream_items import decode_items

OPEN: Final = "zmqdist.open"
"""The method that starts a stream. Arguments: (number, method, arguments). The client chooses the
number, which identifies the stream in later calls.
"""
NEXT: Final = "zmqdist.next"
"""The method that requests items. Argument: (number). The server replies when at least one item is
ready."""
CLOSE: Final = "zmqdist.close"
"""The method that ends the stream at the server. Argument: (number)."""

_numbers = itertools.count(1)


class Stream:
    """The items of one call of a generator function, for `for item in stream` or `async for`. One
    thread at a time may use it.

    >>> stream = client.count(3)
    >>> [int(item) for item in stream]
    [0, 1, 2]

    Iteration ends as the generator does: normally or, after all items, with an OpError for the
    exception of the generator. Iteration raises UnavailableError if the connection has ended, and
    DeadlineExceededError if the deadline of the whole stream has passed. To stop early, call
    `close`, leave a `with` block, or drop the stream; each of these also closes the generator at
    the server.
    """

    def __init__(self, channel: Channel, method: str, arguments: Any, due: float) -> None:
        """Start the stream, without waiting for the server. Raises InvalidArgumentError if a value
        in the arguments cannot travel."""
        self._channel = channel
        self._method = method
        self._due = due
        self._number = next(_numbers)
        self._ready: deque[tuple[bytes, Sequence[Any]]] = deque()
        self._failure: Exception | None = None
        self._turn = threading.Lock()
        self._call: ClientCall | None = None
        body, parts = payload.pack((self._number, method, arguments))
        call = ClientCall(
            OPEN,
            body,
            snapshot(parts, lends=channel.shares_memory, still=False) if parts else (),
            due,
        )
        call.bounded = False
        channel.submit(call)
        self._call = call

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        self._enter_turn()
        try:
            while not self._ready and self._call is not None:
                self._channel.wait(self._call)
                self._take()
            return self._first()
        finally:
            self._turn.release()

    def _enter_turn(self) -> None:
        """Take the lock of the reading thread. Raises FailedPreconditionError after a fork, or
        while another thread or task reads the stream.
        """
        self._channel.check_process()
        if not self._turn.acquire(blocking=False):
            raise FailedPreconditionError(
                f"another thread or task reads this stream of {self._method!r}: only one may read "
                f"it at a time"
            )

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        self._enter_turn()
        try:
            while not self._ready and self._call is not None:
                try:
                    await ended(self._channel, self._call)
                except BaseException:
                    # the asyncio task was cancelled, and `ended` has cancelled the call in flight
                    self.close()
                    raise
                self._take()
            return self._first()
        except StopIteration:
            raise StopAsyncIteration from None
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the stream at this client and at the server. Items that the caller has not taken are
        lost. Idempotent.

        >>> stream = client.count(1_000_000)
        >>> int(next(stream))
        0
        >>> stream.close()
        """
        call, self._call = self._call, None
        self._ready.clear()
        self._failure = None
        if call is not None:
            _close(self._channel, call, self._number)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        call = self.__dict__.get("_call")
        if call is not None:
            in_background("zmqdist-stream-close", _close, self._channel, call, self._number)

    def __repr__(self) -> str:
        state = "ended" if self._call is None else "open"
        return f"<Stream of {self._method!r} at {self._channel.address}: {state}>"

    # -- received items ----------------------------------------------------------------------------

    def _first(self) -> Any:
        if self._ready:
            body, parts = self._ready.popleft()
            return payload.unpack(body, parts, self._channel.address)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        raise StopIteration

    def _take(self) -> None:
        """Take the items out of the last reply, and request the next items."""
        call = self._call
        assert call is not None
        self._call = None
        if call.code:
            self._failure = from_code(
                call.code, call.message.replace(repr(call.method), repr(self._method))
            )
            if (
                call.code != errors.UNAVAILABLE
            ):  # the connection has not ended, so the generator may still wait for calls
                _close(self._channel, call, self._number)
            return
        try:
            items = decode_items(call.body, len(call.frames), self._channel.address)
        except Exception as error:
            # whatever decoding raises must not look like the end of the stream
            self._failure = error
            _close(self._channel, call, self._number)
            return
        if items.parts:
            frames = iter(call.frames)
            parts: Any = [list(itertools.islice(frames, count)) for count in items.parts]
        else:
            parts = itertools.repeat(())
        self._ready.extend(zip(items.bodies, parts, strict=False))
        if items.end is None:
            self._call = call = _control_call(NEXT, self._number, self._due)
            self._channel.submit(call)
        elif items.end[0]:
            self._failure = from_code(*items.end)


def _close(channel: Channel, call: ClientCall, number: int) -> None:
    close_call = _control_call(CLOSE, number, inf)
    try:
        channel.submit(close_call)
        if close_call.code != errors.FAILED_PRECONDITION:
            # The channel is open, so `call` may be in flight. A closed channel has ended it
            # already.
            channel.cancel(call)
    except FailedPreconditionError:  # this is a forked child, and the stream belongs to the parent
        pass


def _control_call(method: str, number: int, due: float) -> ClientCall:
    call = ClientCall(method, payload.pack((number,))[0], (), due)
    # a call that waited for a server would reach another incarnation, which does not know this
    # stream
    call.waits_for_server = False
    return call
