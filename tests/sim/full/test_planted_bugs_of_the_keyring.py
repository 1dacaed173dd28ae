"""Does the simulation of the keyring find bugs? One bug is planted at a time; within SEEDS_MAX
seeds it must report a broken promise."""

from __future__ import annotations

from math import inf
from typing import Any

import msgspec
import pytest

from tests.sim.planted import Plant, around, effects, events, unheard, without
from tests.sim.simulations.keyring import simulate_keyring
from zmqdist.events import Send, Ticked
from zmqdist.messages import AskKey, Join, Joined, KeyState
from zmqdist.transport import keyring_machine
from zmqdist.transport.keyring_machine import (
    REVOKED,
    CutKey,
    KeyHeard,
    Keyring,
    KeysRevoked,
    SaveKeyring,
    TokenMade,
)

pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 500


def is_joined(effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Joined)


def any_name(patch: pytest.MonkeyPatch) -> None:
    """Each Join has the name of its token."""
    names: dict[str, str] = {}

    def alter(self: Keyring, event: Any) -> Any:
        if isinstance(event, TokenMade):
            names[event.number] = event.name
        if isinstance(event, KeyHeard) and isinstance(event.heard.message, Join):
            join = event.heard.message
            right = Join(join.number, join.secret, names[join.number])
            return msgspec.structs.replace(
                event, heard=msgspec.structs.replace(event.heard, message=right)
            )
        return event

    events(Keyring, alter)(patch)


def used_again(patch: pytest.MonkeyPatch) -> None:
    """The event of a token comes again before each Join."""
    tokens: dict[str, TokenMade] = {}

    def handle(former: Any, self: Keyring, event: Any, now: float) -> Any:
        if isinstance(event, TokenMade):
            tokens[event.number] = event
        if isinstance(event, KeyHeard) and isinstance(event.heard.message, Join):
            former(self, tokens[event.heard.message.number], now)
        return former(self, event, now)

    around(Keyring, "handle", handle)(patch)


def unsaved(self: Keyring, event: Any, made: list[Any]) -> list[Any]:
    joined = any(map(is_joined, made))
    return [each for each in made if not (joined and isinstance(each, SaveKeyring))]


def saved_last(self: Keyring, event: Any, made: list[Any]) -> list[Any]:
    return sorted(made, key=lambda each: isinstance(each, SaveKeyring))


def silent(about: Any) -> Plant:
    """No process is told of these states of keys, unless it asks."""

    def alter(self: Keyring, event: Any, made: list[Any]) -> list[Any]:
        if isinstance(event, KeyHeard) and isinstance(event.heard.message, AskKey):
            return made
        return [
            each
            for each in made
            if not (
                isinstance(each, Send)
                and isinstance(each.message, KeyState)
                and about(each.message)
            )
        ]

    return effects(Keyring, alter)


def both_are_current(former: Any, self: Keyring, event: Any, now: float) -> Any:
    members = dict(self.members)
    made = former(self, event, now)
    if any(map(is_joined, made)):
        self.members |= {key: members[key] for key in members if key in self.members}
    return made


def forgets(which: Any) -> Plant:
    """The keyring forgets each replaced key of which `which(key, role, shown)` is true."""

    def alter(self: Keyring, event: Any, made: list[Any]) -> list[Any]:
        shown = {each.shown for each in self.members.values() if each.replaced_at is None}
        for key in [key for key, each in self.members.items() if each.replaced_at is not None]:
            if which(self.state(key).role, key in shown):
                del self.members[key]
        return made

    return effects(Keyring, alter)


def revoked_members_only(former: Any, self: Keyring, key: bytes, address: str = "") -> KeyState:
    role = self.static.get(key, "")
    return KeyState(key, role, role, bool(role)) if role else former(self, key, address)


BUGS: list[tuple[str, Plant, str]] = [
    ("a token works under any name", any_name, "P1"),
    ("a token works twice", used_again, "P1"),
    (
        "a token has no end",
        events(
            Keyring,
            lambda self, event: (
                msgspec.structs.replace(event, until=inf) if isinstance(event, TokenMade) else event
            ),
        ),
        "P1",
    ),
    (
        "any secret is right",
        lambda patch: patch.setattr(keyring_machine.hmac, "compare_digest", lambda *two: True),
        "P1",
    ),
    ("an admission is not saved", effects(Keyring, unsaved), "P4"),
    ("an admission is saved too late", effects(Keyring, saved_last), "P4"),
    ("a revocation is not saved", without(Keyring, SaveKeyring, KeysRevoked), "P2"),
    (
        "revocations are not in the record",
        around(Keyring, "record", lambda former, self: {**former(self), "revoked": []}),
        "P",
    ),
    ("a revoked key goes on", without(Keyring, CutKey), "P7"),
    ("a static key cannot be revoked", around(Keyring, "state", revoked_members_only), "P"),
    ("changes are told to no process", silent(lambda state: not state.address), "P3"),
    ("a moved address is told to no process", silent(lambda state: state.address), "P3"),
    ("two keys of one name are current", around(Keyring, "handle", both_are_current), "P5"),
    ("a replaced key stays good", unheard(Keyring, Ticked), "P5"),
    (
        "replaced keys are kept for ever",
        around(
            Keyring,
            "__init__",
            lambda former, *args, **kwargs: former(*args, **{**kwargs, "replaced_max": 10**6}),
        ),
        "P8",
    ),
    (
        "a key that an open port shows is forgotten",
        forgets(lambda role, shown: shown and role == REVOKED),
        "P8",
    ),
    (
        "a key is forgotten that has its role still",
        forgets(lambda role, shown: not shown and role != REVOKED),
        "P8",
    ),
    ("a key is forgotten in silence", silent(lambda state: not state.role), "P3"),
    ("the end of a replaced key is told to no process", without(Keyring, Send, Ticked), "P3"),
]


@pytest.mark.parametrize(("what", "plant", "said"), BUGS, ids=[bug[0] for bug in BUGS])
def test_simulation_finds_bug(
    what: str, plant: Plant, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = None
    for seed in range(SEEDS_MAX):
        try:
            simulate_keyring(seed)
        except (AssertionError, KeyError) as error:
            found = str(error)
            break
    assert found is not None, f"no promise was seen broken in {SEEDS_MAX} seeds: {what}"
    assert found.startswith(said)
