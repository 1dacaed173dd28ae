"""The keyring of a dispatcher: the role of each public key, the open join tokens, and the revoked
keys. No I/O, no clock.

Theory of operation
    The static part is the file `authorized`. A process whose key is not in that file makes a key
    pair and joins: it sends a join token over a connection that its key authenticates, so that the
    token admits only this key. A token is bound to one name ("worker:3", "submit"), and the name
    decides the role. The keyring stores only a digest of the token's secret.
    A process that listens, or is about to connect to a peer, asks about the peer's key, and the
    dispatcher replies with the key's state. The dispatcher also sends that process each later
    change of the state, so that every process can refuse a revoked key. A process whose key has
    lost its role may still connect, as REVOKED, because ZeroMQ cannot say why it refuses a
    handshake. The dispatcher sends that process one reply, the reason.
    A key is replaced by a newer key of the same name. The newer key arrives by NewKey over a
    connection of the old key, or because a process joined under that name again. The old key keeps
    its role for `renewal_s`, so that no connection in the making fails. After that the old key
    admits no new connection. So that no work is lost, connections that were opened with the old key
    stay open, until they end for another reason or an admin revokes the old key. Other processes
    still trust a port that shows the old key (`listens`), because an open port cannot change its
    key without ending its connections.
    The keyring keeps at most `replaced_max` replaced keys that no port shows any more, and forgets
    the oldest, because a cluster that runs for years replaces keys all the time. A forgotten key is
    as unknown as a key that never joined.

Promises, checked by tests/transport/test_keyring_machine.py and tests/sim/simulations/keyring.py
    P1  a token admits one key, before the token expires, and only under the token's name
    P2  a revoked key never has a role again, not even in a keyring that was restored
    P3  a process that has asked about a key is sent each change of the key's state, in order
    P4  a change is saved before any process learns of it: SaveKeyring precedes the Sends
    P5  at most one key of a member's name has a role, apart from keys that were replaced less than
        `renewal_s` ago
    P6  tokens, keys and questions are bounded; a request beyond a bound is refused and changes
        nothing
    P7  the connections of a revoked key are ended by one CutKey for each key
    P8  the keyring forgets only a key that was replaced more than `renewal_s` ago and that no
        current member's port shows; it keeps at most `replaced_max` such keys

Not here: files, sockets, and making secrets (scheduling/dispatcher/key_service.py).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from math import inf
from typing import Any, Final, TypeAlias

import msgspec

from zmqdist import errors
from zmqdist.events import Heard, Peer, PeerGone, Send, Ticked
from zmqdist.limits import (
    JOIN_EXPLAINED_S,
    JOIN_TOKENS_MAX,
    KEY_QUESTIONS_MAX,
    KEY_RENEWAL_S,
    MEMBER_KEYS_MAX,
    REPLACED_KEYS_MAX,
)
from zmqdist.messages import AskKey, Join, Joined, KeyState, NewKey, Refused, RenewKey

JOINING: Final = "joining"
"""Role of an unknown key while `Keyring.joinable` is true: the key's process may only join."""
REVOKED: Final = "revoked"
"""Role of a key that has lost its former role: its connection gets one reply, the reason."""

LISTENING_ROLES: Final = frozenset({"worker", "submit", "admin"})
"""Roles of processes that listen although they are no servers: workers and programs. A peer may
trust a port that shows a key of such a role.
"""

KEY_BYTES: Final = 32
_ROLES: Final = ("client", "observe", "submit", "worker", "admin")
_REPLACED: Final = (
    "this key was replaced by a newer one of the same name: connect with the newer key"
)


def role_of(name: str) -> str:
    """Return the role of a member's name: its job if that is a role ("submit" for "submit:2"),
    otherwise "worker" (for "ps:0")."""
    job = name.partition(":")[0]
    return job if job in _ROLES else "worker"


def digest_of(secret: bytes) -> bytes:
    """Return the digest of a token's secret, by which the keyring recognises the secret."""
    return hashlib.sha256(secret).digest()


class MemberKey(msgspec.Struct, frozen=True):
    """A key whose process joined.

    Attributes:
      address: "host:port" at which the process listens as a worker or a program; "" if it does not
        listen.
      shown: the key with which the process joined, if the port at `address` still shows that older
        key; b"" if the port shows this key.
      since_s: time at which the process joined with this key, or replaced an older key by it, in
        seconds since 1970.
      replaced_at: time on the machine's clock at which a newer key replaced this key; None while
        this key is the current key.
    """

    name: str
    role: str
    since_s: float
    address: str = ""
    shown: bytes = b""
    replaced_at: float | None = None


class RevokedKey(msgspec.Struct, frozen=True):
    """A key that an admin has revoked, with the time in seconds since 1970, and the reason that the
    dispatcher sends to the key's process.
    """

    name: str
    since_s: float
    problem: str


class _Token(msgspec.Struct):
    digest: bytes
    name: str
    address: str
    until: float
    key: bytes = b""
    """The key that the token has admitted; empty while the token is unused."""


class _Questioner(msgspec.Struct):
    """A connection whose peer has asked about keys.

    Attributes:
      key: the key of the peer itself.
      renews: whether the peer makes a new key pair when it gets RenewKey.
      keys, addresses: the keys about which the peer has asked, and the addresses at which it wants
        to know the key.
    """

    key: bytes
    renews: bool = False
    keys: set[bytes] = msgspec.field(default_factory=set)
    addresses: set[str] = msgspec.field(default_factory=set)


class TokenMade(msgspec.Struct, frozen=True):
    """An admin has made a token. It expires when `now` of `handle` reaches `until`. `digest` is the
    digest of its secret."""

    number: str
    digest: bytes
    name: str
    until: float
    address: str = ""


class KeyHeard(msgspec.Struct, frozen=True):
    """A message about keys has arrived on a connection that `key` authenticates; `clock_s` is the
    time in seconds since 1970."""

    heard: Heard
    key: bytes
    clock_s: float


class KeysRevoked(msgspec.Struct, frozen=True):
    """An admin revokes these keys, and withdraws the unused tokens of `name`."""

    keys: tuple[bytes, ...]
    name: str
    clock_s: float


class RenewalAsked(msgspec.Struct, frozen=True):
    """An admin wants the members of this name to make new keys; "" means all members."""

    name: str = ""


class SaveKeyring(msgspec.Struct, frozen=True):
    """Save `record()` for the next start of the dispatcher, before carrying out the effects that
    follow this one."""


class CutKey(msgspec.Struct, frozen=True):
    """End all connections of a key, after sending the reason to the peer of each connection."""

    key: bytes
    problem: str


KeyringEvent: TypeAlias = TokenMade | KeyHeard | KeysRevoked | RenewalAsked | PeerGone | Ticked
KeyringEffect: TypeAlias = Send | SaveKeyring | CutKey


class Keyring:
    """The keyring of one dispatcher; the module's docstring explains it.

    Attributes:
      members, revoked: the keys that joined, and the keys that were revoked, by public key of 32
        bytes.
      wrong: number of joins that were refused.
    """

    def __init__(
        self,
        static: Mapping[bytes, str],
        *,
        renewal_s: float = KEY_RENEWAL_S,
        replaced_max: int = REPLACED_KEYS_MAX,
    ) -> None:
        self.static = dict(static)
        self.members: dict[bytes, MemberKey] = {}
        self.revoked: dict[bytes, RevokedKey] = {}
        self.wrong = 0
        self._renewal_s = renewal_s
        self._replaced_max = replaced_max
        self._tokens: dict[str, _Token] = {}
        self._joinable_until = -inf
        self._questioners: dict[Peer, _Questioner] = {}
        self._expiring: dict[bytes, float] = {}
        """For each replaced key, the time on the machine's clock at which it loses its role."""

    # -- rights of keys ----------------------------------------------------------------------------

    def state(self, key: bytes, address: str = "") -> KeyState:
        """Return the rights of a key at this moment. `address` is where the key's process listens,
        if the state is the reply to a question about this address."""
        if key in self.revoked:
            revoked = self.revoked[key]
            return KeyState(key, REVOKED, revoked.name, False, revoked.problem, address)
        member = self.members.get(key)
        if member is None:
            role = self.static.get(key, "")
            return KeyState(key, role, role, role in LISTENING_ROLES, address=address)
        listens = member.role in LISTENING_ROLES
        # the time of grace is over: connections of the key stay, new ones are refused
        if member.replaced_at is not None and key not in self._expiring:
            return KeyState(key, REVOKED, member.name, listens, _REPLACED, address)
        return KeyState(key, member.role, member.name, listens, address=address)

    def name_of(self, key: bytes) -> str:
        """Return the name to which a key is bound; "" for a static key, which may take any name of
        its role."""
        member = self.members.get(key)
        return "" if member is None else member.name

    def joinable(self, now: float) -> bool:
        """Return whether unknown keys may connect to show a token. They may until JOIN_EXPLAINED_S
        after the last token, used or not, has expired, so that a process with a used or expired
        token gets the reason.
        """
        return now < self._joinable_until

    def find(self, name_or_key: str | bytes) -> tuple[bytes, ...]:
        """Return the known public keys of a member or role with this name. For a public key, return
        only that key, if it is known. Revoked keys are left out.
        """
        if isinstance(name_or_key, bytes):
            exists = name_or_key in self.members or name_or_key in self.static
            return (name_or_key,) if exists and name_or_key not in self.revoked else ()
        keys = [key for key, member in self.members.items() if member.name == name_or_key]
        keys += [key for key, role in self.static.items() if role == name_or_key]
        return tuple(key for key in keys if key not in self.revoked)

    @property
    def deadline(self) -> float | None:
        """The time at which `handle(Ticked(), now)` next has something to do; None means no such
        time."""
        return min(self._expiring.values(), default=None)

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: KeyringEvent, now: float) -> list[KeyringEffect]:
        """Apply one event and return its effects, in order. Raises OpError only for the events that
        an admin causes."""
        match event:
            case TokenMade():
                self._make(event, now)
                return []
            case KeyHeard(Heard(peer, Join() as join), key, clock_s):
                return self._join(peer, join, key, now, clock_s)
            case KeyHeard(Heard(peer, AskKey() as question), key):
                return self._ask(peer, question, key)
            case KeyHeard(Heard(peer, NewKey(new)), key, clock_s):
                return self._renew(peer, key, new, now, clock_s)
            case KeysRevoked():
                return self._revoke(event)
            case RenewalAsked(name):
                return [
                    Send(peer, RenewKey())
                    for peer, questioner in self._questioners.items()
                    if questioner.renews
                    and (member := self.members.get(questioner.key)) is not None
                    and member.replaced_at is None
                    and name in ("", member.name)
                ]
            case PeerGone(peer):
                self._questioners.pop(peer, None)
                return []
            case Ticked():
                return self._expire(now)
            case _:
                return []

    def _make(self, event: TokenMade, now: float) -> None:
        if len(self._tokens) >= JOIN_TOKENS_MAX:
            self._tokens = {
                number: token
                for number, token in self._tokens.items()
                if token.until + JOIN_EXPLAINED_S > now
            }
        if len(self._tokens) >= JOIN_TOKENS_MAX:
            raise errors.ResourceExhaustedError(
                f"this dispatcher keeps {JOIN_TOKENS_MAX} join tokens, used or not: wait until "
                f"some have expired"
            )
        self._tokens[event.number] = _Token(event.digest, event.name, event.address, event.until)
        self._joinable_until = max(self._joinable_until, event.until + JOIN_EXPLAINED_S)

    def _join(
        self, peer: Peer, join: Join, key: bytes, now: float, clock_s: float
    ) -> list[KeyringEffect]:
        token = self._tokens.get(join.number)
        # The digests are compared in constant time, and even if the number is unknown, so that a
        # guesser learns nothing from the time.
        right = hmac.compare_digest(
            digest_of(join.secret), token.digest if token is not None else bytes(KEY_BYTES)
        )
        if token is None or not right:
            self.wrong += 1
            return [
                Send(
                    peer,
                    Refused(
                        errors.UNAUTHENTICATED,
                        "this dispatcher does not know the join token, or it was withdrawn: ask "
                        "for a new ticket",
                        final=True,
                    ),
                )
            ]
        problem = self._problem(token, join.name, key, now)
        if problem is not None:
            self.wrong += 1
            return [Send(peer, problem)]
        if token.key == key:
            # the process joins again with the same key, because the reply to its first Join was
            # lost
            return [Send(peer, Joined(role_of(token.name), token.name))]
        token.key = key
        member = MemberKey(token.name, role_of(token.name), clock_s, token.address)
        return self._admit(key, member, now, [Send(peer, Joined(member.role, member.name))])

    def _problem(self, token: _Token, name: str, key: bytes, now: float) -> Refused | None:
        """Return why a token whose secret is right does not admit this key; None if the token
        admits it."""
        if name != token.name:
            return Refused(
                errors.PERMISSION_DENIED,
                f"the join token is for {token.name}, and this process wants to join as "
                f"{name[:100]!r}: use a ticket for this name",
                final=True,
            )
        if token.key == key and self.state(key).role == role_of(name):
            return None
        # P1: a token admits one key
        if token.key:
            return Refused(
                errors.UNAUTHENTICATED,
                f"the join token for {name} has been used already: each token admits one process, "
                f"so ask for a new ticket",
                final=True,
            )
        if token.until <= now:
            return Refused(
                errors.UNAUTHENTICATED,
                f"the join token for {name} expired {now - token.until:.0f} s ago: ask for a new "
                f"ticket, perhaps with a longer --valid-s",
                final=True,
            )
        # one key would have two names
        if self.state(key).role:
            return Refused(
                errors.ALREADY_EXISTS,
                f"the key of this process is known already: a process that joins as {name} must "
                f"make a new key pair",
                final=True,
            )
        return self._full()

    def _full(self) -> Refused | None:
        if len(self.members) + len(self.revoked) < MEMBER_KEYS_MAX:
            return None
        return Refused(
            errors.RESOURCE_EXHAUSTED,
            f"this dispatcher keeps {MEMBER_KEYS_MAX} keys and takes no more: start it anew with "
            f"an empty work_dir",
            final=True,
        )

    def _admit(
        self, key: bytes, member: MemberKey, now: float, replies: list[Send]
    ) -> list[KeyringEffect]:
        """Add a member's key. It replaces the other current keys of the member's name, because a
        name has one current key (P5)."""
        for older_key, older in list(self.members.items()):
            if older.name == member.name and older.replaced_at is None:
                self.members[older_key] = msgspec.structs.replace(older, replaced_at=now)
                self._expiring[older_key] = now + self._renewal_s
        self.members[key] = member
        forgotten = self._forget()
        # P4: the change is saved before any process learns of it
        return [
            SaveKeyring(),
            *replies,
            *self._changed(key),
            *self._moved(member.address),
            *forgotten,
        ]

    def _forget(self) -> list[Send]:
        """Forget the oldest replaced keys, so that at most `replaced_max` of them are left (P8)."""
        shown = {member.shown for member in self.members.values() if member.replaced_at is None}
        replaced = [
            key
            for key, member in self.members.items()
            if member.replaced_at is not None and key not in self._expiring and key not in shown
        ]
        forgotten = replaced[: max(0, len(replaced) - self._replaced_max)]
        # P8: a forgotten key is as unknown as one that never joined
        for key in forgotten:
            del self.members[key]
        return [send for key in forgotten for send in self._changed(key)]

    def _ask(self, peer: Peer, question: AskKey, key: bytes) -> list[KeyringEffect]:
        questioner = self._questioners.setdefault(peer, _Questioner(key))
        # P6: a peer must not fill the dispatcher's memory
        if len(questioner.keys) + len(questioner.addresses) >= KEY_QUESTIONS_MAX:
            return [
                Send(
                    peer,
                    Refused(
                        errors.RESOURCE_EXHAUSTED,
                        f"this connection has asked about {KEY_QUESTIONS_MAX} keys already",
                    ),
                )
            ]
        questioner.renews |= question.renews
        if question.address:
            questioner.addresses.add(question.address)
            return [Send(peer, self._at(question.address))]
        if len(question.key) == KEY_BYTES:
            questioner.keys.add(question.key)
        return [Send(peer, self.state(question.key))]

    def _renew(
        self, peer: Peer, old: bytes, new: bytes, now: float, clock_s: float
    ) -> list[KeyringEffect]:
        member = self.members.get(old)
        if member is None or old in self.revoked or member.replaced_at is not None:
            if (
                member is not None
                and old not in self.revoked
                and self.state(new).name == member.name
            ):
                # the process sends the same NewKey again, because the first reply was lost
                return [Send(peer, Joined(member.role, member.name))]
            return [
                Send(
                    peer,
                    Refused(
                        errors.FAILED_PRECONDITION,
                        "only a process that joined can replace its key, and only its current one",
                    ),
                )
            ]
        if len(new) != KEY_BYTES or self.state(new).role:
            return [
                Send(
                    peer,
                    Refused(errors.ALREADY_EXISTS, "the new key is known already, or is no key"),
                )
            ]
        full = self._full()
        if full is not None:
            return [Send(peer, full)]
        return self._admit(
            new,
            msgspec.structs.replace(member, since_s=clock_s, shown=member.shown or old),
            now,
            [Send(peer, Joined(member.role, member.name))],
        )

    def _revoke(self, event: KeysRevoked) -> list[KeyringEffect]:
        for number in [
            number
            for number, token in self._tokens.items()
            if token.name == event.name and not token.key
        ]:
            del self._tokens[number]
        effects: list[KeyringEffect] = [SaveKeyring()]
        for key in event.keys:
            if key in self.revoked:
                continue
            member = self.members.pop(key, None)
            name = self.static.get(key, "") if member is None else member.name
            problem = f"the key of this process ({name}) was revoked at the dispatcher: it needs a new ticket or key"
            self._expiring.pop(key, None)
            # P2: a revoked key is remembered, so that it never has a role again
            self.revoked[key] = RevokedKey(name, event.clock_s, problem)
            effects += [CutKey(key, problem), *self._changed(key)]
            effects += self._moved("" if member is None else member.address)
        return effects

    def _expire(self, now: float) -> list[KeyringEffect]:
        effects: list[KeyringEffect] = []
        for key in [key for key, until in self._expiring.items() if until <= now]:
            del self._expiring[key]
            effects += self._changed(key)
        return effects

    # -- states of keys ----------------------------------------------------------------------------

    def _at(self, address: str) -> KeyState:
        """Return the state of the current key of the member that listens at an address. If no
        member does, return the state of an empty key, which stands for the key in `server.pub`.
        """
        for key, member in self.members.items():
            if member.address == address and member.replaced_at is None:
                # an open port cannot change its key without ending its connections
                return self.state(member.shown or key, address)
        return KeyState(b"", "", address=address)

    def _changed(self, key: bytes) -> list[Send]:
        state = self.state(key)
        return [
            Send(peer, state)
            for peer, questioner in self._questioners.items()
            if key in questioner.keys
        ]

    def _moved(self, address: str) -> list[Send]:
        if not address:
            return []
        state = self._at(address)
        return [
            Send(peer, state)
            for peer, questioner in self._questioners.items()
            if address in questioner.addresses
        ]

    # -- restart -----------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Return the state to save for a restart, as plain values; keys are bytes."""
        return {
            "members": [
                [key, m.name, m.role, m.since_s, m.address, m.shown, m.replaced_at is not None]
                for key, m in self.members.items()
            ],
            "revoked": [[key, r.name, r.since_s, r.problem] for key, r in self.revoked.items()],
        }

    def restore(self, record: Mapping[str, Any], now: float) -> None:
        """Load the record of an earlier keyring. A record has no tokens, because tokens end with
        their dispatcher."""
        for key, name, role, since_s, address, shown, replaced in record["members"]:
            self.members[key] = MemberKey(
                name, role, since_s, address, shown, now if replaced else None
            )
            if replaced:
                self._expiring[key] = now + self._renewal_s
        for key, name, since_s, problem in record["revoked"]:
            self.revoked[key] = RevokedKey(name, since_s, problem)
