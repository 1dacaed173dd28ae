"""The outcome of a call for whose reply the caller has not waited."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from zmqdist import nest
from zmqdist.callbacks import NotAFuture, check_callback
from zmqdist.errors import InvalidArgumentError, OpError, from_code
from zmqdist.rpc import payload
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.specs import checked_signature, convert
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel


class StatusOrResult(NotAFuture):
    """The outcome of one call, which never changes. Any thread may call the methods, in any order
    and repeatedly.

    >>> result = client.scale(np.arange(3), 10)
    >>> result.is_ok(), result.get_value().tolist()
    (True, [0, 10, 20])

    Methods that wait do so until the call's own deadline. Without a deadline they wait until the
    server replies or the connection ends; if no server is connected, they wait for a server.
    Dropping the object does not cancel the call: the remote function still runs. `bool` of the
    object is True even if the call ends with an error.
    """

    __slots__ = ("__weakref__", "_call", "_channel", "_read", "_value")

    def __init__(
        self, channel: Channel, call: ClientCall, read: Callable[[ClientCall, str], Any]
    ) -> None:
        self._channel = channel
        self._call = call
        self._read = read
        self._value: tuple[Any] | None = None

    def is_ok(self) -> bool:
        """Wait for the end of the call. Return whether the call ended with a value.

        >>> client.scale(np.arange(3)).is_ok()
        True
        """
        self._channel.wait(self._call)
        return self._call.code == 0

    def get_error(self) -> tuple[int, str]:
        """Wait for the end of the call. Return its error as (code, message), or (0, "") if the call
        ended with a value.

        >>> client.scale(np.arange(3)).get_error()
        (0, '')
        """
        self._channel.wait(self._call)
        return self._call.code, self._call.message

    def get_value(self) -> Any:
        """Wait for the end of the call, and return its value, which is the same object each time.

        >>> client.scale(np.arange(3)).get_value()
        array([0, 2, 4])

        Raises:
          OpError: the call ended with an error; the code of the error decides the class.
          InvalidArgumentError: the value does not fit the `output_specs` of the call.
        """
        value = self._value
        if value is None:
            call = self._call
            if not call.ended:
                self._channel.wait(call)
            value = self._value = (outcome(call, self._channel.address, self._read),)
        return value[0]

    def done(self) -> bool:
        """Return whether the call has ended. Never waits.

        >>> result = client.scale(np.arange(3))
        >>> _ = result.get_value()
        >>> result.done()
        True
        """
        return self._channel.poll(self._call)

    def cancel(self) -> bool:
        """End the call with CANCELLED. Return False if the call had ended before.

        >>> result = client.scale(np.arange(3))
        >>> _ = result.get_value()
        >>> result.cancel()  # too late
        False

        If the server has not started the function when the cancellation arrives, the function does
        not run. A running function goes on, and can check `zmqdist.cancelled()`.
        """
        return self._channel.cancel(self._call)

    def add_done_callback(self, fn: Callable[[StatusOrResult], object]) -> None:
        """Have `fn(self)` called once when the call has ended, in a thread of the client. If the
        call has ended already, invoke `fn` at once in this thread.

        >>> import queue
        >>> values = queue.Queue()
        >>> result = client.scale(np.arange(3))
        >>> result.add_done_callback(lambda result: values.put(result.get_value()))
        >>> values.get(timeout=10)
        array([0, 2, 4])

        Callbacks of one client run one after the other. `fn` may wait for other calls, but must not
        wait for an event that another callback causes. If `fn` raises in the client's thread, the
        exception is logged. The client cannot be garbage-collected until `fn` has been called.

        Raises RuntimeError if the process cannot start a thread for callbacks.
        """
        check_callback(fn)
        if self._call.ended:
            fn(self)
        else:
            callbacks = self._channel.callbacks
            callbacks.start()
            self._channel.add_done_callback(self._call, lambda call: callbacks.put(fn, self))

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in any asyncio loop, and return the value as `get_value` does. If the waiting
        asyncio task is cancelled, the call is cancelled, too.
        """
        if self._value is None and not self._call.ended:
            yield from ended(self._channel, self._call).__await__()
        return self.get_value()

    def __repr__(self) -> str:
        call = self._call
        state = "pending" if not call.ended else "ok" if call.code == 0 else f"error {call.code}"
        return f"<StatusOrResult of {call.method!r} at {self._channel.address}: {state}>"


class InternalResult(StatusOrResult):
    """The outcome of a call of this package. Its callbacks do not wait, so the thread that reads
    the replies calls them."""

    __slots__ = ()

    def add_done_callback(self, fn: Callable[[StatusOrResult], object]) -> None:
        self._channel.add_done_callback(self._call, lambda call: fn(self))


def is_sent(result: StatusOrResult) -> bool:
    """Return whether the call of `result` has been sent, as `Channel.is_sent` does."""
    return result._channel.is_sent(result._call)


def outcome_of(result: StatusOrResult) -> tuple[Any, OpError | None]:
    """Return (value, None), or (None, error) if the call has failed or its value cannot be decoded
    here, for example for lack of memory.

    For callbacks: if a callback raised, a thread that waits for what it does would wait for ever.
    """
    try:
        return result.get_value(), None
    except Exception as error:
        known = error if isinstance(error, OpError) else from_code(*code_and_message(error))
        # The frames of a traceback would keep the caller's memory until the cyclic collector runs.
        return None, known.with_traceback(None)


def read_as(result: StatusOrResult, read: Callable[[ClientCall, str], Any]) -> StatusOrResult:
    """Return another StatusOrResult of the same call. Its value is what `read(call, address of the
    server)` returns."""
    return StatusOrResult(result._channel, result._call, read)


async def ended(channel: Channel, call: ClientCall) -> None:
    """Wait in an asyncio loop until the call has ended. If the waiting asyncio task is cancelled,
    cancel the call, too."""
    import asyncio  # imported here, so that programs without asyncio do not load it

    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def notify(_: ClientCall) -> None:
        try:
            loop.call_soon_threadsafe(resolve)
        except RuntimeError:  # the event loop has been closed, so no asyncio task waits any more
            pass

    channel.add_done_callback(call, notify)
    try:
        await future
    except asyncio.CancelledError:
        channel.cancel(call)
        raise


def outcome(call: ClientCall, address: str, read: Callable[[ClientCall, str], Any]) -> Any:
    """Return the value of a call that has ended, or raise its error."""
    if call.code:
        raise from_code(call.code, call.message)
    return read(call, address)


def as_returned(call: ClientCall, address: str) -> Any:
    """Return the value of a call in the structure that the remote function returned."""
    return payload.unpack(call.body, call.frames, address)


def as_leaves(call: ClientCall, address: str) -> list[Any] | None:
    """Return the flat list of the leaves of a call's value, or None if the remote function returned
    nothing."""
    value = as_returned(call, address)
    return None if value is None else nest.flatten(value)


def as_specified(specs: Any) -> Callable[[ClientCall, str], Any]:
    """Return a function that reads the leaves of a reply and returns them as arrays, in the
    structure of `specs`."""
    wanted = nest.flatten(checked_signature("output_specs", specs))

    def read(call: ClientCall, address: str) -> Any:
        leaves = as_leaves(call, address) or []
        if len(leaves) != len(wanted):
            raise InvalidArgumentError(
                f"{call.method} returned {len(leaves)} values, the output_specs have {len(wanted)}"
            )
        arrays = []
        for number, (leaf, spec) in enumerate(zip(leaves, wanted, strict=True)):
            try:
                arrays.append(convert(leaf, spec))
            except InvalidArgumentError as error:
                text = f"value {number} of {call.method} does not fit its output_specs: {error.message}"
                raise InvalidArgumentError(text) from None
        return nest.pack_sequence_as(specs, arrays)

    return read
