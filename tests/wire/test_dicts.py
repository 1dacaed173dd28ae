"""Dicts from untrusted bytes: for all keys the time is linear in the bytes."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from zmqdist.errors import WireError
from zmqdist.wire import safe

PRIME = 2**61 - 1
"""Python's hash of a number is its remainder."""

_pack = msgspec.msgpack.encode


def minus(count: int, length: int = 16) -> list[tuple[int, ...]]:
    """Return different tuples with the same hash, because hash(-1) is hash(-2)."""
    return list(itertools.islice(itertools.product((-1, -2), repeat=length), count))


def tagged(keys: Iterable[Any], make: Callable[[Any], Any] = lambda key: key) -> bytes:
    """Encode a dict with these keys in the codec's form for any keys (tag 2)."""
    return _pack([2, *(part for key in keys for part in (make(key), 0))])


def a_tuple(key: tuple[Any, ...]) -> list[Any]:
    return [0, *key]


def a_complex(key: complex) -> list[Any]:
    return [6, key.real, key.imag]


def a_big_int(key: int) -> list[Any]:
    return [7, key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)]


def a_scalar(key: Any) -> list[Any]:
    return [5, "<f8", struct.pack("<d", key)]


def a_map(keys: Iterable[Any]) -> bytes:
    """Encode the dict as a map of MessagePack, which the codec writes only for keys of str."""
    packed = [_pack(key) for key in keys]
    return b"\xdf" + struct.pack(">I", len(packed)) + b"".join(key + b"\x00" for key in packed)


SAME_HASH = {
    "big ints": lambda count: tagged((PRIME * number for number in range(8, 8 + count)), a_big_int),
    "complex": lambda count: tagged(
        (complex(-1000003.0 * number, number) for number in range(count)), a_complex
    ),
    "floats": lambda count: tagged(
        2.0 ** (61 * number) * odd for number in range(-16, 16) for odd in range(1, count // 16, 2)
    ),
    "numpy scalars": lambda count: tagged(
        (2.0 ** (61 * (n % 32 - 16)) for n in range(count)), a_scalar
    ),
    "tuples": lambda count: tagged(minus(count), a_tuple),
    "nested tuples": lambda count: tagged(minus(count), lambda key: [0, a_tuple(key)]),
    "one key again and again": lambda count: tagged([5.5] * count),
    "map of tuples": lambda count: a_map(minus(count)),
    "map of maps of tuples": lambda count: b"\x81\xa1a\x92\x01" + a_map(minus(count)),
    "map that ends early": lambda count: b"\xdf\xff\xff\xff\xff" + a_map(minus(count))[5:],
    "map in many lists": lambda count: b"\x91" * 400 + a_map(minus(count)),
    "map far inside": lambda count: b"\x81\xa1a" * 8 + a_map(minus(count)),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", SAME_HASH)
def test_keys_of_same_hash_cost_little(kind: str) -> None:
    """The decoder takes about a second. A dict of 60,000 such keys takes minutes, because its time
    grows with their square."""
    body = SAME_HASH[kind](60_000)
    if kind == "floats":  # few of these have the same hash
        assert len(safe.decode(body, [], "peer")) == 60_000
    else:
        with pytest.raises(WireError, match="not a value of the safe codec"):
            safe.decode(body, [], "peer")


@pytest.mark.parametrize("kind", [kind for kind in SAME_HASH if kind != "floats"])
def test_many_keys_of_same_hash_are_refused(kind: str) -> None:
    with pytest.raises(WireError, match="not a value of the safe codec"):
        safe.decode(SAME_HASH[kind](200), [], "peer")


def chained(bits: int, run: int) -> list[int]:
    """Ints of different hashes: `run` of them lie one after the other on the way that CPython
    takes, and the others begin on it."""
    size = 2**bits
    way = np.empty(run, np.int64)
    place = 1
    for number in range(run):
        way[number] = place
        place = (5 * place + 1) % size
    taken = np.full(size, run)
    taken[way] = np.arange(run)
    start: Any = np.repeat(way[: run // 2], 127) + np.tile(np.arange(1, 128), run // 2) * size
    rest, at, good = start.copy(), start % size, np.ones(len(start), bool)
    while rest.any():
        good &= taken[at] < run
        rest >>= 5
        at = (5 * at + rest + 1) % size
    good &= taken[at] < run // 2
    return [*way.tolist(), *start[good][: 2 * size // 3 - run].tolist()]


def test_colliding_keys_are_refused() -> None:
    keys = chained(14, 9000)
    assert len({hash(key) for key in keys}) == len(keys) > 9500
    with pytest.raises(WireError, match="keys of a dict have colliding hashes"):
        safe.decode(tagged(keys), [], "peer")


def test_collisions_are_found_at_each_dict_size() -> None:
    keys = [*chained(14, 9000), *range(2**40, 2**40 + 3000)]
    with pytest.raises(WireError, match="keys of a dict have colliding hashes"):
        safe.decode(tagged(keys), [], "peer")


def looked(hashes: Iterable[int], bits: int) -> int:
    """Compute `dicts.probe_count` one key after the other, as CPython does."""
    taken, made = set(), 0
    for each in hashes:
        rest = each % 2**64
        place = rest % 2**bits
        made += 1
        while place in taken:
            made += 1
            rest >>= 5
            place = (5 * place + rest + 1) % 2**bits
        taken.add(place)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_probe_count_equals_insertion_in_order(seed: int) -> None:
    drawn = random.Random(seed)
    step = 1 << drawn.choice([0, 0, 3, 6, 10, 20])
    hashes = [
        drawn.randrange(-(2**20), 2**20) * step if seed % 2 else number * step
        for number in range(170)
    ]
    assert safe.probe_count(np.array(hashes, np.int64), 8) == looked(hashes, 8)
    chain = chained(9, 300)
    drawn.shuffle(chain)
    assert safe.probe_count(np.array(chain), 9) == looked(chain, 9)


drawn = random.Random(5)
FAIR = {
    "a range": range(20_000),
    "a range downwards": range(20_000, 0, -1),
    "negative ints": range(-20_000, 0),
    "random ints": [drawn.randrange(-(2**63), 2**63) for _ in range(20_000)],
    "random ints of 128 bits": [drawn.getrandbits(128) for _ in range(300)],
    "times of a clock": [
        1_700_000_000_000_000_000 + 1_000_000 * number for number in range(20_000)
    ],
    "addresses": [2**47 + 4096 * number for number in range(20_000)],
    "high bits": [number << 40 for number in range(20_000)],
    "floats": [number / 1000 for number in range(20_000)],
    "powers of two": [2.0**number for number in range(-1000, 1000)],
    "pairs": [(row, column) for row in range(150) for column in range(150)],
    "complex numbers": [complex(row, column) for row in range(100) for column in range(100)],
    "numpy ints": [np.int64(7 * number) for number in range(300)],
    "strs": [f"key {number}" for number in range(20_000)],
    "all kinds": [
        *range(5000),
        *map(str, range(5000)),
        *(number + 0.5 for number in range(5000)),
        None,
        b"",
        (),
    ],
}


@pytest.mark.parametrize("kind", FAIR)
def test_ordinary_keys_travel(kind: str) -> None:
    value = dict.fromkeys(FAIR[kind], 1)
    body, frames = safe.encode(value)
    back = safe.decode(body, frames, "peer")
    assert back == value
    assert list(map(type, back)) == list(map(type, value))


@pytest.mark.parametrize("levels", range(9))
@pytest.mark.parametrize(
    "between", [lambda inner: inner, lambda inner: [inner], lambda inner: ((inner,), 1)]
)
def test_large_maps_travel_at_any_depth(levels: int, between: Any) -> None:
    value: Any = {f"key {number}": [{"x": (number, 0.1)}] for number in range(300)}
    value["array"] = np.zeros((2, 3), [("a", "i4"), ("b", [("c", "f8", (2,))])])
    for _ in range(levels):
        value = {"inside": between(value), "beside": b"\xde\xdf" * 600}
    back = safe.decode(*safe.encode(value), "peer")
    while "inside" in value:
        value, back = value["inside"], back["inside"]
        while not isinstance(value, dict):
            assert type(value) is type(back)
            value, back = value[0], back[0]
    assert value.pop("array").dtype == back.pop("array").dtype
    assert back == value
