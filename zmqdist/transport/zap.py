"""Which peers may connect, and in which role: ZeroMQ's authentication protocol (ZAP, RFC 27).

Rules
    `decide` is pure and total: it denies by default and never raises, whatever the frames contain.
    The status is 200, 400 or 500, never 300: after 300 neither side closes the connection, and the client waits for ever.
    No secret reaches a log, a repr or a reply.

The user id of a reply is the peer's role. libzmq attaches it to every message of the connection (router.py).

Roles
    client   may call methods, may not send code
    submit   may also schedule functions
    worker   may run functions
    admin    may do everything

Not here: reading the keys and the token (keys.py, token.py), choosing a mechanism (security.py).
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import zmq

from zmqdist.limits import MESSAGES_PER_WAKE_MAX

if TYPE_CHECKING:
    from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.transport")

ROLES: Final = ("client", "submit", "worker", "admin")
ADMIN: Final = "admin"
DOMAIN: Final = b"zmqdist"
ENDPOINT: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"
LOG_EVERY_S: Final = 1.0
"""Seconds between two log lines about refusals, each with their number: a stranger must not be able to fill the disk."""

_ROLE_BY_NAME: Final = {role.encode(): role for role in ROLES}


@dataclass(frozen=True)
class ZapRequest:
    """One connection that wants to authenticate. The stranger has chosen all fields except `address`."""

    version: bytes
    request_id: bytes
    domain: bytes
    address: bytes
    mechanism: bytes
    credentials: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class ZapReply:
    """The reply: `status` 200 with a role as `user_id`, else 400 (refused) or 500 (not a request)."""

    request_id: bytes
    status: int
    text: str
    user_id: str = ""

    def frames(self) -> list[bytes]:
        return [VERSION, self.request_id, b"%d" % self.status, self.text.encode(), self.user_id.encode(), b""]


@dataclass(frozen=True)
class Policy:
    """The secrets that give access.

    Attributes:
      token: the password of mechanism PLAIN; empty refuses every peer.
      roles: role of each CURVE public key (32 bytes).
    """

    token: bytes = field(default=b"", repr=False)
    roles: Mapping[bytes, str] = field(default_factory=dict)


def parse(frames: Sequence[bytes]) -> ZapRequest:
    """Return the request in the frames after the empty delimiter. Missing frames become empty, which `decide` refuses."""
    version, request_id, domain, address, _identity, mechanism = (*frames[:6], *[b""] * (6 - len(frames[:6])))
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
    return ZapReply(request.request_id, 400, "not allowed here")


def _decide_plain(request: ZapRequest, policy: Policy) -> ZapReply:
    name, password = request.credentials
    # Compared in any case, and in constant time, so that the time of the reply reveals nothing.
    right = hmac.compare_digest(password, policy.token) and bool(policy.token)
    role = _ROLE_BY_NAME.get(name)
    if not right or role is None:
        return ZapReply(request.request_id, 400, "unknown role" if right else "wrong token")
    return ZapReply(request.request_id, 200, "welcome", role)


def _decide_curve(request: ZapRequest, policy: Policy) -> ZapReply:
    role = policy.roles.get(request.credentials[0])
    if role not in ROLES:
        return ZapReply(request.request_id, 400, "this key is not authorized")
    return ZapReply(request.request_id, 200, "welcome", role)


class ZapHandler:
    """Runs `decide` for all connections of a loop's context.

    Attributes:
      refused: number of refused connections.
    """

    def __init__(self, loop: Loop, policy: Policy) -> None:
        self._loop = loop
        self._policy = policy
        self.refused = 0
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
            self._answer(self._socket.recv_multipart(zmq.NOBLOCK), self._socket.send_multipart)
        return True

    def _answer(self, frames: list[bytes], send: Callable[[list[bytes]], object]) -> None:
        if len(frames) < 2:
            return
        request = parse(frames[2:])
        reply = decide(request, self._policy)
        send([frames[0], b"", *reply.frames()])
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
