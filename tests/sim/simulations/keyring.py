"""A dispatcher's keyring in random events: the real Keyring, on a disk that may stop being written
between any two of its effects.

Members join with right and wrong tokens, ask about keys, renew theirs; an admin makes tokens,
revokes and has keys renewed; the dispatcher is killed and started again from what it saved. After
each event the promises of keyring_machine.py are compared with what this file has seen.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from zmqdist.events import Heard, PeerGone, Send, Ticked
from zmqdist.messages import AskKey, Join, Joined, KeyState, NewKey, Refused, RenewKey
from zmqdist.transport.keyring_machine import (
    REVOKED,
    CutKey,
    KeyHeard,
    Keyring,
    KeyringEffect,
    KeyringEvent,
    KeysRevoked,
    MemberKey,
    RenewalAsked,
    SaveKeyring,
    TokenMade,
    digest_of,
)

EVENTS = 150
NAMES = ("worker:0", "worker:1", "ps:0", "submit")
ADDRESS = {"ps:0": "host:1"}
RENEWAL_S = 5.0
REPLACED_MAX = 1


@dataclass
class MadeToken:
    """A token, with what the admin who made it knows."""

    name: str
    secret: bytes
    until: float
    key: bytes = b""


@dataclass
class Asker:
    """A process with a connection: its last request, and the last reply to it."""

    number: int
    key: bytes
    keys: dict[bytes, KeyState] = field(default_factory=dict)
    addresses: dict[str, KeyState] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self.number


class KeyringSim:
    """One run of a keyring with seeded faults."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.now = 100.0
        self.static = {self._key(): role for role in ("worker", "submit", "admin")}
        self.ring = Keyring(self.static, renewal_s=RENEWAL_S, replaced_max=REPLACED_MAX)
        self.disk = copy.deepcopy(self.ring.record())
        self.tokens: dict[str, MadeToken] = {}
        self.names: dict[bytes, str] = {}
        """Of every key that was told that it is admitted."""
        self.withdrawn: set[bytes] = set()
        """Keys whose end some process has heard of, or has seen by its connections."""
        self.askers: list[Asker] = []
        self.cut: set[bytes] = set()
        self.joins = self.restarts = self.revocations = self.forgotten = 0

    def _key(self) -> bytes:
        return self.random.randbytes(32)

    def promise(self, holds: bool, name: str) -> None:
        if not holds:
            happened = "\n".join(self.trace[-40:])
            raise AssertionError(
                f"{name} is broken; pytest tests/sim --seed {self.seed}\n{happened}"
            )

    def run(self) -> KeyringSim:
        kinds = (
            *[self._make] * 4,
            *[self._join] * 6,
            *[self._ask] * 5,
            *[self._pass] * 4,
            self._revoke,
            self._renew_all,
            self._renew_one,
            self._leave,
        )
        for _ in range(EVENTS):
            self.random.choice(kinds)()
            if self.random.random() < 0.02:
                self._restart()
            self._check()
        return self

    # -- events ------------------------------------------------------------------------------------

    def _make(self) -> None:
        name = self.random.choice(NAMES)
        number, secret = f"{len(self.tokens)}", self.random.randbytes(16)
        until = self.now + self.random.choice((1.0, 60.0))
        self.tokens[number] = MadeToken(name, secret, until)
        self._handle(TokenMade(number, digest_of(secret), name, until, ADDRESS.get(name, "")))

    def _join(self) -> None:
        if not self.tokens:
            return
        number = self.random.choice([*self.tokens][-6:])
        token = self.tokens[number]
        right = self.random.random() < 0.8
        name = token.name if self.random.random() < 0.8 else self.random.choice(NAMES)
        key = token.key if token.key and self.random.random() < 0.3 else self._key()
        if self.random.random() < 0.1 and self.names:
            key = self.random.choice([*self.names])
        peer, at = Asker(-1, key), self.now
        joined = self._message(peer, Join(number, token.secret if right else b"no", name))
        if joined:
            self.promise(
                right and name == token.name,
                "P1: a token admits under another name, or a wrong token admits",
            )
            self.promise(token.key in (b"", key), "P1: a token admits two keys")
            self.promise(token.key == key or at < token.until, "P1: a token admits after its end")
            token.key = key
            self.joins += 1

    def _ask(self) -> None:
        if len(self.askers) < 4:
            self.askers.append(
                Asker(self.random.randrange(10**6), self.random.choice([*self.names, *self.static]))
            )
        asker = self.random.choice(self.askers)
        if self.random.random() < 0.2:
            address = self.random.choice(("host:1", "host:2"))
            asker.addresses.setdefault(address, KeyState(b"?", ""))
            self._message(asker, AskKey(b"", address, True))
            return
        known = [*self.names, *self.static, *self.withdrawn]
        key = self.random.choice(known) if self.random.random() < 0.9 else self._key()
        asker.keys.setdefault(key, KeyState(b"?", ""))
        self._message(asker, AskKey(key, "", True))

    def _renew_one(self) -> None:
        owners = [key for key in self.names if self.ring.name_of(key)]
        if owners:
            old, new = self.random.choice(owners), self._key()
            before = self.ring.state(old)
            if self._message(Asker(-1, old), NewKey(new)):
                self.promise(
                    before.role not in ("", REVOKED), "P1: a key without a role was renewed"
                )

    def _renew_all(self) -> None:
        self._handle(RenewalAsked(self.random.choice(("", *NAMES))))

    def _revoke(self) -> None:
        one = self.random.random() < 0.5 and bool(self.names)
        what: str | bytes = (
            self.random.choice([*self.names]) if one else self.random.choice((*NAMES, "worker"))
        )
        found = self.ring.find(what)
        if found:
            self.revocations += 1
            self._handle(KeysRevoked(found, "" if isinstance(what, bytes) else what, 0.0))

    def _pass(self) -> None:
        self.now += self.random.choice((0.1, 1.0, 4.0))
        due = self.ring.deadline
        if due is not None and due <= self.now:
            self._handle(Ticked())

    def _leave(self) -> None:
        if self.askers:
            asker = self.askers.pop(self.random.randrange(len(self.askers)))
            self._handle(PeerGone(asker))

    def _restart(self) -> None:
        self.restarts += 1
        self.trace.append("restart")
        self.now += 10.0
        self.ring = Keyring(self.static, renewal_s=RENEWAL_S, replaced_max=REPLACED_MAX)
        self.ring.restore(copy.deepcopy(self.disk), self.now)
        self.askers.clear()
        self.tokens.clear()
        self.cut |= set(self.ring.revoked)  # every connection has ended with the dispatcher

    # -- effects -----------------------------------------------------------------------------------

    def _message(self, peer: Asker, message: Any) -> bool:
        """Return whether the peer got the reply that a key is admitted."""
        return self._handle(KeyHeard(Heard(peer, message), peer.key, 0.0))

    def _handle(self, event: KeyringEvent) -> bool:
        heard = (
            f" {type(event.heard.message).__name__} by {event.key[:3].hex()}"
            if isinstance(event, KeyHeard)
            else ""
        )
        self.trace.append(f"{self.now:8.1f}  {type(event).__name__}{heard}")
        known = {*self.ring.members, *self.static}
        before = dict(self.ring.members)
        effects = self.ring.handle(event, self.now)
        self._check_forgotten(before)
        self._check_cuts(known, effects)
        crash_at = (
            self.random.randrange(len(effects) + 1) if self.random.random() < 0.05 else len(effects)
        )
        joined = False
        for effect in effects[:crash_at]:
            joined |= self._carry_out(event, effect)
        if crash_at < len(effects):
            self._restart()
        return joined

    def _carry_out(self, event: KeyringEvent, effect: KeyringEffect) -> bool:
        match effect:
            case SaveKeyring():
                self.disk = copy.deepcopy(self.ring.record())
            case CutKey(key, _):
                self.withdrawn.add(key)
            case Send(Asker() as asker, KeyState() as state):
                if state.role == REVOKED and not state.listens:
                    self.withdrawn.add(state.key)
                states: dict[Any, KeyState] = asker.addresses if state.address else asker.keys
                states[state.address or state.key] = state
            case Send(_, Joined(_, name)) if isinstance(event, KeyHeard):
                message = event.heard.message
                self.names[message.key if isinstance(message, NewKey) else event.key] = name
                return True
            case Send(Asker() as asker, RenewKey()):
                self.promise(
                    self.ring.state(asker.key).role not in ("", REVOKED),
                    "P7: a key without a role is renewed",
                )
            case Send(_, Refused()):
                pass
        return False

    def _check_forgotten(self, before: dict[bytes, MemberKey]) -> None:
        members = self.ring.members
        shown = {member.shown for member in members.values() if member.replaced_at is None}
        for key in before.keys() - members.keys() - self.ring.revoked.keys():
            at = before[key].replaced_at
            self.promise(
                at is not None and at + RENEWAL_S <= self.now,
                "P8: a key is forgotten that has a role",
            )
            self.promise(key not in shown, "P8: a key is forgotten that an open port shows")
            self.names.pop(key, None)
            self.forgotten += 1
        old = [
            k
            for k, m in members.items()
            if m.replaced_at is not None and m.replaced_at + RENEWAL_S <= self.now
        ]
        late = self.ring.deadline is not None and self.ring.deadline <= self.now
        grown = len(members) > len(before) and not late
        self.promise(
            not grown or len({*old} - shown) <= REPLACED_MAX,
            "P8: replaced keys are kept without a bound",
        )

    def _check_cuts(self, before: set[bytes], effects: list[KeyringEffect]) -> None:
        lost = [k for k in before if k in self.ring.revoked and k not in self.cut]
        cut = [effect.key for effect in effects if isinstance(effect, CutKey)]
        self.promise(
            len(cut) == len({*cut} & before), "P7: a key is cut twice, or one that was not known"
        )
        self.promise(set(lost) <= set(cut), "P7: a key was revoked, and its connections go on")
        self.cut |= set(cut)

    def _check(self) -> None:
        for key in self.withdrawn:
            self.promise(self.ring.state(key).role == REVOKED, "P2: a revoked key has a role again")
        for asker in self.askers:
            for key, heard in asker.keys.items():
                same = replace(heard, address="") == self.ring.state(key)
                self.promise(same, f"P3: {asker.number} was not told of a change")
            for address, heard in asker.addresses.items():
                members = [
                    (k, m)
                    for k, m in self.ring.members.items()
                    if m.address == address and m.replaced_at is None
                ]
                shown = [m.shown or k for k, m in members] or [b""]
                self.promise(
                    heard.key in shown,
                    f"P3: {asker.number} does not know which key listens at {address}",
                )
        for key, name in self.names.items():
            self.promise(self.ring.state(key).name == name, "P4: an admitted key was forgotten")
        for name in NAMES:
            current = [
                m
                for k, m in self.ring.members.items()
                if m.name == name and self.ring.state(k).role != REVOKED
            ]
            self.promise(
                sum(m.replaced_at is None for m in current) <= 1, "P5: two current keys of one name"
            )
            old = [m.replaced_at for m in current if m.replaced_at is not None]
            late = self.ring.deadline is not None and self.ring.deadline < self.now
            self.promise(
                late or all(at + RENEWAL_S > self.now for at in old),
                "P5: a replaced key is good for ever",
            )


def simulate_keyring(seed: int) -> KeyringSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    return KeyringSim(seed).run()
