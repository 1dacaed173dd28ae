"""Does the simulation of the keyring find bugs? One bug is planted at a time; within SEEDS_MAX
seeds it must report a broken promise."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.sim.simulations.keyring import simulate_keyring
from zmqdist.transport import keyring_machine
from zmqdist.transport.keyring_machine import CutKey, Keyring, KeysRevoked, KeyVerdict, SaveKeyring

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 500

ADMIT = vars(Keyring)["_admit"]
EXPIRE = vars(Keyring)["_expire"]
FORGET = vars(Keyring)["_forget"]
PROBLEM = vars(Keyring)["_problem"]
RECORD = Keyring.record
RESTORE = Keyring.restore
REVOKE = vars(Keyring)["_revoke"]
VERDICT = Keyring.verdict


def any_name(self: Keyring, token: Any, name: str, key: bytes, now: float) -> Any:
    return PROBLEM(self, token, token.name, key, now)


def used_again(self: Keyring, token: Any, name: str, key: bytes, now: float) -> Any:
    token.key = b""
    return PROBLEM(self, token, name, key, now)


def never_late(self: Keyring, token: Any, name: str, key: bytes, now: float) -> Any:
    return PROBLEM(self, token, name, key, min(now, token.until - 1))


def unsaved(self: Keyring, *args: Any) -> list[Any]:
    return [effect for effect in ADMIT(self, *args) if not isinstance(effect, SaveKeyring)]


def saved_last(self: Keyring, *args: Any) -> list[Any]:
    effects = ADMIT(self, *args)
    return sorted(effects, key=lambda effect: isinstance(effect, SaveKeyring))


def revoked_and_not_saved(self: Keyring, event: KeysRevoked) -> list[Any]:
    return [effect for effect in REVOKE(self, event) if not isinstance(effect, SaveKeyring)]


def revoked_and_not_cut(self: Keyring, event: KeysRevoked) -> list[Any]:
    return [effect for effect in REVOKE(self, event) if not isinstance(effect, CutKey)]


def without_revocations(self: Keyring) -> dict[str, Any]:
    return {**RECORD(self), "revoked": []}


def nobody_hears(self: Keyring, key: bytes) -> list[Any]:
    return []


def both_are_current(
    self: Keyring, key: bytes, member: Any, now: float, replies: list[Any]
) -> list[Any]:
    members = dict(self.members)
    effects = ADMIT(self, key, member, now, replies)
    self.members = {**members, key: member}
    return effects


def never_expires(self: Keyring, now: float) -> list[Any]:
    return []


def expires_in_silence(self: Keyring, now: float) -> list[Any]:
    EXPIRE(self, now)
    return []


def never_forgets(self: Keyring) -> list[Any]:
    return []


def forgets_in_silence(self: Keyring) -> list[Any]:
    FORGET(self)
    return []


def forgets_what_ports_show(self: Keyring) -> list[Any]:
    current = {key: member for key, member in self.members.items() if member.replaced_at is None}
    self.members |= {key: replace(member, shown=b"") for key, member in current.items()}
    sent = FORGET(self)
    self.members |= {key: member for key, member in current.items() if key in self.members}
    return sent


def forgets_at_once(self: Keyring) -> list[Any]:
    expiring, self._expiring = self._expiring, {}  # reach: the bug is in what this reads
    sent = FORGET(self)
    self._expiring = {
        key: until for key, until in expiring.items() if key in self.members
    }  # reach: as above
    return sent


def revoked_members_only(self: Keyring, key: bytes) -> KeyVerdict:
    role = self.static.get(key, "")
    return KeyVerdict(role, role, bool(role)) if role else VERDICT(self, key)


BUGS: list[tuple[str, Any, str, Callable[..., Any], str]] = [
    ("a token works under any name", Keyring, "_problem", any_name, "P1"),
    ("a token works twice", Keyring, "_problem", used_again, "P1"),
    ("a token has no end", Keyring, "_problem", never_late, "P1"),
    ("any secret is right", hmac, "compare_digest", lambda one, other: True, "P1"),
    ("an admission is not saved", Keyring, "_admit", unsaved, "P4"),
    ("an admission is saved too late", Keyring, "_admit", saved_last, "P4"),
    ("a revocation is not saved", Keyring, "_revoke", revoked_and_not_saved, "P2"),
    ("revocations are not in the record", Keyring, "record", without_revocations, "P"),
    ("a revoked key goes on", Keyring, "_revoke", revoked_and_not_cut, "P7"),
    ("a static key cannot be revoked", Keyring, "verdict", revoked_members_only, "P"),
    ("changes are told to no process", Keyring, "_changed", nobody_hears, "P3"),
    ("a moved address is told to no process", Keyring, "_moved", nobody_hears, "P3"),
    ("two keys of one name are current", Keyring, "_admit", both_are_current, "P5"),
    ("a replaced key stays good", Keyring, "_expire", never_expires, "P5"),
    ("replaced keys are kept for ever", Keyring, "_forget", never_forgets, "P8"),
    (
        "a key that an open port shows is forgotten",
        Keyring,
        "_forget",
        forgets_what_ports_show,
        "P8",
    ),
    ("a key is forgotten that has its role still", Keyring, "_forget", forgets_at_once, "P8"),
    ("a key is forgotten in silence", Keyring, "_forget", forgets_in_silence, "P3"),
    (
        "the end of a replaced key is told to no process",
        Keyring,
        "_expire",
        expires_in_silence,
        "P3",
    ),
]


@pytest.mark.parametrize(
    ("what", "owner", "name", "bug", "said"), BUGS, ids=[bug[0] for bug in BUGS]
)
def test_the_simulation_finds_that(
    what: str,
    owner: Any,
    name: str,
    bug: Callable[..., Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keyring_machine.hmac if owner is hmac else owner, name, bug)
    found = None
    for seed in range(SEEDS_MAX):
        try:
            simulate_keyring(seed)
        except (AssertionError, KeyError) as error:
            found = str(error)
            break
    assert found is not None, f"no promise was seen broken in {SEEDS_MAX} seeds: {what}"
    assert found.startswith(said)
