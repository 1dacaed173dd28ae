"""One client's call table and socket together, without a thread: the work that channel.py does
under its lock.

Rules
    One thread at a time uses a connection, and no method waits.
    A call that ends is appended to `ended`; the owner wakes the threads that wait for it, and
    empties the list.
    A method that uses the socket reads all input, and queries EVENTS last (R1 in channel.py gives
    the reason and the exceptions). Before the socket of a lost connection is closed, all messages
    that the connection has delivered are read. Several calls leave as one message (calls_machine.py
    says when). A method that reads replies also sends the calls that were gathered meanwhile.

Not here: which thread uses the connection, and which threads wait (channel.py); when to connect,
and what a failure means (dealer.py).
"""

from __future__ import annotations

import logging
import os
import select
import threading
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import zmq
from msgspec.structs import replace

from zmqdist.clock import monotonic
from zmqdist.errors import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, OpError, WireError, from_code
from zmqdist.files import fill_standard_streams
from zmqdist.limits import HEADER_PIECE_BYTES, WAIT_LOG_S
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
from zmqdist.transport.connection_snapshots import ClientSnapshot
from zmqdist.transport.dealer import Connector, Down, Up, receive_rest
from zmqdist.transport.loop import input_check
from zmqdist.transport.memory_limits import check_descriptors_and_threads
from zmqdist.transport.security import ClientSecurity
from zmqdist.transport.shm_pool import this_pool
from zmqdist.transport.transfers import BulkChannel, allocate_fresh, is_large
from zmqdist.wire import headers
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

SOCKETS_MAX: Final = 65_536

CHUNKS_PER_TURN: Final = 4
"""Number of messages of large transfers that one turn reads before other threads can take the
lock.
"""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class ProcessContext:
    """The ZeroMQ context that all clients of a process share. A forked child has a new context, and
    cannot use its parent's clients."""

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self._lock = allocate_lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                fill_standard_streams()
                check_descriptors_and_threads("the first client of this process")
                self._context = zmq.Context()
                self._context.max_sockets = SOCKETS_MAX
            return self._context


process_context = ProcessContext()
"""The ZeroMQ context of the running process. A fork replaces this variable, so read it as
`client_connection.process_context` and do not import it by name.
"""


def _forked() -> None:
    global process_context
    process_context = ProcessContext()


os.register_at_fork(after_in_child=_forked)


class ClientConnection:
    """The calls of one client and the socket that carries them; the module's docstring has the
    rules.

    Attributes:
      table: the call table.
      ended: calls that have ended, for which the owner has not woken the waiting threads yet.
      poll: `poll(timeout_ms)` over all descriptors that this connection needs; each attempt to
        connect replaces the function.
      monitor_fd: the descriptor of the monitor, which `poll` includes; the owner calls `maintain`
        after input of the monitor.
      strays: number of messages that were dropped because the client did not understand or expect
        them.
      sent, received: number of messages since the connection object was made.
      bulk: the transfers of large parts of calls and replies on the current connection.
    """

    def __init__(self, address: str, security: ClientSecurity, hello: Hello, wake_fd: int) -> None:
        """Begin to connect. Raises InvalidArgumentError if `address` is not an address."""
        self.address = address
        self.table = ClientCalls(address)
        self.ended: list[ClientCall] = []
        self.strays = 0
        self.sent = 0
        self.received = 0
        pool = this_pool()
        self._hello = encode_hello(hello if pool is None else replace(hello, memory=pool.offer))
        self._wake_fd = wake_fd
        self._refused = False
        self._log_at = monotonic() + WAIT_LOG_S
        self._connector = Connector(
            process_context.context(), address, security, opened=self._opened, closing=self._closing
        )
        self.bulk = BulkChannel(address, self._put_message)
        self._chunks = 0
        self._closing()

    # -- the socket of the current attempt ---------------------------------------------------------

    def _opened(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        # The socket is used without pyzmq's wrappers, which take as long as the functions of libzmq
        # themselves.
        backend: Any = super(zmq.Socket, socket)
        self._has_input: Callable[[], Any] = input_check(socket)
        self._send: Callable[..., Any] = backend.send
        self._recv: Callable[..., Any] = backend.recv
        self.bulk = BulkChannel(self.address, self._put_message)
        self.monitor_fd = int(monitor.getsockopt(zmq.FD))
        self._watch(int(socket.getsockopt(zmq.FD)), self.monitor_fd)

    def _closing(self, *_: object) -> None:
        self._has_input = lambda: False
        self.bulk.connection_lost()
        self.monitor_fd = -1
        self._watch()

    def _watch(self, *fds: int) -> None:
        poller = select.poll()
        for fd in (self._wake_fd, *fds):
            poller.register(fd, select.POLLIN)
        self.poll = poller.poll

    @property
    def due(self) -> float | None:
        """The time at which the owner must call `maintain`, even without input of the monitor; None
        if only input of the monitor matters.
        """
        return self._connector.due

    def snapshot(self, threads_waiting: int, stalls: int) -> ClientSnapshot:
        """Return the current figures of the client. The arguments are the figures that only the
        owner knows."""
        table, bulk = self.table, self.bulk
        return ClientSnapshot(
            connected=table.incarnation != 0,
            shared_memory=bulk.shares_memory,
            calls_waiting=len(table.waiting) + len(table.held_back),
            bytes_waiting=table.waiting_bytes
            + sum(len(call.body) for call in table.held_back.values()),
            calls_in_flight=len(table.in_flight),
            threads_waiting=threads_waiting,
            transfers=len(bulk.tracked),
            bytes_unacknowledged=bulk.unacknowledged,
            messages_sent=self.sent,
            messages_received=self.received,
            strays=self.strays,
            stalls=stalls,
        )

    def close(self, linger_s: float) -> None:
        """Close the connection, without ending any call."""
        self.bulk.finalize()
        self._connector.close(linger_s)

    def finalize(self, linger_s: float) -> None:
        """Send waiting calls and close the connection, from a finalizer, which must not take the
        lock of the shared-memory pool."""
        self.bulk.finalize()
        if self.table.waiting:
            self.flush()
        self._connector.close(linger_s)

    # -- out ---------------------------------------------------------------------------------------

    def submit(self, call: ClientCall, waits: bool) -> None:
        """Add a new call, and send it if it may leave now. A call that the table refuses ends at
        once. The caller must query EVENTS afterwards.

        Args:
          waits: whether a thread waits for the call. If so, the call does not wait to be batched.
        """
        if self.table.submitted(call) or waits:
            self._send_waiting()
        if call.frames and self.table.is_unsent(call) and not is_large(call.frames):
            # the frames are copied, because the caller may change its arrays after this method
            call.frames = [bytes(frame) for frame in call.frames]

    def flush(self) -> None:
        """Send waiting calls, if a server is connected, and read the messages that have arrived."""
        self._send_waiting()
        self.read_arrived()

    def cancel(self, call: ClientCall) -> None:
        """End a call that its caller cancels. Do nothing if the call has ended."""
        if not call.ended:
            message = self.table.cancelled(call)
            self.ended.append(call)
            self.bulk.call_ended(call.id)
            if message is not None:
                self._put(headers.encode(message))
                self.read_arrived()
            if self.table.held_back:
                self.flush()  # a call that was held back may be sent now

    def fail(self, code: int, message: str) -> None:
        """End all unanswered calls of this client with this error."""
        self.bulk.connection_lost()
        self.ended += self.table.failed(code, message)

    def _send_waiting(self) -> None:
        table = self.table
        while (table.waiting or table.held_back) and (calls := table.next_message()):
            now, frames = monotonic(), calls[0].frames
            if len(calls) > 1:
                sent = self._put(
                    headers.encode(Calls([table.request(call, now) for call in calls]))
                )
            elif frames:
                sent = self.bulk.send(table.request(calls[0], now), frames)
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
        """Send a message now, with a copy of its frames. Return False if there is no connection to
        send it."""
        if len(header) > HEADER_PIECE_BYTES:
            header, frames = headers.split_header(header, frames)
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

    # -- in ----------------------------------------------------------------------------------------

    def read_arrived(self, announced: bool = False) -> bool:
        """Read all messages that have arrived, and send the calls that were gathered meanwhile.
        Return whether any message had arrived.

        Args:
          announced: whether the socket's descriptor has signalled input, which nearly always means
            that a message has arrived.
        """
        if announced:
            try:
                self._drain()
            except zmq.Again:
                # No message had arrived, because only the first receive in `_drain` raises Again.
                # EVENTS need not be queried any more (R1), because a receive that raises Again has
                # queried them.
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
        """Read all messages that have arrived. The caller knows that there is at least one message.

        After CHUNKS_PER_TURN messages of large transfers, stop, so that other threads can take the
        lock. Then write the eventfd, so that the leader's next poll returns at once and the leader
        reads the other messages.
        """
        table = self.table
        while True:
            frame = self._recv(_NOBLOCK, False)
            self.received += 1
            header: bytes = frame.bytes
            frames: Sequence[Any] | None = ()
            if frame.more:
                header, frames = receive_rest(self._connector.socket, header)  # type: ignore[arg-type]
            try:
                if frames is None:
                    raise WireError(self.address, "a message of too many frames or bytes")
                self._handle_message(header, frames)
            except WireError as error:
                self.strays += 1
                log.warning("message dropped: %s", error)
            except MemoryError:
                # no one knows which calls the message answers, and their callers must not wait for
                # ever
                self.fail(
                    RESOURCE_EXHAUSTED,
                    f"no memory here for a message of {self.address}: request less at a time",
                )
            if (not table.in_flight and table.incarnation) or not self._has_input():
                return
            if self._chunks >= CHUNKS_PER_TURN:
                self._chunks = 0
                os.eventfd_write(self._wake_fd, 1)
                return

    def _handle_message(self, header: bytes, frames: Sequence[Any]) -> None:
        if is_hello(header):
            self._handle_hello(header)
            return
        message = headers.decode(header, self.address)
        if type(message) is Reply:
            if message.parts:
                self._receive_parts(message)
            else:
                self._end_call(message, frames)
        elif type(message) is Replies:
            for reply in message.items:
                self._end_call(reply, ())
        elif type(message) is Chunk:
            self._chunks += 1
            self.bulk.chunk_arrived(message, frames)
        elif type(message) is Credit:
            self._chunks += 1
            self.bulk.credited(message)
        elif type(message) is SendParts:
            self.bulk.send_held_parts(message)
        elif type(message) is Goodbye:
            self.table.server_leaving()
        elif type(message) is not Refused:
            self.strays += 1
        elif self.table.incarnation:
            self.strays += 1
            log.warning("%s refused a message: %s", self.address, message.message)
        else:
            # the server refused the client's hello
            self._note_refusal(from_code(message.code, message.message))

    def _end_call(self, message: Reply, frames: Sequence[Any]) -> None:
        if self.bulk.tracked:
            self.bulk.call_ended(message.id)
        call = self.table.replied(message, frames)
        if call is not None:
            self.ended.append(call)

    def _receive_parts(self, message: Reply) -> None:
        """Receive the large parts of a reply. The call ends when all of them have arrived."""
        call, bulk = self.table.in_flight.get(message.id), self.bulk
        if call is None:  # the call ended before its reply arrived
            bulk.decline(message.parts)
            self._put(headers.encode(CancelCall(message.id)))
            return
        room = allocate_fresh if call.allocate is None else partial(call.allocate, message.body)
        try:
            frames = bulk.receive(
                message.id, message.parts, room, partial(self._parts_arrived, message)
            )
        except OpError as error:
            self._fail_reply(message.id, error.error_code, error.message)
        except MemoryError:
            self._fail_reply(
                message.id,
                RESOURCE_EXHAUSTED,
                f"no memory here for the arrays in the reply of {self.address}: request less at a "
                f"time",
            )
        else:
            if frames is not None:
                self._end_call(message, frames)

    def _parts_arrived(self, message: Reply, frames: list[Any] | None, problem: str) -> None:
        if frames is not None:
            self._end_call(message, frames)
        else:
            self._fail_reply(message.id, INVALID_ARGUMENT, f"peer {self.address}: {problem}")

    def _fail_reply(self, id: int, code: int, text: str) -> None:
        """End a call whose reply cannot be received, and ask the server to stop sending it."""
        self._end_call(Reply(id, code, text, b""), ())
        self._put(headers.encode(CancelCall(id)))

    def _handle_hello(self, header: bytes) -> None:
        try:
            hello = decode_hello(header, self.address)
        except OpError as error:
            # the server speaks another major version of the protocol, or its hello is damaged
            self._note_refusal(error)
            return
        nonce = self.bulk.open_offered_memory(hello)
        if nonce:
            self._put(headers.encode(SharedMemoryAccepted(nonce)))
        self.bulk.memory_accepted(hello.nonce)
        self.table.server_up(hello.incarnation)

    def _note_refusal(self, error: OpError) -> None:
        # `maintain` closes the socket later, because the leader may be polling it now (R2 in
        # channel.py)
        self._refused = True
        self.fail(error.error_code, error.message)

    # -- the connection ----------------------------------------------------------------------------

    def maintain(self, now: float) -> None:
        """Process the monitor's events, and begin a new attempt to connect if it is time. May
        replace `poll`."""
        connector, table = self._connector, self.table
        if self._refused:
            self._refused = False
            connector.close()
        if connector.socket is None and connector.due is None and table.waiting:
            # the server refused this client earlier, but a new call justifies a new attempt
            connector.retry(now)
        refused = connector.tick(now)
        if refused is not None:
            self.fail(refused.error.error_code, refused.error.message)
        # Read the monitor after `tick`, because a new socket and its monitor must be queried once
        # before they are polled (R1).
        for change in connector.read(now):
            if isinstance(change, Up):
                self._has_input()  # querying EVENTS makes the socket notice its new connection
                self._put(self._hello)
            elif isinstance(change, Down):
                if self._has_input():
                    # reads the messages that the connection delivered before it was lost
                    self._drain()
                self.ended += table.connection_lost()
                self._log_at = now + WAIT_LOG_S
                connector.retry(now)
            else:
                self.fail(change.error.error_code, change.error.message)
        self.read_arrived()
        if table.waiting and not table.incarnation and now >= self._log_at:
            self._log_at = now + WAIT_LOG_S
            trouble = connector.trouble or "it has not replied to our hello yet"
            log.warning(
                "%d call(s) wait for a server at %s: %s", len(table.waiting), self.address, trouble
            )

    def expire(self, now: float) -> None:
        """End the calls whose deadline has passed."""
        if now >= self.table.deadline:
            ended = self.table.ticked(now)
            self.ended += ended
            if self.bulk.tracked:
                # the server knows the calls' deadlines, but would still send or await chunks
                for call in ended:
                    if self.bulk.call_ended(call.id):
                        self._put(headers.encode(CancelCall(call.id)))
                self.read_arrived()
            if self.table.held_back:
                self.flush()
