"""The key-value store: names of keys, and random requests. The scenarios are in transcripts/."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.coordination.helpers import Call
from zmqdist.coordination.keys_machine import Keys, normal
from zmqdist.errors import ALREADY_EXISTS, OK, RESOURCE_EXHAUSTED
from zmqdist.limits import KEY_CHARS_MAX


def request(store: Keys, method: str, *args: Any) -> Call:
    call = Call()
    for effect in getattr(store, method)(call, *args):
        effect.ticket.replied(effect)
    return call


@pytest.mark.parametrize(
    ("key", "path"),
    [("a", "a"), ("/a", "a"), ("a/", "a"), ("//a///b//", "a/b"), ("", ""), ("///", "")],
)
def test_redundant_slashes_are_ignored(key: str, path: str) -> None:
    assert normal(key) == path


def test_too_long_key_is_refused() -> None:
    assert request(Keys(), "put", "k" * (KEY_CHARS_MAX + 1), 1, 10).code == RESOURCE_EXHAUSTED


def test_store_behaves_like_dict(seed: int) -> None:
    """Compare the directory by bisection with one that looks at every key."""
    dice = random.Random(seed)
    store, plain = Keys(), dict[str, Any]()
    names = ["a", "a/b", "a/b/c", "a/c", "a0", "a.", "b", "a/b0"]
    for step in range(60):
        key = dice.choice(names)
        match dice.randrange(4):
            case 0:
                code = request(store, "put", key, step, 10).code
                assert code == (ALREADY_EXISTS if key in plain else OK)
                plain.setdefault(key, step)
            case 1:
                assert request(store, "put", key, step, 10, True).code == OK
                plain[key] = step
            case 2:
                removed = [name for name in plain if name == key or name.startswith(key + "/")]
                assert request(store, "delete", key).value == len(removed)
                for name in removed:
                    del plain[name]
            case 3:
                expected = {
                    name: plain[name] for name in sorted(plain) if name.startswith(key + "/")
                }
                assert request(store, "below", key).value == expected
        assert request(store, "below", "").value == dict(sorted(plain.items()))
