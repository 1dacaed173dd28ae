"""The one listening socket of a server: who is connected, and messages from and to them.

Rules
    A peer is one connection. Its routing id is chosen by ZeroMQ and never seen again; name and incarnation are in its hello.
    A connection speaks first with a hello and is answered with ours. Until then, and after a hello of another major
    version, nothing it says is taken. Its role comes from the handshake (zap.py), never from what it says.
    A message is given to the handler of its kind, if the peer's role may send that kind; `admin` may send everything.
    Nothing a peer sends raises here: it is counted in `dropped`, answered with Refused a bounded number of times, and
    logged once per peer.
    A send never waits. False means that it was not sent; True does not promise that it arrives.

Who has gone
    The monitor reports the end of a descriptor, and descriptors are used again at once: so a report only names suspects, which are all
    peers that were met on that descriptor. A suspect is sent a Ping; ZeroMQ's "host unreachable" is the truth. The end of a connection
    reaches the socket later than its report: ZeroMQ's thread and the loop hand it over three times, behind all else that they have to
    do. So the question is repeated, after twice as long each time, until the suspect has gone, or as many peers of its descriptor
    have gone as ends were reported of it. A limit in time would let off peers that have gone, which then stay for good, with their calls,
    streams and threads.
    The first message of a connection may be read after the report of its end. So a peer that is met on a descriptor with more
    reported ends than peers that have gone is a suspect from the beginning.
    `on_gone` is called when everything that the peer had sent before has been read.

Not here: what the messages mean, and pending calls (their bound is the business of who answers them).
"""

from __future__ import annotations

import errno
import logging
import socket as sockets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import zmq
from msgspec.structs import replace

from zmqdist.background import wait_finished
from zmqdist.errors import (
    FAILED_PRECONDITION,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    InvalidArgumentError,
    ProtocolMismatchError,
    UnknownError,
    WireError,
)
from zmqdist.limits import FRAME_BYTES_MAX, GRACE_S, HANDSHAKE_S, HEARTBEAT_SERVER_S, MESSAGES_PER_WAKE_MAX, PEERS_MAX
from zmqdist.messages import Chunk, Credit, Goodbye, Message, Ping, Refused, Shares
from zmqdist.transport.address import is_ipv6, join, split
from zmqdist.transport.dealer import Buffer, receive_payload
from zmqdist.transport.loop import Loop, Watched
from zmqdist.transport.malloc_trim import give_back
from zmqdist.transport.monitor import DISCONNECTED, decode_event, open_monitor
from zmqdist.transport.own_address import all_taken, bind_free, free_ports
from zmqdist.transport.security import CURVE, NONE, ServerSecurity
from zmqdist.transport.shm_pool import this_arena
from zmqdist.transport.transfers import Lanes
from zmqdist.transport.zap import ADMIN
from zmqdist.wire.headers import decode, encode
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

log = logging.getLogger("zmqdist.transport")

SUSPECT_STEP_S: Final = 0.003
"""A suspect is asked again after this, and then after twice as long each time."""
SUSPECT_STEP_MAX_S: Final = 60.0
"""The longest pause between two questions, each of which costs a Ping to an innocent suspect."""
REFUSALS_MAX: Final = 32
"""Answers of Refused for one peer: one that does not read must not fill our memory."""
GIVE_BACK_S: Final = 1.0
"""So long after the last message that was too large for us the memory that it took goes back to the system."""
LINGER_S: Final = 0.2
"""So long the last answers have to leave when the server stops."""
DROPPED_S: Final = GRACE_S + 1.0
"""A server that was dropped has this long to answer what runs and to free its port."""
BACKLOG: Final = 1024
"""Connections that the kernel keeps for us until they are accepted: a cluster starts all at once."""
NAME_CHARS_MAX: Final = 100

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE) | _NOBLOCK
_POLLIN: Final = int(zmq.POLLIN)
_PING: Final = encode(Ping())


class PortTakenError(UnknownError):
    """A port could not be bound because it is in use."""


Handler: TypeAlias = "Callable[[Peer, Any, list[memoryview]], None]"


class Peer:
    """One connection.

    Attributes:
      routing_id: ZeroMQ's name for it.
      fd: its descriptor number; -1 where that cannot be told.
      role: "client", "submit", "worker" or "admin".
      hello: None until it came; without one the peer is shown to nobody.
      name: for people, with its address until the hello.
      lanes: the large parts on their way from and to it; None until there were any, or shared memory.
      session: whatever the owner of the router keeps with it.
      gone: it was found out that it has gone; nothing can be sent to it.
    """

    __slots__ = ("blamed", "fd", "gone", "hello", "lanes", "name", "refusals", "role", "routing_id", "session", "shut")

    def __init__(self, routing_id: bytes, fd: int, role: str, name: str) -> None:
        self.routing_id = routing_id
        self.fd = fd
        self.role = role
        self.name = name
        self.hello: Hello | None = None
        self.lanes: Lanes | None = None
        self.session: Any = None
        self.gone = False
        self.blamed = False
        self.refusals = 0
        self.shut = False

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, {self.role}{', gone' if self.gone else ''})"


class Router:
    """See the module's docstring. All methods are called in the loop's thread, or before the loop starts.

    Attributes:
      on_hello: called with a peer whose hello came, after ours was sent.
      on_gone: called with a peer that was shown by `on_hello` and has gone; once.
      dropped: messages that were not taken, by reason.
      received: messages since it was made.
      refused_handshakes: connections that ended before a first message of theirs was read. ZeroMQ has no event of its own for some of
        them (a peer that speaks an old protocol, or none), so they are told by their end.
      peers_max: connections that are served.
      leaving: the server stops. Who says hello now is not answered, and so waits for the next server at this address.
    """

    def __init__(self, loop: Loop, security: ServerSecurity, hello: Hello) -> None:
        """Args:
        hello: what this server says of itself.
        """
        self.on_hello: Callable[[Peer], None] | None = None
        self.on_gone: list[Callable[[Peer], None]] = []
        self.dropped: dict[str, int] = {}
        self.received = 0
        self.refused_handshakes = 0
        self.peers_max = PEERS_MAX
        self.leaving = False
        self._loop = loop
        self._security = security
        self._said = hello
        self._hello = encode_hello(hello)
        self._peers: dict[bytes, Peer] = {}
        self._by_fd: dict[int, list[Peer]] = {}
        self._ends: Counter[int] = Counter()
        """By descriptor: ends that were reported, less the peers that were found to have gone."""
        self._going: list[Peer] = []
        self._closed = False
        self._left = 0
        self._handlers: dict[type[Message], tuple[Handler, frozenset[str] | None]] = {}
        self.on(Shares, lambda peer, message, frames: self.lanes(peer).shares(message.nonce))
        self.on(Chunk, lambda peer, message, frames: self.lanes(peer).chunk(message, frames))
        self.on(Credit, lambda peer, message, frames: self.lanes(peer).credited(message))
        loop.run(self._open)

    def _open(self) -> None:
        self._security.install(self._loop)
        socket = self._loop.context.socket(zmq.ROUTER)
        self._socket = socket
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, round(LINGER_S * 1000))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_SERVER_S * 1000))
        self._security.apply(socket)
        self._send: Callable[[Buffer, int], Any] = super(zmq.Socket, socket).send
        self._recv: Callable[..., Any] = super(zmq.Socket, socket).recv
        self._monitor = open_monitor(socket, DISCONNECTED)
        self._watched: Watched = self._loop.add_socket(socket, self._read)
        self._loop.add_socket(self._monitor, self._read_monitor)
        self._loop.on_stop(self._close)

    def _close(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            if peer.lanes is not None:
                peer.lanes.gone()
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket):
            self._loop.remove_socket(socket)
            socket.close()

    # -- addresses ----------------------------------------------------------------------------------------------------

    def bind(self, address: str) -> str:
        """Listen on `host:port`; port 0 takes a free one (of ZMQDIST_PORTS). A server of this process that was dropped, and has the port,
        ends first.

        Returns:
          The real `host:port`.

        Raises:
          UnknownError: it could not be bound: in use, not an address of this machine, not allowed.
          FailedPreconditionError: the security does not cover the address (security.py).
          InvalidArgumentError: not an address.
        """
        host, port = split(address)
        self._security.check_bind(host)
        number = _look_up(host)
        self._security.check_bind(number)
        try:
            bound = self._bind_one_of(number, port)
        except UnknownError:
            if not wait_finished(DROPPED_S):
                raise
            bound = self._bind_one_of(number, port)
        return join(host, bound)

    def _bind_one_of(self, number: str, port: int) -> int:
        for each in [port] if port else free_ports():
            try:
                return self._loop.run(self._bind, number, each)
            except PortTakenError:
                if port:
                    raise
        raise all_taken(number)

    def bind_fd(self, fd: int) -> str:
        """Serve a TCP socket that is bound and listens already; the descriptor is ZeroMQ's from then on.

        Returns, raises: as `bind`.
        """
        with sockets.socket(fileno=fd) as given:
            name = given.getsockname()
            given.detach()
        if not isinstance(name, tuple):
            raise InvalidArgumentError(f"descriptor {fd} is not a TCP socket")
        self._security.check_bind(name[0])
        return join(name[0], self._loop.run(self._bind, name[0], name[1], fd))

    def _bind(self, host: str, port: int, fd: int = -1) -> int:
        socket = self._socket
        self._watched.dirty = True
        socket.setsockopt(zmq.IPV6, 1 if is_ipv6(host) else 0)
        socket.setsockopt(zmq.USE_FD, fd)
        address = join(host, port)
        try:
            socket.bind(f"tcp://{address if port else address[:-1] + '*'}")
        except zmq.ZMQError as error:
            kind = PortTakenError if error.errno == zmq.EADDRINUSE else UnknownError
            raise kind(f"could not bind {address}: {_why(error)}") from None
        finally:
            socket.setsockopt(zmq.USE_FD, -1)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return split(bound.rstrip(b"\0").decode().removeprefix("tcp://"))[1]

    # -- out ----------------------------------------------------------------------------------------------------------

    def on(
        self,
        kind: type[Message],
        fn: Callable[[Peer, Any, list[memoryview]], None],
        roles: frozenset[str] | None = None,
    ) -> None:
        """Give messages of a kind to `fn(peer, message, frames)`; the frames are its own to keep and to write to.

        Args:
          roles: who may send this kind, besides `admin`; None: everybody. Others are answered PERMISSION_DENIED.
        """
        self._handlers[kind] = (fn, None if roles is None else roles | {ADMIN})

    def lanes(self, peer: Peer) -> Lanes:
        """For messages with large parts from and to a peer."""
        if peer.lanes is None:
            peer.lanes = Lanes(peer.name, lambda message, frames: self.send(peer, message, frames))
            if peer.hello is not None:
                peer.lanes.met(peer.hello)
        return peer.lanes

    def send(self, peer: Peer, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Send without waiting.

        Args:
          frames: payload, copied. For what is small: ZeroMQ's way of sending without a copy takes longer, and large parts have
            their own ways (`lanes`).

        Returns:
          False: the peer has gone (`on_gone` is called later, from the loop), or its queue is full; nothing was sent.
        """
        return self._send_raw(peer, encode(message), frames)

    def _send_raw(self, peer: Peer, header: bytes, frames: Sequence[Buffer] = ()) -> bool:
        if peer.gone or self._closed:
            return False
        self._watched.dirty = True
        try:
            self._send(peer.routing_id, _MORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._mark_gone(peer)
            elif error.errno != zmq.EAGAIN:
                raise
            return False
        last = len(frames)
        self._send(header, _MORE if last else _NOBLOCK)
        for number, frame in enumerate(frames, 1):
            self._send(frame, _MORE if number < last else _NOBLOCK)
        return True

    # -- in -----------------------------------------------------------------------------------------------------------

    def worked(self, count: int) -> None:
        """A handler says that its message was as much work as `count` of them: it is the bound of a turn that counts."""
        self._left -= count - 1

    @property
    def peers(self) -> list[Peer]:
        """Those whose hello was taken."""
        return [peer for peer in self._peers.values() if peer.hello is not None and not peer.gone]

    def _read(self) -> bool:
        """Take what is there, up to the bound; True when stopped at the bound. The loop has just seen that there is something."""
        has_input, recv, peers = self._watched.has_input, self._recv, self._peers
        self._left = MESSAGES_PER_WAKE_MAX
        while self._left > 0:
            if self._left < MESSAGES_PER_WAKE_MAX and not has_input():
                self._watched.dirty = False
                return False
            self._left -= 1
            self.received += 1
            routing_id = recv(_NOBLOCK)
            peer = peers.get(routing_id)
            frame = recv(_NOBLOCK, False)
            if peer is None:
                peer = self._meet(routing_id, frame)
            frames = receive_payload(self._socket) if frame.more else []
            try:
                self._take(peer, frame.bytes, frames)
            except WireError as error:
                self._count("not a message")
                if not peer.blamed:
                    peer.blamed = True
                    log.warning("%s (further ones of it are only counted)", error)
            except Exception:
                self._loop.fault(f"handler of a message from {peer.name}")
        return True

    def _meet(self, routing_id: bytes, frame: zmq.Frame) -> Peer:
        """The first message of a connection that we do not know."""
        role = ADMIN if self._security.mechanism == NONE else _property(frame, "User-Id")
        fd = _fd_of(frame)
        peer = Peer(routing_id, fd, role, f"at {_property(frame, 'Peer-Address') or 'an unknown address'}")
        if len(self._peers) >= self.peers_max:
            peer.shut = True
            self._refuse(peer, RESOURCE_EXHAUSTED, f"this server has its {self.peers_max} connections already")
            return peer
        self._peers[routing_id] = peer
        if fd >= 0:
            self._by_fd.setdefault(fd, []).append(peer)
            if self._ends[fd] > 0:
                self._suspect_later(peer, SUSPECT_STEP_S)  # after our hello, which must be the first that it hears
        return peer

    def _take(self, peer: Peer, header: bytes, frames: list[memoryview] | None) -> None:
        if peer.shut:
            self._count("refused peer")
            return
        if frames is None:
            self._count("too many frames or bytes")
            # The C library keeps what was freed, here a gigabyte or more. It takes some milliseconds: not for each of many.
            self._loop.set_timer(give_back, self._loop.now() + GIVE_BACK_S, give_back)
            return
        if is_hello(header):
            self._greet(peer, header)
            return
        if peer.hello is None:
            peer.shut = True
            self._count("before the hello")
            self._refuse(peer, FAILED_PRECONDITION, "the first message of a connection must be a hello")
            return
        message = decode(header, peer.name)
        handler = self._handlers.get(type(message))
        if handler is None:
            if not isinstance(message, (Ping, Goodbye, Refused)):
                self._count("not served here")
                self._refuse(peer, UNIMPLEMENTED, f"{type(message).__name__} is not served here")
            return
        fn, roles = handler
        if roles is not None and peer.role not in roles:
            self._count("not allowed")
            text = f"role {peer.role} may not send {type(message).__name__} (allowed: {', '.join(sorted(roles))})"
            self._refuse(peer, PERMISSION_DENIED, text)
            return
        fn(peer, message, frames)

    def _greet(self, peer: Peer, header: bytes) -> None:
        if peer.hello is not None:
            self._count("second hello")
            return
        if self.leaving:
            return
        try:
            hello = decode_hello(header, peer.name)
        except ProtocolMismatchError as error:
            peer.shut = True
            self._count("other protocol version")
            log.warning("refused: %s", error)
            self._send_raw(peer, self._hello)  # it names both versions on the other side too
            return
        except WireError:
            peer.shut = True
            raise
        peer.name = _printable(hello.name) or f"{_printable(hello.kind)} {peer.name}"
        if not self._send_raw(peer, self._answer_to(peer, hello)):  # it has gone while its hello lay here
            return
        peer.hello = hello
        if self.on_hello is not None:
            self.on_hello(peer)

    def _answer_to(self, peer: Peer, hello: Hello) -> bytes:
        """Our hello, with our shared memory for whoever has offered its own.

        What is offered may be anybody's whom we can open, ourselves included. So it is believed only of those who could read that anyway:
        who has shown the user's token, and who may run code here. A key that may only call has its arrays go by the socket.
        """
        trusted = peer.role != "client" or self._security.mechanism != CURVE
        arena = this_arena() if trusted and hello.memory is not None else None
        if arena is None:
            return self._hello
        nonce = self.lanes(peer).offered(hello)
        return encode_hello(replace(self._said, memory=arena.offer, nonce=nonce))

    def _refuse(self, peer: Peer, code: int, text: str) -> None:
        if peer.refusals < REFUSALS_MAX:
            peer.refusals += 1
            self._send_raw(peer, encode(Refused(code, text)))

    def _count(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    # -- who has gone ---------------------------------------------------------------------------------------------------

    def _read_monitor(self) -> bool:
        for _ in range(MESSAGES_PER_WAKE_MAX):
            if not int(self._monitor.getsockopt(zmq.EVENTS)) & _POLLIN:
                return False
            _, fd = decode_event(self._monitor.recv_multipart(_NOBLOCK)[0])
            self._ends[fd] += 1
            if self._ends[fd] <= 0:
                continue  # of a peer that a send has found to have gone
            suspects = tuple(self._by_fd.get(fd, ()))
            if not suspects:
                self.refused_handshakes += 1
            for peer in suspects:
                self._suspect(peer, SUSPECT_STEP_S)
        return True

    def _suspect(self, peer: Peer, step_s: float) -> None:
        """Ask whether it has gone, now and again; `step_s` is the next pause."""
        if not peer.gone and self._ends[peer.fd] > 0 and not self._is_gone(peer):
            self._suspect_later(peer, step_s)

    def _suspect_later(self, peer: Peer, step_s: float) -> None:
        then = partial(self._suspect, peer, min(2 * step_s, SUSPECT_STEP_MAX_S))
        self._loop.set_timer((self, peer), self._loop.now() + step_s, then)

    def _is_gone(self, peer: Peer) -> bool:
        self._watched.has_input()  # makes the socket take note of connections that have ended
        self._send_raw(peer, _PING)
        return peer.gone

    def _mark_gone(self, peer: Peer) -> None:
        """Nothing can be sent to it any more. What it sent before it went may still lie here, and is read first."""
        peer.gone = True
        if peer in (met := self._by_fd.get(peer.fd, [])):
            met.remove(peer)
            self._ends[peer.fd] -= 1
            self._loop.set_timer((self, peer), None, self._let_go)
        self._going.append(peer)
        if len(self._going) == 1:
            self._loop.call_soon(self._let_go)

    def _let_go(self) -> None:
        """Forget those who have gone, when nothing of them can be left to read."""
        if self._closed:
            return
        self._watched.dirty = True
        if self._watched.has_input() and self._read():
            self._loop.call_soon(self._let_go)  # there is more: let others have their turn
            return
        going, self._going = self._going, []
        for peer in going:
            self._peers.pop(peer.routing_id, None)
            if peer.lanes is not None:
                peer.lanes.gone()
            if peer.hello is not None:
                for fn in self.on_gone:
                    self._loop.call_soon(fn, peer)


def listen(host: str, any_port: bool = False) -> sockets.socket:
    """A TCP socket at a free port, for `Router.bind_fd` here or in a child. Connections wait in it until somebody serves them.

    Args:
      any_port: whether it may have a port outside of ZMQDIST_PORTS.

    Raises:
      UnknownError: not an address of this machine, or ZMQDIST_PORTS is full.
    """
    number = _look_up(host)
    made = sockets.socket(sockets.AF_INET6 if is_ipv6(number) else sockets.AF_INET, sockets.SOCK_STREAM)
    try:
        made.setblocking(False)
        if any_port:
            made.bind((number, 0))
        else:
            bind_free(made, number)
        made.listen(BACKLOG)
    except BaseException as error:
        made.close()
        if isinstance(error, OSError):
            raise UnknownError(f"could not bind {join(host, 0)}: {error.strerror}") from None
        raise
    return made


def _look_up(host: str) -> str:
    """The number of a host name, IPv4 first; what cannot be looked up is left to ZeroMQ, which knows interface names."""
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError:
        return host
    numbers = sorted((str(entry[4][0]) for entry in found), key=is_ipv6)
    return numbers[0]


def _fd_of(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, TypeError):
        return -1


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def _printable(text: str) -> str:
    """A peer's own words, fit for a log line."""
    return "".join(char if char.isprintable() else "?" for char in text[:NAME_CHARS_MAX])


def _why(error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return "the port is in use; stop what listens there, or take port 0 for a free one"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine does not have that address"
    return str(error.strerror).lower()
