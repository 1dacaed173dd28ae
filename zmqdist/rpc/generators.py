"""The server's end of streams: generators, each with a thread of its own, and the calls that ask for their items.

Rules
    A generator runs in one thread from its first line to its last, `finally` included.
    What it yields is packed at once: it may change it afterwards. Packed items wait until they are asked for; the generator goes on
    meanwhile, up to STREAM_ITEMS_AHEAD items and STREAM_BYTES_AHEAD bytes.
    A call that asks is answered as soon as there is an item, with all that there are, up to the bounds of one message.
    A stream whose client closes it or goes, whose time is up, or whose server stops, closes its generator when that yields next.
    `zmqdist.cancelled()` tells a generator that would not yield for long.
    A client has at most STREAMS_OF_PEER_MAX streams, a generator that does not end counted until it does.

Not here: the client's end, and how the two talk (streams.py).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

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
from zmqdist.rpc.pending_call import Asked
from zmqdist.rpc.service_protocol import AnsweringService
from zmqdist.rpc.snapshots import pack_result
from zmqdist.rpc.streams import CLOSE, NEXT, OPEN
from zmqdist.task_context import enter, leave
from zmqdist.transport.router import Peer
from zmqdist.wire.items import Items, encode_items

log = logging.getLogger("zmqdist.rpc")


class Generators:
    """All streams of one service. Its methods are the loop's, but `join`."""

    def __init__(self, service: AnsweringService) -> None:
        self._service = service
        self._of: dict[Peer, dict[int, _Stream]] = {}
        self._running: set[_Stream] = set()
        service.register_later(OPEN, self._open)
        service.register_later(NEXT, self._next)
        service.register_later(CLOSE, self._close)

    def __len__(self) -> int:
        """Streams that a client has, or whose generator still runs."""
        return len(self._running.union(*(streams.values() for streams in self._of.values())))

    def peer_gone(self, peer: Peer) -> None:
        """Nobody takes anything from its streams any more."""
        for stream in self._of.pop(peer, {}).values():
            stream.close(errors.UNAVAILABLE, "its client has gone")

    def stop(self) -> list[threading.Thread]:
        """End all streams: their callers get UNAVAILABLE. The threads whose generators have yet to take note."""
        for stream in self._running:
            stream.close(errors.UNAVAILABLE, "the server has stopped")
        return [stream.thread for stream in self._running]

    def ended(self, stream: _Stream) -> None:
        """Its thread is over."""
        self._running.discard(stream)
        self._tidy(stream)

    def _open(self, asked: Asked, number: Any, name: Any, given: Any) -> None:
        if type(number) is not int or type(name) is not str:
            raise InvalidArgumentError("a stream has a number, and its method a name")
        method = self._service.allowed(asked.peer, name)
        if not method.streaming:
            raise InvalidArgumentError(f"{name} is not a generator function: call it")
        args, named = method.checked(given, asked.peer.name)
        streams = self._of.get(asked.peer, {})
        if number in streams:
            raise InvalidArgumentError(f"stream number {number} is in use")
        if len(streams) >= STREAMS_OF_PEER_MAX:
            raise ResourceExhaustedError(f"{STREAMS_OF_PEER_MAX} streams of this client are open: close some")
        if len(self._running) >= STREAMS_MAX:
            raise ResourceExhaustedError(f"{STREAMS_MAX} streams run at this server")
        stream = _Stream(self, self._service, number, method, asked)
        stream.start(args, named)
        self._of.setdefault(asked.peer, {})[number] = stream
        self._running.add(stream)

    def _next(self, asked: Asked, number: Any) -> None:
        stream = self._find(asked.peer, number)
        if stream is None:
            raise UnavailableError("this stream is not known here: its connection went, or it was closed")
        stream.ask(asked)
        self._tidy(stream)

    def _close(self, asked: Asked, number: Any) -> None:
        stream = self._find(asked.peer, number)
        if stream is not None:
            stream.close(errors.CANCELLED, "the stream was closed by its caller")
            self._tidy(stream)
        asked.answer(None)

    def _find(self, peer: Peer, number: Any) -> _Stream | None:
        stream = self._of.get(peer, {}).get(number) if type(number) is int else None
        return None if stream is None or stream.over else stream

    def _tidy(self, stream: _Stream) -> None:
        """Forget it, when nobody will ask for it any more and its generator has ended."""
        if stream in self._running or not stream.over:
            return
        streams = self._of.get(stream.peer, {})
        if streams.get(stream.number) is stream:
            del streams[stream.number]
            if not streams:
                del self._of[stream.peer]


class _Stream:
    """One generator. `_turn` guards what its thread and the loop both have.

    Attributes:
      over: it was closed, or its last items have been given away.
    """

    def __init__(self, owner: Generators, service: AnsweringService, number: int, method: Method, asked: Asked) -> None:
        self.peer = asked.peer
        self.number = number
        self.over = False
        self._owner = owner
        self._service = service
        self._method = method
        self._due = asked.due
        self._turn = threading.Condition()
        self._asked: Asked | None = asked
        self._bodies: list[bytes] = []
        self._sources: list[Any] = []
        self._bytes = 0
        self._end: tuple[int, str] | None = None

    def start(self, args: Any, named: dict[str, Any]) -> None:
        self.thread = threading.Thread(
            target=self._run, args=(args, named), name=f"zmqdist-stream-{self._method.name}", daemon=True
        )
        self.thread.start()

    # -- in the loop ------------------------------------------------------------------------------------------------------

    def ask(self, asked: Asked) -> None:
        """Raises InvalidArgumentError: the last one was not answered yet."""
        with self._turn:
            if self._asked is not None and self._asked.wanted():
                raise InvalidArgumentError("the last call for items of this stream is unanswered")
            self._asked = asked
            self._give()

    def close(self, code: int, message: str) -> None:
        """Nobody wants more of it. Who still asks is told this."""
        with self._turn:
            self._bodies, self._sources, self._bytes = [], [], 0
            self._end = (code, message)
            self._give()
            self.over = True
            self._turn.notify()

    # -- in its thread ----------------------------------------------------------------------------------------------------

    def _run(self, args: Any, named: dict[str, Any]) -> None:
        enter(lambda: self.over or time.monotonic() >= self._due)
        try:
            end = self._make(args, named)
        except BaseException as error:
            if self.over:
                log.warning(
                    "a generator of %s raised when it was closed: %s", self._method.name, code_and_message(error)[1]
                )
            end = code_and_message(error)
        leave()
        with self._turn:
            if self._end is None:
                self._end = end
                self._give()
        self._service.soon(self._owner.ended, self)

    def _make(self, args: Any, named: dict[str, Any]) -> tuple[int, str]:
        """Run the generator; how it ended."""
        generator = self._method.fn(*args, **named)
        args = named = None  # type: ignore[assignment]
        try:
            while self._wait_for_room():
                try:
                    box = [next(generator)]
                except StopIteration:
                    return errors.OK, ""
                box[0] = self._method.result(box[0])
                lanes = self.peer.lanes
                body, sources = pack_result(box, lends=lanes is not None and lanes.lends)
                del box
                self._put(body, sources)
        finally:
            generator.close()
        return errors.DEADLINE_EXCEEDED, f"deadline passed while {self._method.name!r} streamed"

    def _wait_for_room(self) -> bool:
        """False: nobody wants more."""
        with self._turn:
            while not self.over and (left_s := self._due - time.monotonic()) > 0:
                if len(self._bodies) < STREAM_ITEMS_AHEAD and self._bytes < STREAM_BYTES_AHEAD:
                    return True
                self._turn.wait(min(left_s, threading.TIMEOUT_MAX))
            return False

    def _put(self, body: bytes, sources: Any) -> None:
        with self._turn:
            if self.over:
                return
            self._bodies.append(body)
            self._sources.append(sources)
            self._bytes += len(body) + sum(map(_nbytes, sources))
            if self._asked is not None:
                self._give()

    # -- with `_turn` held ------------------------------------------------------------------------------------------------

    def _give(self) -> None:
        """Answer whoever asks, if there is something to be told."""
        asked = self._asked
        if asked is None or not (self._bodies or self._end is not None) or self.over:
            return
        self._asked = None
        count = self._fitting()
        bodies, self._bodies = self._bodies[:count], self._bodies[count:]
        sources, self._sources = self._sources[:count], self._sources[count:]
        self._bytes = sum(map(len, self._bodies)) + sum(_nbytes(part) for parts in self._sources for part in parts)
        end = None if self._bodies else self._end
        self.over = end is not None
        parts = [len(one) for one in sources] if any(sources) else []
        asked.answer_packed(encode_items(Items(bodies, parts, end)), [part for one in sources for part in one])
        self._turn.notify()

    def _fitting(self) -> int:
        """So many of the items travel in one message; at least one, if there is any."""
        byte_count = parts = 0
        for count, (body, sources) in enumerate(zip(self._bodies, self._sources, strict=True)):
            byte_count += len(body)
            parts += len(sources)
            if count and (byte_count > CHUNK_BYTES or parts >= FRAMES_MAX):
                return count
        return len(self._bodies)


def _nbytes(source: Any) -> int:
    """Of a large part: bytes, an array or a block of shared memory."""
    return len(source) if isinstance(source, bytes) else int(source.nbytes)
