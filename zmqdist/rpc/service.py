"""The server's side of calls: a service runs the registered methods when the peers of a router call
them.

Rules
    A handler that was registered inline runs in the loop. It must take microseconds only, because
    every peer waits meanwhile. Any other handler runs in a thread of the pool. Calls may run in any
    order, even the calls of one client.
    An exception of a handler becomes the error of its call and has no other effect. An OpError
    keeps its code and its text; the class of any other exception decides the code, and the text has
    class and traceback.
    Values travel by the safe codec, and no code here unpickles anything.
    A handler can check `zmqdist.cancelled()`, which is true when the caller has cancelled the call
    or disconnected, or when the deadline has passed. Inline handlers are too short to need this
    check.
    Clients take turns with their calls that wait for a thread, and the bytes of the arguments of
    these calls are bounded (admission_machine.py). A call of an inline method, or of a method that
    replies later, begins at once. If a client holds arguments back, the service requests these
    arguments as soon as there is room for them.
    The reply to a call that arrived alone leaves at once. Other replies without payload frames are
    collected during one turn of the loop, and leave as one message to each peer.

A PendingCall is a call whose method replies later, without occupying a thread meanwhile.

The service warns when all handler threads are blocked, for instance because each handler calls its
own server and waits for a free thread.

The server's side of streams: the generators, each in a thread of its own, and the calls that
fetch their items.

Rules
    One thread runs a generator from its first line to its last, including `finally`.
    Each item is packed as soon as the generator yields it, so that the generator may change the
    item afterwards. Packed items wait for the client's next call. Meanwhile the generator
    continues, until STREAM_ITEMS_AHEAD items or STREAM_BYTES_AHEAD bytes wait. The server replies
    to a call for items as soon as one item is packed. The reply has all packed items, up to the
    bounds of one message. The server closes a generator at its next yield when the client closes
    the stream or disconnects, when the deadline passes, or when the server stops.
    A generator that rarely yields can check `zmqdist.cancelled()`.
    A client has at most STREAMS_OF_PEER_MAX streams; a closed stream counts until its generator has
    ended.

Methods whose concurrent calls run as one: their arguments are joined along axis 0, and the
result is split again.

Rules
    Every argument is an array, or a structure of arrays, and all arrays of a call have the same
    number of rows (their axis 0). Calls are joined leaf by leaf if their structures, dtypes and row
    shapes are equal; other calls form another batch. The function runs once for each batch, and one
    batch of a method runs at a time. The function must return arrays, in any structure, with as
    many rows as it received. If it returns anything else, every call of the batch ends with
    UNKNOWN. An exception of the function becomes the error of every call of the batch.
    A call whose caller no longer waits is left out of the batch.

Not here: which functions may be registered and how arguments are checked (methods.py), when a call
is accepted, dropped or replied to (transport/calls_machine.py), sockets (transport), when the
warning is due (admission_machine.py), the client's side, and the calls that both sides use
(client.py), which calls are joined, and when (batching_machine.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from zmqdist import clock as time
from zmqdist import errors, nest
from zmqdist.conditions import Condition
from zmqdist.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnknownError,
    WireError,
)
from zmqdist.limits import (
    BATCH_BYTES_MAX,
    BATCH_ITEMS_MAX,
    CHUNK_BYTES,
    FRAMES_MAX,
    HANDLER_THREADS_MAX,
    STREAM_BYTES_AHEAD,
    STREAM_ITEMS_AHEAD,
    STREAMS_MAX,
    STREAMS_OF_PEER_MAX,
)
from zmqdist.messages import (
    Call,
    Calls,
    CancelCall,
    Goodbye,
    Replies,
    Reply,
    SendParts,
    ServerFacts,
)
from zmqdist.platforms import register_at_fork
from zmqdist.rpc.admission_machine import STALL_S, StallDetector
from zmqdist.rpc.batching_machine import Batches
from zmqdist.rpc.figures import most_called
from zmqdist.rpc.handler_errors import code_and_message, failed, no_room, stopping
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.methods import (
    CLOSE,
    ECHO,
    METHODS,
    NEXT,
    OPEN,
    SERVER_INFO,
    Method,
    describe_server,
    echo,
    method_for,
)
from zmqdist.rpc.payload import pack_result
from zmqdist.rpc.short_calls import ShortCall, ShortCalls
from zmqdist.task_context import enter, leave
from zmqdist.tensors import as_array
from zmqdist.transport.calls_machine import ServedCall, ServerCalls, counted_bytes
from zmqdist.transport.connection_snapshots import ServerSnapshot
from zmqdist.transport.keys import NOT_OBSERVABLE, OBSERVER, ROLES
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router
from zmqdist.transport.transfers import Source, allocate_fresh, announced_bytes
from zmqdist.wire.headers import Items, encode_items

log = logging.getLogger("zmqdist.rpc")


class _WaitingCall:
    """One call that waits for its batch, with its arguments as (tuple, dict) and their number of
    rows."""

    __slots__ = ("arguments", "call", "rows")

    def __init__(self, call: PendingCall, arguments: Any, rows: int) -> None:
        self.call = call
        self.arguments = arguments
        self.rows = rows


def check_options(method: Method, rows_max: Any, delay_ms: Any) -> None:
    """Raise ValueError if the calls of `method` cannot be batched with these bounds."""
    if method.inline or method.streaming:
        raise ValueError(
            f"{method.name}: neither an inline method nor a generator function can be batched"
        )
    is_number = isinstance(delay_ms, (int, float, np.integer, np.floating))
    if not (type(rows_max) is int and rows_max > 0 and is_number and 0 <= delay_ms < inf):
        raise ValueError(
            f"{method.name}: max_batch is an int of 1 or more, and max_delay_ms 0 or more "
            f"milliseconds, not "
            f"{rows_max!r} and {delay_ms!r}"
        )


class Batched:
    """The calls of one batched method. The loop calls `called` and `close`."""

    def __init__(self, service: RpcService, method: Method, rows_max: int, delay_s: float) -> None:
        self.name = method.name
        self._service = service
        self._method = method
        self._fn: Callable[..., Any] = method.fn
        self._batches: Batches[_WaitingCall] = Batches(rows_max, delay_s)
        self._running = False
        self._one_at_a_time = threading.Lock()

    def called(self, call: PendingCall, *args: Any, **named: Any) -> None:
        """Queue a call of this method for a batch. Raises InvalidArgumentError if the call's
        arguments are not arrays with the same number of rows.
        """
        arguments = (args, named)
        if named or not all(type(arg) is np.ndarray for arg in args):
            arguments = nest.map_structure(as_array, arguments)  # tensors are joined as arrays
        rows: set[int] = set()
        kind = _kind(arguments, rows)
        if len(rows) != 1:
            row_counts = (
                f"with {' and '.join(map(str, sorted(rows)))} rows" if rows else "none at all"
            )
            raise InvalidArgumentError(
                f"{self._method.name}: wanted arrays of the same number of rows, given {row_counts}"
            )
        waiting = _WaitingCall(call, arguments, rows.pop())
        batch = self._batches.arrived(waiting, kind, waiting.rows, time.monotonic())
        call.on_dropped(partial(self._batches.dropped, waiting, batch))
        self._run_next()

    def __len__(self) -> int:
        """Return the number of calls whose batch still collects calls, or waits until another batch
        has run. The loop calls this."""
        return len(self._batches)

    def close(self) -> None:
        """Run all waiting calls without further delay, because the server stops."""
        for batch in self._batches.drain():
            for waiting in batch:
                waiting.call.note_begin()
            self._service.submit(self._run, batch, refuse=partial(_refuse, batch))

    def _run_next(self) -> None:
        while not self._running:
            batch = self._batches.ready(time.monotonic())
            if not batch:
                deadline = self._batches.deadline
                self._service.set_timer(self, None if deadline == inf else deadline, self._run_next)
                return
            needed_calls = [waiting for waiting in batch if waiting.call.wanted()]
            for waiting in batch:
                waiting.call.note_begin()
                if not waiting.call.wanted():
                    waiting.call.fail(
                        DeadlineExceededError(
                            "the deadline passed before the batch of this call ran"
                        )
                    )
            if needed_calls:
                self._running = True
                self._service.submit(self._run, needed_calls, refuse=partial(_refuse, needed_calls))

    def _ran(self) -> None:
        self._running = False
        self._run_next()

    # -- in a thread of the pool -------------------------------------------------------------------

    def _run(self, batch: list[_WaitingCall]) -> None:
        enter(lambda: not any(waiting.call.wanted() for waiting in batch))
        try:
            with self._one_at_a_time:
                args, named = _joined([waiting.arguments for waiting in batch])
                result = self._method.result(self._fn(*args, **named))
            parts = self._parts(result, [waiting.rows for waiting in batch])
            for waiting, part in zip(batch, parts, strict=True):
                waiting.call.reply(part)
        except BaseException as error:
            for waiting in batch:
                waiting.call.fail(error)
        finally:
            leave()
            self._service.soon(self._ran)

    def _parts(self, result: Any, rows: list[int]) -> Iterator[Any]:
        """Yield the part of the joined result that belongs to each call, as views."""
        total = sum(rows)
        leaves = list(map(as_array, nest.flatten(result)))
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (total,):
                shown = (
                    f"an array of shape {leaf.shape}"
                    if isinstance(leaf, np.ndarray)
                    else f"a {type(leaf).__name__}"
                )
                raise UnknownError(
                    f"{self._method.name} was given a batch of {total} rows, and returned "
                    f"{shown}, which does not have as many rows",
                )
        ends = np.cumsum(rows).tolist()
        return (
            nest.pack_sequence_as(result, [leaf[end - count : end] for leaf in leaves])
            for end, count in zip(ends, rows, strict=True)
        )


def _refuse(batch: Sequence[_WaitingCall], error: OpError) -> None:
    for waiting in batch:
        waiting.call.fail(error)


def _joined(calls: list[Any]) -> Any:
    if len(calls) == 1:
        return calls[0]
    columns = zip(*map(nest.flatten, calls), strict=True)
    return nest.pack_sequence_as(calls[0], [np.concatenate(column) for column in columns])


def _kind(value: Any, rows: set[int]) -> Hashable:
    """Return a key of a call's arguments. Two calls can be joined if and only if their keys are
    equal. Add the row counts of all arrays to `rows`.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        rows.add(len(value))
        return value.dtype, value.shape[1:]
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (str(type(key)), key))
        return dict, *((key, _kind(value[key], rows)) for key in keys)
    if isinstance(value, (list, tuple)):
        return (
            isinstance(value, list),
            getattr(value, "_fields", None),
            *(_kind(item, rows) for item in value),
        )
    shown = (
        "an array without rows" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    )
    raise InvalidArgumentError(
        f"calls of this method are joined along axis 0: wanted arrays, given {shown}"
    )


class Generators:
    """All streams of one service. The loop calls every method."""

    def __init__(self, service: RpcService) -> None:
        self._service = service
        self._by_peer: dict[Peer, dict[int, _Stream]] = {}
        self._running: set[_Stream] = set()
        service.register_later(OPEN, self._open)
        service.register_later(NEXT, self._next)
        service.register_later(CLOSE, self._close)

    def __len__(self) -> int:
        """Return the number of streams that are open at a client, or whose generators still run."""
        return len(self._running.union(*(streams.values() for streams in self._by_peer.values())))

    def in_flight(self) -> Counter[str]:
        """Return the number of running generators of each method. Any thread may call this."""
        return Counter(stream._method.name for stream in list(self._running))

    def drop_peer(self, peer: Peer) -> None:
        """Close the streams of a client that has disconnected."""
        for stream in self._by_peer.pop(peer, {}).values():
            stream.close(errors.UNAVAILABLE, "its client has gone")

    def stop(self) -> list[threading.Thread]:
        """Close all streams, because the server stops; their unanswered calls end with UNAVAILABLE.
        Return the threads whose generators still run.
        """
        for stream in self._running:
            stream.close(errors.UNAVAILABLE, "the server has stopped")
        return [stream.thread for stream in self._running]

    def forget(self, stream: _Stream) -> None:
        """Record that the generator of a stream, and its thread, have ended."""
        self._running.discard(stream)
        stream.count()
        self._forget_if_over(stream)

    def _open(self, call: PendingCall, number: Any, name: Any, arguments: Any) -> None:
        if type(number) is not int or type(name) is not str:
            raise InvalidArgumentError(
                "the number of a stream must be an int, and the name of its method a str"
            )
        method = self._service.allowed(call.peer, name)
        if not method.streaming:
            raise InvalidArgumentError(f"{name} is not a generator function: call it")
        args, named = method.checked(arguments, call.peer.name)
        streams = self._by_peer.get(call.peer, {})
        if number in streams:
            raise InvalidArgumentError(f"stream number {number} is in use")
        # Each stream has a thread, so one client must not take all of them.
        if len(streams) >= STREAMS_OF_PEER_MAX:
            raise ResourceExhaustedError(
                f"{STREAMS_OF_PEER_MAX} streams of this client are open: close some"
            )
        if len(self._running) >= STREAMS_MAX:
            raise ResourceExhaustedError(
                f"{STREAMS_MAX} streams run at this server: wait until some have ended"
            )
        stream = _Stream(self, self._service, number, method, call)
        stream.start(args, named)
        self._by_peer.setdefault(call.peer, {})[number] = stream
        self._running.add(stream)

    def _next(self, call: PendingCall, number: Any) -> None:
        stream = self._find(call.peer, number)
        # Another incarnation of the server does not know the streams of the one before.
        if stream is None:
            raise UnavailableError(
                "the server does not know this stream: the stream was closed, or its connection "
                "has ended"
            )
        stream.request_items(call)
        self._forget_if_over(stream)

    def _close(self, call: PendingCall, number: Any) -> None:
        stream = self._find(call.peer, number)
        if stream is not None:
            stream.close(errors.CANCELLED, "the stream was closed by its caller")
            self._forget_if_over(stream)
        call.reply(None)

    def _find(self, peer: Peer, number: Any) -> _Stream | None:
        stream = self._by_peer.get(peer, {}).get(number) if type(number) is int else None
        return None if stream is None or stream.over else stream

    def _forget_if_over(self, stream: _Stream) -> None:
        """Forget a stream when its client can fetch no more items and its generator has ended."""
        if stream in self._running or not stream.over:
            return
        streams = self._by_peer.get(stream.peer, {})
        if streams.get(stream.number) is stream:
            del streams[stream.number]
            if not streams:
                del self._by_peer[stream.peer]


class _Stream:
    """One stream and its generator. `_condition` guards the state that the generator's thread and
    the loop share.

    Attributes:
      over: whether the stream was closed, or its last items have been sent.
    """

    def __init__(
        self,
        owner: Generators,
        service: RpcService,
        number: int,
        method: Method,
        call: PendingCall,
    ) -> None:
        self.peer = call.peer
        self.number = number
        self.over = False
        self._owner = owner
        self._service = service
        self._method = method
        self._due = call.due
        self._began = time.monotonic()
        self._condition = Condition()
        self._pending: PendingCall | None = call
        self._bodies: list[bytes] = []
        self._sources: list[Any] = []
        self._bytes = 0
        self._end: tuple[int, str] | None = None

    def count(self) -> None:
        """Count this stream, which has ended, as a call of its method. A caller may close it."""
        code = 0 if self._end is None or self._end[0] == errors.CANCELLED else self._end[0]
        self._method.figures.add(time.monotonic() - self._began, code)

    def start(self, args: Any, named: dict[str, Any]) -> None:
        self.thread = threading.Thread(
            target=self._run,
            args=(args, named),
            name=f"zmqdist-stream-{self._method.name}",
            daemon=True,
        )
        self.thread.start()

    # -- in the loop -------------------------------------------------------------------------------

    def request_items(self, call: PendingCall) -> None:
        """Reply to `call`, which requests items of this stream, as soon as an item is packed.
        Raises InvalidArgumentError if the previous call has no reply yet.
        """
        with self._condition:
            if self._pending is not None and self._pending.wanted():
                raise InvalidArgumentError("the last call for items of this stream is unanswered")
            self._pending = call
            self._reply()

    def close(self, code: int, message: str) -> None:
        """Close the stream: drop its packed items, and reply to an unanswered call for items with
        this error."""
        with self._condition:
            self._bodies, self._sources, self._bytes = [], [], 0
            self._end = (code, message)
            self._reply()
            self.over = True
            # The generator may wait for room, and must see now that it is over.
            self._condition.notify()

    # -- in the generator's thread -----------------------------------------------------------------

    def _run(self, args: Any, named: dict[str, Any]) -> None:
        enter(lambda: self.over or time.monotonic() >= self._due)
        try:
            end = self._run_generator(args, named)
        except BaseException as error:
            if self.over:
                log.warning(
                    "a generator of %s raised when it was closed: %s",
                    self._method.name,
                    code_and_message(error)[1],
                )
            end = code_and_message(error)
        leave()
        with self._condition:
            # The stream may have been closed meanwhile, with another reason.
            if self._end is None:
                self._end = end
                self._reply()
        self._service.soon(self._owner.forget, self)

    def _run_generator(self, args: Any, named: dict[str, Any]) -> tuple[int, str]:
        """Run the generator until it ends or the stream is closed. Return (code, message) of the
        generator's end."""
        generator = self._method.fn(*args, **named)
        args = named = None  # type: ignore[assignment]  # the generator alone refers to its arguments now, and may free them
        try:
            while self._wait_for_room():
                try:
                    box = [next(generator)]
                except StopIteration:
                    return errors.OK, ""
                box[0] = self._method.result(box[0])
                bulk = self.peer.bulk
                body, sources = pack_result(box, lends=bulk is not None and bulk.shares_memory)
                del box
                self._put(body, sources)
        finally:
            generator.close()
        return errors.DEADLINE_EXCEEDED, f"deadline passed while {self._method.name!r} streamed"

    def _wait_for_room(self) -> bool:
        """Wait until the generator may produce another item. Return False if the stream was closed
        or its deadline has passed."""
        with self._condition:
            while not self.over and (left_s := self._due - time.monotonic()) > 0:
                if len(self._bodies) < STREAM_ITEMS_AHEAD and self._bytes < STREAM_BYTES_AHEAD:
                    return True
                self._condition.wait(min(left_s, threading.TIMEOUT_MAX))
            return False

    def _put(self, body: bytes, sources: Any) -> None:
        with self._condition:
            if self.over:
                return
            self._bodies.append(body)
            self._sources.append(sources)
            self._bytes += len(body) + sum(map(_nbytes, sources))
            if self._pending is not None:
                self._reply()

    # -- with `_condition` held --------------------------------------------------------------------

    def _reply(self) -> None:
        """Reply to the unanswered call for items, if there is such a call and if items are packed
        or the stream has ended."""
        call = self._pending
        if call is None or not (self._bodies or self._end is not None) or self.over:
            return
        self._pending = None
        count = self._fitting_count()
        bodies, self._bodies = self._bodies[:count], self._bodies[count:]
        sources, self._sources = self._sources[:count], self._sources[count:]
        self._bytes = sum(map(len, self._bodies)) + sum(
            _nbytes(part) for parts in self._sources for part in parts
        )
        # The last reply with items has the end, so that the client sends no further call.
        end = None if self._bodies else self._end
        self.over = end is not None
        parts = [len(item_sources) for item_sources in sources] if any(sources) else []
        call.reply_packed(
            encode_items(Items(bodies, parts, end)),
            [part for item_sources in sources for part in item_sources],
        )
        self._condition.notify()

    def _fitting_count(self) -> int:
        """Return how many of the packed items to send in one message. At least one item is sent,
        even if it is larger than a message should be.
        """
        byte_count = parts = 0
        for count, (body, sources) in enumerate(zip(self._bodies, self._sources, strict=True)):
            byte_count += len(body)
            parts += len(sources)
            if count and (byte_count > CHUNK_BYTES or parts >= FRAMES_MAX):
                return count
        return len(self._bodies)


def _nbytes(source: Any) -> int:
    return len(source) if isinstance(source, bytes) else int(source.nbytes)


UNREAD_S: Final = 0.5
"""Seconds for which a stopping server waits while no client reads any bytes of its replies."""

SWEEP_S: Final = 0.1
"""Seconds between two searches of one client's queue for expired calls. A search is not cheap,
because the queue may have 65,536 calls."""

NAME_WANTED: Final = "wanted identifiers joined by dots (zmqdist.* is reserved)"


def _name_of(fn: Callable[..., object], args: tuple[Any, ...]) -> str:
    """Return the name of the method that a piece of the pool's work runs. The work is a call or a
    batch of calls."""
    batched = getattr(fn, "__self__", None)
    return batched.name if isinstance(batched, Batched) else str(args[2].name)


class PendingCall:
    """A call that waits for its method's reply. Any thread may reply, and only the first reply is
    sent.

    Attributes:
      peer: the caller's connection; `peer.role` is the caller's role, `peer.hello.incarnation` the
        caller's incarnation.
      due: when the caller stops waiting, on the clock of `time.monotonic`. `inf` means that the
        call has no deadline.
    """

    __slots__ = ("_served", "_service", "due", "peer")

    def __init__(self, service: RpcService, served: ServedCall, peer: Peer) -> None:
        self._service = service
        self._served = served
        self.peer = peer
        self.due = served.due
        served.on_dropped = partial(service.drop, served)

    def wanted(self) -> bool:
        """Return whether the caller still waits for the reply."""
        return self._served.is_wanted(time.monotonic())

    def note_begin(self) -> None:
        """Record that a batched call has begun to run, so that its arguments no longer count as
        waiting. The loop calls this."""
        self._service.note_begin(self._served)

    def on_dropped(self, fn: Callable[[], None]) -> None:
        """Have the loop call `fn` if the caller cancels the call or disconnects before the reply.
        The loop does not call `fn` when the call's deadline passes.
        """
        service, served = self._service, self._served

        def dropped() -> None:
            service.drop(served)
            fn()

        served.on_dropped = dropped

    def reply(self, value: Any) -> None:
        """Reply with a value. Later changes of arrays in the value are not sent, because the arrays
        are copied unless they are frozen."""
        try:
            body, sources = pack_result(
                [value], lends=self.peer.bulk is not None and self.peer.bulk.shares_memory
            )
        except BaseException as error:
            self.fail(error)
        else:
            self.reply_packed(body, sources)

    def reply_packed(self, body: bytes, sources: Sequence[Source]) -> None:
        """Reply with a value that `pack_result` has packed."""
        self._service.reply_later(
            self._served, self.peer, Reply(self._served.id, errors.OK, "", body), sources
        )

    def fail(self, error: BaseException) -> None:
        """Reply with an error, as if the method had raised it."""
        self._service.reply_later(self._served, self.peer, failed(self._served.id, error), ())


class RpcService:
    """The methods of one server. After `attach`, a router passes its peers' calls to this service.
    A router may have several services.

    Args:
      is_observable: whether the role "observe" may call the methods that every peer may call.

    Attributes:
      label: the name of this server in the facts of a dispatcher.
      with_details: adds to these facts what the server has besides methods. Any thread may call it.
    """

    def __init__(
        self,
        name: str = "rpc",
        threads_max: int = HANDLER_THREADS_MAX,
        *,
        is_observable: bool = False,
    ) -> None:
        self._is_observable = is_observable
        self.where = f"the {name} server of process {os.getpid()}"
        """The name of this server in log lines."""
        self._methods: dict[str, Method] = {}
        self._name = self.label = name
        self.with_details: Callable[[ServerFacts], ServerFacts] = lambda facts: facts
        self._pool = HandlerPool(
            f"zmqdist-{name}-handler", threads_max, lambda: self.soon(self._let_in)
        )
        self._short = ShortCalls(self._pool, _run_if_wanted, self._finished, self._submit)
        self._stall_detector = StallDetector()
        self._swept_at: dict[Peer, float] = {}
        self._replies: dict[Peer, list[Reply]] = {}
        self._reply_bytes = 0
        self._attached = False
        self._stopping = False
        self._add(Method(METHODS, self._list, [], inline=True))
        self._add(
            Method(SERVER_INFO, lambda: describe_server(name, self._incarnation), [], inline=True)
        )
        self._add(Method(ECHO, echo, None, inline=True))
        self._generators = Generators(self)
        self._batched: list[Batched] = []

    def register(
        self,
        name: str,
        fn: Callable[..., Any],
        input_signature: Any = None,
        output_signature: Any = None,
        *,
        inline: bool = False,
        batch: bool = False,
        max_batch: int = 64,
        max_delay_ms: float = 1,
        roles: frozenset[str] | None = None,
    ) -> None:
        """Register a function as a method.

        Args:
          name: an identifier, or several identifiers joined by dots. A method with dots in its name
            is no attribute of a client.
          fn: a function made by `zmqdist.function`, or any callable. A generator function becomes a
            stream, and clients iterate over the items that it yields. If it has parameters
            `timeout_in_ms` or `out`, clients can give them by position only, because these keywords
            belong to the client.
          input_signature: a structure of TensorSpec for each of the first parameters; it overrides
            the signature of `fn`. With a signature, `fn` gets its arguments as arrays, without a
            signature as they were sent.
          output_signature: a structure of TensorSpec for the result, or for each item of a
            generator function.
          inline: run `fn` in the loop instead of a thread. Use it only for functions that take
            microseconds and never block.
          batch: join concurrent calls of all clients along axis 0 and run them as one call
            (service.py). Each caller gets its rows of the result. One batch runs at a time.
          max_batch: largest number of rows in a batch. A full batch runs without delay; a call with
            more rows runs alone.
          max_delay_ms: milliseconds for which a call waits at most for other calls to join it.
          roles: roles that may call the method, besides `admin`; `None` means every authenticated
            peer.

        Raises:
          FailedPreconditionError: the server has started.
          InvalidArgumentError: `name` is not a valid name, or is registered already.
          ValueError: the input signature does not fit `fn`; `fn` is made by `function`, takes
            arguments and has none; or options are wrong.
          TypeError: `name` is not a str, `fn` is not callable or is an async function, or a
            signature is not made of TensorSpecs.
        """
        if not isinstance(name, str):
            raise TypeError(f"method_name: a method's name is a str, not {type(name).__name__}")
        if self._attached:
            raise FailedPreconditionError(
                "All methods must be registered before starting the server: this one has been "
                "started"
            )
        if name in self._methods:
            raise InvalidArgumentError(f"{name} is already registered.")
        if not all(map(str.isidentifier, name.split("."))) or name.startswith("zmqdist."):
            raise InvalidArgumentError(f"{name!r} cannot name a method: {NAME_WANTED}")
        method = method_for(name, fn, input_signature, output_signature, inline, roles)
        if batch:
            check_options(method, max_batch, max_delay_ms)
            batched = Batched(self, method, max_batch, float(max_delay_ms) / 1000)
            method.fn, method.later, method.batch, method.pooled = batched.called, True, True, False
            self._batched.append(batched)
        self._add(method)

    def register_later(
        self, name: str, fn: Callable[..., None], *, roles: frozenset[str] | None = None
    ) -> None:
        """Register a method that replies later, without occupying a thread: the loop calls
        `fn(call, *args)`.

        `call` is a PendingCall (service.py). An exception of `fn` becomes the error of the
        call. The name may begin with `zmqdist.`; the list of methods leaves such names out.
        """
        self._add(Method(name, fn, roles=roles, later=True))

    def attach(self, router: Router, loop: Loop, incarnation: int) -> None:
        """Begin to serve the calls that a router receives. Call this before the router's loop
        starts, or in the loop's thread.

        Args:
          incarnation: the incarnation in the router's hello.
        """
        self._attached = True
        self._router = router
        self._loop = loop
        self._incarnation = incarnation
        self._short.attach(loop)
        self._calls = ServerCalls(incarnation)
        _serving[incarnation] = self
        roles = None if self._is_observable else frozenset(ROLES) - {OBSERVER}
        router.on(Call, self._called, roles, self._not_allowed)
        router.on(Calls, self._called_many, roles, self._not_allowed)
        router.on(CancelCall, lambda peer, message, frames: self._cancelled(peer, message.id))
        router.on_gone.append(self._note_disconnect)
        loop.at_end_of_turn(self._send_replies)

    def say_goodbye(self, reason: str) -> None:
        """Send a Goodbye to all clients, because this server stops, and accept no new clients. The
        loop calls this.

        Replies that are ready are sent before the Goodbye, so that each client reads them first.
        """
        self._send_replies()
        self._router.stopping = True
        for peer in self._router.peers:
            self._router.send(peer, Goodbye(reason))

    def stop(self, grace_s: float) -> bool:
        """Refuse new calls, and wait until the current calls have their replies. Any thread except
        the loop's may call this.

        Calls whose arguments have not all arrived are refused at once; calls that still wait for a
        thread are refused after `grace_s` seconds.

        Returns:
          False if some handlers still ran, or some replies were still on the way, after `grace_s`.
          Handlers cannot be interrupted.
        """
        self._stopping = True
        if not self._attached:
            return True
        until = time.monotonic() + grace_s
        streaming = self._loop.run(self._generators.stop)
        for batched in self._batched:
            self._loop.run(batched.close)
        # Calls that wait for a thread have until the end of the grace.
        self._loop.run(self._refuse, False)
        idle = self._pool.wait_idle(grace_s)
        if not idle:
            self._loop.run(self._refuse, True)
        self._pool.stop()
        for thread in streaming:
            thread.join(max(0.0, until - time.monotonic()))
        return (
            self._wait_sent(until) and idle and not any(thread.is_alive() for thread in streaming)
        )

    def close(self) -> None:
        """Refuse new calls, without waiting for the current calls. The server's loop calls this
        when it ends, even after `stop`."""
        self._stopping = True
        self._generators.stop()
        self._pool.stop()

    def _wait_sent(self, until: float) -> bool:
        """Wait until clients have received all replies, or until no client has read any bytes of
        them for UNREAD_S.

        Return False if `until` passes first.
        """
        before, unsent, moved_at = 1, self._loop.run(self._router.unsent_bytes), time.monotonic()
        # Looks twice, because it cannot look into ZeroMQ's queues (Router.unsent_bytes).
        while (before or unsent) and (now := time.monotonic()) < min(until, moved_at + UNREAD_S):
            time.sleep(0.002)
            before, unsent = unsent, self._loop.run(self._router.unsent_bytes)
            moved_at = now if unsent != before else moved_at
        return not unsent or time.monotonic() < until

    def snapshot(self) -> ServerSnapshot:
        """Return the server's current figures. Before `attach` they are zeros; after the loop has
        ended they are the last figures. Any thread may call this.

        Raises:
          DeadlineExceededError: the loop did not return the figures within 10 s, because an inline
            method blocks the loop.
        """
        if not self._attached:
            return ServerSnapshot()
        try:
            return self._loop.run(self._snapshot)
        except FailedPreconditionError:
            # the loop has ended, so this thread may read the loop's state
            return self._snapshot()

    def facts(self) -> ServerFacts:
        """Return the figures of the methods that have been called, for the facts of a dispatcher.
        Any thread may call this after `attach`, without waiting for the loop."""
        in_flight = self._calls.in_flight() + self._generators.in_flight()
        methods = [
            method.figures.facts(name, in_flight[name]) for name, method in self._methods.items()
        ]
        return self.with_details(ServerFacts(self._incarnation, self.label, most_called(methods)))

    # -- in the loop -------------------------------------------------------------------------------

    def _snapshot(self) -> ServerSnapshot:
        router, peers = self._router, self._router.peers
        channels = [peer.bulk for peer in peers if peer.bulk is not None]
        queued, running, threads, threads_max = self._pool.counts()
        return ServerSnapshot(
            clients=len(peers),
            calls=len(self._calls),
            calls_queued=queued,
            calls_running=running,
            threads=threads,
            threads_max=threads_max,
            calls_batched=sum(map(len, self._batched)),
            bytes_waiting=self._pool.held_bytes(),
            streams=len(self._generators),
            transfers=sum(len(channel.tracked) for channel in channels),
            bytes_unsent=sum(channel.undelivered for channel in channels),
            bytes_unacknowledged=sum(channel.transfers.pace.unacknowledged for channel in channels),
            messages_received=router.received,
            messages_dropped=dict(router.dropped),
            calls_repeated=self._calls.repeated,
            transfer_faults=sum(channel.faults for channel in channels),
            handshakes_refused=router.refused_handshakes,
            faults=self._loop.faults,
        )

    def _called(self, peer: Peer, call: Call, frames: list[Any]) -> None:
        result = self._take(peer, call, frames)
        if result is not None:
            reply, sources = result
            if sources:
                self._router.bulk_channel(peer).send(reply, sources)
            else:
                self._router.send(peer, reply)

    def _not_allowed(self, peer: Peer, message: Call | Calls, _frames: list[Any]) -> None:
        for call in message.items if isinstance(message, Calls) else [message]:
            self._router.send(peer, failed(call.id, PermissionDeniedError(NOT_OBSERVABLE)))

    def _called_many(self, peer: Peer, calls: Calls, frames: list[memoryview]) -> None:
        if frames:
            raise WireError(peer.name, "several calls in one message with payload frames")
        self._router.count_work(len(calls.items))
        for call in calls.items:
            result = self._take(peer, call, frames)
            if result is not None:
                self._gather(peer, *result)

    def _take(
        self, peer: Peer, call: Call, frames: list[Any]
    ) -> tuple[Reply, Sequence[Source]] | None:
        """Take an arrived call. Return the reply if the call is refused or its method is inline.
        Otherwise pass the call to `_begin` and return None.
        """
        method = self._methods.get(call.method)
        # The fast path has one test for all reasons to refuse a call. The code in the branch finds
        # out which reason holds, if any.
        if (
            method is None
            or method.roles is not None
            or self._stopping
            or call.incarnation != self._incarnation
        ):
            reply = self._calls.stale_reply(call)
            if reply is not None:
                return reply, ()
            try:
                method = self.allowed(peer, call.method)
            except OpError as error:
                return failed(call.id, error), ()
        # An inline method needs no record of its call: the reply is ready before the next message.
        if method.inline and not call.parts:
            began = time.monotonic()
            answer = _run_method(method, call.id, call.body, frames, peer)
            method.figures.add(time.monotonic() - began, answer[0].code)
            return answer
        served = self._calls.call_arrived(peer, call, time.monotonic())
        if isinstance(served, Reply):
            return served, ()
        if method.pooled and not call.parts:
            nbytes = counted_bytes(call.body, frames)
            short = ShortCall(served, peer, method, call.body, frames)
            if not self._short.add(short, nbytes):
                self._submit(*short, nbytes)
        else:
            self._begin(served, peer, method, call, frames)
        return None

    def _gather(self, peer: Peer, reply: Reply, sources: Sequence[Source]) -> None:
        # Large parts have frames of their own, and cannot share a message.
        if sources:
            self._router.bulk_channel(peer).send(reply, sources)
            return
        replies = self._replies.get(peer)
        if replies is None:
            replies = self._replies[peer] = []
        replies.append(reply)
        self._reply_bytes += 4 * len(reply.message) if reply.code else len(reply.body)
        if len(replies) >= BATCH_ITEMS_MAX or self._reply_bytes >= BATCH_BYTES_MAX:
            self._send_replies()

    def _send_replies(self) -> None:
        if self._replies:
            gathered, self._replies, self._reply_bytes = self._replies, {}, 0
            for peer, replies in gathered.items():
                self._router.send(peer, replies[0] if len(replies) == 1 else Replies(replies))

    def _begin(
        self, served: ServedCall, peer: Peer, method: Method, call: Call, frames: list[Any]
    ) -> None:
        """Refuse a call, or run its method when all arguments have arrived and, in the pool, when
        it is the client's turn."""
        if not call.parts:
            nbytes = counted_bytes(call.body, frames) if method.batch else 0
            if not nbytes or self._count(served, peer, call, nbytes):
                self._run(served, peer, method, call.body, frames)
        elif not (method.pooled or method.batch):
            self._receive(served, peer, method, call)
        elif call.held:
            # the client sends the large parts only when this server requests them by SendParts
            self._pool.announced(
                peer,
                served,
                len(call.body) + announced_bytes(call.parts),
                (served, peer, method, call),
            )
            self._let_in()
        elif self._count(served, peer, call, len(call.body) + announced_bytes(call.parts)):
            self._receive(served, peer, method, call)

    def _count(self, served: ServedCall, peer: Peer, call: Call, nbytes: int) -> bool:
        """Add the arguments that arrived with a call to the waiting bytes. If they do not fit,
        refuse the call and return False."""
        refused = self._pool.arrived(peer, served, nbytes)
        # Calls past their deadline must not use up the room of a call that is still wanted.
        if refused and self._drop_unwanted(peer):
            refused = self._pool.arrived(peer, served, nbytes)
        if refused:
            self._router.bulk_channel(peer).decline(call.parts)
            self._finished(served, peer, no_room(served.id, refused), ())
        return not refused

    def _submit(
        self,
        served: ServedCall,
        peer: Peer,
        method: Method,
        body: bytes,
        frames: list[Any],
        nbytes: int = 0,
    ) -> None:
        """Queue the call for a thread of the pool. `nbytes` is the size of its arguments, or 0 if
        admission has counted them already."""
        work = (self._serve, (served, peer, method, body, frames))
        refused = self._pool.ready(peer, served, work, nbytes)
        if refused and self._drop_unwanted(peer):
            refused = self._pool.ready(peer, served, work, nbytes)
        if refused:
            self._finished(served, peer, no_room(served.id, refused), ())
        elif self._pool.full and self._stall_detector.deadline is None:
            self._check_blocked()

    def _drop_unwanted(self, peer: Peer) -> bool:
        """Drop a client's waiting calls that are not wanted any more, at most once per SWEEP_S.
        Return whether any was dropped."""
        now = time.monotonic()
        if now < self._swept_at.get(peer, -inf) + SWEEP_S:
            return False
        self._swept_at[peer] = now
        unwanted = [args[0] for _, args in self._pool.waiting(peer) if not args[0].is_wanted(now)]
        for served in unwanted:
            self._pool.dropped(peer, served)
            self._calls.finished(served)
        return bool(unwanted)

    def _let_in(self) -> None:
        """Request the arguments that clients hold back, as far as there is room for them."""
        # While the server stops, `_refuse` replies to the calls whose arguments are missing.
        while not self._stopping and (item := self._pool.let_in()) is not None:
            served, peer, method, call = item
            if served.is_wanted(time.monotonic()):
                self._receive(served, peer, method, call)
            else:
                self._router.bulk_channel(peer).decline(call.parts)
                self._pool.dropped(peer, served)
                self._finished(served, peer, None, ())

    def _receive(self, served: ServedCall, peer: Peer, method: Method, call: Call) -> None:
        """Receive the large parts of a call. Parts in shared memory have arrived already; parts in
        chunks arrive later."""
        arrived = partial(self._arrived, served, peer, method, call.body)
        try:
            frames = self._router.bulk_channel(peer).receive(
                call.id, call.parts, allocate_fresh, arrived
            )
        except (OpError, MemoryError) as error:
            self._pool.dropped(peer, served)
            self._finished(served, peer, failed(call.id, error), ())
            return
        if frames is not None:
            self._run(served, peer, method, call.body, frames)
        elif call.held:
            self._router.send(peer, SendParts(call.id))

    def _arrived(
        self,
        served: ServedCall,
        peer: Peer,
        method: Method,
        body: bytes,
        frames: list[Any] | None,
        problem: str,
    ) -> None:
        if frames is not None:
            self._run(served, peer, method, body, frames)
        else:
            self.note_begin(served)
            self._finished(served, peer, failed(served.id, WireError(peer.name, problem)), ())

    def _run(
        self, served: ServedCall, peer: Peer, method: Method, body: bytes, frames: list[Any]
    ) -> None:
        if method.pooled:
            self._submit(served, peer, method, body, frames)
        elif method.later:
            try:
                args, named = method.arguments(body, frames, peer.name)
                method.fn(PendingCall(self, served, peer), *args, **named)
            except BaseException as error:
                self.note_begin(served)
                self._finished(served, peer, failed(served.id, error), ())
        elif method.streaming:
            problem = InvalidArgumentError(
                f"{method.name} is a stream: client.stream, or client.{method.name}"
            )
            self._finished(served, peer, failed(served.id, problem), ())
        # An inline method with large arguments: the deadline may have passed while they arrived.
        elif served.is_wanted(time.monotonic()):
            self._finished(served, peer, *_run_method(method, served.id, body, frames, peer))
        else:
            self._finished(served, peer, None, ())

    def reply_later(
        self, served: ServedCall, peer: Peer, reply: Reply | None, sources: Sequence[Source]
    ) -> None:
        """Have the loop send a reply, if the caller still waits for it. Any thread may call
        this.
        """
        self.soon(self._finished, served, peer, reply, sources)

    def soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Have the loop call `fn(*args)`, unless the loop has ended. Any thread may call this."""
        try:
            self._loop.call_soon(fn, *args)
        except FailedPreconditionError:  # the server has stopped without waiting for this call
            pass

    def submit(
        self, fn: Callable[..., None], *args: Any, refuse: Callable[[OpError], object] | None = None
    ) -> None:
        """Have a thread of the pool call `fn(*args)`. If the server stops before that, the loop
        calls `refuse`. Only the loop uses this."""
        # the key of work that is not a call is what to do if the work does not run
        self._pool.ready(None, object() if refuse is None else partial(refuse), (fn, args))

    def set_timer(self, key: Hashable, at: float | None, fn: Callable[[], object]) -> None:
        """Have the loop call a function at a certain time (`Loop.set_timer`)."""
        self._loop.set_timer(key, at, fn)

    def drop(self, served: ServedCall) -> None:
        """Remove a call that will get no reply."""
        self.note_begin(served)
        self._calls.finished(served)

    def note_begin(self, served: ServedCall) -> None:
        """Stop counting the arguments of a call as waiting, because the call has begun or ended.
        Only the loop may use this."""
        self._pool.dropped(served.peer, served)
        self._let_in()

    def _refuse(self, ready: bool) -> None:
        """Reply UNAVAILABLE to calls whose arguments are missing; with `ready`, also to calls that
        wait only for a thread."""
        for short in self._short.take_waiting() if ready else ():
            self._finished(short.served, short.peer, failed(short.served.id, stopping()), ())
        for peer, key, item in self._pool.cut_off(ready):
            if isinstance(key, ServedCall):
                if not ready and item is not None:
                    self._router.bulk_channel(peer).decline(item[3].parts)
                elif peer.bulk is not None:
                    peer.bulk.call_ended(key.id)
                self._finished(key, peer, failed(key.id, stopping()), ())
            elif callable(key):
                key(stopping())

    def _check_blocked(self) -> None:
        """Log a warning if all handler threads have been blocked for too long."""
        detector = self._stall_detector
        stuck, ended_count, running = self._pool.progress()
        if detector.look(stuck, ended_count, self._loop.now()):
            methods = Counter(_name_of(*work) for work in running).most_common(10)
            log.warning(
                "%s: all %d handler threads have been busy for %.0f s, none of their calls has "
                "ended, and further calls wait. "
                "Running: %s. A handler that calls its own server, directly or through another, "
                "waits for a thread that it occupies "
                "itself: call the function instead, register it with inline=True, or give the "
                "server more threads "
                "(threads_max). If the handlers are only slow, add threads or reduce the number "
                "of callers",
                self.where,
                len(running),
                STALL_S,
                ", ".join(f"{name} ({count})" for name, count in methods),
            )
        self._loop.set_timer(detector, detector.deadline, self._check_blocked)

    def _note_disconnect(self, peer: Peer) -> None:
        self._pool.owner_lost(peer)
        self._swept_at.pop(peer, None)
        for served in self._calls.peer_gone(peer):
            if served.on_dropped is not None:
                served.on_dropped()
        self._generators.drop_peer(peer)
        self._let_in()

    def _cancelled(self, peer: Peer, id: int) -> None:
        served = self._calls.cancelled(peer, id)
        if served is not None and served.on_dropped is not None:
            served.on_dropped()
        if peer.bulk is not None:
            if peer.bulk.transfers.is_receiving(id):
                self._calls.arguments_lost(peer, id)
            peer.bulk.call_ended(id)
        # A running call goes on, and its reply is dropped; only a waiting call ends here.
        if served is not None and served.on_dropped is None:
            if self._pool.dropped(peer, served):
                self._calls.finished(served)
            self._let_in()

    @property
    def unsent(self) -> int:
        """Bytes of replies that have not reached their callers yet. Only the loop may read this."""
        return self._router.unsent_bytes()

    @property
    def idle(self) -> bool:
        """Whether every call has its reply and every reply has reached its caller. Only the loop
        may read this."""
        return not len(self._calls) and not self.unsent

    def allowed(self, peer: Peer, name: str) -> Method:
        """Return the method of this name, if this peer may call it.

        Raises InvalidArgumentError if there is no such method, PermissionDeniedError if the peer's
        role may not call it, and UnavailableError while the server stops.
        """
        method = self._methods.get(name)
        if method is None:
            raise InvalidArgumentError(f"{name} is not registered.")
        if method.roles is not None and peer.role not in method.roles:
            allowed = ", ".join(sorted(method.roles))
            raise PermissionDeniedError(
                f"role {peer.role} may not call {name} (allowed: {allowed})"
            )
        if self._stopping:
            raise stopping()
        return method

    def _finished(
        self, served: ServedCall, peer: Peer, reply: Reply | None, sources: Sequence[Source]
    ) -> None:
        now = time.monotonic()
        if self._calls.finished(served, now) and reply is not None:
            self._gather(peer, reply, sources)
            # a call that was cancelled, or was too late, is no measure of the method
            self._methods[served.method].figures.add(now - served.arrived, reply.code)

    def _list(self) -> list[Any]:
        methods = [
            method for name, method in self._methods.items() if not name.startswith("zmqdist.")
        ]
        return [method.info().to_wire() for method in methods]

    def _add(self, method: Method) -> None:
        self._methods[method.name] = method

    # -- in a thread of the pool -------------------------------------------------------------------

    def _serve(
        self, served: ServedCall, peer: Peer, method: Method, body: bytes, frames: list[Any]
    ) -> None:
        reply, sources = _run_if_wanted(served, peer, method, body, frames)
        # The reply to the only call goes out of this thread. Those to many are gathered in the loop.
        send = self._loop.call_now if self._pool.unfinished == 1 else self._loop.call_soon
        try:  # repeats the code of `reply_later`, to save two function calls on the hot path
            send(self._finished, served, peer, reply, sources)
        except FailedPreconditionError:
            pass


_serving: WeakValueDictionary[int, RpcService] = WeakValueDictionary()
"""The services of this process that serve, by incarnation."""

register_at_fork(after_in_child=_serving.clear)


def servers_here() -> list[ServerFacts]:
    """Return the figures of the servers of this process that have been called. Any thread may call
    this."""
    services = (reference() for reference in _serving.valuerefs())
    facts = [service.facts() for service in services if service and not service._stopping]
    return [server for server in facts if server.methods]


def _unwanted(served: ServedCall) -> bool:
    return not served.is_wanted(time.monotonic())


def _run_if_wanted(
    served: ServedCall, peer: Peer, method: Method, body: bytes, frames: list[Any]
) -> tuple[Reply | None, Sequence[Source]]:
    """Run a method as a call in a thread does. There is no reply if the caller no longer waits."""
    if not served.is_wanted(time.monotonic()):
        return None, ()
    enter(partial(_unwanted, served))
    outcome = _run_method(method, served.id, body, frames, peer)
    leave()
    return outcome


def _run_method(
    method: Method, id: int, body: bytes, frames: list[Any], peer: Peer
) -> tuple[Reply, Sequence[Source]]:
    """Run a method and return its reply, which is an error if the method raises. The handler may
    keep and change its result afterwards."""
    bulk = peer.bulk
    call = bulk.call_of(id) if frames and bulk is not None else None
    try:
        box = [method.run(body, frames, peer.name)]
        lends = bulk is not None and bulk.shares_memory
        body, sources = pack_result(box, lends=lends, at_once=method.inline, call=call)
        return Reply(id, errors.OK, "", body), sources
    except BaseException as error:
        return failed(id, error), ()
