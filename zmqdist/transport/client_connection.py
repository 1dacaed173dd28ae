"""One client's calls, table and socket together, without any threads: what channel.py does under its lock.

Rules
    One thread at a time; nothing here waits.
    Calls that end are gathered in `ended`; the owner tells whoever waits for them, and empties the list.
    After any use of the socket EVENTS is asked last and what shows is read (R1 in channel.py; the exceptions are there).
    What has arrived is read before a connection that has gone is let go.
    Calls leave together (calls_machine.py says when); whatever reads an answer also sends what has gathered meanwhile.

Not here: who may use it when, and who waits (channel.py); when to connect and what a failure means (connector.py).
"""

from __future__ import annotations

import logging
import os
import select
import threading
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

import zmq
from msgspec.structs import replace

from zmqdist.errors import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, OpError, WireError, from_code
from zmqdist.limits import WAIT_LOG_S
from zmqdist.messages import (
    Calls,
    CancelCall,
    Chunk,
    Credit,
    Goodbye,
    Message,
    Refused,
    Replies,
    Reply,
    SendParts,
    SharedMemoryAccepted,
)
from zmqdist.transport.calls_machine import ClientCall, ClientCalls
from zmqdist.transport.connector import Connector
from zmqdist.transport.dealer import receive_payload
from zmqdist.transport.figures import ClientSnapshot
from zmqdist.transport.loop import input_of
from zmqdist.transport.monitor import Down, Up
from zmqdist.transport.security import ClientSecurity
from zmqdist.transport.shm_pool import this_arena
from zmqdist.transport.transfers import Lanes, fresh, is_large
from zmqdist.wire import headers
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

SOCKETS_MAX: Final = 65_536

CHUNKS_A_TURN: Final = 4
"""Messages of large transfers after which other threads have their turn."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class Process:
    """What all clients of a process share: one context. A forked child starts anew, and refuses its parent's clients."""

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self._lock = allocate_lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
                self._context.max_sockets = SOCKETS_MAX
            return self._context


process = Process()
"""The one of the running process: another one after a fork, so ask for it by `client_connection.process`."""


def _forked() -> None:
    global process
    process = Process()


os.register_at_fork(after_in_child=_forked)


class ClientConnection:
    """See the module's docstring.

    Attributes:
      table: the calls.
      ended: calls that have ended and whose waiters were not told yet.
      poll: `poll(timeout_ms)` over all descriptors that matter; another one after each attempt to connect.
      monitor_fd: the one of them after which `tend` must be called.
      strays: messages that were not understood or not expected, and dropped.
      sent, received: messages since it was made.
      lanes: the large parts of calls and answers, on the present connection.
    """

    def __init__(self, address: str, security: ClientSecurity, hello: Hello, wake_fd: int) -> None:
        """Raises InvalidArgumentError: not an address."""
        self.address = address
        self.table = ClientCalls(address)
        self.ended: list[ClientCall] = []
        self.strays = 0
        self.sent = 0
        self.received = 0
        arena = this_arena()
        self._hello = encode_hello(hello if arena is None else replace(hello, memory=arena.offer))
        self._wake_fd = wake_fd
        self._turned_away = False
        self._log_at = monotonic() + WAIT_LOG_S
        self._link = Connector(process.context(), address, security, opened=self._opened, closing=self._closing)
        self.lanes = Lanes(address, self._put_message)
        self._chunks = 0
        self._closing()

    # -- the socket of the present attempt --------------------------------------------------------------------------------

    def _opened(self) -> None:
        socket, monitor = self._link.socket, self._link.monitor
        assert socket is not None
        assert monitor is not None
        backend: Any = super(zmq.Socket, socket)  # the wrappers cost as much as the calls themselves
        self._has_input: Callable[[], Any] = input_of(socket)
        self._send: Callable[..., Any] = backend.send
        self._recv: Callable[..., Any] = backend.recv
        self.lanes = Lanes(self.address, self._put_message)
        self.monitor_fd = int(monitor.getsockopt(zmq.FD))
        self._watch(int(socket.getsockopt(zmq.FD)), self.monitor_fd)

    def _closing(self) -> None:
        self._has_input = lambda: False
        self.lanes.gone()
        self.monitor_fd = -1
        self._watch()

    def _watch(self, *fds: int) -> None:
        poller = select.poll()
        for fd in (self._wake_fd, *fds):
            poller.register(fd, select.POLLIN)
        self.poll = poller.poll

    @property
    def due(self) -> float | None:
        """When `tend` must be called, besides after input; None: only input matters."""
        return self._link.due

    def snapshot(self, threads_waiting: int, stalls: int) -> ClientSnapshot:
        """Figures of now, with those of its owner."""
        table, lanes = self.table, self.lanes
        return ClientSnapshot(
            connected=table.incarnation != 0,
            shared_memory=lanes.lends,
            calls_waiting=len(table.waiting) + len(table.held_back),
            bytes_waiting=table.waiting_bytes + sum(len(call.body) for call in table.held_back.values()),
            calls_in_flight=len(table.in_flight),
            threads_waiting=threads_waiting,
            transfers=len(lanes.tracked),
            bytes_unacknowledged=lanes.unacknowledged,
            messages_sent=self.sent,
            messages_received=self.received,
            strays=self.strays,
            stalls=stalls,
        )

    def close(self, linger_s: float) -> None:
        """End the connection. Calls are not touched."""
        self.lanes.dropped()
        self._link.close(linger_s)

    def drop(self, linger_s: float) -> None:
        """Send what waits, and end the connection: for a finalizer."""
        self.lanes.dropped()
        if self.table.waiting:
            self.flush()
        self._link.close(linger_s)

    # -- out --------------------------------------------------------------------------------------------------------------

    def submit(self, call: ClientCall, waits: bool) -> None:
        """A new call; it may have ended after this, refused by the table. EVENTS is left to the caller.

        Args:
          waits: somebody waits for it, so it does not wait for company.
        """
        if self.table.asked(call) or waits:
            self._send_waiting()
        if call.frames and self.table.waits(call) and not is_large(call.frames):
            call.frames = [bytes(frame) for frame in call.frames]  # the caller may change its arrays after this

    def flush(self) -> None:
        """Send what waits, if there is a server, and read what has arrived."""
        self._send_waiting()
        self.settle()

    def cancel(self, call: ClientCall) -> None:
        """The caller gives up; a call that has ended is fine."""
        if not call.ended:
            message = self.table.cancelled(call)
            self.ended.append(call)
            self.lanes.over(call.id)
            if message is not None:
                self._put(headers.encode(message))
                self.settle()
            if self.table.held_back:
                self.flush()  # what had no room beside it may have some now

    def fail(self, code: int, message: str) -> None:
        """End all calls."""
        self.lanes.gone()
        self.ended += self.table.failed(code, message)

    def _send_waiting(self) -> None:
        table = self.table
        while (table.waiting or table.held_back) and (calls := table.next_message()):
            now, frames = monotonic(), calls[0].frames
            if len(calls) > 1:
                sent = self._put(headers.encode(Calls([table.request(call, now) for call in calls])))
            elif frames:
                sent = self.lanes.send(table.request(calls[0], now), frames)
            else:
                sent = self._put(headers.encode(table.request(calls[0], now)))
            if not sent:
                table.undelivered(calls)
                return
            for call in calls:
                call.body = b""
                call.frames = ()

    def _put_message(self, message: Message, frames: Sequence[Any]) -> bool:
        return self._put(headers.encode(message), frames)

    def _put(self, header: bytes, frames: Sequence[Any] = ()) -> bool:
        """Send a message now; its frames are copied. False: there is no connection that takes it."""
        try:
            if not frames:
                self._send(header, _NOBLOCK)
                self.sent += 1
                return True
            self._send(header, _MORE)
            for frame in frames[:-1]:
                self._send(frame, _MORE)
            self._send(frames[-1], _NOBLOCK)
        except zmq.Again:
            return False
        self.sent += 1
        return True

    # -- in ---------------------------------------------------------------------------------------------------------------

    def settle(self, announced: bool = False) -> bool:
        """Read all that has arrived, and send what waited for that; whether anything had arrived.

        Args:
          announced: the descriptor has told of something. It need not be a message, but it nearly always is.
        """
        if announced:
            try:
                self._drain()
            except zmq.Again:  # of its first look only; it has asked for EVENTS, too
                return False
        elif self._has_input():
            self._drain()
        else:
            return False
        table = self.table
        while (table.waiting or table.held_back) and table.incarnation:
            self._send_waiting()
            if not self._has_input():
                break
            self._drain()
        return True

    def _drain(self) -> None:
        """Read all that has arrived; something has. Of large transfers CHUNKS_A_TURN, and then the eventfd says that there is more."""
        table = self.table
        while True:
            frame = self._recv(_NOBLOCK, False)
            self.received += 1
            frames = receive_payload(self._link.socket) if frame.more else ()  # type: ignore[arg-type]
            try:
                if frames is None:
                    raise WireError(self.address, "a message of too many frames or bytes")
                self._take(frame.bytes, frames)
            except WireError as error:
                self.strays += 1
                log.warning("message dropped: %s", error)
            if (not table.in_flight and table.incarnation) or not self._has_input():
                return
            if self._chunks >= CHUNKS_A_TURN:
                self._chunks = 0
                os.eventfd_write(self._wake_fd, 1)
                return

    def _take(self, header: bytes, frames: Sequence[Any]) -> None:
        if is_hello(header):
            self._greeted(header)
            return
        message = headers.decode(header, self.address)
        if type(message) is Reply:
            if message.parts:
                self._take_parts(message)
            else:
                self._answered(message, frames)
        elif type(message) is Replies:
            for reply in message.items:
                self._answered(reply, ())
        elif type(message) is Chunk:
            self._chunks += 1
            self.lanes.chunk(message, frames)
        elif type(message) is Credit:
            self._chunks += 1
            self.lanes.credited(message)
        elif type(message) is SendParts:
            self.lanes.let_in(message)
        elif type(message) is Goodbye:
            self.table.server_leaving()
        elif type(message) is not Refused:
            self.strays += 1
        elif self.table.incarnation:
            self.strays += 1
            log.warning("%s refused a message: %s", self.address, message.message)
        else:
            self._turn_away(from_code(message.code, message.message))  # it did not take our hello

    def _answered(self, message: Reply, frames: Sequence[Any]) -> None:
        if self.lanes.tracked:
            self.lanes.over(message.id)
        call = self.table.answered(message, frames)
        if call is not None:
            self.ended.append(call)

    def _take_parts(self, message: Reply) -> None:
        """An answer whose large parts come by a lane. Its call ends when they are all here."""
        call, lanes = self.table.in_flight.get(message.id), self.lanes
        if call is None:  # nobody waits for it any more
            lanes.decline(message.parts)
            self._put(headers.encode(CancelCall(message.id)))
            return
        room = fresh if call.room is None else partial(call.room, message.body)
        try:
            frames = lanes.receive(message.id, message.parts, room, partial(self._parts_arrived, message))
        except OpError as error:
            self._spoilt(message.id, error.error_code, error.message)
        except MemoryError:
            self._spoilt(message.id, RESOURCE_EXHAUSTED, f"no memory here for the answer of {self.address}")
        else:
            if frames is not None:
                self._answered(message, frames)

    def _parts_arrived(self, message: Reply, frames: list[Any] | None, problem: str) -> None:
        if frames is not None:
            self._answered(message, frames)
        else:
            self._spoilt(message.id, INVALID_ARGUMENT, f"peer {self.address}: {problem}")

    def _spoilt(self, id: int, code: int, text: str) -> None:
        """An answer that cannot be taken ends its call, and what is still on the way is not wanted."""
        self._answered(Reply(id, code, text, b""), ())
        self._put(headers.encode(CancelCall(id)))

    def _greeted(self, header: bytes) -> None:
        try:
            hello = decode_hello(header, self.address)
        except WireError:
            raise
        except OpError as error:  # another major version
            self._turn_away(error)
            return
        nonce = self.lanes.offered(hello)
        if nonce:
            self._put(headers.encode(SharedMemoryAccepted(nonce)))
        self.lanes.shares(hello.nonce)
        self.table.server_up(hello.incarnation)

    def _turn_away(self, error: OpError) -> None:
        self._turned_away = True  # the socket is closed by `tend`: here the leader may be polling it
        self.fail(error.error_code, error.message)

    # -- the connection -----------------------------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """See to what has happened to the connection, and whether it is time to try again. May change `poll`."""
        link, table = self._link, self.table
        if self._turned_away:
            self._turned_away = False
            link.close()
        if link.socket is None and link.due is None and table.waiting:
            link.retry(now)  # it was refused before; somebody asks again
        refused = link.tick(now)
        if refused is not None:
            self.fail(refused.error.error_code, refused.error.message)
        # After the tick: also what a new socket and its monitor have must be asked for once before they are polled.
        for change in link.read(now):
            if isinstance(change, Up):
                self._has_input()  # has the socket learn of its connection
                self._put(self._hello)
            elif isinstance(change, Down):
                if self._has_input():
                    self._drain()  # what the connection brought while it was there; and nothing is sent to it any more
                self.ended += table.connection_lost()
                self._log_at = now + WAIT_LOG_S
                link.retry(now)
            else:
                self.fail(change.error.error_code, change.error.message)
        self.settle()
        if table.waiting and not table.incarnation and now >= self._log_at:
            self._log_at = now + WAIT_LOG_S
            trouble = link.trouble or "it has not answered our hello yet"
            log.warning("%d call(s) wait for a server at %s: %s", len(table.waiting), self.address, trouble)

    def expire(self, now: float) -> None:
        """End the calls whose time has passed."""
        if now >= self.table.deadline:
            ended = self.table.ticked(now)
            self.ended += ended
            if self.lanes.tracked:
                self._give_up(ended)
            if self.table.held_back:
                self.flush()

    def _give_up(self, calls: list[ClientCall]) -> None:
        """The server knows when a call is due, but not that its chunks are of no use any more."""
        for call in calls:
            if self.lanes.over(call.id):
                self._put(headers.encode(CancelCall(call.id)))
        self.settle()
