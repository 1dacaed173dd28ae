"""The client of an RPC server.

Rules
    `client.m(...)` and `call` never wait for the reply; `client.m_blocking(...)` does. Any number
    of threads may share a client. A call that is made while no server is connected waits for a
    server until the call's deadline, and is sent when a server is connected. A call that was in
    flight when the connection ended fails with UNAVAILABLE and is never sent again, because it may
    have run. An error that the client itself can recognise (arguments of the wrong structure, a
    value that cannot travel) is raised when the call is made. Every other error is the outcome of
    the call.

The functions that a client has as attributes, for the methods of its server.

These functions refer to the channel and not to the client, so that no reference cycle keeps a
dropped client alive.

The client's side of a stream: an iterator over the items that a generator at the server yields.

Theory of operation
    A stream consists of ordinary calls. `zmqdist.open` starts it and requests the first items;
    `zmqdist.next` requests more. Until the stream ends, one of these calls is always in flight,
    because the client sends the next call as soon as it takes the reply to the last call. So the
    server produces items while the client works on earlier items. When the client falls behind, the
    server pauses the generator as soon as a window (limits.py) is full.
    A reply has all items that are ready: a single item if the generator is slow, hundreds if it is
    fast.

The outcome of a call for whose reply the caller has not waited.

Not here: threads and the socket (transport/channel.py), the generator (service.py).
"""

from __future__ import annotations

import inspect
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, overload

import numpy as np

from zmqdist import nest
from zmqdist.background import in_background
from zmqdist.callbacks import NotAFuture, check_callback
from zmqdist.clock import monotonic, seconds
from zmqdist.errors import (
    FAILED_PRECONDITION,
    UNAVAILABLE,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    UnimplementedError,
    from_code,
)
from zmqdist.field_types import checked, checks_options, did_you_mean, safe_repr
from zmqdist.limits import CONNECT_S, HEARTBEAT_IVL_S, NAME_CHARS_MAX
from zmqdist.rpc import payload
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.rpc.methods import (
    CLOSE,
    METHODS,
    NEXT,
    OPEN,
    MethodInfo,
    Parameters,
    decode_methods,
    is_flat,
)
from zmqdist.rpc.payload import OutputArray, snapshot
from zmqdist.specs import checked_signature, convert
from zmqdist.transport.calls_machine import NEVER_S, ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.transport.connection_snapshots import ClientSnapshot
from zmqdist.transport.endpoint import strip_scheme
from zmqdist.transport.security import ClientSecurity, client_security
from zmqdist.type_variables import T_co
from zmqdist.wire.headers import decode_items
from zmqdist.wire.hello import our_hello

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
S = TypeVar("S", bound="Interface")


class StatusOrResult(NotAFuture, Generic[T_co]):
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
        self._value: tuple[T_co] | None = None

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

    def get_value(self) -> T_co:
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

    def add_done_callback(self, fn: Callable[[StatusOrResult[T_co]], object]) -> None:
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

    def __await__(self) -> Generator[Any, None, T_co]:
        """Wait in any asyncio loop, and return the value as `get_value` does. If the waiting
        asyncio task is cancelled, the call is cancelled, too.
        """
        if self._value is None and not self._call.ended:
            yield from call_end(self._channel, self._call).__await__()
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


def cancel_unsent(result: StatusOrResult) -> bool:
    """Cancel the call of `result`, unless it has ended or was sent. Return whether it did so."""
    return result._channel.cancel(result._call, only_unsent=True)


def outcome_of(result: StatusOrResult) -> tuple[Any, OpError | None]:
    """Return (value, None), or (None, error) if the call has failed or its value cannot be decoded
    here, for example for lack of memory.

    For callbacks: if a callback raised, a thread that waits for what it does would wait for ever.
    """
    try:
        return result.get_value(), None
    except Exception as error:
        op_error = error if isinstance(error, OpError) else from_code(*code_and_message(error))
        # The frames of a traceback would keep the caller's memory until the cyclic collector runs.
        return None, op_error.with_traceback(None)


def read_as(result: StatusOrResult, read: Callable[[ClientCall, str], Any]) -> StatusOrResult:
    """Return another StatusOrResult of the same call. Its value is what `read(call, address of the
    server)` returns."""
    return StatusOrResult(result._channel, result._call, read)


async def call_end(channel: Channel, call: ClientCall) -> None:
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


def receive_into(call: ClientCall, out: Any) -> Callable[[ClientCall, str], Any]:
    """Have the reply to a call received into the array `out`, and return the function that reads
    the value. Raises InvalidArgumentError if `out` cannot receive an array."""
    output = OutputArray(out)
    call.allocate = output.room
    return output.read


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
    leaf_specs = nest.flatten(checked_signature("output_specs", specs))

    def read(call: ClientCall, address: str) -> Any:
        leaves = as_leaves(call, address) or []
        if len(leaves) != len(leaf_specs):
            raise InvalidArgumentError(
                f"{call.method} returned {len(leaves)} values, the output_specs have {len(leaf_specs)}"
            )
        arrays = []
        for number, (leaf, spec) in enumerate(zip(leaves, leaf_specs, strict=True)):
            try:
                arrays.append(convert(leaf, spec))
            except InvalidArgumentError as error:
                text = f"value {number} of {call.method} does not fit its output_specs: {error.message}"
                raise InvalidArgumentError(text) from None
        return nest.pack_sequence_as(specs, arrays)

    return read


_numbers = itertools.count(1)


class Stream(Generic[T_co]):
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

    def __iter__(self) -> Stream[T_co]:
        return self

    def __next__(self) -> T_co:
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

    def __aiter__(self) -> Stream[T_co]:
        return self

    async def __anext__(self) -> T_co:
        self._enter_turn()
        try:
            while not self._ready and self._call is not None:
                try:
                    await call_end(self._channel, self._call)
                except BaseException:
                    # the asyncio task was cancelled, and `call_end` has cancelled the call in flight
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

    def __enter__(self) -> Stream[T_co]:
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

    def _first(self) -> T_co:
        if self._ready:
            body, parts = self._ready.popleft()
            item: T_co = payload.unpack(body, parts, self._channel.address)
            return item
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
                call.code != UNAVAILABLE
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
        if close_call.code != FAILED_PRECONDITION:
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


def due_after(timeout_in_ms: float, default_in_ms: float) -> float:
    """Return the deadline of a call that begins now, on the clock of `time.monotonic`. `inf` means
    no deadline.

    Args:
      timeout_in_ms: milliseconds, which may be a NumPy number. 0 or less means `default_in_ms`.
      default_in_ms: milliseconds. 0 or less means no deadline.

    Raises:
      TypeError, ValueError: `timeout_in_ms` is not a number.
    """
    try:
        if type(timeout_in_ms) in (bool, np.bool_):
            raise TypeError
        if timeout_in_ms <= 0:
            timeout_in_ms = default_in_ms
        if timeout_in_ms > 0:
            # Without `float`, a time-out that is a float32 would make a sum that is too coarse for
            # a clock.
            due = monotonic() + float(timeout_in_ms) / 1000
            return due if due < NEVER_S else inf
    except (TypeError, ValueError):  # `float` raises ValueError for an array
        text = f"timeout_in_ms is a number of milliseconds, 0 for the default, not {type(timeout_in_ms).__name__}"
        raise TypeError(text) from None
    except OverflowError:  # the int is too large for a float
        return inf
    if timeout_in_ms != timeout_in_ms:
        raise ValueError("timeout_in_ms is a number of milliseconds, 0 for the default, not NaN")
    return inf


def check_name(name: str) -> None:
    """Raise TypeError or InvalidArgumentError if `name` cannot be the name of a method."""
    if not isinstance(name, str):
        raise TypeError(f"method_name: a method's name is a str, not {type(name).__name__}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                f"{name!r} is no method's name: it is no text in UTF-8"
            ) from None


def packed_arguments(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the arguments of a call in the form in which they travel (methods.py)."""
    return {**named, "": args} if named else args


def _check(info: MethodInfo) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Return a function that raises TypeError or ValueError for arguments with wrong names or, if
    there is a signature, another structure. A stub calls it before it sends the call.
    """
    parameters, specs = Parameters(info.signature), info.input_signature

    def check(args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if specs is None:
            parameters.check_names(len(args), named)
        else:
            parameters.fit(specs, args, named, lambda value, spec: None)

    return check


def _count(info: MethodInfo) -> int | None:
    """Return how many positional arguments a call must have to be sent without a check, if it has
    no arguments by name. `None` means any number. -1 means that every call needs a check.
    """
    specs = info.input_signature
    return None if specs is None else len(specs) if is_flat(specs) else -1


def stubs(
    channel: Channel, info: MethodInfo, default_in_ms: float
) -> tuple[Callable[..., Any], ...]:
    """Return the function `client.m` of a method and, unless the method is a stream, also
    `client.m_blocking`."""
    functions = (
        (_stream(channel, info, default_in_ms),)
        if info.streaming
        else _calls(channel, info, default_in_ms)
    )
    for function, name in zip(functions, (info.name, f"{info.name}_blocking"), strict=False):
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"RPC Call for {info.name} method to server {channel.address}"
    return functions


def _calls(
    channel: Channel, info: MethodInfo, default_in_ms: float
) -> tuple[Callable[..., Any], ...]:
    name, check, count = info.name, _check(info), _count(info)

    def prepare(
        args: tuple[Any, ...], named: dict[str, Any], timeout_in_ms: int, out: Any, still: bool
    ) -> tuple[ClientCall, Callable[[ClientCall, str], Any]]:
        due = due_after(timeout_in_ms, default_in_ms)
        if named or (count is not None and len(args) != count):
            check(args, named)
        body, parts = payload.pack(packed_arguments(args, named) if named else args)
        sources = snapshot(parts, lends=channel.shares_memory, still=still) if parts else ()
        call = ClientCall(name, body, sources, due)
        return call, as_returned if out is None else receive_into(call, out)

    def start(*args: Any, timeout_in_ms: int = 0, out: Any = None, **named: Any) -> StatusOrResult:
        call, read = prepare(args, named, timeout_in_ms, out, False)
        channel.submit(call)
        return StatusOrResult(channel, call, read)

    def wait(*args: Any, timeout_in_ms: int = 0, out: Any = None, **named: Any) -> Any:
        call, read = prepare(args, named, timeout_in_ms, out, True)
        try:
            channel.call_and_wait(call)
        except BaseException:
            # Ctrl-C, or a signal handler that raises, has ended the wait. The caller may now change
            # the arrays, so they must not be sent.
            channel.cancel(call)
            raise
        return outcome(call, channel.address, read)

    return start, wait


def _stream(channel: Channel, info: MethodInfo, default_in_ms: float) -> Callable[..., Stream]:
    name, check = info.name, _check(info)

    def begin(*args: Any, timeout_in_ms: int = 0, **named: Any) -> Stream:
        check(args, named)
        return Stream(
            channel, name, packed_arguments(args, named), due_after(timeout_in_ms, default_in_ms)
        )

    return begin


LAYER: Final = "zmq"


def check_layer(rpc_layer: str, kind: str, address: str) -> None:
    """Raise ValueError unless `rpc_layer` is "zmq". `kind` is "Server" or "Client"."""
    if rpc_layer != LAYER:
        raise ValueError(
            f'Only the "{LAYER}" backend is supported at the moment, given '
            f"rpc_layer={rpc_layer!r}: write "
            f'{kind}.create("{LAYER}", {address!r})'
        )


def new_incarnation() -> int:
    """Return a random number from 1 to 2**63 - 1 for one incarnation of a client or server."""
    return int.from_bytes(os.urandom(8), "big") >> 1 or 1


class RpcClient:
    """A client of one server; `Client.create` makes it.

    >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    >>> server.register("scale", lambda array, by: array * by)
    >>> server.start()
    >>> client = zd.rpc.Client.create("zmq", server.address)
    >>> client.scale_blocking(np.arange(3), 10)
    array([ 0, 10, 20])
    >>> client.close()
    >>> server.stop()

    Close it with `close` or a with-statement. Closing ends unanswered calls with CANCELLED. A
    client that the program drops is closed when the results of its calls were dropped, too.

    The client has attributes for each method that the server had when the client was made, or at
    the last `refresh`. `m(*args, **kwargs)` returns a StatusOrResult; `m_blocking(*args, **kwargs)`
    waits and returns the value, or raises the error. If the method is a generator function,
    `m(*args, **kwargs)` returns a Stream. The keywords `timeout_in_ms` and `out` (as in `call`) are
    the client's own, so a parameter of the method with such a name must be given by position.
    Arguments that cannot be right (an unknown keyword, a structure other than that of the
    signature) raise TypeError or ValueError before the call is sent. If the name of a method is not
    an identifier, or is an attribute of this class, use `call`, or `stream` for a generator
    function.

    Attributes:
      address: "host:port" of the server.
      name: the name of this client in logs; it need not be unique.
    """

    address: str
    name: str

    @staticmethod
    def create(
        rpc_layer: str,
        address: str,
        name: str = "",
        timeout_in_ms: int = 0,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
    ) -> ZmqClient:
        """Connect to a server and fetch its list of methods. This blocks until the server replies.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.register("double", lambda x: 2 * x)
        >>> server.start()
        >>> client = zd.rpc.Client.create("zmq", server.address)
        >>> sorted(client.methods())
        ['double']
        >>> client.close()
        >>> server.stop()

        Args:
          rpc_layer: "zmq".
          address: "host:port" or "zmq://host:port".
          name: the name of this client in logs; it need not be unique.
          timeout_in_ms: default deadline in milliseconds of each call, and of `create` itself. 0 or
            less means no deadline; `create` then waits without limit, and logs for which server it
            waits.
          keys_dir, token_file: the folder of the keys, or the file of the token. By default the
            folder is ZMQDIST_KEYS_DIR. Without keys, the client shows the user's token, which works
            on loopback only.

        Returns:
          A ZmqClient. The caller owns the client and closes it.

        Raises:
          ValueError: `rpc_layer` is not "zmq".
          TypeError, ValueError: `timeout_in_ms` is not a number.
          InvalidArgumentError: `address` is not a valid address.
          DeadlineExceededError: no server replied within `timeout_in_ms`.
          UnavailableError: the connection ended twice before the server had replied.
          UnauthenticatedError: the server refused the key or token, or failed to prove its own
            identity.
          FailedPreconditionError: the server speaks another version of the protocol, or uses
            another kind of security; or the address needs keys that are missing, or the secrets
            cannot be read.
        """
        check_layer(rpc_layer, "Client", address)
        return ZmqClient(
            address, name, True, timeout_in_ms, keys_dir=keys_dir, token_file=token_file
        )

    def call(
        self,
        method_name: str,
        args: Any = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
        *,
        out: Any = None,
    ) -> StatusOrResult:
        """Call a method by its name (`ZmqClient.call`).

        >>> client.call("scale", [np.arange(3), 10]).get_value()
        [array([ 0, 10, 20])]
        """
        raise NotImplementedError("call this method on the client that Client.create returns")

    def snapshot(self) -> ClientSnapshot:
        """Return the client's current figures (`ZmqClient.snapshot`).

        >>> client.snapshot().calls >= 0
        True
        """
        raise NotImplementedError("call this method on the client that Client.create returns")


class Interface(Protocol):
    """The base of a Protocol that types a client, for `connect(interface=)`.

    >>> from typing import Any, Protocol
    >>> class Scaling(zd.rpc.Interface, Protocol):
    ...     def scale_blocking(self, array: Any, by: int = 2) -> Any: ...
    >>> with zd.rpc.connect(client.address, interface=Scaling) as scaling:
    ...     print(scaling.scale_blocking(np.arange(3)))
    [0 2 4]
    """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


@overload
def connect(
    address: str,
    *,
    timeout: float | None = CONNECT_S,
    name: str = "",
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> ZmqClient: ...


@overload
def connect(
    address: str,
    *,
    interface: Callable[..., S],
    timeout: float | None = CONNECT_S,
    name: str = "",
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> S: ...


@overload
def connect(
    address: str,
    *,
    interface: Callable[..., T],
    timeout: float | None = CONNECT_S,
    name: str = "",
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> AbstractContextManager[T, None]: ...


@checks_options("connect()")
def connect(
    address: str,
    *,
    interface: Any = None,
    timeout: float | None = CONNECT_S,
    name: str = "",
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Any:
    """Connect to an RPC server, and return a client with the server's methods.

        >>> import zmqdist as zd
        >>> with zd.rpc.serve(methods=[len]) as server, zd.rpc.connect(server.address) as client:
        ...     pending = client.len("four")  # does not wait
        ...     print(client.len_blocking("three"), pending.get_value())
        5 4

    Args:
      address: "host:port" or "zmq://host:port".
      interface: a class, usually a Protocol, with the methods that the client shall have, named and
        typed as the client has them: `m_blocking` returns the value, `m` a StatusOrResult or a
        Stream. Type checkers see the client as an instance of this class, or as a with-statement
        that gives one if its class is not an Interface (docs/types.md).
      timeout: seconds to wait for the server; None waits without a limit. Calls have no time limit
        unless they set `timeout_in_ms`.
      name, keys_dir, token_file: as for `Client.create`.

    Raises the errors of `Client.create`: DeadlineExceededError if no server replies in time. With
    an `interface`, TypeError if it is no class, and UnimplementedError if the server does not have
    all its methods.
    """
    only = None if interface is None else _methods_of(interface)
    client = ZmqClient(address, name, keys_dir=keys_dir, token_file=token_file)
    try:
        client._only = only
        client.refresh(timeout)
        if only is not None and (missing := sorted(only - client._offered)):
            raise UnimplementedError(
                f"the server at {client.address} has no method {missing[0]:.200}, which "
                f"{interface.__name__} has: {did_you_mean(missing[0], client.methods())}"
            )
    except BaseException:
        client.close()
        raise
    return client


def _methods_of(interface: Any) -> set[str]:
    """Return the names that a class declares, as methods or as annotated attributes, and that are
    none of a client's own."""
    if not isinstance(interface, type):
        raise TypeError(f"interface is {interface!r:.200}, wants a class, such as a Protocol")
    declared = (
        {*vars(cls), *inspect.get_annotations(cls)}
        for cls in interface.__mro__
        if cls not in (object, Generic, Protocol, Interface)
    )
    return {
        name
        for name in set().union(*declared)
        if not name.startswith("_") and not hasattr(ZmqClient, name)
    }


class ZmqClient(RpcClient):
    """The concrete class that `Client.create` returns.

    >>> client.scale(np.arange(3), 10).get_value()
    array([ 0, 10, 20])

    A program may also make a ZmqClient directly. Without `list_registered_methods`, the constructor
    does not wait for the server.
    """

    _heartbeat_s: float = HEARTBEAT_IVL_S
    _only: set[str] | None = None
    """The names of the interface that `connect` was given: the client offers no other method."""

    @checked
    def __init__(
        self,
        address: str,
        name: str = "",
        list_registered_methods: bool = False,
        timeout_in_ms: float = 0,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        """Connect. The arguments are those of `Client.create`. With `list_registered_methods`, wait
        for the server, and raise the errors of `Client.create`.

        `security` overrides `keys_dir` and `token_file`; use it to connect in another role than
        "client".
        """
        due_after(timeout_in_ms, 0)
        self.address = strip_scheme(address)
        name = str(name)  # not one of NumPy, which the wire format refuses
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise InvalidArgumentError(
                f"name wants at most {NAME_CHARS_MAX} printable characters: {name[:40]!a}"
            )
        self.name = name
        self._timeout_in_ms = timeout_in_ms
        if security is None:
            security = client_security(
                self.address, "client", keys_dir=_path(keys_dir), token_file=_path(token_file)
            )
        hello = our_hello(
            "client", new_incarnation(), name or f"{socket.gethostname()}:{os.getpid()}"
        )
        self._channel = Channel(self.address, security, hello, self._heartbeat_s)
        self._offered: set[str] = set()
        if list_registered_methods:
            try:
                self.refresh()
            except BaseException:
                self.close()
                raise

    def __getattr__(self, name: str) -> Any:  # the methods of the server are set by `refresh`
        why = "" if self._only is None else f": its interface has {', '.join(sorted(self._only))}"
        text = f"{type(self).__name__!r} object has no attribute {name!r}{why}"
        raise AttributeError(text, name=name, obj=self)

    def call(
        self,
        method_name: str,
        args: Any = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
        *,
        out: Any = None,
    ) -> StatusOrResult:
        """Call a method by its name, without waiting for the reply.

        >>> client.call("scale", [np.arange(3), 10]).get_value()
        [array([ 0, 10, 20])]

        Args:
          method_name: the name under which the method is registered, dots included.
          args: None, one value, or any structure of values. Only the leaves are sent, from left to
            right.
          output_specs: a structure of TensorSpec, into which the returned leaves are packed, as
            arrays. Without it, the value is the flat list of the leaves that the function returned,
            or None if the function returned nothing.
          timeout_in_ms: deadline of this call in milliseconds. 0 or less means the client's
            default.
          out: a writable, contiguous array that receives the reply, which must be one array of the
            same shape and dtype. The value of the call is then `out` itself. A large reply from
            another host is received directly into `out`; any other reply is copied into it once. Do
            not touch `out` until the call has ended. If the reply does not fit
            (InvalidArgumentError), `out` is unchanged; after any other error its content is
            undefined.

        Returns:
          A StatusOrResult for the outcome of the call.

        Raises:
          InvalidArgumentError: a value in `args`, or the name, cannot travel; `out` cannot receive
            an array; or both `out` and `output_specs` were given.
          TypeError, ValueError: `method_name` is not a str, or `timeout_in_ms` not a number.
          FailedPreconditionError: the client was made before a fork.
        """
        check_name(method_name)
        if out is not None and output_specs is not None:
            raise InvalidArgumentError(
                "out and output_specs both decide the form of the value: give only one of them"
            )
        read = as_leaves if output_specs is None else as_specified(output_specs)
        body, parts = payload.pack([] if args is None else payload.leaves(args))
        sources = snapshot(parts, lends=self._channel.shares_memory, still=False) if parts else ()
        due = due_after(timeout_in_ms, self._timeout_in_ms)
        call = ClientCall(method_name, body, sources, due)
        if out is not None:
            read = receive_into(call, out)
        self._channel.submit(call)
        return StatusOrResult(self._channel, call, read)

    def stream(self, method_name: str, *args: Any, timeout_in_ms: int = 0) -> Stream:
        """Call a generator function by its name, without waiting. The client's list of methods need
        not contain the name.

        >>> [int(item) for item in client.stream("count", 3)]
        [0, 1, 2]

        Args:
          timeout_in_ms: deadline of the whole stream in milliseconds. 0 or less means the client's
            default.

        Raises:
          InvalidArgumentError: a value in `args`, or the name, cannot travel.
          TypeError, ValueError: `method_name` is not a str, or `timeout_in_ms` not a number.
          FailedPreconditionError: the client was made before a fork.
        """
        check_name(method_name)
        return Stream(
            self._channel, method_name, args, due_after(timeout_in_ms, self._timeout_in_ms)
        )

    def methods(self, timeout: float | None = None) -> dict[str, MethodInfo]:
        """Fetch the methods that the server has now, by name. Blocks for at most `timeout` seconds;
        None means the client's deadline.

        >>> sorted(client.methods())
        ['count', 'scale']

        If the connection ends meanwhile, this method requests the list once more, because a
        restarted server may listen at the address.

        Raises:
          OpError: the error with which the call for the list ended.
        """
        limit_s = seconds(timeout)
        due = due_after(0 if limit_s is None else max(1000 * limit_s, 1), self._timeout_in_ms)
        try:
            return self._methods(due)
        except UnavailableError:
            return self._methods(due)

    def _methods(self, due: float) -> dict[str, MethodInfo]:
        body, _ = payload.pack([])
        call = ClientCall(METHODS, body, (), due)
        self._channel.call_and_wait(call)
        return decode_methods(outcome(call, self.address, as_returned), self.address)

    def refresh(self, timeout: float | None = None) -> None:
        """Fetch the list of the server's methods again, and update this client's attributes to
        match. This blocks as `methods` does, and raises the errors of `methods`.

        >>> client.refresh()
        """
        methods = self.methods(timeout)
        offered: dict[str, Callable[..., Any]] = {}
        for name, info in methods.items():
            if not name.isidentifier():
                continue
            functions = self.stubs(info)
            for attribute, function in zip((name, f"{name}_blocking"), functions, strict=False):
                reserved = hasattr(self, attribute) and attribute not in self._offered
                hidden = self._only is not None and attribute not in self._only
                if not (reserved or hidden) and (attribute == name or attribute not in methods):
                    offered[attribute] = function
        before, self._offered = self._offered, set(offered)
        # An attribute that remains is overwritten, not deleted and set again, because other threads
        # may use it at any moment.
        for attribute, function in offered.items():
            setattr(self, attribute, function)
        for attribute in before - offered.keys():
            delattr(self, attribute)

    def stubs(self, info: MethodInfo) -> tuple[Callable[..., Any], ...]:
        """Return the functions that call a method: `m` and, unless it is a stream, `m_blocking`.
        `info` is from the result of `methods`. The method's name need not be an identifier.

        >>> _, blocking = client.stubs(client.methods()["scale"])
        >>> blocking(np.arange(3), 10)
        array([ 0, 10, 20])
        """
        return stubs(self._channel, info, self._timeout_in_ms)

    def snapshot(self) -> ClientSnapshot:
        """Return the client's current figures: calls, waiting threads, large arrays in flight,
        messages.

        >>> client.snapshot().calls >= 0
        True

        This is cheap, and any thread may call it.

        Raises:
          FailedPreconditionError: the client was made before a fork.
        """
        return self._channel.snapshot()

    def close(self) -> None:
        """Close the connection. Unanswered calls end with CANCELLED, and later calls with
        FAILED_PRECONDITION. Idempotent.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.start()
        >>> zd.rpc.Client.create("zmq", server.address).close()
        >>> server.stop()
        """
        self._channel.close()

    def __enter__(self) -> ZmqClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @safe_repr
    def __repr__(self) -> str:
        return f"{self.name + ' ' if self.name else ''}of {self.address}{', closed' if self._channel.closed else ''}"


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def channel_of(client: ZmqClient) -> Channel:
    """Return the channel of a client. It is not a public attribute, because a client's attributes
    are for the methods of its server."""
    return client._channel
