"""The client's side of calls: many threads, one DEALER socket, and usually no thread of its own.

Theory of operation: leader and followers The first thread that waits for a reply becomes the
    leader: it polls the descriptors of the socket, of the socket's monitor and of a wake descriptor, which
    other threads write to wake the leader, and it reads for all threads. Other waiting threads are
    followers: each sleeps on a lock of its own until its call has ended or it is promoted. While no
    thread waits, replies stay in ZeroMQ's receive queue. A blocking call costs no more than on the
    bare socket, because the waiting thread itself reads the reply.

    A reader thread leads in the same way, but only for work that no waiting thread does: a call has
    a callback, a call waits for a server while its caller does something else, or arguments are
    still being sent in chunks.

    Calls that no thread waits for are gathered (P8 of calls_machine.py says which leave at once).
    They leave together when a thread begins to wait for a reply or has read a message, or when the
    reader thread wakes: every GATHER_S while calls are gathered.

    A leader spins (polls without sleeping) for SPIN_S before it sleeps, because waking a thread
    takes as long as a quick reply. It does not spin while followers wait, nor after several spins
    in vain.

Rules
    R1  A thread uses the socket only under the lock. Before it releases the lock, it queries EVENTS
        and finds no input, because ZeroMQ's descriptor signals only new input, and any use of the
        socket may consume that signal. There are three exceptions: no call is in flight; the thread
        has sent a call and becomes the leader, which queries EVENTS before it sleeps or leaves; or
        large transfers are under way. During large transfers a thread may release the lock with
        input left, so that other threads can take the lock; the eventfd signals that input.
    R2  The leader polls outside the lock. A thread that ends the leader's call writes the eventfd.
        Only the leader, or any thread while there is no leader, opens and closes sockets, so that
        no descriptor number is reused while the leader polls that number.
    R3  A follower sleeps on its own lock, never on another thread's.
    R4  A leader that leaves, for any reason, promotes a follower, if there is one.
    R5  The thread that takes a follower out of `_followers` (`dict.pop` decides which) releases the
        follower's lock.
    R6  A follower that wakes finds out under the channel's lock whether its call has ended, it was
        promoted, or the deadline has passed.
    R7  While the main thread runs code of the channel, Ctrl-C sets a flag and wakes the main
        thread; KeyboardInterrupt is raised outside the lock (InterruptGuard). If a signal
        handler of the program raises inside the channel, the reply that was being read may be lost,
        but no thread is left waiting without a leader.
    R8  A thread sleeps for at most SLICE_S at a time. If a thread finds input only because this
        time has passed, a signal was lost. This is a bug, and `stalls` counts it.

Do not use a channel in a signal handler or a finalizer: the thread that is interrupted may hold the
lock.

Not here: the states of a call (calls_machine.py), when to connect and what a failure means
(dealer.py), the meaning of a value (rpc).

ClientConnection: one client's call table and socket together, without a thread: the work that a
channel does under its lock
    One thread at a time uses a connection, and no method waits.
    A call that ends is appended to `ended`; the owner wakes the threads that wait for it, and
    empties the list.
    A method that uses the socket reads all input, and queries EVENTS last (R1 gives the reason and
    the exceptions). Before the socket of a lost connection is closed, all messages that the
    connection has delivered are read. Several calls leave as one message (calls_machine.py says
    when). A method that reads replies also sends the calls that were gathered meanwhile.

The InterruptGuard around the code: no thread enters the code after a fork, and Python raises no
KeyboardInterrupt inside it. While the main thread runs guarded code, the guard replaces Python's
handler of SIGINT by its own, which sets a flag and wakes the thread. When the thread leaves the
guarded code, the guard raises KeyboardInterrupt if the flag is set. An exception inside would lose
the message that the thread is reading.

If Ctrl-C arrives after Python's last check for signals and before the system call that sleeps, the
thread notices Ctrl-C when that system call returns, which is after SLICE_S at the
latest.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal costs 20 times as much
import logging
import os
import threading
import weakref
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Final, Literal

import zmq
from msgspec.structs import replace

from zmqdist.background import check_threads, in_background
from zmqdist.callbacks import Callbacks
from zmqdist.clock import monotonic, sleep
from zmqdist.errors import (
    CANCELLED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    FailedPreconditionError,
    OpError,
    WireError,
    from_code,
)
from zmqdist.files import fill_standard_streams
from zmqdist.limits import HEADER_PIECE_BYTES, HEARTBEAT_IVL_S, WAIT_LOG_S
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
from zmqdist.platforms import (
    POLL_READ,
    close_wake_fd,
    new_poll,
    open_wake_fd,
    read_wake_fd,
    register_at_fork,
    write_wake_fd,
)
from zmqdist.task_context import settle_update
from zmqdist.transport.calls_machine import ClientCall, ClientCalls
from zmqdist.transport.connection_snapshots import ClientSnapshot
from zmqdist.transport.dealer import Change, Connector, receive_rest
from zmqdist.transport.loop import MORE, NOBLOCK, input_check
from zmqdist.transport.memory_limits import check_descriptors_and_threads
from zmqdist.transport.security import ClientSecurity
from zmqdist.transport.shm_pool import Block, this_pool
from zmqdist.transport.transfers import BulkChannel, allocate_fresh, is_large
from zmqdist.wire import headers
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

SOCKETS_MAX: Final = 65_536

_yield_core: Final[Callable[[], None]] = getattr(os, "sched_yield", partial(sleep, 0))

CHUNKS_PER_TURN: Final = 4
"""Number of messages of large transfers that one turn reads before other threads can take the
lock.
"""


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
"""The ZeroMQ context of the running process. A fork replaces this variable."""


def _forked() -> None:
    global process_context
    process_context = ProcessContext()
    _unsent.clear()


register_at_fork(after_in_child=_forked)


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

    def __init__(
        self,
        address: str,
        security: ClientSecurity,
        hello: Hello,
        wake_fd: int,
        heartbeat_s: float,
    ) -> None:
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
            process_context.context(),
            address,
            security,
            opened=self._opened,
            closing=self._closing,
            heartbeat_s=heartbeat_s,
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
        poller = new_poll()
        for fd in (self._wake_fd, *fds):
            poller.register(fd, POLL_READ)
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
            bytes_unacknowledged=bulk.transfers.pace.unacknowledged,
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
        if (
            call.frames
            and self.table.is_unsent(call)
            and not is_large(call.frames, Block in map(type, call.frames))
        ):
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
                self._send(header, NOBLOCK)
                self.sent += 1
                return True
            self._send(header, MORE)
            for frame in frames[:-1]:
                self._send(frame, MORE)
            self._send(frames[-1], NOBLOCK)
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
            frame = self._recv(NOBLOCK, False)
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
                write_wake_fd(self._wake_fd, 1)
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
        # `maintain` closes the socket later, because the leader may be polling it now (R2)
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
        refusal = connector.tick(now)
        if refusal is not None:
            self.fail(refusal.error_code, refusal.message)
        # Read the monitor after `tick`, because a new socket and its monitor must be queried once
        # before they are polled (R1).
        for change in connector.read(now):
            if change is Change.UP:
                self._has_input()  # querying EVENTS makes the socket notice its new connection
                self._put(self._hello)
            elif change is Change.DOWN:
                if self._has_input():
                    # reads the messages that the connection delivered before it was lost
                    self._drain()
                self.ended += table.connection_lost()
                self._log_at = now + WAIT_LOG_S
                connector.retry(now)
            elif isinstance(change, OpError):
                self.fail(change.error_code, change.message)
        self.read_arrived()
        if table.waiting and not table.incarnation and now >= self._log_at:
            self._log_at = now + WAIT_LOG_S
            log.warning(
                "%d call(s) wait for a server at %s: %s",
                len(table.waiting),
                self.address,
                connector.trouble or "it has not replied to our hello yet",
            )

    def expire(self, now: float) -> None:
        """End the calls whose deadline has passed."""
        if now >= self.table.deadline:
            expired_calls = self.table.ticked(now)
            self.ended += expired_calls
            if self.bulk.tracked:
                # the server knows the calls' deadlines, but would still send or await chunks
                for call in expired_calls:
                    if self.bulk.call_ended(call.id):
                        self._put(headers.encode(CancelCall(call.id)))
                self.read_arrived()
            if self.table.held_back:
                self.flush()


_SIGINT: Final = int(_signal.SIGINT)


class InterruptGuard:
    """The guard of one channel. Use `with guard as shielded:` around all code that takes the
    channel's lock. Do not nest such blocks.

    Attributes:
      interrupted: whether Ctrl-C has arrived since the main thread entered the guarded code. If so,
        the main thread should leave that code. Only a `shielded` thread reads this flag.
      wake: the function that the signal handler calls after it has written the eventfd; None while
        the main thread does not sleep. It must be safe to call at any point of the main thread's
        code.
    """

    def __init__(self, address: str, wake_fd: int) -> None:
        self.interrupted = False
        self.wake: Callable[[], None] | None = None
        self._address = address
        self._wake_fd = wake_fd
        self._process = process_context
        self._shields = False

    @property
    def forked(self) -> bool:
        """Whether this process was forked after the guard had been made."""
        return self._process is not process_context

    def check(self) -> None:
        """Raise FailedPreconditionError if this process was forked after the guard had been
        made.
        """
        if self._process is not process_context:
            raise FailedPreconditionError(
                f"the client of {self._address} was made before a fork: make a new one in this "
                f"process"
            )

    def __enter__(self) -> bool:
        """Return whether this thread is now shielded from Ctrl-C: only the main thread is, and only
        if SIGINT has Python's own handler.
        Raises the errors of `check`."""
        self.check()
        if (
            get_ident() != self._process.main_thread
            or _signal.getsignal(_SIGINT) is not _signal.default_int_handler
        ):
            return False
        _signal.signal(_SIGINT, self._on_sigint)
        self._shields = True
        return True

    def __exit__(self, *exc_info: object) -> None:
        if self._shields and get_ident() == self._process.main_thread:
            self._shields = False
            _signal.signal(_SIGINT, _signal.default_int_handler)
            if self.interrupted:
                self.interrupted = False
                raise KeyboardInterrupt

    def _on_sigint(self, signum: int, frame: object) -> None:
        self.interrupted = True
        write_wake_fd(self._wake_fd, 1)
        if self.wake is not None:
            self.wake()


SLICE_S: Final = 1.0
GATHER_S: Final = 0.002
"""Seconds for which calls that no thread waits for are gathered, to be sent together. A call is
delayed by at most twice this time."""
CHECK_EVERY_CALLS: Final = 32
"""Number of gathered calls between two checks for replies, because a check costs as much as
gathering a few calls."""
SPIN_S: Final = 0.0002
"""Seconds for which a leader polls before it sleeps: as long as a round trip on one host takes, if
the server replies at once."""
SPINS_IN_VAIN_MAX: Final = 4
"""Number of vain spins in a row after which replies count as slow, so that a leader spins only in
every SPIN_AGAIN-th wait."""
SPIN_AGAIN: Final = 32
FRESH_S: Final = 0.0002
"""Seconds after a check of the connection in which a new call does not check again, because a
blocking call has just made that check."""
YIELD_S: Final = 0.0001
"""Seconds for which the leader of a large transfer sleeps after it has woken a thread, so that this
thread can run."""
LINGER_S: Final = 0.5
"""Seconds that messages which were sent right before `close` have to leave."""
_NO_THREAD: Final = 0
# Channels with callbacks to call. This set keeps them from being collected, even while their reader
# threads sleep.
_channels_with_callbacks: Final[set[Channel]] = set()


class _Sleeper:
    """A thread that sleeps on a lock of its own. *Invariant*: the lock is held while the sleeper is
    in `_followers` or `_parked`."""

    __slots__ = ("call", "lock", "promoted", "thread")

    def __init__(self, call: ClientCall | None) -> None:
        self.call = call
        self.thread = get_ident()
        self.promoted = False
        self.lock = allocate_lock()
        self.lock.acquire()


def _release(sleepers: dict[_Sleeper, None], sleeper: _Sleeper) -> None:
    """Wake a sleeper, unless another thread does so (R5). The handler of Ctrl-C may call this at
    any point of the main thread."""
    if sleepers.pop(sleeper, sleeper) is None:
        sleeper.lock.release()


_unsent: Final[set[weakref.ref[Channel]]] = set()
"""Channels with calls that wait to be batched. Threads add and pop at the same time."""


def send_gathered() -> None:
    """Send what the channels of this process gather, because a thread is about to wait: the caller
    of several calls to several servers waits for all of them."""
    for _ in range(len(_unsent)):  # others may go on gathering
        try:
            channel = _unsent.pop()()
        except KeyError:  # another thread has taken the last
            return
        if channel is not None:
            with channel._guard, channel._lock:
                if not channel.closed:
                    channel._connection.flush()
                    channel._wake_waiters()


class Channel:
    """The client's side of calls to one address, for any number of threads. Dropping the last
    reference closes the channel.

    Attributes:
      address: "host:port".
      closed: whether `close` was called.
      callbacks: the thread for the program's callbacks, which may wait for calls of this channel.
        It ends with the channel.
      stalls: number of waits that lasted SLICE_S although there was input (R8). A value above 0 is
        a bug of zmqdist.
    """

    def __init__(
        self,
        address: str,
        security: ClientSecurity,
        hello: Hello,
        heartbeat_s: float = HEARTBEAT_IVL_S,
    ) -> None:
        """Begin to connect, without waiting for the server. Raises InvalidArgumentError for a wrong
        address."""
        check_threads()
        self.address = address
        self.stalls = 0
        self.callbacks = Callbacks()
        self._wake_fd = open_wake_fd()
        self._connection = ClientConnection(address, security, hello, self._wake_fd, heartbeat_s)
        self._lock = allocate_lock()
        self._turnstile = allocate_lock()
        self._woke_waiters = False
        self._leader = _NO_THREAD
        self._leader_call: ClientCall | None = None
        self._followers: dict[_Sleeper, None] = {}
        self._parked: dict[_Sleeper, None] = {}
        self._reader: threading.Thread | None = None
        self._due_callbacks: list[tuple[Callable[[ClientCall], object], ClientCall]] = []
        self._calls_with_callbacks = 0
        self._checked_at = 0.0
        self._gathering = False
        self._spins_in_vain = 0
        self._guard = InterruptGuard(address, self._wake_fd)
        self._reference = weakref.ref(self)
        self.closed = False
        self._connection.maintain(monotonic())

    # -- what callers do ---------------------------------------------------------------------------

    def submit(self, call: ClientCall) -> None:
        """Send the call and return at once. Small frames are copied. The caller must not change
        large frames (transfers.py) any more.

        On a closed channel the call ends at once with FAILED_PRECONDITION. Raises
        FailedPreconditionError after a fork.
        """
        settle_update()
        if self._gathering and not call.frames and not call.later and self._gather(call):
            return
        with self._guard:
            self._submit(call, False)

    def check_process(self) -> None:
        """Raise FailedPreconditionError after a fork."""
        self._guard.check()

    def call_and_wait(self, call: ClientCall) -> None:
        """Send the call and wait until it has ended. Raises the errors of `submit`, and
        KeyboardInterrupt."""
        settle_update()
        with self._guard as shielded:
            if self._submit(call, True):
                self._lead(call, shielded)
            elif not call.ended:
                self._wait(call, shielded)

    def wait(self, call: ClientCall) -> None:
        """Wait until the call has ended. Any number of threads may wait for the same call."""
        if call.ended:
            return
        send_gathered()
        with self._guard as shielded:
            self._wait(call, shielded)

    def poll(self, call: ClientCall) -> bool:
        """Read the messages that have arrived, end expired calls, and return whether the call has
        ended. Does not wait."""
        if call.ended:
            return True
        with self._guard, self._lock:
            now = monotonic()
            if not self.closed:
                self._connection.flush()
                if self._leader == _NO_THREAD:
                    self._check_connection(now)
            self._connection.expire(now)
            self._wake_waiters()
        return call.ended

    def cancel(self, call: ClientCall, *, only_unsent: bool = False) -> bool:
        """End the call with CANCELLED, and send the server a message that cancels it. Return False
        if the call had ended before or, with `only_unsent`, was sent."""
        with self._guard, self._lock:
            if call.ended or self.closed:
                return False
            if only_unsent and not self._connection.table.is_unsent(call):
                return False
            self._connection.cancel(call)
            self._wake_waiters()
            return True

    def cancel_all(self) -> bool:
        """Cancel all unanswered calls. Return whether the channel is open and has a server."""
        with self._guard, self._lock:
            if self.closed:
                return False
            for call in self._connection.table.unanswered:
                self._connection.cancel(call)
            self._wake_waiters()
            return bool(self._connection.table.incarnation)

    def add_done_callback(self, call: ClientCall, fn: Callable[[ClientCall], object]) -> None:
        """Have the reader thread call `fn(call)` once when the call has ended. If it has ended
        already, this thread calls `fn` at once.

        `fn` must not wait, because the reader thread may be the only one that reads replies.
        """
        with self._guard, self._lock:
            if not call.ended:
                if call.callbacks is None:
                    call.callbacks = []
                    self._calls_with_callbacks += 1
                    _channels_with_callbacks.add(self)
                call.callbacks.append(fn)
                if self._connection.table.waiting:
                    self._connection.flush()
                    self._wake_waiters()
                self._ensure_reader()
                return
        fn(call)

    def close(self) -> None:
        """End all unanswered calls with CANCELLED, and close the connection. Messages just sent
        have LINGER_S to leave. Idempotent."""
        if self._guard.forked:
            return
        with self._guard, self._lock:
            if self.closed:
                return
            self.closed, self._gathering = True, False
            self._connection.flush()
            self._connection.fail(CANCELLED, f"the client of {self.address} was closed")
            self._wake_waiters()
            if self._leader == _NO_THREAD:
                self._connection.close(LINGER_S)
            else:
                write_wake_fd(self._wake_fd, 1)
            self._wake_reader()
        self.callbacks.close()

    @property
    def shares_memory(self) -> bool:
        """Whether the server can open this process's shared memory, as far as this client knows."""
        return self._connection.bulk.shares_memory

    def snapshot(self) -> ClientSnapshot:
        """Return the current figures. Raises FailedPreconditionError after a fork."""
        with self._guard, self._lock:
            return self._connection.snapshot(
                len(self._followers) + (self._leader_call is not None), self.stalls
            )

    def __del__(self) -> None:
        if "_guard" in self.__dict__ and not self._guard.forked:
            # The finalizer of a stream may have passed this channel to another thread, which may
            # hold the lock now.
            if not self._lock.acquire(False):
                in_background("zmqdist-client-close", self.close)
                return
            self.closed, self._gathering = True, False
            self._connection.finalize(LINGER_S)
            self._wake_reader()
            self._lock.release()
            self.callbacks.close()
        if "_wake_fd" in self.__dict__:
            close_wake_fd(self._wake_fd)

    # -- sending -----------------------------------------------------------------------------------

    def _gather(self, call: ClientCall) -> bool:
        """Add a call that can be batched. Return False if the call needs `_submit`. Enter the guard
        only to use the socket."""
        self._guard.check()
        with self._lock:
            connection, table = self._connection, self._connection.table
            if not self._gathering or not table.in_flight or not table.incarnation:
                return False
            leave = table.submitted(call)
            if not leave and len(table.waiting) % CHECK_EVERY_CALLS:
                return True
        with self._guard, self._lock:
            if leave:
                connection.flush()
            elif self._leader == _NO_THREAD and not self.closed:
                connection.read_arrived()
            self._wake_waiters()
        return True

    def _submit(self, call: ClientCall, waits: bool) -> bool:
        """Submit a new call. Return whether this thread has become the leader, which happens only
        if `waits` is True."""
        now = monotonic()
        with self._turnstile, self._lock:
            if self.closed:
                call.end(FAILED_PRECONDITION, f"the client of {self.address} is closed")
                return False
            connection, table = self._connection, self._connection.table
            if self._leader == _NO_THREAD and (
                now - self._checked_at > FRESH_S or not table.incarnation
            ):
                self._check_connection(now)
            connection.submit(call, waits)
            if table.waiting:
                if table.incarnation:
                    _unsent.add(self._reference)
                    if not call.later:
                        self._begin_gathering()
                else:
                    self._ensure_connecting(now, waits)
            if not waits and (
                table.held_back or (connection.bulk.tracked and connection.bulk.transfers.sending)
            ):
                # until all of this call has left, a thread must read the server's acknowledgments,
                # requests for parts, and replies
                self._ensure_reader()
            lead = waits and self._leader == _NO_THREAD and not call.ended
            if lead:
                self._leader = get_ident()
                self._leader_call = call
            else:
                connection.read_arrived()
            if connection.ended:
                self._wake_waiters()
            return lead

    def _ensure_connecting(self, now: float, waits: bool) -> None:
        """Maintain the connection now, and make sure that a thread maintains it later, because a
        call waits for a server."""
        if self._leader == _NO_THREAD:
            self._connection.maintain(now)
        else:
            write_wake_fd(self._wake_fd, 1)
        if not waits:
            self._ensure_reader()

    def _begin_gathering(self) -> None:
        """Have the reader thread send the gathered calls soon."""
        if not self._gathering:
            self._gathering = True
            self._ensure_reader()
            # Wake the reader thread if it is the leader, because its poll may sleep for longer than
            # GATHER_S.
            if self._leader != _NO_THREAD and self._leader_call is None:
                write_wake_fd(self._wake_fd, 1)

    # -- waiting -----------------------------------------------------------------------------------

    def _wait(self, call: ClientCall, shielded: bool) -> None:
        me = None
        with self._turnstile, self._lock:
            if self._connection.table.waiting:
                self._connection.flush()
                self._wake_waiters()
            if call.ended:
                return
            if self._leader == _NO_THREAD:
                self._leader = get_ident()
                self._leader_call = call
            else:
                me = _Sleeper(call)
                self._followers[me] = None
                if call.waiters is None:
                    call.waiters = []
                call.waiters.append(me)
        if me is None or self._follow(me, call, shielded):
            self._lead(call, shielded)

    def _lead(self, call: ClientCall, shielded: bool) -> None:
        """Read for all threads, as the leader, until the call of this thread has ended or Ctrl-C
        has arrived."""
        # query EVENTS before the first sleep: a send may have consumed the signal of input (R1)
        slice_ms = 0.0
        try:
            while True:
                ready = self._connection.poll(slice_ms) if slice_ms else self._spin()
                if self._connection.bulk.tracked:
                    self._woke_waiters = _yield_lock(self._turnstile, self._woke_waiters)
                with self._lock:
                    self._after_poll(ready, slice_ms)
                    if call.ended or (shielded and self._guard.interrupted):
                        self._step_down()
                        return
                slice_ms = self._slice_ms(call.due)
        except BaseException:
            # a signal handler may raise, and the other threads need a leader (R4)
            with self._lock:
                if self._leader == get_ident():
                    self._connection.read_arrived()
                    self._wake_waiters(self._leader)
                    self._step_down()
            raise

    def _spin(self) -> list[tuple[int, int]]:
        """Poll without sleeping for SPIN_S, unless followers wait or recent spins were in vain.
        Return the ready descriptors."""
        if self._followers:
            return []
        if self._spins_in_vain >= SPINS_IN_VAIN_MAX:
            self._spins_in_vain += 1
            if self._spins_in_vain % SPIN_AGAIN:
                return []
        poll = self._connection.poll
        end = monotonic() + SPIN_S
        while not (ready := poll(0)):
            if monotonic() >= end:
                self._spins_in_vain += 1
                return ready
            _yield_core()  # lets ZeroMQ's own thread, which receives the reply, run on this core
        self._spins_in_vain = 0
        return ready

    def _follow(self, me: _Sleeper, call: ClientCall, shielded: bool) -> bool:
        """Sleep until the call has ended, Ctrl-C has arrived, or this thread has become the leader;
        return True in the last case."""
        if shielded:
            followers = self._followers
            self._guard.wake = lambda: _release(followers, me)
        try:
            while True:
                # A Ctrl-C that arrived before `wake` was set did not wake this thread, which then
                # must not sleep.
                slice_s = 0.0 if shielded and self._guard.interrupted else SLICE_S
                me.lock.acquire(True, max(0.0, min(slice_s, call.due - monotonic())))
                with self._turnstile, self._lock:
                    if self._ends_sleep(me, call, shielded):
                        return me.promoted
        except BaseException:
            # a signal handler of the program may raise, and this thread then waits no longer
            with self._lock:
                self._leave_followers(me, call)
            raise
        finally:
            if shielded:
                self._guard.wake = None

    def _ends_sleep(self, me: _Sleeper, call: ClientCall, shielded: bool) -> bool:
        """Return whether this follower's sleep is over (R6). If it is over and `me.promoted` is
        set, the follower is the leader now."""
        asleep = me in self._followers
        if call.ended or (shielded and self._guard.interrupted):
            self.stalls += call.ended and asleep
            self._leave_followers(me, call)
            return True
        if me.promoted:
            return True
        if self._leader == _NO_THREAD:
            self.stalls += asleep
            self._promote(me)
            return True
        self._connection.expire(monotonic())
        self._wake_waiters()
        if not call.ended and not asleep:
            # Ctrl-C woke this thread, but `interrupted` is not set any more: sleep again
            self._followers[me] = None
        return call.ended

    def _leave_followers(self, me: _Sleeper, call: ClientCall) -> None:
        self._followers.pop(me, None)
        if call.waiters is not None and me in call.waiters:
            call.waiters.remove(me)
        if me.promoted:
            me.promoted = False
            if self._leader == me.thread:
                self._step_down()

    def _promote(self, follower: _Sleeper) -> None:
        follower.promoted = True
        self._leader, self._leader_call = follower.thread, follower.call
        _release(self._followers, follower)

    def _step_down(self) -> None:
        """Stop leading, and promote a follower if there is one (R4)."""
        self._leader = _NO_THREAD
        self._leader_call = None
        if self._followers:
            self._promote(next(reversed(self._followers)))
        elif self.closed:
            self._connection.close(LINGER_S)
        elif self._parked and self._reader_needed():
            self._wake_reader()

    def _slice_ms(self, due: float) -> float:
        """Return how many milliseconds a leader may sleep: until `due` or the connection's next
        step, and at most SLICE_S."""
        connection_due = self._connection.due
        due = due if connection_due is None else min(due, connection_due)
        return max(0.0, min(SLICE_S, due - monotonic()) * 1000)

    # -- under the lock ----------------------------------------------------------------------------

    def _after_poll(self, ready: list[tuple[int, int]], slept_ms: float) -> None:
        """Read messages, maintain the connection and end expired calls, after the leader has polled
        for `slept_ms` at most."""
        connection = self._connection
        if self.closed:
            return
        tend, announced = not connection.table.incarnation, False
        for fd, _ in ready:
            if fd == self._wake_fd:
                read_wake_fd(fd)
            elif fd == connection.monitor_fd:
                tend = True
            else:
                announced = True
        # Only a sleep of SLICE_S counts as a stall, because input often arrives just when a shorter
        # sleep ends.
        unannounced = not ready and slept_ms >= SLICE_S * 1000 and not connection.poll(0)
        if unannounced and self._leader_call is not None:
            self.stalls += self._leader_call.ended
        if connection.read_arrived(announced):
            self.stalls += unannounced
        now = self._checked_at = monotonic()
        if tend:
            connection.maintain(now)
        if now >= connection.table.deadline:
            connection.expire(now)
        if connection.ended:
            self._wake_waiters(self._leader)

    def _check_connection(self, now: float) -> None:
        """Read the messages that have arrived, and maintain the connection, without waiting. Use
        this while there is no leader."""
        self._checked_at = now
        connection = self._connection
        connection.read_arrived()
        if not connection.table.incarnation or connection.poll(0):
            connection.maintain(now)

    def _wake_waiters(self, reader: int = _NO_THREAD) -> None:
        """Wake the threads whose calls have ended, and queue callbacks. If the leader calls this,
        `reader` is its thread."""
        ended_calls = self._connection.ended
        for call in ended_calls:
            if call is self._leader_call and self._leader != reader:
                # the call of the leader has ended, so end its poll (R2)
                write_wake_fd(self._wake_fd, 1)
            if call.waiters is not None:
                self._woke_waiters = True
                for follower in call.waiters:
                    _release(self._followers, follower)
                call.waiters = None
            if call.callbacks is not None:
                self._due_callbacks += [(fn, call) for fn in call.callbacks]
                call.callbacks = None
                self._calls_with_callbacks -= 1
                self._ensure_reader()
        ended_calls.clear()

    # -- the reader thread -------------------------------------------------------------------------

    def _reader_needed(self) -> bool:
        connection, table = self._connection, self._connection.table
        waiting = table.held_back or (table.waiting and not table.incarnation)
        return bool(
            self._calls_with_callbacks
            or self._due_callbacks
            or waiting
            or connection.bulk.transfers.sending
        )

    def _ensure_reader(self) -> None:
        if self._reader is None:
            self._reader = threading.Thread(
                target=_reader_main,
                args=(weakref.ref(self),),
                name=f"zmqdist-reader-{self.address}",
                daemon=True,
            )
            self._reader.start()
        else:
            self._wake_reader()

    def _wake_reader(self) -> None:
        for sleeper in tuple(self._parked):
            _release(self._parked, sleeper)

    def reader_turn(self, me: _Sleeper) -> float | None:
        """Do the reader thread's work between two sleeps. Return for how many seconds the thread
        may sleep; None if it may end."""
        with self._lock:
            to_call, self._due_callbacks = self._due_callbacks, []
        for fn, call in to_call:
            try:
                fn(call)
            except BaseException:
                # the reader thread must survive a callback that raises, because other callbacks are
                # due
                log.exception("a callback of a call to %s raised", self.address)
        to_call.clear()
        with self._lock:
            if not (self._calls_with_callbacks or self._due_callbacks):
                _channels_with_callbacks.discard(self)
            woken = self._parked.pop(me, me) is me
            me.lock.acquire(False)  # a release after the time-out would end the next sleep at once
            if not woken:
                self._send_gathered()
                self._connection.expire(monotonic())
                self._wake_waiters()
            if self._due_callbacks:
                return 0.0
            if self.closed:
                self._reader = None
                return None
            if self._leader == _NO_THREAD and self._reader_needed():
                self._leader = me.thread
            elif woken or self._gathering or self._reader_needed():
                self._parked[me] = None
                left_s = self._connection.table.deadline - monotonic()
                return max(0.0, min(GATHER_S if self._gathering else SLICE_S, left_s))
            else:
                self._reader = None
                return None
        self._lead_one_slice()
        return 0.0

    def _lead_one_slice(self) -> None:
        try:
            slice_ms = min(
                GATHER_S * 1000 if self._gathering else inf,
                self._slice_ms(self._connection.table.deadline),
            )
            ready = self._connection.poll(slice_ms)
            if self._connection.bulk.tracked:
                self._woke_waiters = _yield_lock(self._turnstile, self._woke_waiters)
            with self._lock:
                self._after_poll(ready, slice_ms)
                self._send_gathered()
                self._wake_waiters(self._leader)
        finally:
            with self._lock:
                self._step_down()

    def _send_gathered(self) -> None:
        """Send the gathered calls. If there are none, or no server is connected, stop gathering, so
        that the reader sleeps longer."""
        table = self._connection.table
        if table.waiting and table.incarnation:
            if self._leader == _NO_THREAD:
                self._check_connection(monotonic())
            self._connection.flush()
        else:
            self._gathering = False


def _yield_lock(turnstile: LockType, woke: bool) -> Literal[False]:
    """Let the threads that wait for the channel's lock take it before this leader does. Return the
    new value of `_woke_waiters`."""
    if woke:
        # without the sleep, the woken thread would wait for the GIL for a whole switch interval
        sleep(YIELD_S)
    with turnstile:
        return False


def _reader_main(channel_ref: weakref.ref[Channel]) -> None:
    """Run the reader thread. While the thread sleeps, it does not refer to the channel, so that an
    unused channel can be collected."""
    me = _Sleeper(None)
    while (channel := channel_ref()) is not None:
        sleep_s = channel.reader_turn(me)
        if sleep_s is None:
            return
        del channel
        if sleep_s:
            me.lock.acquire(True, sleep_s)
