"""The connection of a worker or coordinator to a server. A loop owns the connection.

Rules
    Each connection begins with a hello from each side. A message that arrives before the server's
    hello is dropped. If there is no connection, `send` returns False, and the owner keeps the
    message.
    When a connection is lost, the messages that have arrived are read first. Then `on_down` is
    called, and new attempts to connect begin. They go on without limit, with back-off.
    A refusal (`on_refused`) ends the attempts, because the server would refuse the next attempt as
    well. `reconnect` begins new attempts.

All callbacks run in the loop's thread. All methods are called in that thread, or before the loop
starts. The plain RPC client has a channel of its own, without a thread (channel.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq

from zmqdist.errors import OpError, WireError, from_code
from zmqdist.limits import FRAMES_MAX, HEADER_PIECE_BYTES, MESSAGES_PER_WAKE_MAX, PAYLOAD_BYTES_MAX
from zmqdist.messages import Message, Ping, Refused
from zmqdist.transport.connector import Connector
from zmqdist.transport.loop import Loop, WatchedSocket
from zmqdist.transport.monitor import Down, Rejected, Up
from zmqdist.transport.security import ClientSecurity
from zmqdist.wire.headers import decode, encode, join_header, pieces_after, split_header
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK


class DealerConnection:
    """A connection that exchanges hellos and delivers messages to callbacks; the module's docstring
    has the rules.

    Attributes:
      up: whether both hellos have been exchanged and the connection has not been lost since.
      trouble: why there is no connection, for the log line about a caller that waits for the
        server.
      dropped: number of messages that were dropped, by reason.
    """

    def __init__(
        self,
        loop: Loop,
        address: str,
        security: ClientSecurity,
        hello: Hello,
        *,
        on_up: Callable[[Hello], None],
        on_message: Callable[[Message, list[memoryview]], None],
        on_down: Callable[[], None],
        on_refused: Callable[[OpError], None],
    ) -> None:
        """Make a connection object; `connect` begins to connect.

        Args:
          hello: the hello that is sent on each new connection.
          on_up: a function that is called with the server's hello.
          on_message: a function that is called with a message and its payload frames, which it may
            keep.
        """
        self.address = address
        self.up = False
        self.dropped: dict[str, int] = {}
        self._loop = loop
        self._hello = encode_hello(hello)
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._on_refused = on_refused
        self._watched: WatchedSocket | None = None
        self._connector = Connector(
            loop.context, address, security, opened=self._opened, closing=self._closing
        )
        self._connector.due = None
        self._closed = False
        loop.on_stop(self.close)

    @property
    def trouble(self) -> str:
        return self._connector.trouble

    def connect(self) -> None:
        """Begin to connect. Attempts go on until the server accepts or refuses the connection."""
        self._connector.due = self._loop.now()
        self._rearm()

    def reconnect(self) -> None:
        """Drop the current connection, or disregard the refusal, and try again after the back-off.
        No callback is called."""
        self.up = False
        self._connector.retry(self._loop.now())
        self._rearm()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection without a callback; sent messages have `linger_s` seconds to leave.
        Idempotent."""
        self._closed = True
        self.up = False
        self._connector.close(linger_s)
        self._rearm()

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Send a message without waiting.

        Args:
          frames: the payload. Large frames are not copied, so the caller must never change them
            afterwards.

        Returns:
          False if there is no connection; then nothing was sent. True does not promise that the
          message arrives.
        """
        return self.up and self._send(encode(message), frames)

    def _send(self, header: bytes, frames: Sequence[Buffer] = ()) -> bool:
        watched = self._watched
        assert watched is not None
        watched.dirty = True
        if len(header) > HEADER_PIECE_BYTES:
            header, frames = split_header(header, frames)
        last = len(frames)
        try:
            self._raw_send(header, _MORE if last else _NOBLOCK)
        except zmq.Again:
            # the connection is lost, and the monitor's event about it has not been read yet
            return False
        # No send below can fail: if the connection ends now, ZeroMQ loses the message as a whole.
        for number, frame in enumerate(frames, 1):
            watched.socket.send(frame, _MORE if number < last else _NOBLOCK, copy=False)
        return True

    # -- the link ----------------------------------------------------------------------------------

    def _opened(self) -> None:
        socket, monitor = self._connector.socket, self._connector.monitor
        assert socket is not None
        assert monitor is not None
        self._watched = self._loop.add_socket(socket, self._read)
        self._raw_send: Callable[[bytes, int], Any] = super(zmq.Socket, socket).send
        self._raw_recv: Callable[..., Any] = super(zmq.Socket, socket).recv
        self._loop.add_socket(monitor, self._read_monitor)

    def _closing(self) -> None:
        socket, monitor = self._connector.socket, self._connector.monitor
        assert socket is not None
        assert monitor is not None
        self._loop.remove_socket(socket)
        self._loop.remove_socket(monitor)
        self._watched = None

    def _rearm(self) -> None:
        self._loop.set_timer(self, None if self._closed else self._connector.due, self._tick)

    def _tick(self) -> None:
        refused = self._connector.tick(self._loop.now())
        self._rearm()
        if refused is not None:
            self._on_refused(refused.error)

    def _read_monitor(self) -> None:
        for change in self._connector.read(self._loop.now()):
            if isinstance(change, Up):
                self._send(self._hello)
            elif isinstance(change, Down):
                self._lost()
            elif isinstance(change, Rejected):
                self.up = False
                self._on_refused(change.error)
        self._rearm()

    def _lost(self) -> None:
        while self._read():
            pass
        if self._closed or self._watched is None:
            # a callback for one of the last messages has closed this connection
            return
        was_up, self.up = self.up, False
        self._connector.retry(self._loop.now())
        self._rearm()
        if was_up:
            self._on_down()

    def _refuse(self, error: OpError) -> None:
        self.up = False
        self._connector.close()
        self._connector.trouble = str(error)
        self._rearm()
        self._on_refused(error)

    # -- messages ----------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Read at most MESSAGES_PER_WAKE_MAX messages. Return whether more messages may be
        waiting.
        """
        for _ in range(MESSAGES_PER_WAKE_MAX):
            watched = self._watched  # a callback may have ended the connection
            if watched is None:
                return False
            if not watched.has_input():
                watched.dirty = False
                return False
            frame = self._raw_recv(_NOBLOCK, False)
            header, frames = (
                receive_rest(watched.socket, frame.bytes) if frame.more else (frame.bytes, [])
            )
            try:
                self._handle_frames(header, frames)
            except WireError as error:
                if not self._drop("not a message"):
                    log.warning("%s", error)
            except Exception as error:
                self._loop.fault(f"handler of a message from {self.address}")
                if isinstance(error, MemoryError):
                    # a new connection begins with what a lost message may have said
                    self._loop.call_soon(self._lost)
        return True

    def _handle_frames(self, header: bytes, frames: list[memoryview] | None) -> None:
        if frames is None:
            self._drop("too many frames or bytes")
        elif is_hello(header):
            self._handle_hello(header)
        elif self.up:
            message = decode(header, self.address)
            if type(message) is not Ping:
                self._on_message(message, frames)
        else:
            message = decode(header, self.address)
            if isinstance(message, Refused):
                self._refuse(from_code(message.code, f"{self.address}: {message.message}"))
            else:
                self._drop("before the hello")

    def _handle_hello(self, header: bytes) -> None:
        if self.up:
            self._drop("second hello")
            return
        try:
            hello = decode_hello(header, self.address)
        except OpError as error:
            # another version, whose text names both versions, or a damaged hello
            self._refuse(error)
            return
        self.up = True
        self._on_up(hello)

    def _drop(self, reason: str) -> int:
        """Count a dropped message. Return how many were dropped for this reason before."""
        before = self.dropped.get(reason, 0)
        self.dropped[reason] = before + 1
        return before


def receive_rest(socket: zmq.Socket[bytes], first: bytes) -> tuple[bytes, list[memoryview] | None]:
    """Receive the frames after the first frame of a message. Return the header, and the payload as
    writable views that keep their frames alive.

    Return None as the payload, and drop all its frames, if it exceeds FRAMES_MAX or
    PAYLOAD_BYTES_MAX. These bounds do not limit the memory of the process, because ZeroMQ holds the
    whole message in memory before it returns the first frame.
    """
    pieces, frames = list[bytes](), list[memoryview]()
    pieces_count = pieces_after(first)
    more, count, nbytes = True, 1, 0
    while more:
        frame = socket.recv(_NOBLOCK, copy=False)
        more = frame.more
        if len(pieces) < pieces_count:
            pieces.append(frame.bytes)
            continue
        count += 1
        nbytes += len(frame)
        if count <= FRAMES_MAX and nbytes <= PAYLOAD_BYTES_MAX:
            frames.append(frame.buffer)
        elif frames:
            frames.clear()
    return join_header(
        first, pieces
    ), frames if count <= FRAMES_MAX and nbytes <= PAYLOAD_BYTES_MAX else None
