"""The one listening socket of a server: the connected peers, and the messages from and to them.

Rules
    A peer is one connection. ZeroMQ chooses its routing id, which is never used again; the peer's
    hello has its name and incarnation. A connection begins with the peer's hello, and the server
    replies with its own. Messages of the peer before its hello, or after a hello of another major
    version, are dropped. The handshake alone decides the peer's role (security.py).
    The router calls the handler of a message's kind, if the peer's role may send that kind; `admin`
    may send all kinds. A peer whose role is `revoked` gets one reply, which names the reason: the
    router sends this reply in place of the server's hello. A peer whose role is `joining` gets the
    hello, and may send only the kinds that are registered for this role.
    No message of a peer raises an error in the server. The router counts a wrong message in
    `dropped`, sends Refused to the peer (at most REFUSALS_MAX times), and logs the first wrong
    message of each peer.
    `send` never waits. It returns False if the message was not sent; True does not promise that the
    message arrives.

Lost connections
    The monitor reports which descriptor was closed, not which peer has gone, and the system reuses
    descriptor numbers at once. So when the end of a connection is reported, all peers whose
    messages arrived on that descriptor become suspects. The router sends each suspect a Ping, and
    only ZeroMQ's "host unreachable" proves that the suspect has gone. The socket learns of the end
    of a connection later than the monitor reports it, because ZeroMQ's thread and the loop pass it
    on in three steps, behind all their other work. So the router repeats the Ping, each time after
    twice the pause, until the suspect has gone, or until as many peers of its descriptor have gone
    as ends were reported. The router sets no limit to the time of these Pings, because after such a
    limit the calls, streams and threads of a lost peer would remain for ever.
    The router may read the first message of a connection after the end of this connection was
    reported. So a new peer is a suspect at once if its descriptor has more reported ends than peers
    that have gone.
    The loop calls `on_gone` when all messages that the peer had sent were read.

Ending a connection
    ZeroMQ's ROUTER cannot end one of its connections. So `expel` drops all further messages of the
    peer, reports the peer as gone, and shuts the peer's descriptor down EXPELLED_S later, when the
    reason has been sent. If the monitor has reported meanwhile that the descriptor was closed, the
    router leaves the descriptor alone, because the system may have given its number to another
    connection.

A Peer is one connection, and the data that ZeroMQ attaches to each message of this connection.

Not here: the meaning of messages, and the bound on calls that wait for a reply. The handlers have
both.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import socket as sockets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias

import zmq
from msgspec.structs import replace
from zmq import Event

from zmqdist.addresses import is_ipv6, join_address
from zmqdist.background import wait_finished
from zmqdist.errors import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAUTHENTICATED,
    UNIMPLEMENTED,
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    ProtocolMismatchError,
    UnknownError,
    WireError,
)
from zmqdist.limits import (
    FRAME_BYTES_MAX,
    GRACE_S,
    HANDSHAKE_S,
    HEADER_PIECE_BYTES,
    HEARTBEAT_SERVER_S,
    HEARTBEAT_TIMEOUT_S,
    MESSAGES_PER_WAKE_MAX,
    PEERS_MAX,
)
from zmqdist.messages import Chunk, Credit, Goodbye, Message, Ping, Refused, SharedMemoryAccepted
from zmqdist.transport.dealer import (
    Buffer,
    decode_event,
    open_monitor,
    receive_rest,
)
from zmqdist.transport.endpoint import split
from zmqdist.transport.keyring_machine import JOINING, LISTENING_ROLES, REVOKED
from zmqdist.transport.keys import ROLES
from zmqdist.transport.loop import MORE, NOBLOCK, POLLIN, Loop, WatchedSocket
from zmqdist.transport.memory_limits import trim_heap
from zmqdist.transport.own_address import (
    BACKLOG,
    all_taken,
    bind_problem,
    free_ports,
    limit_unsent,
    listen,
    look_up,
    our_ports,
    ports_are_limited,
    remote_address,
    shut_down,
    unsent_bytes,
)
from zmqdist.transport.pipe import BYTES, LoopPipe, Parts, close_for_all
from zmqdist.transport.security import (
    ADMIN,
    CURVE,
    LIMITED,
    NONE,
    ServerSecurity,
    role_and_key,
)
from zmqdist.transport.shm_pool import this_pool
from zmqdist.transport.shortcut import (
    STRANGER_BYTES_MAX,
    Shortcut,
    is_own_user,
    leaves_room,
    listen_on_host,
    received,
    register,
)
from zmqdist.transport.transfers import BulkChannel
from zmqdist.wire.headers import decode, encode, split_header
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

NAME_CHARS_MAX: Final = 100


class Peer:
    """One connection of a server.

    Attributes:
      routing_id: ZeroMQ's name for the connection.
      fd: the descriptor number of the connection; -1 if unknown.
      port: the port of this server to which the peer is connected; 0 if unknown.
      role: "client", "observe", "submit", "worker" or "admin"; "joining" or "revoked" for a peer to which the
        server sends only one reply.
      key: the peer's public key, 32 bytes; empty without CURVE.
      limited: whether the role is "joining" or "revoked".
      hello: the peer's hello; None until it has arrived. The router lists only peers with a hello
        in `peers`, and passes only these to `on_hello`.
      name: the peer's name for log lines and errors; it contains the address until the hello
        arrives.
      bulk: the channel for large parts in either direction; None until the router needs it.
      session: any object that the owner of the router stores here.
      gone: whether the router knows that the connection has ended. Then no message can be sent to
        the peer.
      fault_logged: whether a wrong message of this peer was logged. Then the router only counts
        further wrong messages.
      refusals: number of Refused messages that the router sent to the peer.
      shortcut: the way to the peer in this process or on this host that does not pass ZeroMQ, if
        there is one.
      ignored: whether the router drops all further messages of the peer.
    """

    __slots__ = (
        "bulk",
        "fault_logged",
        "fd",
        "gone",
        "hello",
        "ignored",
        "key",
        "limited",
        "name",
        "port",
        "refusals",
        "role",
        "routing_id",
        "session",
        "shortcut",
    )

    def __init__(self, routing_id: bytes, fd: int, role: str, name: str, key: bytes = b"") -> None:
        self.routing_id = routing_id
        self.fd = fd
        self.role = role
        self.key = key
        self.limited = role in LIMITED
        self.name = name
        self.hello: Hello | None = None
        self.bulk: BulkChannel | None = None
        self.session: Any = None
        self.gone = False
        self.port = 0
        self.fault_logged = False
        self.refusals = 0
        self.ignored = False
        self.shortcut: Shortcut | LoopPipe[bytes] | None = None

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.role}{', gone' if self.gone else ''})"


def fd_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection through which a frame arrived; -1 if ZeroMQ does not
    know it."""
    with contextlib.suppress(zmq.ZMQError, ValueError, TypeError):
        return int(frame.get(zmq.SRCFD))
    return -1


def property_of(frame: zmq.Frame, name: str) -> str:
    """Return a property of the connection through which a frame arrived; "" if the connection has
    no property of this name."""
    with contextlib.suppress(zmq.ZMQError):
        return str(frame.get(name))
    return ""


def printable(text: str) -> str:
    """Return a text that a peer has sent, shortened and without unprintable characters, for a log
    line."""
    return "".join(char if char.isprintable() else "?" for char in text[:NAME_CHARS_MAX])


SUSPECT_STEP_S: Final = 0.003
"""Seconds between the first Ping to a suspect and the second; each later pause is twice as long as
the last pause."""
SUSPECT_STEP_MAX_S: Final = 60.0
"""The longest pause between two Pings, in seconds. A suspect whose connection is alive gets one
Ping after each pause."""
REFUSALS_MAX: Final = 32
"""Largest number of Refused messages that are sent to one peer, because a peer that does not read
them must not fill this process's memory.
"""
TRIM_DELAY_S: Final = 1.0
"""Seconds after the last oversized message until the process returns freed memory to the system."""
LINGER_S: Final = 0.2
"""Seconds for which ZeroMQ still sends the last replies when the server stops."""
DROPPED_S: Final = GRACE_S + 1.0
"""Seconds in which a server that the program has dropped may still reply to running calls, before
it frees its port."""
EXPELLED_S: Final = 0.2
"""Seconds from the message that tells an expelled peer the reason until the router shuts the peer's
connection down."""

_PING: Final = encode(Ping())


class PortTakenError(UnknownError):
    """The error for a port that could not be bound because it is in use."""


Handler: TypeAlias = "Callable[[Peer, Any, list[memoryview]], None]"


class Router:
    """The server's socket and its peers; the module's docstring has the rules. Use it in the loop's
    thread, or before the loop starts.

    Attributes:
      on_hello: a function that is called with a peer whose hello has arrived, after the server's
        hello was sent. It is not called with a peer whose role is `joining` or `revoked`.
      on_refused: functions that the loop calls with each peer of which it refuses a message, and why.
      on_gone: functions that the loop calls once with each peer that has gone, if the peer's hello
        had been accepted.
      dropped: number of messages that were not accepted, by reason.
      received: number of messages that the router has received.
      refused_handshakes: number of connections that ended before their first message was read. For
        some refusals ZeroMQ reports no other event, for instance if the peer does not speak ZeroMQ
        or speaks an old version of its protocol. A connection that its peer closes during the
        handshake does not count, because load balancers and readiness probes do so.
      peers_max: bound on the number of connections that are served.
      stopping: whether the server stops. A server that stops sends no hello, so that a new peer
        waits for the next server at this address.
    """

    def __init__(self, loop: Loop, security: ServerSecurity, hello: Hello) -> None:
        """Open the socket, without binding it.

        Args:
          hello: the hello that is sent to each peer.
        """
        self.on_hello: Callable[[Peer], None] | None = None
        self.on_gone: list[Callable[[Peer], None]] = []
        self.on_refused: list[Callable[[Peer, str], None]] = []
        self.dropped: Counter[str] = Counter()
        self.received = 0
        self.refused_handshakes = 0
        self._closed_by_peer = False
        self.peers_max = PEERS_MAX
        self.stopping = False
        self._loop = loop
        self._security = security
        self._hello_fields = hello
        self._hello = encode_hello(hello)
        self._peers: dict[bytes, Peer] = {}
        self._by_fd: dict[int, list[Peer]] = {}
        self._reported_ends: Counter[int] = Counter()
        """For each descriptor, the number of reported ends less the number of peers that have
        gone.
        """
        self._accepted: dict[int, int] = {}
        """For each descriptor of an open connection, the number of the connection. It is empty
        unless the security policy has a `judge`."""
        self._numbers = itertools.count()
        self._gone_unread: list[Peer] = []
        self._listeners: dict[int, sockets.socket] = {}
        """The Unix sockets to which processes of this host connect for a shortcut, by port."""
        self._pipes: dict[Peer, LoopPipe[bytes]] = {}
        """The pipes of peers that have such a shortcut."""
        self._closed = False
        self._port = 0
        self._turn_budget = 0
        self._handlers: dict[
            type[Message], tuple[Handler, frozenset[str] | None, Handler | None]
        ] = {}
        self.on(
            SharedMemoryAccepted,
            lambda peer, message, frames: self.bulk_channel(peer).memory_accepted(message.nonce),
        )
        self.on(
            Chunk,
            lambda peer, message, frames: self.bulk_channel(peer).chunk_arrived(message, frames),
        )
        self.on(Credit, lambda peer, message, frames: self.bulk_channel(peer).credited(message))
        loop.run(self._open)

    def _open(self) -> None:
        self._security.install(self._loop)
        socket = self._loop.context.socket(zmq.ROUTER)
        self._socket = socket
        socket.set_hwm(0)
        options = {
            zmq.LINGER: round(LINGER_S * 1000),
            zmq.ROUTER_MANDATORY: 1,
            zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
            zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: round(HANDSHAKE_S * 1000),
            zmq.HEARTBEAT_IVL: round(HEARTBEAT_SERVER_S * 1000),
            zmq.HEARTBEAT_TIMEOUT: round(HEARTBEAT_TIMEOUT_S * 1000),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        self._security.apply(socket)
        self._send: Callable[[Buffer, int], Any] = super(zmq.Socket, socket).send
        self._recv: Callable[..., Any] = super(zmq.Socket, socket).recv
        events = (
            Event.DISCONNECTED
            | Event.HANDSHAKE_FAILED_NO_DETAIL
            | (0 if self._security.policy.judge is None else Event.ACCEPTED)
        )
        self._monitor = open_monitor(socket, events)
        self._watched: WatchedSocket = self._loop.add_socket(socket, self._read)
        self._loop.add_socket(self._monitor, self._read_monitor)
        self._loop.on_stop(self._close)
        if self._security.voucher is not None:
            self._security.voucher.attach(self)

    def _close(self) -> None:
        self._closed = True
        if self._security.voucher is not None:
            self._security.voucher.detach(self)
        for peer in self._peers.values():
            if peer.bulk is not None:
                peer.bulk.connection_lost()
        for port in tuple(self._listeners):
            self._close_listener(port)
        until = self._loop.now() + LINGER_S
        for pipe in self._pipes.values():
            pipe.flush(until - self._loop.now())
            pipe.close()
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket):
            self._loop.remove_socket(socket)
            socket.close()
        our_ports[self._port] -= 1

    # -- addresses ---------------------------------------------------------------------------------

    def bind(self, address: str) -> str:
        """Listen on `host:port`. Port 0 means any free port or, if ZMQDIST_PORTS is set, a free
        port of that range.

        If another server of this process, which the program has dropped, still has the port, wait
        at most DROPPED_S until that server has freed it.

        Returns:
          The bound `host:port`.

        Raises:
          UnknownError: the address is in use or does not belong to this host, or this process may
            not bind it.
          FailedPreconditionError: the security does not permit the address (security.py).
          InvalidArgumentError: `address` is not an address.
        """
        host, port = split(address)
        self._security.check_bind(host)
        number = look_up(host)
        self._security.check_bind(number)
        with contextlib.suppress(UnknownError):
            return join_address(host, self._bind_one_of(number, port))
        # if no thread is left, the last one may have freed the port since the attempt
        wait_finished(DROPPED_S)
        return join_address(host, self._bind_one_of(number, port))

    def _bind_one_of(self, number: str, port: int) -> int:
        if port or not ports_are_limited():
            return self._loop.run(self._bind, number, port)
        # `listen` skips a port that a launcher has reserved for another server. ZeroMQ would bind
        # that port, because it sets SO_REUSEADDR.
        with contextlib.suppress(UnknownError), listen(number) as listener:
            return self._loop.run(self._bind, number, listener.getsockname()[1], listener.detach())
        # ZeroMQ, unlike `listen`, also binds a port on which connections of an ended server are in
        # the state TIME_WAIT.
        for free in free_ports():
            with contextlib.suppress(PortTakenError):
                return self._loop.run(self._bind, number, free)
        raise all_taken(number)

    def bind_fd(self, fd: int) -> str:
        """Serve a TCP socket that listens already. The descriptor then belongs to ZeroMQ. The
        result and the errors are those of `bind`."""
        with sockets.socket(fileno=fd) as wrapped:
            name = wrapped.getsockname()
            wrapped.detach()
        if not isinstance(name, tuple):
            raise InvalidArgumentError(f"descriptor {fd} is not a TCP socket")
        self._security.check_bind(name[0])
        return join_address(name[0], self._loop.run(self._bind, name[0], name[1], fd))

    def unsent_bytes(self, port: int = 0) -> int:
        """Return the bytes that have not left for the peers (of this port, unless it is 0), and
        those of large parts that have not reached them.

        What only ZeroMQ's queues hold is not counted. ZeroMQ moves it on as long as the kernel
        takes it, so nothing is left there if nothing is unsent for a while.
        """
        return sum(
            unsent_bytes(peer.fd)
            + (peer.bulk.undelivered if peer.bulk else 0)
            + (self._pipes[peer].unsent_bytes if peer in self._pipes else 0)
            for peer in self.peers
            if port in (0, peer.port)
        )

    def unbind(self, address: str) -> None:
        """Accept no more connections at an address that `bind` or `bind_fd` has returned, and end
        its open ones."""
        self._loop.run(self._close_listener, split(address)[1])
        self._loop.run(self._socket.unbind, f"tcp://{address}")

    def _bind(self, host: str, port: int, fd: int = -1) -> int:
        socket = self._socket
        self._watched.dirty = True
        socket.setsockopt(zmq.IPV6, 1 if is_ipv6(host) else 0)
        socket.setsockopt(zmq.USE_FD, fd)
        address = join_address(host, port)
        try:
            socket.bind(f"tcp://{address if port else address[:-1] + '*'}")
        except zmq.ZMQError as error:
            kind = PortTakenError if error.errno == zmq.EADDRINUSE else UnknownError
            raise kind(f"could not bind {address}: {bind_problem(error)}") from None
        finally:
            socket.setsockopt(zmq.USE_FD, -1)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self._port = split(bound.rstrip(b"\0").decode().removeprefix("tcp://"))[1]
        our_ports[self._port] += 1
        incarnation = self._hello_fields.incarnation
        register(self, self._port, incarnation)
        has_keys = self._security.mechanism == CURVE
        listener = None if has_keys else listen_on_host(self._port, incarnation)
        if listener is not None:
            self._listeners[self._port] = listener
            self._loop.add_fd(listener.fileno(), partial(self._accept, self._port, listener))
        return self._port

    # -- out ---------------------------------------------------------------------------------------

    def on(
        self,
        kind: type[Message],
        fn: Handler,
        roles: frozenset[str] | None = None,
        refused: Handler | None = None,
    ) -> None:
        """Register `fn(peer, message, frames)` as the handler of a kind of message. The handler may
        keep the frames and write to them.

        Args:
          roles: the roles besides `admin` that may send this kind; `None` means every role except
            `joining` and `revoked`. The router refuses the message from any other role.
          refused: called in place of a Refused, because it has another reply.
        """
        self._handlers[kind] = (fn, None if roles is None else roles | {ADMIN}, refused)

    def bulk_channel(self, peer: Peer) -> BulkChannel:
        """Return the channel for large parts from and to a peer; make it on first use."""
        if peer.bulk is None:
            peer.bulk = BulkChannel(
                peer.name, lambda message, frames: self.send(peer, message, frames)
            )
        return peer.bulk

    def send(self, peer: Peer, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Send a message without waiting.

        Args:
          frames: the payload, which must be small. It is copied, because ZeroMQ takes longer to
            send a small frame without a copy. Large parts travel by `bulk_channel`.

        Returns:
          False if nothing was sent: the peer has gone (the loop calls `on_gone` later), or its
          queue is full.
        """
        if peer.shortcut is not None and not peer.ignored:
            return peer.shortcut.send(encode(message), frames)
        return not peer.ignored and self._send_raw(peer, encode(message), frames)

    def expel(self, peer: Peer, code: int = 0, text: str = "") -> None:
        """Drop all further messages of a peer, and end its connection. The loop calls `on_gone`
        soon, before the connection has ended.

        Args:
          code, text: the reason to send to the peer; with code 0 no reason is sent.
        """
        if peer.ignored or peer.gone:
            return
        if code:
            self._send_raw(peer, encode(Refused(code, text, final=True)))
        peer.ignored = True
        if peer.bulk is not None:
            peer.bulk.connection_lost()
        if peer.hello is not None:
            peer.hello = None
            for fn in self.on_gone:
                self._loop.call_soon(fn, peer)
        self._loop.set_timer(
            (self, peer, "expelled"), self._loop.now() + EXPELLED_S, partial(self._shut_down, peer)
        )

    def expel_key(self, key: bytes, problem: str, spared: Peer | None = None) -> None:
        """Expel each peer, except `spared`, whose connection was authenticated by this key, which
        is now revoked."""
        for peer in [
            peer for peer in self._peers.values() if peer.key == key and peer is not spared
        ]:
            self.expel(peer, UNAUTHENTICATED, problem)

    def key_revoked(self, key: bytes, problem: str) -> None:
        """Have the loop expel the peers whose connections were authenticated by a public key that
        is now revoked. Any thread may call this.
        """
        with contextlib.suppress(FailedPreconditionError):  # a stopped loop has no connections
            self._loop.call_soon(self.expel_key, key, problem)

    def _shut_down(self, peer: Peer) -> None:
        self._read_monitor()
        if (
            not peer.gone
            and peer.fd >= 0
            and self._reported_ends[peer.fd] <= 0
            and self._by_fd.get(peer.fd) == [peer]
        ):
            shut_down(peer.fd)

    def _end_stranger(self, fd: int, number: int) -> None:
        """End a connection that was accepted HANDSHAKE_S ago, if no message has arrived on it, or
        only messages of a `limited` peer.

        While unknown keys may join, a stranger can pass the handshake. Without the time limit, it
        could keep its connections open.
        """
        while self._read_monitor():
            pass
        if self._accepted.get(fd) != number:
            return
        if all(peer.limited for peer in self._by_fd.get(fd, ())):
            shut_down(fd)
        elif self._reported_ends[fd] > 0:
            # these peers may be of an earlier connection with this descriptor
            self._limit_stranger(fd, number)

    def _limit_stranger(self, fd: int, number: int) -> None:
        self._loop.set_timer(
            (self, fd), self._loop.now() + HANDSHAKE_S, partial(self._end_stranger, fd, number)
        )

    def _send_raw(self, peer: Peer, header: bytes, frames: Sequence[Buffer] = ()) -> bool:
        if peer.gone or self._closed:
            return False
        self._watched.dirty = True
        try:
            self._send(peer.routing_id, MORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._mark_gone(peer)
            elif error.errno != zmq.EAGAIN:
                raise
            return False
        if len(header) > HEADER_PIECE_BYTES:
            header, frames = split_header(header, frames)
        last = len(frames)
        self._send(header, MORE if last else NOBLOCK)
        for number, frame in enumerate(frames, 1):
            self._send(frame, MORE if number < last else NOBLOCK)
        return True

    # -- in ----------------------------------------------------------------------------------------

    def count_work(self, count: int) -> None:
        """Count the message that is being handled as `count` messages of this turn, because it
        makes as much work as `count` messages."""
        self._turn_budget -= count - 1

    @property
    def peers(self) -> list[Peer]:
        """The peers whose hello was accepted and that have not gone."""
        return [peer for peer in self._peers.values() if peer.hello is not None and not peer.gone]

    def _read(self) -> bool:
        """Read messages until none is left, or until the bound of this turn is reached; return True
        in the second case.

        The loop calls this when it has just found that the socket has input.
        """
        has_input, recv, peers = self._watched.has_input, self._recv, self._peers
        self._turn_budget = MESSAGES_PER_WAKE_MAX
        while self._turn_budget > 0:
            if self._turn_budget < MESSAGES_PER_WAKE_MAX and not has_input():
                self._watched.dirty = False
                return False
            self._turn_budget -= 1
            routing_id = recv(NOBLOCK)
            peer = peers.get(routing_id)
            frame = recv(NOBLOCK, False)
            if peer is None:
                peer = self._add_peer(routing_id, frame)
            header, frames = (
                receive_rest(self._socket, frame.bytes) if frame.more else (frame.bytes, [])
            )
            self._deliver(peer, header, frames)
        return True

    def _deliver(self, peer: Peer, header: bytes, frames: list[memoryview] | None) -> None:
        """Handle a message, and whatever is wrong with it."""
        self.received += 1
        try:
            self._handle_frames(peer, header, frames)
        except WireError as error:
            self.dropped["not a message"] += 1
            self._refuse(peer, INVALID_ARGUMENT, error.problem)
            if not peer.fault_logged:
                peer.fault_logged = True
                log.warning("%s (further wrong messages of this peer are only counted)", error)
        except Exception as error:
            self._loop.fault(f"handler of a message from {peer.name}")
            if isinstance(error, MemoryError):
                # no one knows who waits for the answer to this message
                self.expel(peer)

    def shortcut_from(self, hello: Hello, address: Any, back: Shortcut) -> Shortcut:
        """Return a shortcut to this server for a connection of this process, by its hello and its
        local address. `back` is the shortcut in the other direction. Any thread may call this."""
        peer: Peer | None = None

        def deliver(header: bytes, frames: list[memoryview] | None) -> None:
            nonlocal peer
            if peer is None:
                peer = self._peer_at(hello, str(address).encode())
                if peer is not None:
                    peer.shortcut = back
            if peer is not None and peer.routing_id in self._peers:
                self._deliver(peer, header, frames)

        return Shortcut(self._loop, deliver)

    def _peer_at(self, hello: Hello, address: bytes) -> Peer | None:
        # the last one, because an equal one that has ended may have had the same descriptor
        for peer in reversed(self.peers):
            if peer.hello == hello and str(remote_address(peer.fd)).encode() == address:
                return peer
        return None

    def _accept(self, port: int, listener: sockets.socket) -> None:
        """Accept the Unix socket of another process of this host, and find its connection."""
        try:
            end, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the others have no shortcut
            self._close_listener(port)
            return
        if leaves_room(end) and is_own_user(end):
            peer: Peer | None = None

            def deliver(header: bytes, parts: Parts) -> None:
                nonlocal peer
                frames = received(parts)
                if peer is not None:
                    if peer.routing_id in self._peers:
                        self._deliver(peer, header, frames)
                    return
                with contextlib.suppress(OpError):
                    hello = decode_hello(header, "a process of this host")
                    peer = self._peer_at(hello, bytes(frames[0]) if frames else b"")
                if peer is None or peer in self._pipes:
                    peer = None
                    pipe.close()
                else:
                    self._loop.set_timer(pipe, None, pipe.close)
                    pipe.bound(inf)
                    pipe.send(self._hello)
                    peer.shortcut = self._pipes[peer] = pipe

            def ended() -> None:
                self._loop.set_timer(pipe, None, pipe.close)
                pipe.close()
                if peer is not None and not peer.gone:
                    self._shut_down(peer)  # what the peer was sent is lost

            pipe = LoopPipe(self._loop, BYTES, deliver, ended, end)
            pipe.bound(STRANGER_BYTES_MAX)
            self._loop.set_timer(pipe, self._loop.now() + HANDSHAKE_S, pipe.close)

    def _close_listener(self, port: int) -> None:
        if (listener := self._listeners.pop(port, None)) is not None:
            self._loop.remove_fd(listener.fileno())
            close_for_all(listener)

    def _add_peer(self, routing_id: bytes, frame: zmq.Frame) -> Peer:
        """Add the peer of a new connection, whose first message has arrived."""
        role, key = (
            (ADMIN, b"")
            if self._security.mechanism == NONE
            else role_and_key(property_of(frame, "User-Id"))
        )
        if key and role != JOINING:  # since the handshake, an admin may have revoked the key
            role = self._security.policy.role(key) or REVOKED
        fd = fd_of(frame)
        peer = Peer(
            routing_id,
            fd,
            role,
            f"at {property_of(frame, 'Peer-Address') or 'an unknown address'}",
            key,
        )
        if len(self._peers) >= self.peers_max:
            peer.ignored = True
            self._refuse(
                peer,
                RESOURCE_EXHAUSTED,
                f"this server has its {self.peers_max} connections already",
            )
            return peer
        self._peers[routing_id] = peer
        if fd >= 0:
            peer.port = (limit_unsent(fd) or (0, 0))[1]
            self._by_fd.setdefault(fd, []).append(peer)
            if self._reported_ends[fd] > 0:
                # The first Ping waits, because the first message to the peer must be the hello of
                # this server.
                self._suspect_later(peer, SUSPECT_STEP_S)
        return peer

    def _handle_frames(self, peer: Peer, header: bytes, frames: list[memoryview] | None) -> None:
        if peer.ignored:
            self.dropped["refused peer"] += 1
            return
        if frames is None:
            self.dropped["too many frames or bytes"] += 1
            self._refuse(peer, RESOURCE_EXHAUSTED, "a message has too many frames or bytes")
            # The C library keeps the message's freed memory, perhaps a gigabyte. A timer returns it
            # to the system once for many messages.
            self._loop.set_timer(trim_heap, self._loop.now() + TRIM_DELAY_S, trim_heap)
            return
        if is_hello(header):
            self._handle_hello(peer, header)
            return
        if peer.hello is None:
            peer.ignored = True
            self.dropped["before the hello"] += 1
            self._refuse(
                peer, FAILED_PRECONDITION, "the first message of a connection must be a hello"
            )
            return
        message = decode(header, peer.name)
        handler = self._handlers.get(type(message))
        if handler is None:
            if not isinstance(message, (Ping, Goodbye, Refused)):
                self.dropped["not served here"] += 1
                self._refuse(peer, UNIMPLEMENTED, f"{type(message).__name__} is not served here")
            return
        fn, roles, refused = handler
        if (roles is not None and peer.role not in roles) or (roles is None and peer.limited):
            self.dropped["not allowed"] += 1
            if refused is not None and not peer.limited:
                refused(peer, message, frames)
                return
            self._refuse(
                peer,
                PERMISSION_DENIED,
                f"role {peer.role} may not send {type(message).__name__} "
                f"(allowed: {', '.join(sorted(roles or ROLES))})",
            )
            return
        fn(peer, message, frames)

    def _handle_hello(self, peer: Peer, header: bytes) -> None:
        if peer.hello is not None:
            self.dropped["second hello"] += 1
            return
        if self.stopping:
            return
        try:
            hello = decode_hello(header, peer.name)
        except ProtocolMismatchError as error:
            peer.ignored = True
            self.dropped["other protocol version"] += 1
            log.warning("refused: %s", error)
            # with this hello, the peer's error can name both versions, too
            self._send_raw(peer, self._hello)
            return
        except WireError:
            peer.ignored = True
            raise
        peer.name = printable(hello.name) or f"{printable(hello.kind)} {peer.name}"
        if peer.role == REVOKED:
            self.expel(peer, UNAUTHENTICATED, self._security.policy.problem(peer.key))
            return
        if not self._send_raw(peer, self._hello_for(peer, hello)):
            # the peer had gone before its hello was read
            return
        peer.hello = hello
        if self.on_hello is not None and not peer.limited:
            self.on_hello(peer)

    def _hello_for(self, peer: Peer, hello: Hello) -> bytes:
        """Return the server's hello to a peer. The hello offers this process's shared memory if the
        peer has offered its own and is trusted.

        A dishonest peer could offer the memory of another process, and this server would open that
        memory for it. So a peer is trusted only if it could read the memory of this user's
        processes anyway: it has shown the user's token, its role may run code on this host, or the
        server has no security. If a peer is not trusted, large arrays travel through the socket.
        """
        trusted = self._security.mechanism != CURVE or peer.role in LISTENING_ROLES
        pool = this_pool() if trusted and hello.memory is not None else None
        if pool is None:
            return self._hello
        return encode_hello(
            replace(
                self._hello_fields,
                memory=pool.offer,
                nonce=self.bulk_channel(peer).open_offered_memory(hello),
            )
        )

    def _refuse(self, peer: Peer, code: int, text: str) -> None:
        if peer.refusals < REFUSALS_MAX:
            peer.refusals += 1
            self._send_raw(peer, encode(Refused(code, text)))
            for fn in self.on_refused:
                fn(peer, text)

    # -- peers that have gone ----------------------------------------------------------------------

    def _read_monitor(self) -> bool:
        for _ in range(MESSAGES_PER_WAKE_MAX):
            if not int(self._monitor.getsockopt(zmq.EVENTS)) & POLLIN:
                return False
            event, fd = decode_event(self._monitor.recv_multipart(NOBLOCK)[0])
            if event == Event.HANDSHAKE_FAILED_NO_DETAIL:
                # the value is an errno, and Event.DISCONNECTED of the same connection comes next
                self._closed_by_peer = fd in (errno.EPIPE, errno.ECONNRESET)
                continue
            if event == Event.ACCEPTED:
                self._accepted[fd] = next(self._numbers)
                self._limit_stranger(fd, self._accepted[fd])
                continue
            closed_by_peer, self._closed_by_peer = self._closed_by_peer, False
            if self._accepted.pop(fd, None) is not None:
                self._loop.set_timer((self, fd), None, self._forget_gone)
            self._reported_ends[fd] += 1
            if self._reported_ends[fd] <= 0:
                continue  # `send` found that the peer has gone before this report arrived
            suspects = tuple(self._by_fd.get(fd, ()))
            if not suspects and not closed_by_peer:
                self.refused_handshakes += 1
            for peer in suspects:
                self._suspect(peer, SUSPECT_STEP_S)
        return True

    def _suspect(self, peer: Peer, step_s: float) -> None:
        """Send a Ping to find out whether the peer has gone. If the Ping does not prove this, send
        the next one after `step_s`."""
        if not peer.gone and self._reported_ends[peer.fd] > 0:
            # querying EVENTS makes the socket notice connections that have ended
            self._watched.has_input()
            self._send_raw(peer, _PING)
            if not peer.gone:
                self._suspect_later(peer, step_s)

    def _suspect_later(self, peer: Peer, step_s: float) -> None:
        self._loop.set_timer(
            (self, peer),
            self._loop.now() + step_s,
            partial(self._suspect, peer, min(2 * step_s, SUSPECT_STEP_MAX_S)),
        )

    def _mark_gone(self, peer: Peer) -> None:
        """Record that the peer has gone. Its unread messages are read before the router forgets
        it.
        """
        peer.gone = True
        peer.shortcut = None
        if peer in (met := self._by_fd.get(peer.fd, [])):
            met.remove(peer)
            self._reported_ends[peer.fd] -= 1
            self._loop.set_timer((self, peer), None, self._forget_gone)
        self._gone_unread.append(peer)
        if len(self._gone_unread) == 1:
            self._loop.call_soon(self._forget_gone)

    def _forget_gone(self) -> None:
        """Read the remaining messages of the peers that have gone, then forget these peers."""
        if self._closed:
            return
        self._watched.dirty = True
        if self._watched.has_input() and self._read():
            # `_read` stopped at its bound, so the other callbacks of the loop run before the rest
            # is read
            self._loop.call_soon(self._forget_gone)
            return
        going, self._gone_unread = self._gone_unread, []
        for peer in going:
            if (pipe := self._pipes.pop(peer, None)) is not None:
                pipe.drain()
                pipe.close()
            self._peers.pop(peer.routing_id, None)
            if peer.bulk is not None:
                peer.bulk.connection_lost()
            if peer.hello is not None:
                for fn in self.on_gone:
                    self._loop.call_soon(fn, peer)
