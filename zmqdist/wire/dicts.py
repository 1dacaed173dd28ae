"""Dicts out of untrusted bytes, in time that grows with the bytes and no faster.

A peer knows Python's hashes of numbers and tuples, and can choose keys that a dict looks for in one place after the other: with
multiples of 2**61 - 1, all of hash 0, a dict of 60,000 keys takes a minute. The hashes of str and bytes are secret, so those keys
need no care. Others are looked at here before there is a dict of them:

    No more than SAME_HASH_MAX keys of a dict have the same hash. Keys that nobody chose for it have different ones.
    A dict of more than FEW_KEYS keys may take PROBES_MAX probes for each of them, where CPython needs about two. Keys of different
    hashes can be chosen, too, so that each is looked for in the places of many others.

msgspec makes dicts itself, with keys of any type. One with fewer than 128 items cannot take long; a body in which there may be a larger one
is read part by part, by types that tell msgspec that keys are str: then it refuses others before there is a dict of them.

Not here: which types keys may have (safe.py).
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
"""Keys of one dict that may have the same hash."""
FEW_KEYS: Final = 8192
"""A dict of fewer keys cannot take long once few of them have the same hash: a quarter of a microsecond for each byte at most."""
PROBES_MAX: Final = 64
"""Places of a dict that are looked at for each of its keys, on average."""

_SMALL_BYTES: Final = 1024
"""A map in fewer bytes has not enough keys to take long, whatever they are."""
_PARTS: Final = re.compile(
    rb"(?:[\x00-\x9f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1\xdc]..|[\xca\xce\xd2\xdd].{4}|[\xcb\xcf\xd3].{8}|"
    + b"|".join(b"%b.{%d}" % (re.escape(bytes([0xA0 + length])), length) for length in range(32))
    + rb"|\xde\x00[\x00-\x7f]|\xdf\x00\x00\x00[\x00-\x7f]){0,40}",
    re.DOTALL,
)
"""A few things of a known length: beginnings of arrays and small maps, numbers, short strs."""
_LONG: Final = {b"\xc4": 1, b"\xc5": 2, b"\xc6": 4, b"\xd9": 1, b"\xda": 2, b"\xdb": 4}
"""What begins bytes or a str: so many bytes of its length follow."""
_JUMPS_MAX: Final = 32
_RANDOM: Final = frozenset({str, bytes})
_INT: Final = frozenset({int})

_unpack_any = msgspec.msgpack.Decoder().decode
_unpack_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_unpack_items = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def unpack(body: bytes | memoryview) -> Any:
    """What MessagePack has in a body: arrays as lists, maps as dicts.

    Raises:
      msgspec.DecodeError: not MessagePack; or there is a large map with other keys than str (one in a smaller map is not looked for).
      ValueError, RecursionError: nested too deeply.
    """
    if len(body) <= _SMALL_BYTES:
        return _unpack_any(body)
    return _unpack(body if type(body) is bytes else bytes(body), 2 * len(body), 2 * DEPTH_MAX)


def _unpack(body: bytes, typed_below: int, depth_left: int) -> Any:
    """The same for a part. `typed_below`: it may be read with types where it is not longer; a longer one, around it, was tried in vain."""
    if depth_left == 0:
        raise ValueError(f"a large part is nested deeper than {2 * DEPTH_MAX}")
    if not (b"\xde" in body or b"\xdf" in body) or _ends_without_large_map(body) or not _may_have_large_map(body):
        return _unpack_any(body)
    first = body[0]
    # Many parts: read them all at once, if there are no bytes among them.
    if first >= 0xDC and 2 * len(body) <= typed_below:
        try:
            return _typed().decode(body)
        except msgspec.ValidationError:
            typed_below = len(body)
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF)
    parts: Any = _unpack_items(body) if is_map else _unpack_parts(body)
    if max(map(len, parts.values() if is_map else parts), default=0) <= _SMALL_BYTES:
        return _unpack_any(body)  # none of the parts has a large map in it, and its own keys have just been read
    if is_map:
        return {key: _unpack_part(bytes(part), typed_below, depth_left - 1) for key, part in parts.items()}
    return [_unpack_part(bytes(part), typed_below, depth_left - 1) for part in parts]


def _unpack_part(part: bytes, typed_below: int, depth_left: int) -> Any:
    return _unpack_any(part) if len(part) <= _SMALL_BYTES else _unpack(part, typed_below, depth_left)


def _may_have_large_map(body: bytes) -> bool:
    """Whether anything in it looks like the beginning of a map of 128 items or more, be it the midst of a number or of bytes."""
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
    """Whether a walk over what is in it, one after the other whatever lies in what, comes to its end soon and meets no large map."""
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
    """Reads what has no bytes in it, and maps with keys of str only. (msgspec has no type for what may be str or bytes.)

    msgspec's types know no recursion but by classes, so they are written out, as deep as most values are.
    """
    plain: Any = None | bool | int | float | str
    kind = plain
    for _ in range(6):
        kind = plain | list[kind] | dict[str, kind]  # type: ignore[valid-type]
    return msgspec.msgpack.Decoder(kind)


def dict_of(keys: list[Any], values: list[Any], kinds: set[type]) -> dict[Any, Any]:
    """A dict of hashable keys that a peer has chosen, which have these types.

    Raises:
      ValueError: it would take long to make and to use, or the numbers of keys and values differ.
    """
    if len(keys) > SAME_HASH_MAX and not kinds <= _RANDOM:
        _check(keys, kinds)
    return dict(zip(keys, values, strict=True))


def _check(keys: list[Any], kinds: set[type]) -> None:
    count = len(keys)
    few_alike = kinds == _INT and min(keys) >= -(2**63) and max(keys) < 2**64  # a dozen of them share a hash
    if few_alike and count <= FEW_KEYS:
        return
    hashes = np.fromiter(map(hash, keys), np.int64, count)
    if not few_alike:
        ordered = np.sort(hashes)
        if (ordered[SAME_HASH_MAX:] == ordered[:-SAME_HASH_MAX]).any():
            raise ValueError(f"a dict with more than {SAME_HASH_MAX} keys of the same hash")
    bits = FEW_KEYS.bit_length()
    while count > FEW_KEYS:
        # A dict of this size takes two keys for three places; with one more it is made again, twice as large.
        fitting = 2 ** (bits + 1) // 3
        if probe_count(hashes[:fitting], bits) > PROBES_MAX * min(count, fitting):
            raise ValueError(f"a dict whose {count} keys are looked for in the same places")
        if fitting >= count:
            return
        bits += 1


def probe_count(hashes: NDArray[np.int64], bits: int) -> int:
    """Places that CPython looks at while it puts keys of these different hashes, in this order, into a dict of 2**bits places.

    That is counted without a step of Python for each: all keys look at once, a place belongs to the earliest key that has looked
    at it, and a key that has not got its place, or loses it, looks at its next. As in the college admissions of Gale and Shapley it ends
    the same whatever the order of looking, here as if one key came after the other, and so with as many looks. Counting ends, with a figure
    above PROBES_MAX for each key, when there are more, or when it takes as long as if there were.
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
        # Of several that come to one place NumPy keeps what is written last: the earliest key.
        owner[at[::-1]] = np.minimum(asking, held)[::-1]
        has = owner[at] == asking
        ousted = held[has]
        asking = np.concatenate((asking[~has], ousted[ousted < count]))
        asking.sort(kind="stable")
        left = rest[asking] >> np.uint64(5)
        rest[asking] = left
        place[asking] = (5 * place[asking] + left.view(np.int64) + 1) & mask
    return made
