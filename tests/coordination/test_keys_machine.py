"""The key-value store, held to the bullets of TensorFlow's coordination_service_test.cc; each test
has the name of its bullet."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.coordination.coordinated import Call
from zmqdist.coordination.keys_machine import Keys, normal
from zmqdist.coordination.replies import Effect
from zmqdist.errors import (
    ALREADY_EXISTS,
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
)
from zmqdist.limits import KEY_CHARS_MAX


class Store(Keys):
    """Each request makes a Call."""

    def ask(self, method: str, *args: Any) -> Call:
        call = Call()
        self.tell(getattr(self, method)(call, *args))
        return call

    def tell(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect.ticket, Call)
            effect.ticket.replied(effect)

    def insert(self, key: str, value: Any, overwrite: bool = False) -> int:
        return self.ask("put", key, value, 10, overwrite).code


def test_InsertKeyValue_Duplicate_Fail() -> None:
    store = Store()
    assert store.insert("key0", "original") == OK
    assert store.insert("key0", "never added") == ALREADY_EXISTS
    assert store.ask("try_get", "key0").value == "original"


def test_InsertKeyValue_Duplicate_Overwrite() -> None:
    store = Store()
    store.insert("key0", "original")
    assert store.insert("key0", "overwritten", True) == OK
    assert store.ask("try_get", "key0").value == "overwritten"


def test_TestSetGetValues() -> None:
    store = Store()
    for key, value in (
        ("key0", "value0"),
        ("/path", "value"),
        ("/path/to/key1", "value1"),
        ("path/to//key2/", "v2"),
    ):
        assert store.insert(key, value) == OK
    assert store.ask("get", "key0").value == "value0"
    assert store.ask("get", "path//to///key1////").value == "value1"
    assert store.ask("delete", "key0").value == 1
    pending = store.ask("get", "key0")
    assert not pending.done
    assert store.insert("key0", "again") == OK
    assert pending.value == "again"
    assert store.ask("delete", "/path").value == 3
    assert not store.ask("get", "/path/to/key1").done
    assert len(store) == 1


def test_TryGetKeyValue() -> None:
    store = Store()
    assert store.ask("try_get", "key").code == NOT_FOUND
    store.insert("key", "value")
    assert store.ask("try_get", "key").value == "value"
    store.ask("delete", "key")
    assert store.ask("try_get", "key").code == NOT_FOUND


@pytest.mark.parametrize(
    ("keys", "below"),
    [
        (["dir/path"], ["dir/path"]),
        (
            ["dir/path", "dir/path2", "dir/sub_dir/path"],
            ["dir/path", "dir/path2", "dir/sub_dir/path"],
        ),
        ([], []),
        (["dir0/path"], []),
        (["wrong_dir/dir/path"], []),
        (["dir_key"], []),
        (["dir"], []),
    ],
    ids=[
        "GetKeyValueDir_SingleValueInDirectory",
        "GetKeyValueDir_MultipleValuesInDirectory",
        "GetKeyValueDir_Empty_ReturnsEmptyList",
        "GetKeyValueDir_WrongDir_ReturnsEmptyList",
        "GetKeyValueDir_WrongDirPrefix_ReturnsEmptyList",
        "GetKeyValueDir_NonDirectoryPrefix_ReturnsEmptyList",
        "GetKeyValueDir_NonDirectoryKey_ReturnsEmptyList",
    ],
)
def test_GetKeyValueDir(keys: list[str], below: list[str]) -> None:
    store = Store()
    for key in keys:
        store.insert(key, key.upper())
    assert store.ask("below", "dir").value == {key: key.upper() for key in below}
    assert store.ask("below", "/dir//").value == {key: key.upper() for key in below}
    assert list(store.ask("below", "").value) == sorted(keys)


def test_IncrementKeyValue() -> None:
    store = Store()
    waiting = store.ask("get", "n")
    assert [store.ask("increment", "n", by, 8).value for by in (1, 5, -2)] == [1, 6, 4]
    assert waiting.value == 1
    store.insert("text", "4")
    refused = store.ask("increment", "text", 1, 8)
    assert refused.code == FAILED_PRECONDITION
    assert "type str" in refused.message
    assert store.ask("try_get", "text").value == "4"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("a", "a"), ("/a", "a"), ("a/", "a"), ("//a///b//", "a/b"), ("", ""), ("///", "")],
)
def test_redundant_slashes_are_ignored(written: str, meant: str) -> None:
    assert normal(written) == meant


@pytest.mark.parametrize("method", ["put", "get", "delete", "increment"])
def test_a_key_without_a_name_is_refused(method: str) -> None:
    more = {"put": (1, 1), "increment": (1, 1)}.get(method, ())
    assert Store().ask(method, "//", *more).code == INVALID_ARGUMENT


def test_a_wait_for_a_key_ends_at_its_deadline_and_the_others_wait_on() -> None:
    store = Store()
    short, long = store.ask("get", "k", 1.0), store.ask("get", "k", 2.0)
    assert store.deadline == 1.0
    store.tell(store.ticked(1.0))
    assert (short.code, long.done, store.deadline) == (DEADLINE_EXCEEDED, False, 2.0)
    assert "no task set key 'k' in time" in short.message
    store.insert("k", 1)
    assert (long.value, store.waiting) == (1, 0)


def test_a_refused_request_changes_nothing() -> None:
    store = Store(keys_max=2, bytes_max=30)
    assert [store.insert("a", 1), store.insert("b", 1), store.insert("c", 1)] == [
        OK,
        OK,
        RESOURCE_EXHAUSTED,
    ]
    assert store.ask("put", "a", 2, 19, True).code == RESOURCE_EXHAUSTED
    assert store.ask("try_get", "a").value == 1
    assert store.ask("put", "a", 2, 18, True).code == OK
    assert (len(store), store.nbytes) == (2, 30)
    store.ask("delete", "a")
    store.ask("delete", "b")
    assert (len(store), store.nbytes) == (0, 0)
    assert Store().insert("k" * (KEY_CHARS_MAX + 1), 1) == RESOURCE_EXHAUSTED


def test_nothing_is_left_of_dropped_requests_and_a_store_that_stops_ends_the_others() -> None:
    store = Store()
    gone, there = store.ask("get", "k"), store.ask("get", "k")
    store.dropped(gone)
    store.dropped(gone)
    assert store.waiting == 1
    store.tell(store.stopped("the service has stopped"))
    assert (gone.done, there.code, store.waiting) == (False, CANCELLED, 0)


def test_the_store_behaves_like_a_plain_dict(seed: int) -> None:
    """Compare the directory by bisection with one that looks at every key."""
    dice = random.Random(seed)
    store, plain = Store(), dict[str, Any]()
    names = ["a", "a/b", "a/b/c", "a/c", "a0", "a.", "b", "a/b0"]
    for step in range(60):
        key = dice.choice(names)
        match dice.randrange(4):
            case 0:
                assert store.insert(key, step) == (ALREADY_EXISTS if key in plain else OK)
                plain.setdefault(key, step)
            case 1:
                assert store.insert(key, step, True) == OK
                plain[key] = step
            case 2:
                gone = [name for name in plain if name == key or name.startswith(key + "/")]
                assert store.ask("delete", key).value == len(gone)
                for name in gone:
                    del plain[name]
            case 3:
                expected = {
                    name: plain[name] for name in sorted(plain) if name.startswith(key + "/")
                }
                assert store.ask("below", key).value == expected
        assert store.ask("below", "").value == dict(sorted(plain.items()))
