"""The keyring: which keys may join, the rights of a key, and which processes hear of a change.
Promises of transport/keyring_machine.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from zmqdist import errors
from zmqdist.events import Heard, PeerGone, Send, Ticked
from zmqdist.messages import AskKey, Join, Joined, KeyState, NewKey, Refused, RenewKey
from zmqdist.transport import keyring_machine
from zmqdist.transport.keyring_machine import (
    REVOKED,
    CutKey,
    KeyHeard,
    Keyring,
    KeysRevoked,
    RenewalAsked,
    SaveKeyring,
    TokenMade,
    digest_of,
    role_of,
)

STATIC, OTHER, ONE, TWO, THREE = (bytes([number]) * 32 for number in range(5))
SECRET = b"a secret"


@pytest.fixture
def ring() -> Keyring:
    made = Keyring({STATIC: "submit", OTHER: "admin"}, renewal_s=5.0)
    made.handle(TokenMade("7", digest_of(SECRET), "worker:3", 60.0), 0.0)
    return made


def hear(ring: Keyring, peer: str, key: bytes, message: Any, now: float = 1.0) -> list[Any]:
    return ring.handle(KeyHeard(Heard(peer, message), key, 1_000.0), now)


def join(
    ring: Keyring,
    key: bytes = ONE,
    name: str = "worker:3",
    secret: bytes = SECRET,
    now: float = 1.0,
) -> list[Any]:
    return hear(ring, "joiner", key, Join("7", secret, name), now)


def test_token_admits_key_after_save(ring: Keyring) -> None:
    assert join(ring) == [SaveKeyring(), Send("joiner", Joined("worker", "worker:3"))]
    assert ring.state(ONE) == KeyState(ONE, "worker", "worker:3", True)
    assert ring.name_of(ONE) == "worker:3"


@pytest.mark.parametrize(
    ("key", "name", "secret", "now", "code", "text"),
    [
        (
            ONE,
            "worker:3",
            b"other",
            1.0,
            errors.UNAUTHENTICATED,
            "this dispatcher does not know the join token",
        ),
        (
            ONE,
            "worker:4",
            SECRET,
            1.0,
            errors.PERMISSION_DENIED,
            "is for worker:3, and this process wants to join as 'worker:4'",
        ),
        (
            ONE,
            "worker:3",
            SECRET,
            72.0,
            errors.UNAUTHENTICATED,
            "the join token for worker:3 expired 12 s ago",
        ),
        (STATIC, "worker:3", SECRET, 1.0, errors.ALREADY_EXISTS, "is known already"),
    ],
)
def test_wrong_token_is_refused_with_reason(
    ring: Keyring, key: bytes, name: str, secret: bytes, now: float, code: int, text: str
) -> None:
    ((refusal),) = join(ring, key, name, secret, now)
    assert isinstance(refusal.message, Refused)
    assert (refusal.message.code, refusal.message.final) == (code, True)
    assert text in refusal.message.message
    assert ring.wrong == 1
    assert not ring.members


def test_token_works_once_but_reply_repeats(ring: Keyring) -> None:
    join(ring)
    assert join(ring) == [Send("joiner", Joined("worker", "worker:3"))]
    (refusal,) = join(ring, TWO)
    assert "has been used already" in refusal.message.message
    assert ring.state(TWO) == KeyState(TWO, "")


def test_unknown_keys_connect_while_tokens_live(ring: Keyring) -> None:
    assert not Keyring({}).joinable(0.0)
    assert ring.joinable(1.0)
    assert ring.joinable(61.0), "a late token gets the reason"
    assert not ring.joinable(60.0 + keyring_machine.JOIN_EXPLAINED_S)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("worker:3", "worker"),
        ("ps:0", "worker"),
        ("submit", "submit"),
        ("client:1", "client"),
        ("admin", "admin"),
    ],
)
def test_name_determines_role(name: str, role: str) -> None:
    assert role_of(name) == role


def test_asker_hears_changes_of_key(ring: Keyring) -> None:
    unknown = hear(ring, "asker", STATIC, AskKey(ONE))
    assert unknown == [Send("asker", KeyState(ONE, ""))]
    assert join(ring)[2:] == [Send("asker", KeyState(ONE, "worker", "worker:3", True))]
    revoked = ring.handle(KeysRevoked((ONE,), "worker:3", 0.0), 2.0)
    problem = ring.state(ONE).problem
    assert "(worker:3) was revoked" in problem
    assert revoked == [
        SaveKeyring(),
        CutKey(ONE, problem),
        Send("asker", KeyState(ONE, REVOKED, "worker:3", False, problem)),
    ]
    ring.handle(PeerGone("asker"), 3.0)
    assert not [
        effect
        for effect in ring.handle(KeysRevoked((STATIC,), "submit", 0.0), 3.0)
        if isinstance(effect, Send)
    ]


def test_revoked_key_stays_revoked(ring: Keyring) -> None:
    join(ring)
    ring.handle(KeysRevoked((ONE, STATIC), "worker:3", 0.0), 2.0)
    following = Keyring({STATIC: "submit"})
    following.restore(ring.record(), 0.0)
    assert following.state(ONE).role == following.state(STATIC).role == REVOKED
    following.handle(TokenMade("7", digest_of(SECRET), "worker:3", 60.0), 0.0)
    (refusal,) = join(following)
    assert "is known already" in refusal.message.message
    assert following.find("worker:3") == following.find(ONE) == ()


def test_revoked_name_loses_open_tokens(ring: Keyring) -> None:
    ring.handle(KeysRevoked((), "worker:3", 0.0), 1.0)
    (refusal,) = join(ring)
    assert "was withdrawn" in refusal.message.message


def test_renewed_key_replaces_key_after_a_while(ring: Keyring) -> None:
    join(ring)
    hear(ring, "owner", ONE, AskKey(ONE, "", True))
    assert ring.handle(RenewalAsked(""), 2.0) == [Send("owner", RenewKey())]
    assert hear(ring, "owner", ONE, NewKey(TWO), 2.0) == [
        SaveKeyring(),
        Send("owner", Joined("worker", "worker:3")),
    ]
    assert ring.state(ONE).role == ring.state(TWO).role == "worker"
    assert ring.deadline == 7.0
    (state,) = ring.handle(Ticked(), 7.0)
    assert (state.message.role, state.message.listens) == (REVOKED, True), (
        "an open port may continue to use it"
    )
    assert ring.find("worker:3") == (ONE, TWO), "revoking the name revokes both"


@pytest.mark.parametrize(
    ("old", "new"), [(STATIC, TWO), (ONE, STATIC), (ONE, b"short"), (THREE, TWO)]
)
def test_current_key_alone_is_renewed(ring: Keyring, old: bytes, new: bytes) -> None:
    join(ring)
    (reply,) = hear(ring, "owner", old, NewKey(new))
    assert isinstance(reply.message, Refused)
    assert ring.state(ONE).role == "worker"


def test_port_of_ps_shows_first_key(ring: Keyring) -> None:
    asker = "asker"
    assert hear(ring, asker, STATIC, AskKey(b"", "host:1")) == [
        Send(asker, KeyState(b"", "", address="host:1"))
    ]
    ring.handle(TokenMade("7", digest_of(SECRET), "ps:0", 60.0, "host:1"), 0.0)
    moved = join(ring, ONE, "ps:0")[-1]
    assert moved == Send(asker, KeyState(ONE, "worker", "ps:0", True, "", "host:1"))
    renewed = hear(ring, "ps", ONE, NewKey(TWO))
    assert renewed[-1] == moved, "its port still uses the first key"
    ring.handle(TokenMade("7", digest_of(SECRET), "ps:0", 60.0, "host:1"), 0.0)
    assert join(ring, THREE, "ps:0")[-1].message.key == THREE, (
        "a restarted ps has a new port and a new key"
    )


def test_requests_beyond_bounds_are_refused(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring_machine, "JOIN_TOKENS_MAX", 1)
    with pytest.raises(errors.ResourceExhaustedError, match="keeps 1 join tokens"):
        ring.handle(TokenMade("8", b"", "worker:4", 60.0), 0.0)
    monkeypatch.setattr(keyring_machine, "MEMBER_KEYS_MAX", 0)
    assert join(ring)[0].message.code == errors.RESOURCE_EXHAUSTED
    monkeypatch.setattr(keyring_machine, "KEY_QUESTIONS_MAX", 0)
    assert hear(ring, "asker", STATIC, AskKey(ONE))[0].message.code == errors.RESOURCE_EXHAUSTED


def test_oldest_replaced_keys_are_forgotten() -> None:
    ring = Keyring({STATIC: "submit"}, renewal_s=5.0, replaced_max=1)
    keys = [bytes([number]) * 32 for number in range(10, 16)]
    ring.handle(TokenMade("7", digest_of(SECRET), "worker:3", 60.0), 0.0)
    join(ring, keys[0])
    hear(ring, "asker", STATIC, AskKey(keys[1]))
    effects: list[Any] = []
    for number, (old, new) in enumerate(itertools.pairwise(keys), 1):
        effects = hear(ring, "owner", old, NewKey(new), 10.0 * number)
        ring.handle(Ticked(), 10.0 * number + 5.0)
    assert ring.members.keys() == {keys[0], keys[3], keys[4], keys[5]}, (
        "the first one is on the port"
    )
    assert ring.state(keys[2]) == KeyState(keys[2], "")
    assert effects[0] == SaveKeyring()
    following = Keyring({STATIC: "submit"})
    following.restore(ring.record(), 0.0)
    assert following.members.keys() == ring.members.keys()


def test_asker_hears_of_forgotten_key() -> None:
    ring = Keyring({STATIC: "submit"}, renewal_s=5.0, replaced_max=0)
    for number, key in enumerate((ONE, TWO, THREE)):
        ring.handle(TokenMade("7", digest_of(SECRET), "worker:3", 60.0), 0.0)
        hear(ring, "asker", STATIC, AskKey(key))
        effects = join(ring, key, now=10.0 * number)
        ring.handle(Ticked(), 10.0 * number + 5.0)
    assert effects[-1] == Send("asker", KeyState(ONE, ""))
