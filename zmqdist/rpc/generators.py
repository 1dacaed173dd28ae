"""The server's side of streams: the generators, each in a thread of its own, and the calls that
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

Not here: the client's side, and the calls that both sides use (streams.py).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from zmqdist.limits import (
    CHUNK_BYTES,
    FRAMES_MAX,
    STREAM_BYTES_AHEAD,
    STREAM_ITEMS_AHEAD,
    STREAMS_MAX,
    STREAMS_OF_PEER_MAX,
)
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.rpc.methods import Method
from zmqdist.rpc.pending_call import PendingCall
from zmqdist.rpc.service_protocol import AnsweringService
from zmqdist.rpc.snapshots import pack_result
from zmqdist.rpc.streams import CLOSE, NEXT, OPEN
from zmqdist.task_context import enter, leave
from zmqdist.transport.peer import Peer
from zmqdist.wire.stream_items import Items, encode_items

log = logging.getLogger("zmqdist.rpc")


class Generators:
    """All streams of one service. The loop calls every method."""

    def __init__(self, service: AnsweringService) -> None:
        self._service = service
        self._by_peer: dict[Peer, dict[int, _Stream]] = {}
        self._running: set[_Stream] = set()
        service.register_later(OPEN, self._open)
        service.register_later(NEXT, self._next)
        service.register_later(CLOSE, self._close)

    def __len__(self) -> int:
        """Return the number of streams that are open at a client, or whose generators still run."""
        return len(self._running.union(*(streams.values() for streams in self._by_peer.values())))

    def peer_gone(self, peer: Peer) -> None:
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

    def ended(self, stream: _Stream) -> None:
        """Record that the generator of a stream, and its thread, have ended."""
        self._running.discard(stream)
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
        service: AnsweringService,
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
        self._condition = threading.Condition()
        self._pending: PendingCall | None = call
        self._bodies: list[bytes] = []
        self._sources: list[Any] = []
        self._bytes = 0
        self._end: tuple[int, str] | None = None

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
            if self._end is None:
                self._end = end
                self._reply()
        self._service.soon(self._owner.ended, self)

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
    """Return the size in bytes of a large part: bytes, an array or a block of shared memory."""
    return len(source) if isinstance(source, bytes) else int(source.nbytes)
