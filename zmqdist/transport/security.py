"""The security mechanism of a socket, and the secrets for it.

Rules
    A server has one mechanism. If keys are given, this is CURVE. Without keys, a server binds only
    loopback, where it checks the user's token (ZeroMQ's PLAIN, with the token as the password and
    the role as the user name). If `insecure` is set, a server without keys binds any address and
    checks nothing, and each start logs a warning.

    A connecting side uses CURVE if keys are given, else the token, or no secret if `insecure` is
    set. It shows the token only on loopback, and only to a socket on which this user listens,
    because on a shared host a stranger can take over a freed port, and would learn the token. Only
    Linux tells who listens: elsewhere it shows only a token whose file the program or the
    environment names.
    ZeroMQ's own reconnecting cannot check first which user listens, so it is off
    (`ClientSecurity.apply`), and dealer.py calls `may_connect` before each attempt. A stranger
    could still take the port between this check and the connecting.

    With CURVE a listening socket shows a key that depends on the kind of its process. A server (the
    dispatcher, a task of a cluster) shows the key of the cluster's servers, and a worker or a
    program shows the key of its role. A side that connects to a server expects the key in
    `server.pub`. A side that connects to a worker or a program has received that process's public
    key with the address, and accepts the key only if the file `authorized` lists it for a role that
    listens. So a process with a worker's key can pose only as a worker.

    Where a dispatcher vouches for keys (peer_keys.py), a listening socket asks the dispatcher about
    the key of each peer. A connecting socket asks about the key that came with the address or, if
    no key came, asks which key listens at the address. The file `authorized` then counts only while
    the dispatcher does not reply.

    The folder of a process that joined (join_ticket.py) has one key, which that process shows
    wherever it connects or listens. The process reads the key again for each connection, because
    the key may have been replaced.

    Keys come from an argument or ZMQDIST_KEYS_DIR, a token file from an argument or
    ZMQDIST_TOKEN_FILE. If an argument names a token file and only the environment names keys, the
    token is used.

Which peers may connect, and in which role, is decided by ZeroMQ's authentication protocol (ZAP, RFC
27).
    `decide` is a pure function. It denies by default and never raises, whatever the frames contain.
    The status is 200, 400 or 500, never 300: after 300 no side closes the connection, and the
    client waits for ever. No secret reaches a log, a repr or a reply.

The user id of a reply is the peer's role; with CURVE, the peer's public key follows the role.
libzmq attaches the user id to every message of the connection (router.py).

Roles
    client   may call methods, may not send code
    observe  may read the inside of a cluster at its dispatcher, and nothing else
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

Not here: reading the files of keys and tokens (keys.py).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import zmq
from zmq.utils import z85

from zmqdist.addresses import is_ipv6, is_loopback
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError
from zmqdist.limits import MESSAGES_PER_WAKE_MAX, PEERS_MAX
from zmqdist.platforms import IS_LINUX
from zmqdist.transport import keys
from zmqdist.transport.endpoint import split
from zmqdist.transport.keyring_machine import (
    JOINING,
    KEY_BYTES,
    LISTENING_ROLES,
    REVOKED,
)
from zmqdist.transport.keys import KEYS_DIR_VARIABLE, ROLES

if TYPE_CHECKING:
    from zmqdist.messages import KeyState
    from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.transport")

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
    judge: Callable[[bytes], KeyState] | None = None
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
    # never 300: no side would close the connection, and the client would wait for ever
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
        # beyond the bound there is no reply, and ZeroMQ ends the handshake at its time limit
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


PLAIN: Final = "plain"
CURVE: Final = "curve"
NONE: Final = "none"

SERVER: Final = "server"

NEVER_MS: Final = 1_000_000_000
"""Milliseconds until ZeroMQ itself reconnects: eleven days, which is longer than any owner waits
before it replaces a lost connection. ZeroMQ's value -1 means "never", but with -1 ZeroMQ also
discards messages that had arrived and were not read before the connection ended.
"""

VoucherOf: TypeAlias = "Callable[[str | Path, str], Vouching | None]"

_LISTEN: Final = "0A"
READ_BYTES: Final = 256
"""Bytes of the kernel's table of connections to read at a time. To fill a larger page, the kernel
would walk through all connections of the host.
"""


class KeyWatcher(Protocol):
    """A socket that ends its connections to peers with a certain key when that key is revoked."""

    def key_revoked(self, key: bytes, problem: str) -> None:
        """End the connections to peers with this key. Any thread may call this."""


class Vouching(Protocol):
    """The protocol by which a socket asks a dispatcher about keys. peer_keys.py implements it."""

    def attach(self, watcher: KeyWatcher) -> None: ...

    def detach(self, watcher: KeyWatcher) -> None: ...

    def judge(self, key: bytes) -> KeyState: ...

    def ask(self, key: bytes, answer: Callable[[], object]) -> None: ...

    def expected(self, address: str, peer: bytes) -> bytes | None: ...


@dataclass(frozen=True)
class ServerSecurity:
    """The mechanism and the secrets with which a server checks each peer. `server_security` makes
    it."""

    mechanism: str
    policy: Policy = field(default_factory=Policy)
    key: keys.KeyPair | None = None
    voucher: Vouching | None = None

    @property
    def public(self) -> bytes:
        """The public key of 32 bytes that the server shows and announces with its address; empty
        without CURVE."""
        return b"" if self.key is None else keys.decode_public(self.key.public)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options of a ROUTER. Call it before the socket binds."""
        if self.mechanism == NONE:
            return
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if self.mechanism == PLAIN:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            assert self.key is not None
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.key.secret)

    def install(self, loop: Loop) -> None:
        """Install the handler that decides which peers may connect. Call this once for each loop,
        before a socket binds.

        Raises:
          FailedPreconditionError: the loop has a handler already.
        """
        if self.mechanism == NONE:
            return
        try:
            ZapHandler(loop, self.policy)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            raise FailedPreconditionError(
                f"loop {loop.name} serves a secured socket already: give each server a loop of "
                f"its own"
            ) from None

    def check_bind(self, host: str) -> None:
        """Raise FailedPreconditionError if this mechanism cannot protect the address."""
        if self.mechanism == PLAIN and not is_loopback(host):
            raise _needs_keys(host)


@dataclass(frozen=True)
class ClientSecurity:
    """The mechanism and the secrets with which a connecting side identifies itself to the server.
    `client_security` makes it.

    Attributes:
      role: the role in which this side wants to connect (security.py lists the roles).
      source: the origin of the secret, for errors.
      key: this side's key pair. `None` means that each connection reads the key from `folder`,
        which belongs to a process that joined.
      server_key: the public key (Z85) that the other side must show. It is not used with `voucher`,
        which returns the key.
      peer: the public key that came with the address; empty for the address of a server.
      token_is_named: whether the program or the environment has named the file of the token.
    """

    mechanism: str
    role: str
    source: str = ""
    token: bytes = field(default=b"", repr=False)
    key: keys.KeyPair | None = None
    server_key: bytes = b""
    folder: str = ""
    peer: bytes = b""
    voucher: Vouching | None = None
    token_is_named: bool = False

    def apply(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Set the options of a DEALER, and switch off ZeroMQ's own reconnecting. Call it before the
        socket connects.

        Call `may_connect` right before each connect, and connect only if it returns True.
        """
        host, _ = split(address)
        # ZeroMQ itself could not check first which user listens there
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        if is_ipv6(host):
            socket.setsockopt(zmq.IPV6, 1)
        if self.mechanism == PLAIN:
            socket.setsockopt(zmq.PLAIN_USERNAME, self.role.encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.token)
        elif self.mechanism == CURVE:
            pair = self.key or keys.load_role(self.folder, self.role)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.expected(address) or b"")
            socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)

    def expected(self, address: str) -> bytes | None:
        """Return the public key (Z85) that the server must show; None while the dispatcher has not
        replied. Raises UnauthenticatedError if the dispatcher does not vouch for the server's key.
        """
        return (
            self.server_key if self.voucher is None else self.voucher.expected(address, self.peer)
        )

    def may_connect(self, address: str) -> bool:
        """Return whether the secret may be shown at the address now. The result can be False only
        if the secret is the token, or if `voucher` is set.

        Returns:
          False if no process listens at the address, or the dispatcher has not vouched for the
          server's key yet; the caller tries again later.

        Raises:
          UnauthenticatedError: another user listens at the address, or the dispatcher does not
            vouch for the server's key.
          FailedPreconditionError: the address is not on this host, or the system does not report
            which user listens at it.
        """
        if self.mechanism != PLAIN:
            return self.mechanism != CURVE or self.expected(address) is not None
        host, port = split(address)
        if not is_loopback(host):
            raise _needs_keys(host)
        if not IS_LINUX:
            if self.token_is_named:
                return True
            raise FailedPreconditionError(
                f"{sys.platform} does not tell which user listens on {address}, and another user "
                f"would learn your token: name its file if no one else uses this host "
                f"({keys.TOKEN_FILE_VARIABLE}), or use CURVE keys (`zmqdist keygen`)"
            )
        uids = listening_users(host, port)
        strangers = uids - {os.geteuid()}
        # a stranger that has taken over a freed port would learn the token
        if strangers:
            raise UnauthenticatedError(
                f"user {min(strangers)} listens on {address}, not this user ({os.geteuid()}): the "
                f"token was not shown there. "
                f"Use another port, or CURVE keys (`zmqdist keygen`) for a server of another user",
            )
        return bool(uids)


def server_security(
    host: str,
    *,
    role: str = SERVER,
    keys_dir: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool = False,
    vouched: VoucherOf | None = None,
) -> ServerSecurity:
    """Return the security of a server that binds `host`. This reads the secrets, and makes the
    user's token on first use.

    Args:
      role: the kind of process that listens: "server", or the role of a worker or a program. With
        CURVE the socket shows the key of this role.
      insecure: if there are no keys, let every peer connect as admin, unencrypted, and log a
        warning.
      vouched: a function that returns the Vouching for a key folder and a role, or None if no
        dispatcher vouches for keys.

    Raises:
      FailedPreconditionError: there are no keys for an address that other hosts can reach, or the
        secrets cannot be read.
    """
    folder = _keys_folder(keys_dir, token_file)
    if folder is not None:
        joined = keys.load_joined(folder)
        pair = keys.load_role(folder, role if joined is None else joined.role)
        voucher = None if vouched is None else vouched(folder, role)
        if voucher is None:
            return ServerSecurity(CURVE, Policy(roles=keys.load_authorized(folder)), pair)
        return ServerSecurity(CURVE, Policy(judge=voucher.judge, ask=voucher.ask), pair, voucher)
    if insecure:
        log.warning(
            "%s is served without authentication and encryption: any process that reaches it can "
            "run code as this user",
            host,
        )
        return ServerSecurity(NONE)
    if not is_loopback(host):
        raise _needs_keys(host)
    secret, _ = keys.user_token(token_file)
    return ServerSecurity(PLAIN, Policy(token=secret))


def client_security(
    address: str,
    role: str,
    *,
    peer: bytes = b"",
    keys_dir: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool = False,
    vouched: VoucherOf | None = None,
) -> ClientSecurity:
    """Return the security with which a socket connects to `address` as `role`. This does not
    connect.

    Args:
      peer: the public key that came with the address of a worker or a program; empty for a server.
      insecure: if there are no keys, connect without a secret. Only a server that was started with
        `insecure` accepts this.

    Raises:
      FailedPreconditionError: there are no keys for an address that is not loopback, or the secrets
        cannot be read.
      InvalidArgumentError: there is no such role, or `address` is not an address.
      UnauthenticatedError: `peer` is not the key of a worker or a program of this cluster.
    """
    if role not in ROLES:
        raise InvalidArgumentError(f"{role!r} is not a role: {', '.join(ROLES)}")
    host, _ = split(address)
    folder = _keys_folder(keys_dir, token_file)
    if folder is not None:
        return _curve_client(
            address, role, folder, peer, None if vouched is None else vouched(folder, role)
        )
    if insecure:
        return ClientSecurity(NONE, role)
    if not is_loopback(host):
        raise _needs_keys(host)
    secret, path = keys.user_token(token_file)
    is_named = bool(token_file or os.environ.get(keys.TOKEN_FILE_VARIABLE))
    return ClientSecurity(PLAIN, role, f"token {path}", token=secret, token_is_named=is_named)


def _curve_client(
    address: str, role: str, folder: str | Path, peer: bytes, voucher: Vouching | None
) -> ClientSecurity:
    joined = keys.load_joined(folder)
    role = role if joined is None else joined.role
    pair = keys.load_role(folder, role)
    # Error texts show the public key itself, because the file may be replaced while this key is in
    # use.
    source = f"key {pair.public.decode()}, read from {Path(folder, role)}.key"
    if voucher is not None:
        return ClientSecurity(
            CURVE,
            role,
            source,
            key=pair if joined is None else None,
            folder=str(folder),
            peer=peer,
            voucher=voucher,
        )
    return ClientSecurity(
        CURVE, role, source, key=pair, server_key=_expected_key(address, folder, peer)
    )


def _expected_key(address: str, folder: str | Path, peer: bytes) -> bytes:
    """Return the public key (Z85) that the other side must show."""
    if not peer:
        return keys.load_server_public(folder)
    # a process with a client's key must not pose as a worker
    if keys.load_authorized(folder).get(peer) not in LISTENING_ROLES:
        raise UnauthenticatedError(
            f"no connection to {address}: its public key {keys.encode_public(peer)} is not that "
            f"of a worker or a program in "
            f"{Path(folder, keys.AUTHORIZED)}",
        )
    return keys.encode_public(peer).encode()


def _keys_folder(keys_dir: str | Path | None, token_file: str | Path | None) -> str | Path | None:
    return keys_dir or (None if token_file else os.environ.get(KEYS_DIR_VARIABLE)) or None


def _needs_keys(host: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"other hosts can reach {host}, and no CURVE keys are given: make some with `zmqdist "
        f"keygen DIR` and set "
        f"{KEYS_DIR_VARIABLE}=DIR on every host, or stay on 127.0.0.1 (insecure=True or --insecure "
        f"goes without)",
    )


def listening_users(host: str, port: int) -> set[int]:
    """Return the user ids of the sockets that would accept a connection to a loopback address;
    empty if no process listens.

    Raises:
      FailedPreconditionError: this system does not report which user listens.
    """
    try:
        return {uid for uid, _ in listening_sockets(host, port)}
    except (OSError, ValueError, IndexError) as error:
        raise FailedPreconditionError(
            f"cannot find out which user listens on {host}:{port} ({error}): use CURVE keys "
            f"(`zmqdist keygen`)"
        ) from None


def listening_sockets(host: str, port: int) -> set[tuple[int, int]]:
    """Return (user id, inode) of the sockets that would accept a connection to an IP address of
    this host.

    Like the kernel, this function prefers a socket bound to the exact address to one bound to all
    addresses.

    Raises:
      OSError, ValueError, IndexError: the kernel's table of connections is missing or has another
        form.
    """
    ip_address = ipaddress.ip_address(host)
    if isinstance(ip_address, ipaddress.IPv4Address):
        exact = {ip_address, ipaddress.IPv6Address(f"::ffff:{ip_address}")}
        wild = {ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")}
    else:
        exact, wild = {ip_address}, {ipaddress.ip_address("::")}
    sockets_by_address: dict[Any, set[tuple[int, int]]] = {}
    for name in ("tcp", "tcp6"):
        _collect_listening(f"/proc/net/{name}", port, sockets_by_address)
        # The other table, which takes milliseconds to read, is not needed: all sockets that share
        # an address belong to one user.
        if ip_address in sockets_by_address:
            return sockets_by_address[ip_address]
    for addresses in (exact, wild):
        sockets = {
            socket_id for address in addresses for socket_id in sockets_by_address.get(address, ())
        }
        if sockets:
            return sockets
    return set()


def _collect_listening(
    path: str, port: int, sockets_by_address: dict[Any, set[tuple[int, int]]]
) -> None:
    suffix = f":{port:04X}"
    if path.endswith("6") and not os.path.exists(path):  # a kernel without IPv6 has no such file
        return
    with open(path) as file:
        next(file)
        for line in file:
            words = line.split(None, 10)
            # The kernel lists listening sockets first (its proc_net_tcp.rst), and thousands of
            # other sockets may follow.
            if words[3] != _LISTEN:
                break
            if words[1].endswith(suffix):
                sockets_by_address.setdefault(_address(words[1][: -len(suffix)]), set()).add(
                    (int(words[7]), int(words[9]))
                )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that the kernel prints as 32-bit words in this host's byte order."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return ipaddress.ip_address(raw)
