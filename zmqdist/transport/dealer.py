"""The connection of one DEALER socket to a server.

DealerConnection: the connection of a worker or coordinator, which a loop owns
    Each connection begins with a hello from each side. A message that arrives before the server's
    hello is dropped. If there is no connection, `send` returns False, and the owner keeps the
    message.
    When a connection is lost, the messages that have arrived are read first. Then `on_down` is
    called, and new attempts to connect begin. They go on without limit, with back-off.
    A refusal (`on_refused`) ends the attempts, because the server would refuse the next attempt as
    well. `reconnect` begins new attempts.

    All callbacks run in the loop's thread. All methods are called in that thread, or before the
    loop starts. The plain RPC client has a channel of its own, without a thread (channel.py).

Connector: the attempts to connect, their back-off, and the meaning of the monitor's events
    Each attempt has a new socket and a new monitor. So no message that was queued for one
    incarnation of the server reaches the next incarnation, and no event of an earlier attempt is
    mistaken for an event of the current attempt.
    ZeroMQ's own reconnecting is off, because `ClientSecurity.may_connect` must be called before
    each attempt (security.py). Each attempt looks a host name up again, so that the client finds a
    server that has returned at another address. The attempts for a name use IPv4 and IPv6 in turn,
    because the name may have only one kind of address, and the server may listen on only one kind.
    Heartbeats are ZeroMQ's own, from both sides, the server's rarer: it has more connections.

    A connector starts no thread, and waits for nothing but the look-up of a host name before a
    probe. The owner's threads use it one at a time. The owner
    polls the descriptors of `socket` and `monitor` (edge-triggered, see loop.py); calls `read`
    after input of the monitor, and `tick` at the time `due`: both methods return the changes of the
    connection; reads all messages in the socket after a Down, and then calls `retry`.

ConnectionWatch: the meaning of the events that ZeroMQ's monitor reports to the connecting side. It
does no I/O. Its owner feeds it the events of all attempts to connect a DEALER to
one address. The watch returns whether the connection is up, was lost, has failed for now, or is
refused for good, and formulates the error of a refusal.

The events of libzmq for each fault (found by experiment)
    a refused token or key     HANDSHAKE_FAILED_AUTH, at once and every time
    another mechanism          FAILED_PROTOCOL with MECHANISM_MISMATCH, or FAILED_NO_DETAIL with EPIPE: a race decides which
    a wrong key of the server  FAILED_NO_DETAIL with EPIPE in each attempt, and no other event
    a busy server              FAILED_NO_DETAIL with EAGAIN after HANDSHAKE_IVL: this is not a refusal
Some faults look alike, so after a mismatch, and after the third closed handshake in a row, the
watch asks its owner for the server's greeting (`PROBE_NEEDED`; port_probe.py reads it), which names
the server's mechanism. `judge` then decides.
"""

from __future__ import annotations

import enum
import itertools
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import zmq
from zmq import Event
from zmq.utils import z85

from zmqdist.addresses import is_name
from zmqdist.errors import (
    FailedPreconditionError,
    OpError,
    UnauthenticatedError,
    UnavailableError,
    WireError,
    from_code,
)
from zmqdist.limits import (
    FRAME_BYTES_MAX,
    FRAMES_MAX,
    HANDSHAKE_S,
    HEADER_PIECE_BYTES,
    HEARTBEAT_IVL_S,
    HEARTBEAT_TIMEOUT_S,
    MESSAGES_PER_WAKE_MAX,
    PAYLOAD_BYTES_MAX,
)
from zmqdist.messages import Message, Ping, Refused
from zmqdist.random import chance
from zmqdist.transport.endpoint import endpoint, split
from zmqdist.transport.keyring_machine import JOINING
from zmqdist.transport.loop import MORE, NOBLOCK, Loop, WatchedSocket
from zmqdist.transport.own_address import limit_unsent, our_connections, shut_down
from zmqdist.transport.pipe import BYTES, LoopPipe, Parts
from zmqdist.transport.port_probe import PortProbe
from zmqdist.transport.security import CURVE, NONE, PLAIN, ClientSecurity
from zmqdist.transport.shortcut import Shortcut, connect_on_host, find, received
from zmqdist.wire.headers import decode, encode, join_header, pieces_after, split_header
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

CLIENT_EVENTS: Final = (
    Event.CONNECTED
    | Event.CLOSED
    | Event.DISCONNECTED
    | Event.HANDSHAKE_SUCCEEDED
    | Event.HANDSHAKE_FAILED_NO_DETAIL
    | Event.HANDSHAKE_FAILED_PROTOCOL
    | Event.HANDSHAKE_FAILED_AUTH
)

CLOSES_MAX: Final = 3
"""Number of handshakes in a row that the server may close before a probe reads its greeting."""

_EVENT: Final = struct.Struct("=HI")
_serial = itertools.count()


def open_monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Start the monitor of `socket`, and return a second socket that receives the events. Close the
    second socket after `socket.disable_monitor()`.

    The queue of events has no bound. While a bounded queue is full, ZeroMQ's own thread, which
    serves all connections, would block.
    """
    context = socket.context
    endpoint = f"inproc://zmqdist.monitor.{next(_serial)}"
    socket.monitor(endpoint, events)
    monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(endpoint)
    return monitor


def decode_event(frame: bytes) -> tuple[int, int]:
    """Return the (event, value) that the first frame of a monitor message contains. The event
    decides whether the value is a descriptor, an errno, a protocol error of libzmq, or the status
    of a ZAP reply.
    """
    return _EVENT.unpack_from(frame)


class Change(enum.Enum):
    """Verdicts of the watch that need no text."""

    UP = enum.auto()
    """The handshake succeeded, so the owner sends its hello."""
    DOWN = enum.auto()
    """A connection that was up is lost. The owner can still read the messages that had arrived."""
    PROBE_NEEDED = enum.auto()
    """This attempt failed in a way that only the server's greeting can explain."""


Verdict: TypeAlias = "Change | OpError | str"
"""An OpError is the refusal: no attempt to connect will succeed until the security of the client or
of the server is changed. A str is why this attempt failed; the next attempt may succeed."""

_MECHANISM_NAMES: Final = {
    PLAIN: "the user's token (PLAIN)",
    CURVE: "CURVE keys",
    NONE: "no security",
}
_MECHANISMS: Final = {"PLAIN": PLAIN, "CURVE": CURVE, "NULL": NONE}
_ADVICE: Final = {
    PLAIN: "leave out the keys or insecure=True on this side, or start the server with keys",
    CURVE: "give this side the folder of the server's keys (ZMQDIST_KEYS_DIR)",
    NONE: "start the server with the user's token or with keys; a server without security is "
    "reached with insecure=True",
}


class ConnectionWatch:
    """The state of one connecting side over all its attempts to connect; the module's docstring
    explains it.

    Attributes:
      connected: whether a TCP connection exists and the handshake has not ended.
      up: whether the handshake succeeded and the connection has not been lost since.
    """

    def __init__(self, address: str, security: ClientSecurity) -> None:
        self.address = address
        self.security = security
        self.connected = False
        self.up = False
        self._closes = 0
        self._mismatch = False

    def begin(self) -> None:
        """Forget the state of the last attempt, because the next attempt uses a new socket."""
        self.connected = self.up = False

    def feed(self, event: int, value: int) -> Verdict | None:
        """Process one event of the monitor. Return the verdict, or None if the owner need not
        act.
        """
        if event == Event.CONNECTED:
            self.connected = True
            return None
        if event not in (
            Event.HANDSHAKE_SUCCEEDED,
            Event.DISCONNECTED,
            Event.CLOSED,
            Event.HANDSHAKE_FAILED_AUTH,
            Event.HANDSHAKE_FAILED_PROTOCOL,
            Event.HANDSHAKE_FAILED_NO_DETAIL,
        ):
            return None
        was_up, was_connected = self.up, self.connected
        self.begin()
        if event == Event.HANDSHAKE_SUCCEEDED:
            self.up = True
            self._closes = 0
            self._mismatch = False
            return Change.UP
        if event == Event.HANDSHAKE_FAILED_AUTH:
            return self._refusal(value)
        if event == Event.HANDSHAKE_FAILED_PROTOCOL and value == MISMATCH:
            self._mismatch = True
            return Change.PROBE_NEEDED
        if event in (Event.HANDSHAKE_FAILED_PROTOCOL, Event.HANDSHAKE_FAILED_NO_DETAIL):
            return self._handshake_closed(value)
        if was_up:
            return Change.DOWN
        if not was_connected:
            self._closes = 0
            return "no process listens there"
        return self._handshake_closed(0)  # the server does not speak ZeroMQ, or has ended

    def _handshake_closed(self, value: int) -> Verdict:
        # ZeroMQ's time limit for the handshake has passed, which is no refusal
        if value == zmq.EAGAIN:
            return "the server did not finish the handshake in time: it may be very busy"
        self._closes += 1
        if self._closes >= CLOSES_MAX:
            return Change.PROBE_NEEDED
        return "the server closed the connection during the handshake"

    def judge(self, mechanism: str | None) -> OpError | None:
        """Decide what the mechanism in the server's greeting means for further attempts.

        Args:
          mechanism: the mechanism in the greeting; "" for a server that does not speak ZeroMQ; None
            if no greeting arrived.

        Returns:
          The refusal; or None if another attempt may succeed.
        """
        closes, self._closes = self._closes, 0
        mismatch, self._mismatch = self._mismatch, False
        ours, address = self.security.mechanism, self.address
        if mechanism is None:
            if not mismatch:
                return None
            return FailedPreconditionError(
                f"{address} does not use {_MECHANISM_NAMES[ours]}, as this side does: give both "
                f"the same security"
            )
        theirs = _MECHANISMS.get(mechanism)
        if theirs is None:
            return FailedPreconditionError(
                f"the process that listens on {address} is not a zmqdist server: is the port right?"
            )
        if theirs != ours:
            return FailedPreconditionError(
                f"the server at {address} uses {_MECHANISM_NAMES[theirs]}"
                f"{', in plaintext' if theirs == NONE else ''}, this side "
                f"{_MECHANISM_NAMES[ours]}: {_ADVICE[theirs]}"
            )
        # the server may have been restarting
        if closes < CLOSES_MAX:
            self._closes = closes
            return None
        if ours == CURVE:
            return UnauthenticatedError(
                f"the server at {address} does not have the key that this side expects: most "
                f"likely `server.pub` is of another cluster, or a worker listens there (this side "
                f"uses {self.security.source})"
            )
        return UnavailableError(
            f"the server at {address} closed {closes} handshakes in a row: its log may say why"
        )

    def _refusal(self, status: int) -> OpError:
        if status != 400:
            why = f"its authentication failed with status {status}"
        elif self.security.mechanism == PLAIN:
            why = (
                "it belongs to another user or to a cluster with a token of its own "
                "(local_cluster, launch), "
                "or was started with another ZMQDIST_TOKEN_FILE"
            )
        elif self.security.role == JOINING:
            why = "the dispatcher has no open join token, so the ticket was used or has ended: ask for a new one"
        elif (
            self.security.mechanism == CURVE and self.security.folder and self.security.key is None
        ):
            why = (
                "it does not know the key with which this process had joined, as after a restart "
                "without its work_dir: "
                "join again with a new ticket"
            )
        elif self.security.mechanism == CURVE:
            why = "that public key is not in the server's `authorized` file"
        else:
            why = "it wants a token or a key"
        return UnauthenticatedError(
            f"the server at {self.address} refused this side as {self.security.role} "
            f"({self.security.source or 'nothing'}): {why}"
        )


BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
CONNECT_S: Final = 5.0
"""Seconds after which an attempt without a TCP connection is abandoned. A name that cannot be
looked up causes no event at all."""
FIRST_LOOKUP_S: Final = 1.0
"""Seconds for the first attempt to reach a name. It looks for IPv4 addresses only, and the second
attempt accepts any address."""
PROBE_STEP_S: Final = 0.005

_open_sockets: Final[set[zmq.Socket[bytes]]] = set()
"""Sockets of all connectors. This set keeps each socket alive until its connector closes the
socket. Without this set, the garbage collector, which finalizes the parts of a dropped client in
any order, could close a socket before the client's finalizer has sent the waiting calls.
"""


class Connector:
    """One connection and its attempts; the module's docstring has the rules.

    Attributes:
      socket, monitor: the sockets of the current attempt; None between two attempts.
      due: the time at which the owner calls `tick`, on the clock of the arguments `now`; None if
        only input of the monitor matters.
      trouble: why the last attempt failed, for the log line about a caller that waits for the
        server.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        security: ClientSecurity,
        *,
        opened: Callable[[zmq.Socket[bytes], zmq.Socket[bytes]], None],
        closing: Callable[[zmq.Socket[bytes], zmq.Socket[bytes]], None],
        heartbeat_s: float = HEARTBEAT_IVL_S,
    ) -> None:
        """Make a connector. Its first `tick` begins the first attempt.

        Args:
          opened: a function that is called when `socket` and `monitor` exist, before any message or
            event can arrive through them.
          closing: a function that is called before the two sockets are closed.
        """
        self.address = address
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.due: float | None = 0.0
        self.trouble = "not tried yet"
        self._context = context
        self._security = security
        self._opened = opened
        self._closing = closing
        self._heartbeat_s = heartbeat_s
        self._watch = ConnectionWatch(address, security)
        self._failures = 0
        self._is_name = is_name(split(address)[0])
        self._probe: PortProbe | None = None
        self._between_attempts = True
        self._fd = -1
        self._server_key = b""

    def tick(self, now: float) -> OpError | None:
        """If `due` has come, begin an attempt to connect, abandon an attempt, or take the next step
        of a probe. Return the refusal if no attempt can succeed.
        """
        if self.due is None or now < self.due:
            return None
        probe = self._probe
        if probe is not None:
            if not probe.step(now):
                self.due = now + PROBE_STEP_S
                return None
            self._probe = None
            refusal = self._watch.judge(probe.mechanism)
            if refusal is not None:
                return self._refuse(refusal)
            self._schedule_attempt(now)
            return None
        if self._between_attempts:
            return self._begin(now)
        self._fail("no connection was made in time", now)
        return None

    def read(self, now: float) -> list[Change | OpError]:
        """Read the monitor's events, and return the changes of the connection that matter to the
        owner. Call this again while the monitor's EVENTS show input.
        """
        changes: list[Change | OpError] = []
        while self.monitor is not None and int(self.monitor.getsockopt(zmq.EVENTS)) & int(
            zmq.POLLIN
        ):
            event, value = decode_event(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            self._fd = (
                value
                if event == Event.CONNECTED
                else self._fd
                if event == Event.HANDSHAKE_SUCCEEDED
                else -1
            )
            if event == Event.CONNECTED:
                our_connections[value] = limit_unsent(value)
            verdict = self._watch.feed(event, value)
            if isinstance(verdict, str):
                self._fail(verdict, now)
            elif verdict is Change.PROBE_NEEDED:
                self._drop()
                self._probe = PortProbe(self.address, now)
                self.due = now
            elif isinstance(verdict, OpError):
                changes.append(self._refuse(verdict))
            elif verdict is not None:
                if verdict is Change.UP:
                    self._failures = 0
                    self.trouble = ""
                else:
                    self.trouble = "the connection was lost"
                self.due = None
                changes.append(verdict)
            elif self._watch.connected:
                # from here ZeroMQ bounds the time of the handshake (HANDSHAKE_IVL)
                self.trouble = (
                    "the server accepted the connection, but has not finished the handshake"
                )
                self.due = None
        return changes

    def retry(self, now: float) -> None:
        """Drop the current connection, or disregard the refusal, and try again after the
        back-off.
        """
        self._drop()
        self._schedule_attempt(now)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection; sent messages have `linger_s` seconds to leave. A later `retry`
        connects again."""
        self._drop(linger_s)
        self.due = None
        if self._security.voucher is not None:
            self._security.voucher.detach(self)

    def key_revoked(self, key: bytes, problem: str) -> None:
        """End the connection if its server has shown this key, because the key was revoked. Any
        thread may call this.

        ZeroMQ notices that its descriptor was shut down. The owner of this connector then gets a
        Down, as after any other lost connection.
        """
        fd = self._fd
        if fd >= 0 and key == self._server_key:
            shut_down(fd)

    @property
    def local_address(self) -> Any:
        """The local address of the connection; None if it is not known."""
        return our_connections.get(self._fd)

    # -- one attempt -------------------------------------------------------------------------------

    def _begin(self, now: float) -> OpError | None:
        try:
            if self._security.voucher is not None:
                self._security.voucher.attach(self)
            if not self._security.may_connect(self.address):
                self._fail(
                    "no process listens there"
                    if self._security.mechanism == PLAIN
                    else "the dispatcher has not vouched for its key yet",
                    now,
                )
                return None
            self._open()
        except OpError as error:
            return self._refuse(error)
        self._between_attempts = False
        self.due = now + (FIRST_LOOKUP_S if self._is_name and not self._failures else CONNECT_S)
        return None

    def _open(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        try:
            configure(socket, self._heartbeat_s)
            self._security.apply(socket, self.address)
            # the name may have addresses of one kind only, so that the attempts use both kinds in
            # turn
            if self._is_name and self._failures % 2:
                socket.setsockopt(zmq.IPV6, 1)
            self._fd = -1
            if self._security.voucher is not None:
                self._server_key = z85.decode(self._security.expected(self.address) or b"")
            self._watch.begin()
            monitor = open_monitor(socket, CLIENT_EVENTS)
        except BaseException:
            socket.close(linger=0)
            raise
        self.socket, self.monitor = socket, monitor
        _open_sockets.update((socket, monitor))
        self._opened(socket, monitor)
        socket.connect(endpoint(self.address))

    def _fail(self, why: str, now: float) -> None:
        self.trouble = why
        self.retry(now)

    def _refuse(self, refusal: OpError) -> OpError:
        self.trouble = str(refusal)
        self._drop()
        return refusal

    def _schedule_attempt(self, now: float) -> None:
        self._between_attempts = True
        pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._failures, 10))
        self._failures += 1
        # random, so that the processes of a cluster do not all reconnect at the same moment
        self.due = now + pause_s * chance.uniform(0.5, 1.0)

    def _drop(self, linger_s: float = 0.0) -> None:
        """Close the socket, the monitor and the probe, and clear `due`."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
        self.due = None
        self._between_attempts = False
        self._watch.begin()
        self._fd = -1
        socket, monitor = self.socket, self.monitor
        if socket is None or monitor is None:
            return
        self._closing(socket, monitor)
        self.socket = self.monitor = None
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=round(linger_s * 1000))
        _open_sockets.difference_update((socket, monitor))


def configure(socket: zmq.Socket[bytes], heartbeat_s: float = HEARTBEAT_IVL_S) -> None:
    """Set the options that all connecting sockets have in common. `ClientSecurity.apply` sets the
    security options. `heartbeat_s` is the interval of ZeroMQ's heartbeats."""
    socket.set_hwm(0)
    options = {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
        # The handshake has a bound of its own, because ZeroMQ sends no heartbeats before the
        # handshake has ended.
        zmq.HANDSHAKE_IVL: round(HANDSHAKE_S * 1000),
        zmq.HEARTBEAT_IVL: round(heartbeat_s * 1000),
        zmq.HEARTBEAT_TIMEOUT: round(HEARTBEAT_TIMEOUT_S * 1000),
        zmq.CONNECT_TIMEOUT: round(CONNECT_S * 1000),
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


Buffer: TypeAlias = "bytes | bytearray | memoryview"


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
        on_up: Callable[[Hello], object],
        on_message: Callable[[Message, list[memoryview]], object],
        on_down: Callable[[], object],
        on_refused: Callable[[OpError], object],
        heartbeat_s: float = HEARTBEAT_IVL_S,
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
        self._hello = hello
        self._server_hello = hello
        self._to_server: Shortcut | LoopPipe[bytes] | None = None
        self._from_server: Shortcut | LoopPipe[bytes] | None = None
        self._silent = False
        """Whether a server has not answered by its pipe, so that none is used any more."""
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._on_refused = on_refused
        self._watched: WatchedSocket | None = None
        self._connector = Connector(
            loop.context,
            address,
            security,
            opened=self._opened,
            closing=self._closing,
            heartbeat_s=heartbeat_s,
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
        if linger_s and isinstance(self._to_server, LoopPipe):
            self._to_server.flush(linger_s)
        self._connector.close(linger_s)
        self._rearm()
        # A connection that ends long before its loop must not keep what its callbacks refer to,
        # neither by the loop nor in a cycle of references.
        self._loop.not_on_stop(self.close)
        self._on_up = self._on_message = self._on_down = self._on_refused = _ignore

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Send a message without waiting.

        Args:
          frames: the payload. Large frames are not copied, so the caller must never change them
            afterwards.

        Returns:
          False if there is no connection; then nothing was sent. True does not promise that the
          message arrives.
        """
        if self.up and self._to_server is not None:
            return self._to_server.send(encode(message), frames)
        return self.up and self._send(encode(message), frames)

    def _send(self, header: bytes, frames: Sequence[Buffer] = ()) -> bool:
        watched = self._watched
        assert watched is not None
        watched.dirty = True
        if len(header) > HEADER_PIECE_BYTES:
            header, frames = split_header(header, frames)
        last = len(frames)
        try:
            self._raw_send(header, MORE if last else NOBLOCK)
        except zmq.Again:
            # the connection is lost, and the monitor's event about it has not been read yet
            return False
        # No send below can fail: if the connection ends now, ZeroMQ loses the message as a whole.
        for number, frame in enumerate(frames, 1):
            watched.socket.send(frame, MORE if number < last else NOBLOCK, copy=False)
        return True

    # -- the link ----------------------------------------------------------------------------------

    def _opened(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self._watched = self._loop.add_socket(socket, self._read)
        self._raw_send: Callable[[bytes, int], Any] = super(zmq.Socket, socket).send
        self._raw_recv: Callable[..., Any] = super(zmq.Socket, socket).recv
        self._loop.add_socket(monitor, self._read_monitor)

    def _closing(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self._loop.remove_socket(socket)
        self._loop.remove_socket(monitor)
        self._watched = self._to_server = None
        if self._from_server is not None:
            self._loop.set_timer((self, "pipe"), None, self._pipe_silent)
            self._from_server.close()
            self._from_server = None

    def _rearm(self) -> None:
        self._loop.set_timer(self, None if self._closed else self._connector.due, self._tick)

    def _tick(self) -> None:
        refusal = self._connector.tick(self._loop.now())
        self._rearm()
        if refusal is not None:
            self._on_refused(refusal)

    def _read_monitor(self) -> None:
        for change in self._connector.read(self._loop.now()):
            if change is Change.UP:
                self._send(encode_hello(self._hello))
            elif change is Change.DOWN:
                self._lost()
            elif isinstance(change, OpError):
                self.up = False
                self._on_refused(change)
        self._rearm()

    def _lost(self) -> None:
        while self._read():
            pass
        if self._from_server is not None:
            self._from_server.drain()
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
            frame = self._raw_recv(NOBLOCK, False)
            header, frames = (
                receive_rest(watched.socket, frame.bytes) if frame.more else (frame.bytes, [])
            )
            self._deliver(header, frames)
        return True

    def _deliver(self, header: bytes, frames: list[memoryview] | None) -> None:
        """Handle a message, and whatever is wrong with it."""
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
        if self.up or self._from_server is not None:
            self._drop("second hello")
            return
        try:
            hello = self._server_hello = decode_hello(header, self.address)
        except OpError as error:
            # another version, whose text names both versions, or a damaged hello
            self._refuse(error)
            return
        port, address = split(self.address)[1], self._connector.local_address
        if (server := find(port, hello.incarnation)) is not None:
            self._from_server = Shortcut(self._loop, self._deliver)
            self._to_server = server.shortcut_from(self._hello, address, self._from_server)
        elif not self._silent and (end := connect_on_host(port, hello.incarnation)) is not None:
            pipe = LoopPipe(self._loop, BYTES, self._deliver_piped, self._pipe_ended, end)
            pipe.send(encode_hello(self._hello), [str(address).encode()])
            self._from_server = pipe
            until = self._loop.now() + HANDSHAKE_S
            self._loop.set_timer((self, "pipe"), until, self._pipe_silent)
            return
        self._begin()

    def _begin(self) -> None:
        self._loop.set_timer((self, "pipe"), None, self._pipe_silent)
        self.up = True
        self._on_up(self._server_hello)

    def _deliver_piped(self, header: bytes, parts: Parts) -> None:
        if self._to_server is None:  # the server's reply, that it has found this connection
            self._to_server = self._from_server
            self._begin()
        else:
            self._deliver(header, received(parts))

    def _pipe_ended(self) -> None:
        if self._to_server is None and self._from_server is not None:
            self._from_server.close()
            self._from_server = None
            self._begin()
        else:
            self._lost()

    def _pipe_silent(self) -> None:
        # the server may still answer there, so that its replies would be lost for this connection
        self._silent = True
        self._lost()

    def _drop(self, reason: str) -> int:
        """Count a dropped message. Return how many were dropped for this reason before."""
        before = self.dropped.get(reason, 0)
        self.dropped[reason] = before + 1
        return before


def _ignore(*_: object) -> None:
    """Do nothing, as the callback of a connection that was closed."""


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
        frame = socket.recv(NOBLOCK, copy=False)
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
