"""Dicts from untrusted bytes, in time proportional to the number of bytes.

A peer knows Python's hashes of numbers and tuples, so it can choose keys that collide. For example,
all multiples of 2**61 - 1 have hash 0, and a dict with 60,000 of them as keys takes a minute to
build. The hashes of str and bytes are secret, so those keys need no check. Other keys are checked
before a dict is made of them:

    At most SAME_HASH_MAX keys of a dict may have the same hash. Keys that were not chosen for an
    attack rarely have equal hashes. A dict of more than FEW_KEYS keys may take PROBES_MAX probes
    for each key on average, where CPython usually needs about two. This bound is needed because a
    peer can also choose keys of different hashes that probe each other's places.

msgspec itself makes dicts with keys of any type. A dict of fewer than 128 items cannot take long.
If a body may contain a larger dict, this module decodes the body part by part, with types that
allow only str as keys, so that msgspec refuses other keys before it makes a dict.

Not here: the types that keys may have (safe.py).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from zmqdist.limits import DEPTH_MAX

SAME_HASH_MAX: Final = 64
"""Largest number of keys of one dict that may have the same hash."""
FEW_KEYS: Final = 8192
"""Number of keys up to which probes are not counted: making such a dict takes at most 0.25 us for
each byte if few keys share a hash."""
PROBES_MAX: Final = 64
"""Largest number of places of a dict that may be probed for each key, on average."""

_SMALL_BYTES: Final = 1024
"""Bytes. A map in at most so many bytes cannot take long, whatever its keys are, because it has too
few of them."""
_PARTS: Final = re.compile(
    rb"(?:[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xdc]..|[\xca\xce\xd2\xdd].{4}|[\xcb\xcf\xd3].{8}|"
    + b"|".join(b"%b.{%d}" % (re.escape(bytes([0xA0 + length])), length) for length in range(32))
    + rb"|\xde\x00[\x00-\x7f]|\xdf\x00\x00\x00[\x00-\x7f]){0,40}",
    re.DOTALL,
)
"""Matches up to 40 items whose first bytes show their length: headers of arrays and small maps,
numbers, short strs."""
_LONG: Final = {b"\xc4": 1, b"\xc5": 2, b"\xc6": 4, b"\xd9": 1, b"\xda": 2, b"\xdb": 4}
"""For each first byte of an item that is bytes or a long str, the number of bytes that encode the
length of the item."""
_JUMPS_MAX: Final = 32
_RANDOM: Final = frozenset({str, bytes})
_INT: Final = frozenset({int})

_unpack_any = msgspec.msgpack.Decoder().decode
_unpack_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_unpack_items = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def unpack(body: bytes | memoryview) -> Any:
    """Return the value that a MessagePack body encodes, with arrays as lists and maps as dicts.

    Raises:
      msgspec.DecodeError: the body is not MessagePack, or a large map has keys other than str. Keys
      of smaller maps are not checked.
      ValueError, RecursionError: the value is nested too deeply.
    """
    if len(body) <= _SMALL_BYTES:
        return _unpack_any(body)
    return _unpack(body if type(body) is bytes else bytes(body), 2 * len(body), 2 * DEPTH_MAX)


def _unpack(body: bytes, typed_below: int, depth_left: int) -> Any:
    """Return the value of a part of a body, as `unpack` does.

    Decode with types only if this part has at most half of `typed_below` bytes. `typed_below` is
    the length of the last enclosing part for which decoding with types has failed, and at first
    twice the length of the whole body.
    """
    if depth_left == 0:
        raise ValueError(f"nested deeper than {2 * DEPTH_MAX} levels")
    if (
        not (b"\xde" in body or b"\xdf" in body)
        or _ends_without_large_map(body)
        or not _may_have_large_map(body)
    ):
        return _unpack_any(body)
    first = body[0]
    # Decoding all parts to one declared type at once is faster if there are many parts. It fails if
    # one of the parts is bytes.
    if first >= 0xDC and 2 * len(body) <= typed_below:
        try:
            return _typed().decode(body)
        except msgspec.ValidationError:
            typed_below = len(body)
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF)
    parts: Any = _unpack_items(body) if is_map else _unpack_parts(body)
    if max(map(len, parts.values() if is_map else parts), default=0) <= _SMALL_BYTES:
        # a map in so short a part cannot take long to decode, and `_unpack_items` has checked the
        # keys if the body is a map
        return _unpack_any(body)
    if is_map:
        return {
            key: _unpack_part(bytes(part), typed_below, depth_left - 1)
            for key, part in parts.items()
        }
    return [_unpack_part(bytes(part), typed_below, depth_left - 1) for part in parts]


def _unpack_part(part: bytes, typed_below: int, depth_left: int) -> Any:
    return (
        _unpack_any(part) if len(part) <= _SMALL_BYTES else _unpack(part, typed_below, depth_left)
    )


def _may_have_large_map(body: bytes) -> bool:
    """Return whether a body has bytes that could begin a map of 128 items or more. These bytes may
    in fact be inside a number or a string.
    """
    for mark, width in ((b"\xde", 2), (b"\xdf", 4)):
        at = body.find(mark)
        for _ in range(_JUMPS_MAX):
            if at < 0:
                break
            if int.from_bytes(body[at + 1 : at + 1 + width], "big") >= 128:
                return True
            at = body.find(mark, at + 1)
        else:
            return True
    return False


def _ends_without_large_map(body: bytes) -> bool:
    """Return whether a short walk over the items of a body reaches the end without meeting a large
    map. The walk ignores nesting."""
    at = 0
    for _ in range(_JUMPS_MAX):
        at = _PARTS.match(body, at).end()  # type: ignore[union-attr]
        width = _LONG.get(body[at : at + 1])
        if width is None:
            return at == len(body)
        at += 1 + width + int.from_bytes(body[at + 1 : at + 1 + width], "big")
    return False


@lru_cache(maxsize=1)
def _typed() -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for values whose maps have only str as keys. It refuses bytes, because
    msgspec has no type that means str or bytes.

    msgspec's types cannot be recursive without classes, so they are written out to the depth that
    most values have.
    """
    plain: Any = None | bool | int | float | str
    kind = plain
    for _ in range(6):
        kind = plain | list[kind] | dict[str, kind]  # type: ignore[valid-type]
    return msgspec.msgpack.Decoder(kind)


def dict_of(keys: list[Any], values: list[Any], kinds: set[type]) -> dict[Any, Any]:
    """Return a dict of hashable keys that a peer has chosen. `kinds` is the set of the types of the
    keys.

    Raises:
      ValueError: the dict would take long to make and to use, or there are not as many keys as
        values.
    """
    if len(keys) > SAME_HASH_MAX and not kinds <= _RANDOM:
        _check(keys, kinds)
    return dict(zip(keys, values, strict=True))


def _check(keys: list[Any], kinds: set[type]) -> None:
    count = len(keys)
    few_alike = (
        kinds == _INT and min(keys) >= -(2**63) and max(keys) < 2**64
    )  # at most a dozen 64-bit ints share a hash, so equal hashes need no check
    if few_alike and count <= FEW_KEYS:
        return
    hashes = np.fromiter(map(hash, keys), np.int64, count)
    if not few_alike:
        ordered = np.sort(hashes)
        if (ordered[SAME_HASH_MAX:] == ordered[:-SAME_HASH_MAX]).any():
            raise ValueError(f"more than {SAME_HASH_MAX} keys of a dict have the same hash")
    bits = FEW_KEYS.bit_length()
    while count > FEW_KEYS:
        # When two thirds of a dict's places are filled, CPython makes the dict anew with twice as
        # many places.
        fitting = 2 ** (bits + 1) // 3
        if probe_count(hashes[:fitting], bits) > PROBES_MAX * min(count, fitting):
            raise ValueError(f"too many of the {count} keys of a dict have colliding hashes")
        if fitting >= count:
            return
        bits += 1


def probe_count(hashes: NDArray[np.int64], bits: int) -> int:
    """Return how many places CPython probes while it puts keys of these different hashes, in this
    order, into a dict of 2**bits places.

    NumPy counts the probes of all keys at once. In each step every key without a place probes one
    place. A place belongs to the earliest key that has probed it. A key that does not get the
    place, or loses it, probes its next place in the next step. As in the college admissions of Gale
    and Shapley, the result does not depend on the order of probing, so the number of probes is the
    same as if CPython put one key after the other into the dict. If there are more than PROBES_MAX
    probes for each key, or if counting takes too long, the function stops early and returns a
    number above that bound.
    """
    count, mask = len(hashes), 2**bits - 1
    rest = hashes.view(np.uint64).copy()
    place = hashes & mask
    owner = np.full(2**bits, count, np.int32)
    asking = np.arange(count, dtype=np.int32)
    made = rounds = 0
    while len(asking):
        made += len(asking)
        rounds += 1
        if made > PROBES_MAX * count or rounds > 1000 + PROBES_MAX * count // 256:
            return max(made, PROBES_MAX * count + 1)
        at = place[asking]
        held = owner[at]
        # If several keys probe one place, NumPy stores the key that is written last: the earliest
        # key, because of [::-1].
        owner[at[::-1]] = np.minimum(asking, held)[::-1]
        has = owner[at] == asking
        ousted = held[has]
        asking = np.concatenate((asking[~has], ousted[ousted < count]))
        asking.sort(kind="stable")
        left = rest[asking] >> np.uint64(5)
        rest[asking] = left
        place[asking] = (5 * place[asking] + left.view(np.int64) + 1) & mask
    return made
