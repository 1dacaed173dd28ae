"""The client's end of a stream: an iterator over what a generator of the server yields.

Theory of operation
    A stream is ordinary calls. `zmqdist.open` begins it and asks for the first items, `zmqdist.next` asks for more: one of them is
    on its way as long as the stream has not ended, since the next is sent when the answer to the last is taken. So the
    server makes items while this side works on earlier ones, and stops at a window (limits.py) when nobody asks.
    An answer has whatever is there: one item where they come slowly, hundreds where they come fast.

Not here: the generator (generators.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Final

from zmqdist import errors
from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError, OpError, from_code
from zmqdist.rpc import payload
from zmqdist.rpc.future import ended
from zmqdist.rpc.snapshots import snapshot
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.wire.items import decode_items

OPEN: Final = "zmqdist.open"
"""Begin a stream: (number, method, arguments). The number is the client's choice, and names it in what follows."""
NEXT: Final = "zmqdist.next"
"""Give me what there is: (number). Answered when there is something."""
CLOSE: Final = "zmqdist.close"
"""Nobody wants any more of it: (number)."""

_numbers = itertools.count(1)


class Stream:
    """The items of one call of a generator function: `for item in stream`, or `async for`. Of one thread at a time.

    It ends as the generator does: with its end, or with the error that it raised, after all items that it yielded before.
    UnavailableError: the server has gone; DeadlineExceededError: the time for the whole stream is up. Whoever does not take it to
    its end closes it, leaves a `with`, or drops it: then the generator is closed at the server, too.
    """

    def __init__(self, channel: Channel, method: str, arguments: Any, due: float) -> None:
        """Begins; waits for nothing. Raises InvalidArgumentError: something in the arguments cannot travel."""
        self._channel = channel
        self._method = method
        self._due = due
        self._number = next(_numbers)
        self._ready: deque[tuple[bytes, Sequence[Any]]] = deque()
        self._failure: OpError | None = None
        self._call: ClientCall | None = None
        body, parts = payload.pack((self._number, method, arguments))
        call = ClientCall(OPEN, body, snapshot(parts, lends=channel.lends, still=False) if parts else (), due)
        call.bounded = False
        channel.call(call)
        self._call = call

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        while not self._ready and self._call is not None:
            self._channel.wait(self._call)
            self._take()
        return self._first()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        while not self._ready and self._call is not None:
            try:
                await ended(self._channel, self._call)
            except BaseException:  # the task was cancelled, and with it what was asked
                self.close()
                raise
            self._take()
        try:
            return self._first()
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """End it here and at the server; what was not taken is lost. Idempotent."""
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

    # -- what came --------------------------------------------------------------------------------------------------------

    def _first(self) -> Any:
        if self._ready:
            body, parts = self._ready.popleft()
            return payload.unpack(body, parts, self._channel.address)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        raise StopIteration

    def _take(self) -> None:
        """The answer is here: keep its items, and ask for the next."""
        call = self._call
        assert call is not None
        self._call = None
        if call.code:
            self._failure = from_code(call.code, call.message.replace(repr(call.method), repr(self._method)))
            if call.code != errors.UNAVAILABLE:  # it may go on there, and wait for questions
                _close(self._channel, call, self._number)
            return
        try:
            items = decode_items(call.body, len(call.frames), self._channel.address)
        except OpError as error:
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
            self._channel.call(call)
        elif items.end[0]:
            self._failure = from_code(*items.end)


def _close(channel: Channel, call: ClientCall, number: int) -> None:
    close_call = _control_call(CLOSE, number, inf)
    try:
        channel.call(close_call)
        if close_call.code != errors.FAILED_PRECONDITION:  # else the channel was closed, and has ended the call
            channel.cancel(call)
    except FailedPreconditionError:  # in a forked child: the stream is the parent's
        pass


def _control_call(method: str, number: int, due: float) -> ClientCall:
    call = ClientCall(method, payload.pack((number,))[0], (), due)
    call.waits_for_server = False  # another one does not know this stream
    return call
