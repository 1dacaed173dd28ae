"""The decision which peers may connect, and in which role, by ZeroMQ's authentication protocol
(ZAP, RFC 27).

Rules
    `decide` is a pure function. It denies by default and never raises, whatever the frames contain.
    The status is 200, 400 or 500, never 300: after 300 no side closes the connection, and the
    client waits for ever. No secret reaches a log, a repr or a reply.

The user id of a reply is the peer's role; with CURVE, the peer's public key follows the role.
libzmq attaches the user id to every message of the connection (router.py).

Roles
    client   may call methods, may not send code
    submit   may also schedule functions
    worker   may run functions
    admin    may do everything

    joining  may only join: the role of an unknown key while the dispatcher's join tokens are open,
    and for a time after they end
    revoked  may do nothing: the role of a key that has lost its former role
With the last two roles, a peer gets one reply and nothing else (router.py). ZeroMQ itself could not
report why it refuses the peer.

Where a dispatcher vouches for keys, the ZapHandler may reply late. ZeroMQ waits for the reply until
the handshake of the connecting side times out.

Not here: reading the keys and the token (keys.py, token.py), choosing a mechanism (security.py).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from zmqdist.errors import FailedPreconditionError
from zmqdist.limits import MESSAGES_PER_WAKE_MAX, PEERS_MAX
from zmqdist.transport.keyring_machine import JOINING, KEY_BYTES, REVOKED, KeyVerdict

if TYPE_CHECKING:
    from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.transport")

ROLES: Final = ("client", "submit", "worker", "admin")
ADMIN: Final = "admin"
DOMAIN: Final = b"zmqdist"
ENDPOINT: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"
LOG_EVERY_S: Final = 1.0
"""Seconds between two log lines about refusals. One line counts several refusals, because a
stranger must not be able to fill the disk."""

LIMITED: Final = frozenset({JOINING, REVOKED})
"""Roles of connections on which the server sends one reply and nothing else."""

_ROLE_BY_NAME: Final = {role.encode(): role for role in ROLES}


@dataclass(frozen=True)
class ZapRequest:
    """ZeroMQ's request to authenticate one new connection. The connecting peer, a stranger, has
    chosen all fields except `address`."""

    version: bytes
    request_id: bytes
    domain: bytes
    address: bytes
    mechanism: bytes
    credentials: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class ZapReply:
    """The reply to a ZapRequest. A `status` of 200 accepts the peer with the role in `user_id`; 400
    refuses it, and 500 reports a request of wrong form.
    """

    request_id: bytes
    status: int
    text: str
    user_id: str = ""

    def frames(self) -> list[bytes]:
        return [
            VERSION,
            self.request_id,
            b"%d" % self.status,
            self.text.encode(),
            self.user_id.encode(),
            b"",
        ]


@dataclass(frozen=True)
class Policy:
    """The secrets and keys that give access to a server.

    Attributes:
      token: the password of mechanism PLAIN; with an empty token, every peer is refused.
      roles: role of each CURVE public key (32 bytes).
      judge: a function that returns the rights of a CURVE key, which may change with time. `None`
        means that `roles` decides.
      ask: `ask(key, answer)` asks the dispatcher about a key, and calls `answer()`, in any thread,
        when `judge` may decide about it: after the dispatcher's reply, or after a time limit.
        `None` means that `judge`, or `roles`, can decide about any key without delay.
    """

    token: bytes = field(default=b"", repr=False)
    roles: Mapping[bytes, str] = field(default_factory=dict)
    judge: Callable[[bytes], KeyVerdict] | None = None
    ask: Callable[[bytes, Callable[[], object]], object] | None = None

    def role(self, key: bytes) -> str:
        """Return the role of a key; "" if the key has no role."""
        return self.roles.get(key, "") if self.judge is None else self.judge(key).role

    def problem(self, key: bytes) -> str:
        """Return why a key has lost its role."""
        problem = "" if self.judge is None else self.judge(key).problem
        return (
            problem
            or "this server does not know the key of this process any more: the process needs a "
            "new ticket or key"
        )


def parse(frames: Sequence[bytes]) -> ZapRequest:
    """Return the request in the frames after the empty delimiter. Missing frames become empty,
    which `decide` refuses."""
    version, request_id, domain, address, _identity, mechanism = (
        *frames[:6],
        *[b""] * (6 - len(frames[:6])),
    )
    return ZapRequest(version, request_id, domain, address, mechanism, tuple(frames[6:]))


def decide(request: ZapRequest, policy: Policy) -> ZapReply:
    """Decide whether a connection is accepted, and with which role. Never raises."""
    if request.version != VERSION:
        return ZapReply(request.request_id, 500, "not a request of ZAP 1.0")
    if request.domain == DOMAIN:
        if request.mechanism == b"PLAIN" and len(request.credentials) == 2:
            return _decide_plain(request, policy)
        if request.mechanism == b"CURVE" and len(request.credentials) == 1:
            return _decide_curve(request, policy)
    return ZapReply(request.request_id, 400, "this server does not admit connections in this way")


def _decide_plain(request: ZapRequest, policy: Policy) -> ZapReply:
    name, password = request.credentials
    # The passwords are compared even if the role is unknown, and in constant time, so that the time
    # of the reply reveals nothing.
    right = hmac.compare_digest(password, policy.token) and bool(policy.token)
    role = _ROLE_BY_NAME.get(name)
    if not right or role is None:
        return ZapReply(request.request_id, 400, "unknown role" if right else "wrong token")
    return ZapReply(request.request_id, 200, "welcome", role)


def _decide_curve(request: ZapRequest, policy: Policy) -> ZapReply:
    key = request.credentials[0]
    role = policy.role(key)
    if len(key) != KEY_BYTES or (role not in ROLES and role not in LIMITED):
        return ZapReply(request.request_id, 400, "this key is not authorized")
    return ZapReply(request.request_id, 200, "welcome", f"{role} {z85.encode(key).decode()}")


def role_and_key(user_id: str) -> tuple[str, bytes]:
    """Return the two parts of the user id of a ZapReply: the peer's role, and the peer's public key
    of 32 bytes, which is empty without CURVE.
    """
    role, _, key = user_id.partition(" ")
    return role, z85.decode(key.encode()) if key else b""


class ZapHandler:
    """The handler that runs `decide` for all connections of a loop's ZeroMQ context.

    Attributes:
      refused: number of connections that the handler has refused.
    """

    def __init__(self, loop: Loop, policy: Policy) -> None:
        self._loop = loop
        self._policy = policy
        self.refused = 0
        self._pending = 0
        self._logged_at: float | None = None
        self._logged = 0
        self._socket = loop.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(ENDPOINT)
        except zmq.ZMQError:
            self._socket.close()
            raise
        loop.add_socket(self._socket, self._serve)

    def _serve(self) -> bool:
        for _ in range(MESSAGES_PER_WAKE_MAX):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
                return False
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
        return True

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) < 2:
            return
        request = parse(frames[2:])
        ask = self._policy.ask
        if ask is None or request.mechanism != b"CURVE" or len(request.credentials) != 1:
            self._reply(frames[0], request)
        elif self._pending < PEERS_MAX:
            self._pending += 1
            ask(request.credentials[0], partial(self._soon, frames[0], request))

    def _soon(self, routing_id: bytes, request: ZapRequest) -> None:
        """Have the loop reply to a request whose key can be judged now. Any thread may call
        this.
        """
        if self._loop.in_loop:
            self._answered(routing_id, request)
            return
        with suppress(FailedPreconditionError):
            # the loop has been stopped, so its sockets need no reply
            self._loop.call_soon(self._answered, routing_id, request)

    def _answered(self, routing_id: bytes, request: ZapRequest) -> None:
        self._pending -= 1
        if not self._socket.closed:
            self._reply(routing_id, request)

    def _reply(self, routing_id: bytes, request: ZapRequest) -> None:
        reply = decide(request, self._policy)
        self._socket.send_multipart([routing_id, b"", *reply.frames()])
        if reply.status != 200:
            self._count(request, reply)

    def _count(self, request: ZapRequest, reply: ZapReply) -> None:
        self.refused += 1
        now = self._loop.now()
        if self._logged_at is not None and now - self._logged_at < LOG_EVERY_S:
            return
        log.warning(
            "refused %d connection(s), the last one from %s: %s",
            self.refused - self._logged,
            request.address.decode("ascii", "replace")[:64],
            reply.text,
        )
        self._logged_at = now
        self._logged = self.refused
