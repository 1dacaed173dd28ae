"""Which security mechanism a socket uses, and the secrets for it.

Rules
    A server has one mechanism, chosen by where it binds: on loopback the user's token (ZeroMQ's PLAIN; the user name is
    the role), elsewhere CURVE. CURVE is used on loopback too when keys are given. A bind to anything else without keys is
    refused, unless it is called insecure, and then it warns at each start.

    Who connects uses CURVE when keys are given, else the token, and the token only on loopback, and only to a socket that
    this user listens on: on a shared machine a stranger can take over a port that was freed, and would be told the token.
    ZeroMQ's own reconnecting cannot look first, so it is switched off (`ClientSecurity.apply`): each attempt asks
    `may_connect` before (connector.py does). What remains is the instant between the look and the connect.

    With CURVE a listening socket shows the key of what its process is: servers (the dispatcher, tasks of a cluster) that of the cluster's
    servers, workers and programs that of their role. Who connects to a server expects `server.pub`; who connects to a worker or a program
    was told its public key with its address, and takes it only if `authorized` lists it for a role that listens. So one who runs a worker
    can be taken for a worker, and for nothing else.

    Keys are given by argument or by ZMQDIST_KEYS_DIR, a token file by argument or by ZMQDIST_TOKEN_FILE. A token file that
    is given as an argument stands above keys that only the environment has. `curve=True` insists on keys, `curve=False`
    ignores them.

Not here: reading the files (keys.py, token.py), the decision about who is let in (zap.py).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq

from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError
from zmqdist.transport import keys, token
from zmqdist.transport.address import is_ipv6, is_loopback, split
from zmqdist.transport.zap import DOMAIN, ROLES, Policy, ZapHandler

if TYPE_CHECKING:
    from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.transport")

PLAIN: Final = "plain"
CURVE: Final = "curve"
NONE: Final = "none"

SERVER: Final = "server"
LISTENING_ROLES: Final = frozenset({"worker", "submit", "admin"})
"""Roles whose key a process may show that listens without being a server."""

NEVER_MS: Final = 1_000_000_000
"""Eleven days, and longer than any owner leaves an ended connection be. -1, which ZeroMQ offers for "never", would also throw
away what had arrived and was not read yet when a connection ends."""

_LISTEN: Final = "0A"
READ_BYTES: Final = 256
"""Of the kernel's table at a time: it makes as many lines as are asked for, and looks through all connections to fill a page."""


@dataclass(frozen=True)
class ServerSecurity:
    """What a server demands of whoever connects. Made by `server_security`."""

    mechanism: str
    policy: Policy = field(default_factory=Policy)
    key: keys.KeyPair | None = None

    @property
    def public(self) -> bytes:
        """The public key that it shows, in 32 bytes: to be told with its address. Empty without CURVE."""
        return b"" if self.key is None else keys.decode_public(self.key.public)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options of a ROUTER, before it binds."""
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
        """Set up the handler that decides who may connect, before anything binds. Once per loop.

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
                f"loop {loop.name} serves a secured socket already: give each server a loop of its own"
            ) from None

    def check_bind(self, host: str) -> None:
        """Refuse an address that this mechanism cannot protect. Raises FailedPreconditionError."""
        if self.mechanism == PLAIN and not is_loopback(host):
            raise _needs_keys(host)


@dataclass(frozen=True)
class ClientSecurity:
    """What a connecting side shows. Made by `client_security`.

    Attributes:
      role: what it wants to be, see zap.py.
      source: where the secret is from, for errors.
    """

    mechanism: str
    role: str
    source: str = ""
    token: bytes = field(default=b"", repr=False)
    key: keys.KeyPair | None = None
    server_key: bytes = b""

    def apply(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Set the options of a DEALER, before it connects; ZeroMQ's own reconnecting is switched off.

        Ask `may_connect` right before each connect; where it is False there is nothing to connect to yet.
        """
        host, _ = split(address)
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        if is_ipv6(host):
            socket.setsockopt(zmq.IPV6, 1)
        if self.mechanism == PLAIN:
            socket.setsockopt(zmq.PLAIN_USERNAME, self.role.encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.token)
        elif self.mechanism == CURVE:
            assert self.key is not None
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.key.secret)

    def may_connect(self, address: str) -> bool:
        """Whether the secret may be shown at the address now. Always True but for the token.

        Returns:
          False: nobody listens there; ask again later.

        Raises:
          UnauthenticatedError: another user listens there.
          FailedPreconditionError: the address is not on this machine, or it cannot be told who listens.
        """
        if self.mechanism != PLAIN:
            return True
        host, port = split(address)
        if not is_loopback(host):
            raise _needs_keys(host)
        uids = listening_users(host, port)
        strangers = uids - {os.geteuid()}
        if strangers:
            raise UnauthenticatedError(
                f"{address} is listened on by user {min(strangers)}, not by this user ({os.geteuid()}): the token was not "
                f"shown to it. Use another port, or CURVE keys (`zmqdist keygen`) for a server of another user",
            )
        return bool(uids)


def server_security(
    host: str,
    *,
    role: str = SERVER,
    curve: bool | None = None,
    keys_dir: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool = False,
) -> ServerSecurity:
    """The security of a server that binds `host`. Reads the secrets; makes the user's token at first use.

    Args:
      role: what listens: "server", or the role of a worker or a program. With CURVE it shows the key of that.
      curve: True insists on keys, False ignores them, None uses them where they are given.
      insecure: without keys, let everybody in as admin, unencrypted; logs a warning.

    Raises:
      FailedPreconditionError: no keys for an address that others reach, or the secrets cannot be read.
    """
    folder = _keys_folder(curve, keys_dir, token_file)
    if folder is not None:
        return ServerSecurity(CURVE, Policy(roles=keys.load_authorized(folder)), keys.load_role(folder, role))
    if insecure:
        log.warning(
            "%s is served without authentication and encryption: whoever reaches it can run code as this user", host
        )
        return ServerSecurity(NONE)
    if not is_loopback(host):
        raise _needs_keys(host)
    secret, _ = token.user_token(token_file)
    return ServerSecurity(PLAIN, Policy(token=secret))


def client_security(
    address: str,
    role: str,
    *,
    peer: bytes = b"",
    curve: bool | None = None,
    keys_dir: str | Path | None = None,
    token_file: str | Path | None = None,
    insecure: bool = False,
) -> ClientSecurity:
    """What to show at `address`, to be let in as `role`. Does not connect.

    Args:
      peer: the public key that was told with the address, of a worker or a program; empty for a server.
      curve: as in `server_security`.
      insecure: without keys, show nothing: for a server that was started insecure.

    Raises:
      FailedPreconditionError: no keys for an address that is not loopback, or the secrets cannot be read.
      InvalidArgumentError: no such role, or not an address.
      UnauthenticatedError: `peer` is not the key of a worker or a program of this cluster.
    """
    if role not in ROLES:
        raise InvalidArgumentError(f"{role!r} is not a role: {', '.join(ROLES)}")
    host, _ = split(address)
    folder = _keys_folder(curve, keys_dir, token_file)
    if folder is not None:
        pair = keys.load_role(folder, role)
        # By the key itself: the file may be replaced while this one is in use.
        source = f"key {pair.public.decode()}, read from {Path(folder, role)}.key"
        return ClientSecurity(CURVE, role, source, key=pair, server_key=_expected_key(address, folder, peer))
    if insecure:
        return ClientSecurity(NONE, role)
    if not is_loopback(host):
        raise _needs_keys(host)
    secret, path = token.user_token(token_file)
    return ClientSecurity(PLAIN, role, f"token {path}", token=secret)


def _expected_key(address: str, folder: str | Path, peer: bytes) -> bytes:
    """The public key that the other side has to have, as ZeroMQ takes it."""
    if not peer:
        return keys.load_server_public(folder)
    if keys.load_authorized(folder).get(peer) not in LISTENING_ROLES:
        raise UnauthenticatedError(
            f"{address} is not connected to: its public key {keys.encode_public(peer)} is of no worker or program in "
            f"{Path(folder, keys.AUTHORIZED)}",
        )
    return keys.encode_public(peer).encode()


def _keys_folder(curve: bool | None, keys_dir: str | Path | None, token_file: str | Path | None) -> str | Path | None:
    if curve is False:
        return None
    folder = keys_dir or (None if token_file and not curve else os.environ.get(keys.ENVIRONMENT))
    if curve and not folder:
        raise FailedPreconditionError(
            f"CURVE was asked for, but no keys are given: make some with `zmqdist keygen DIR` and name the folder, "
            f"by {keys.ENVIRONMENT} for instance",
        )
    return folder or None


def _needs_keys(host: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{host} is reached from other machines, and no CURVE keys are given: make some with `zmqdist keygen DIR` and set "
        f"{keys.ENVIRONMENT}=DIR on every machine, or stay on 127.0.0.1 (insecure=True or --insecure goes without)",
    )


def listening_users(host: str, port: int) -> set[int]:
    """User ids of the sockets that would take a connection to a loopback address; empty when nobody listens.

    Raises:
      FailedPreconditionError: this system does not tell.
    """
    try:
        return {uid for uid, _ in listening_sockets(host, port)}
    except (OSError, ValueError, IndexError) as error:
        raise FailedPreconditionError(
            f"cannot tell who listens on {host}:{port} ({error}): use CURVE keys (`zmqdist keygen`)"
        ) from None


def listening_sockets(host: str, port: int) -> set[tuple[int, int]]:
    """(user id, inode) of the sockets that would take a connection to an address of this machine, given by its number.

    The kernel prefers a socket that is bound to the very address to one that is bound to all, and so does this.

    Raises:
      OSError, ValueError, IndexError: this system does not tell.
    """
    wanted = ipaddress.ip_address(host)
    if isinstance(wanted, ipaddress.IPv4Address):
        exact = {wanted, ipaddress.IPv6Address(f"::ffff:{wanted}")}
        wild = {ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")}
    else:
        exact, wild = {wanted}, {ipaddress.ip_address("::")}
    found: dict[Any, set[tuple[int, int]]] = {}
    for name in ("tcp", "tcp6"):
        _collect_listening(f"/proc/net/{name}", port, found)
        if (
            wanted in found
        ):  # only sockets of one user can share an address, and each table takes milliseconds where it is empty
            return found[wanted]
    for addresses in (exact, wild):
        sockets = {each for address in addresses for each in found.get(address, ())}
        if sockets:
            return sockets
    return set()


def _collect_listening(path: str, port: int, found: dict[Any, set[tuple[int, int]]]) -> None:
    suffix = f":{port:04X}"
    if path.endswith("6") and not os.path.exists(path):  # a kernel without IPv6
        return
    with open(path) as file:
        next(file)
        for line in file:
            words = line.split(None, 10)
            if (
                words[3] != _LISTEN
            ):  # the kernel lists those that listen first (its proc_net_tcp.rst), and the rest may be thousands
                break
            if words[1].endswith(suffix):
                found.setdefault(_address(words[1][: -len(suffix)]), set()).add((int(words[7]), int(words[9])))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints 32-bit words in the order of the machine."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return ipaddress.ip_address(raw)
