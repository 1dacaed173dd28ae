"""The keyring in a dispatcher: the runtime of transport/keyring_machine.py.

KeyService passes messages about keys to the machine and carries out the machine's effects: it sends
messages, saves the keyring, and closes connections. It also makes the secrets of join tokens, and
serves the RPC methods of `zmqdist keys`.

The keyring is saved in the file `keyring.json` (mode 0600) of the `work_dir`. The file is replaced
as a whole, and is on the disk before the dispatcher tells a process that its key was admitted or
revoked. Without a `work_dir` the keyring is lost when the dispatcher ends. The next dispatcher then
refuses the processes that had joined, and tells them to join again.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.events import Heard, PeerGone, Send, Ticked
from zmqdist.limits import HANDSHAKE_S, JOIN_VALID_S, JOINING_MAX
from zmqdist.messages import AskKey, Join, KeyState, Message, NewKey, Register
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport import keys
from zmqdist.transport.endpoint import split
from zmqdist.transport.join_ticket import JoinTicket
from zmqdist.transport.keyring_machine import (
    JOINING,
    CutKey,
    KeyHeard,
    Keyring,
    KeyringEvent,
    KeysRevoked,
    RenewalAsked,
    SaveKeyring,
    TokenMade,
    digest_of,
    role_of,
)
from zmqdist.transport.keys import read_private
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router
from zmqdist.transport.security import ADMIN, CURVE, LOG_EVERY_S, Policy, ServerSecurity

log = logging.getLogger("zmqdist.scheduling")

FILE: Final = "keyring.json"
VALID_S_MAX: Final = 7 * 86_400.0
"""The longest time in seconds for which a join token may be valid. A secret that is valid for
longer is as dangerous as a key."""
ANSWERED_S: Final = 0.5
"""Seconds between a reply and the close of its connection, so that the reply is sent first. Such a
reply goes to a process that sent a Join, or to an admin who revoked the key of the admin's own
connection.
"""


class KeyService:
    """The keyring of one dispatcher; the module's docstring has the rules. Call its methods in the
    loop's thread.

    Args:
      work_dir: the folder in which the keyring is saved; None keeps the keyring in memory only.

    Attributes:
      security: the ServerSecurity that the router gets. It asks the keyring about keys, and not the
        file `authorized`.
    """

    def __init__(self, security: ServerSecurity, work_dir: str | None) -> None:
        self._keyring = Keyring(security.policy.roles)
        self._public = b"" if security.key is None else security.key.public
        self._curve = security.mechanism == CURVE
        self._file = Path(work_dir, FILE) if work_dir and self._curve else None
        self._joining: deque[float] = deque()
        """The times, in the last HANDSHAKE_S, at which a connection with an unknown key was
        admitted so that its process could join."""
        self._tried: set[Peer] = set()
        """The connected peers that have sent a Join."""
        self._wrong = 0
        self._logged_at = 0.0
        self._on_expelled: Callable[[Peer], object] = lambda peer: None
        policy = Policy(judge=self._judge) if self._curve else security.policy
        self.security = replace(security, policy=policy)
        if self._file is not None and self._file.exists():
            self._restore(self._file)

    def attach(
        self, loop: Loop, router: Router, service: RpcService, on_expelled: Callable[[Peer], object]
    ) -> None:
        """Register the handlers and RPC methods.

        Args:
          on_expelled: called with each peer whose key was revoked, before the connection of the
            peer is closed.
        """
        self._loop = loop
        self._router = router
        self._on_expelled = on_expelled
        router.on(
            Join, self._handle_join, frozenset({JOINING, "client", "observe", "submit", "worker"})
        )
        for kind in (AskKey, NewKey):
            router.on(
                kind, self._handle_message, frozenset({"client", "observe", "submit", "worker"})
            )
        router.on_gone.append(self._note_disconnect)
        service.register("keys", self._list, inline=True, roles=frozenset())
        service.register("keys_token", self.open_join, inline=True, roles=frozenset())
        service.register_later("keys_revoke", self._revoke, roles=frozenset())
        service.register("keys_rotate", self._rotate, inline=True, roles=frozenset())
        self._rearm()

    def name_problem(self, peer: Peer, register: Register) -> str:
        """Return why this peer may not register under the name in `register`, or "" if it may."""
        name = self._keyring.name_of(peer.key)
        requested_name = f"{register.job}:{register.index}" if register.index >= 0 else register.job
        if name == requested_name and register.job != "ps":
            return ""
        # A key without a name may register any name if there is no CURVE, or if the file
        # `authorized` lists the key.
        if not name and (not self._curve or self._keyring.state(peer.key).role):
            return ""
        if not name:
            return f"the key of this process was replaced or revoked, so it may not register as {requested_name}: join with a new ticket"
        remedy = (
            f": start it with --index {name.partition(':')[2]}"
            if name.startswith("worker:")
            else ""
        )
        return f"the key of this process is for {name}, so it may not register as {requested_name}{remedy}"

    def open_join(
        self, name: str, address: str, valid_s: float = JOIN_VALID_S, at: str = ""
    ) -> str:
        """Make a join token and return its join ticket (transport/join_ticket.py).

        Args:
          address: "host:port" at which the process that joins reaches this dispatcher.
          at: "host:port" at which the process that joins will listen as a server; "" for a worker
            or a program.
        """
        self._check_name(name)
        if not self._curve:
            raise errors.FailedPreconditionError(
                "this dispatcher has no CURVE keys, so no process can join it: see SECURITY.md"
            )
        if not 0 < valid_s <= VALID_S_MAX:
            raise errors.InvalidArgumentError(
                f"a join token can be valid for more than 0 s and at most {VALID_S_MAX:g} s, not "
                f"for {valid_s} s"
            )
        if at:
            split(at)
        number, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._handle(
            TokenMade(number, digest_of(secret.encode()), name, self._loop.now() + valid_s, at)
        )
        return JoinTicket(name, address, self._public, number, secret, at).encode()

    def _check_name(self, name: str) -> None:
        job, colon, index = name.partition(":")
        plain = role_of(name) != "worker"
        if (
            not job.isidentifier()
            or (colon and not (index.isascii() and index.isdigit()))
            or (not colon and not plain)
        ):
            raise errors.InvalidArgumentError(
                f"{name[:100]!r} cannot join: wanted JOB:INDEX, as worker:3 or ps:0, or one of "
                f"client, observe, submit, admin"
            )

    # -- connections -------------------------------------------------------------------------------

    def _judge(self, key: bytes) -> KeyState:
        state = self._keyring.state(key)
        now = self._loop.now()
        # An unknown key is let in only while a ticket is open, so that its process can send a Join.
        if state.role or not self._keyring.joinable(now):
            return state
        while self._joining and self._joining[0] + HANDSHAKE_S <= now:
            self._joining.popleft()
        # Strangers may occupy only so many descriptors while a ticket is open.
        if len(self._joining) >= JOINING_MAX:
            return state
        self._joining.append(now)
        return KeyState(key, JOINING)

    def _handle_join(self, peer: Peer, message: Join, _frames: list[memoryview]) -> None:
        """Handle the first Join of a connection, and close the connection after the reply. Ignore
        later Joins of the connection."""
        # One guess for each connection, so that guessing a token costs a handshake each time.
        if peer in self._tried:
            return
        self._tried.add(peer)
        self._loop.set_timer(
            (self, peer), self._loop.now() + ANSWERED_S, lambda: self._router.expel(peer)
        )
        self._handle_message(peer, message, _frames)
        wrong, now = self._keyring.wrong, self._loop.now()
        if wrong > self._wrong and now - self._logged_at >= LOG_EVERY_S:
            log.warning("refused %d join(s), the last one of %s", wrong - self._wrong, peer.name)
            self._wrong, self._logged_at = wrong, now

    def _handle_message(self, peer: Peer, message: Message, _frames: list[memoryview]) -> None:
        self._handle(KeyHeard(Heard(peer, message), peer.key, time.time()))

    def _note_disconnect(self, peer: Peer) -> None:
        self._tried.discard(peer)
        self._handle(PeerGone(peer))

    # -- RPC methods for admins --------------------------------------------------------------------

    def _list(self) -> list[dict[str, Any]]:
        """Return all keys, each with its role, name, time and state ("static", "joined", "replaced"
        or "revoked")."""
        ring = self._keyring
        rows = [
            {
                "role": role,
                "name": role,
                "key": keys.encode_public(key),
                "since_s": 0.0,
                "state": "static",
            }
            for key, role in ring.static.items()
            if key not in ring.revoked
        ]
        rows += [
            {
                "role": member.role,
                "name": member.name,
                "key": keys.encode_public(key),
                "since_s": member.since_s,
                "state": "joined" if member.replaced_at is None else "replaced",
            }
            for key, member in ring.members.items()
        ]
        rows += [
            {
                "role": "",
                "name": revocation.name,
                "key": keys.encode_public(key),
                "since_s": revocation.since_s,
                "state": "revoked",
            }
            for key, revocation in ring.revoked.items()
        ]
        return rows

    def _revoke(self, call: PendingCall, name_or_key: str, force: bool = False) -> None:
        """Revoke all keys of a name, or one key, and reply with the rows of `_list` that these keys
        had.

        Without `force` the method refuses to revoke the caller's own key, so that at least one
        admin key remains valid.
        """
        self._need_curve()
        matching_keys = self._keyring.find(keys.decode_key(name_or_key) or name_or_key)
        if not matching_keys:
            raise errors.NotFoundError(
                f"no key in use has this name or this text: {name_or_key[:100]!r}"
            )
        # An admin who revokes the last admin key by mistake could not mend it.
        if call.peer.key in matching_keys and not force:
            ring = self._keyring
            other_keys = (key for key in (*ring.static, *ring.members) if key not in matching_keys)
            last = (
                ""
                if any(ring.state(key).role == ADMIN for key in other_keys)
                else ", which is the last admin key"
            )
            raise errors.PermissionDeniedError(
                f"{name_or_key[:100]!r} includes the key of this command{last}: use the key of "
                f"another admin, or --force"
            )
        rows = [row for row in self._list() if keys.decode_key(row["key"]) in matching_keys]
        self._handle(KeysRevoked(matching_keys, name_or_key, time.time()), call.peer)
        log.warning("revoked %d key(s) of %s", len(matching_keys), name_or_key)
        call.reply(rows)

    def _rotate(self, name: str) -> int:
        """Ask the members of this name to make new keys, and return the number of members that were
        asked."""
        self._need_curve()
        return self._handle(RenewalAsked(name))

    def _need_curve(self) -> None:
        if not self._curve:
            raise errors.FailedPreconditionError(
                "this dispatcher has no CURVE keys: it admits every process that shows the user's "
                "token (see SECURITY.md)"
            )

    # -- the machine -------------------------------------------------------------------------------

    def _handle(self, event: KeyringEvent, caller: Peer | None = None) -> int:
        """Pass an event to the machine and carry out the machine's effects. Return the number of
        messages that were sent.

        Args:
          caller: the admin who has caused the event and waits for a reply.
        """
        count = 0
        for effect in self._keyring.handle(event, self._loop.now()):
            match effect:
                case SaveKeyring():
                    self._save()
                case CutKey(key, problem):
                    self._cut(key, problem, caller)
                case Send(to, message):
                    count += self._router.send(to, message)  # type: ignore[arg-type]
        self._rearm()
        return count

    def _cut(self, key: bytes, problem: str, caller: Peer | None = None) -> None:
        """End the connections of a revoked key. The connection of `caller` ends a moment later, so
        that the reply can be sent."""
        for peer in [peer for peer in self._router.peers if peer.key == key and peer is not caller]:
            self._on_expelled(peer)
        self._router.expel_key(key, problem, spared=caller)
        if caller is not None and caller.key == key:
            self._loop.set_timer(
                (self, caller), self._loop.now() + ANSWERED_S, lambda: self._cut(key, problem)
            )

    def _rearm(self) -> None:
        self._loop.set_timer(self, self._keyring.deadline, lambda: self._handle(Ticked()))

    # -- the file ----------------------------------------------------------------------------------

    def _restore(self, file: Path) -> None:
        text = read_private(file, "keyring of the dispatcher")
        try:
            record = msgspec.json.decode(text, type=_Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.DataLossError(
                f"the keyring {file} is damaged ({error}): put back a copy of the file. Without "
                f"the file every process has to"
                " join again, and keys that `authorized` lists are no longer revoked"
            ) from None
        self._keyring.restore(msgspec.structs.asdict(record), time.monotonic())

    def _save(self) -> None:
        if self._file is None:
            return
        part = self._file.with_name(f".{FILE}.new")
        content = msgspec.json.encode(self._keyring.record())
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(self._file)
        except OSError as error:
            raise errors.ResourceExhaustedError(
                f"the keyring cannot be kept in {self._file}: {error.strerror}"
            ) from None


class _Record(msgspec.Struct):
    members: list[tuple[bytes, str, str, float, str, bytes, bool]]
    revoked: list[tuple[bytes, str, float, str]]
