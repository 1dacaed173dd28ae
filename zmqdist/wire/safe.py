"""The codec of RPC, which converts values to bytes and back, for peers that may not send code.

Rules
    The set of types is closed: None, bool, int of any size, float, complex, str, bytes, list,
    tuple, namedtuple, dict, NumPy's scalars and arrays, TensorSpec, tensors of torch and arrays of
    jax. A value arrives with its exact type, with four exceptions: bytearray and memoryview become
    bytes, a namedtuple gets a generic class with the same name and fields (unless its class is
    registered in namedtuples.py), np.memmap becomes an array, and so does a tensor whose package
    the receiver has not imported, because a sender must not make it import any. Other subclasses
    are refused, because they would arrive as their base class.

    Decoding any bytes either returns a value or raises WireError, and the sender chooses no class.
    A decoded value takes at most about 80 times the memory of its body (as a list of empty dicts
    does), and the size of a body is bounded. Decoding takes time in proportion to the number of
    bytes, whatever the bytes are (see Dicts).

Form
    The body is MessagePack. None, bool, float, str, bytes and ints of 64 bits are encoded as
    themselves. A dict that has only str as keys is encoded as a map. Every other value is encoded
    as a MessagePack array that begins with a tag of `_READERS`. A second, careful attempt
    (`_Writer`), which encodes only large or difficult values, also uses tags for each str and dict.
    Large parts (arrays, and after the careful attempt also str and bytes) are in the frames, in the
    order of a walk through the value from left to right. In place of a part the body has None if
    the part is a frame, or the number of its bytes if it is in the joined frame, which is the last
    one. The joined frame has the parts of medium size of a large value, which would otherwise be
    copied ten times with the body, and all parts for which there are not enough frames.

Dicts: a peer knows Python's hashes of numbers and tuples, so it can choose keys that collide. For
example, all multiples of 2**61 - 1 have hash 0, and a dict with 60,000 of them as keys takes a
minute to build. The hashes of str and bytes are secret, so those keys need no check. Other keys are checked
before a dict is made of them:

    At most SAME_HASH_MAX keys of a dict may have the same hash. Keys that were not chosen for an
    attack rarely have equal hashes. A dict of more than FEW_KEYS keys may take PROBES_MAX probes
    for each key on average, where CPython usually needs about two. This bound is needed because a
    peer can also choose keys of different hashes that probe each other's places.

msgspec itself makes dicts with keys of any type. A dict of fewer than 128 items cannot take long.
If a body may contain a larger dict, this module decodes the body part by part, with types that
allow only str as keys, so that msgspec refuses other keys before it makes a dict.

Not here: functions and objects (trusted.py), the bound on a frame (transport).
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from zmqdist import tensors
from zmqdist.errors import InvalidArgumentError, WireError
from zmqdist.limits import (
    DEPTH_MAX,
    FRAMES_MAX,
    HEADER_BYTES_MAX,
    INLINE_BYTES_MAX,
    NAMEDTUPLE_KINDS_MAX,
    SAFE_BODY_BYTES_MAX,
)
from zmqdist.specs import TensorSpec, how_to_make_plain
from zmqdist.wire.arrays import (
    BadArray,
    bytes_of,
    dtype_from_json,
    dtype_to_json,
    frozen,
    is_fortran,
    is_frozen,
    rebuild,
)
from zmqdist.wire.namedtuples import generic_namedtuple, is_valid_kind

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
    position = hashes & mask
    owner = np.full(2**bits, count, np.int32)
    asking = np.arange(count, dtype=np.int32)
    probes = rounds = 0
    while len(asking):
        probes += len(asking)
        rounds += 1
        if probes > PROBES_MAX * count or rounds > 1000 + PROBES_MAX * count // 256:
            return max(probes, PROBES_MAX * count + 1)
        at = position[asking]
        holder = owner[at]
        # If several keys probe one place, NumPy stores the key that is written last: the earliest
        # key, because of [::-1].
        owner[at[::-1]] = np.minimum(asking, holder)[::-1]
        has = owner[at] == asking
        ousted = holder[has]
        asking = np.concatenate((asking[~has], ousted[ousted < count]))
        asking.sort(kind="stable")
        left = rest[asking] >> np.uint64(5)
        rest[asking] = left
        position[asking] = (5 * position[asking] + left.view(np.int64) + 1) & mask
    return probes


ALLOWED = "None, bool, int, float, complex, str, bytes, list, tuple, namedtuple, dict, numpy scalars and arrays, tensors, TensorSpec"

_TUPLE, _LIST, _DICT, _NAMED, _ARRAY, _SCALAR, _COMPLEX, _BIG_INT, _TEXT, _BYTES, _SPEC, _FROZEN = (
    range(12)
)
_TENSOR: Final = 12

_PLAIN = frozenset({NoneType, bool, int, float, str, bytes})
_ALWAYS_PLAIN = frozenset({NoneType, bool, float})
_STR = frozenset({str})

_CAREFUL_BYTES = 2**20
"""Bytes. If a body is larger than this, the value is encoded again with long str and bytes in
frames, because frames are not copied on the way.
"""

_JOINED_BYTES_MIN = 32
"""Bytes. A smaller part of a large value is in the body, because a place in the joined frame saves
nothing."""

_MEDIUM_FRAMES_MAX = 4
"""Number of frames after which only arrays above INLINE_BYTES_MAX get one, because many small
frames take longer than their copies in the body."""

_pack = msgspec.msgpack.Encoder().encode


# -- encoding --------------------------------------------------------------------------------------


class _Refused(Exception):
    """The error for a value that cannot travel. Its text continues a sentence that begins with the
    place of the value."""


class _TooDeep(_Refused):
    """The error for a value that is nested too deeply. The codec does not search for the place of
    this value."""


class _TooManyBytes(Exception):
    """The error that ends the first attempt early, when the arrays in the body have more than
    _CAREFUL_BYTES."""


class _Writer:
    """The state while one value is encoded.

    Attributes:
      frames: the large parts that were found so far, each of which is a frame.
      joined: the parts that were found so far for the joined frame.
      inline_bytes: bytes of the arrays in the body.
      careful: whether this is the second attempt, which checks each int, str and bytes. Only large
        or difficult values need it.
      inline_max: bytes of the largest array in the body.
      plain: types that MessagePack encodes without help.
    """

    __slots__ = ("careful", "frames", "inline_bytes", "inline_max", "joined", "plain")

    def __init__(self, careful: bool, inline_max: int = INLINE_BYTES_MAX) -> None:
        self.inline_max = inline_max
        self.frames: list[Any] = []
        self.joined: list[Any] = []
        self.inline_bytes = 0
        self.careful = careful
        self.plain = _ALWAYS_PLAIN if careful else _PLAIN

    def is_inline(self, nbytes: int) -> bool:
        """Return whether a part with so many bytes belongs into the body."""
        return nbytes <= (_JOINED_BYTES_MIN if self.careful else self.inline_max)

    def large(self, data: Any, nbytes: int) -> int | None:
        """Take a part that does not belong into the body. Return what the body has in place of
        it.
        """
        if nbytes > self.inline_max and len(self.frames) < FRAMES_MAX - 2:
            self.frames.append(data)
            if len(self.frames) == _MEDIUM_FRAMES_MAX:
                self.inline_max = INLINE_BYTES_MAX
            return None
        self.joined.append(data)
        return nbytes


def encode(value: Any, inline_max: int = INLINE_BYTES_MAX) -> tuple[bytes, list[Any]]:
    """Return the body and the frames that encode a value.

    The frames of contiguous arrays show the arrays' own memory, so send or copy the frames before
    the arrays can change. The body is a copy.

    Args:
      inline_max: bytes of the largest array in the body. After _MEDIUM_FRAMES_MAX frames, arrays of
        up to INLINE_BYTES_MAX are in the body, too.

    Raises:
      InvalidArgumentError: part of the value has a type that cannot travel (the text names its
        place), or is nested too deeply; or the value is too large without its arrays, or has too
        many large parts.
    """
    cls = type(value)
    try:  # the fast path, for most replies and the arguments of most calls
        if cls in _PLAIN:
            body = _pack(value)
        elif cls is tuple and _PLAIN.issuperset(map(type, value)):
            body = _pack((_TUPLE, *value))
        elif cls is tuple and len(value) == 1 and type(value[0]) is np.ndarray:
            out = _Writer(False, inline_max)
            return _pack((_TUPLE, _write_array(value[0], out, 1))), out.frames
        else:
            body = None
    except (OverflowError, ValueError):
        # the encoder of msgspec refuses ints of more than 64 bits, halves of surrogate pairs, and
        # bytes of 4 GiB
        body = None
    if body is None or len(body) > _CAREFUL_BYTES:
        return _encode(value, inline_max)
    return body, []


def _encode(value: Any, inline_max: int) -> tuple[bytes, list[Any]]:
    out = _Writer(False, inline_max)
    try:
        try:
            body = _pack(_node(value, out, 0))
        except (OverflowError, ValueError, _TooManyBytes):
            body = None
        if body is None or len(body) > _CAREFUL_BYTES:
            out = _Writer(True, inline_max)
            body = _pack(_node(value, out, 0))
    except _Refused as refused:
        _explain(value, refused)
    if len(body) > SAFE_BODY_BYTES_MAX:
        _invalid(
            f"a value of {len(body)} bytes without its large arrays; at most "
            f"{SAFE_BODY_BYTES_MAX} travel in one call: "
            "send long lists of numbers as arrays, or in several calls"
        )
    if out.joined:
        out.frames.append(b"".join(out.joined))
    return body, out.frames


def _node(value: Any, out: _Writer, depth: int) -> Any:
    """Return the object that msgspec encodes in place of a value."""
    cls = type(value)
    if cls in out.plain:
        return value
    write = _WRITERS.get(cls) or _writer_of(value)
    return write(value, out, depth)


def _writer_of(value: Any) -> Callable[[Any, _Writer, int], Any]:
    if isinstance(value, np.generic) and value.dtype.type is type(value):
        return _write_scalar
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _write_named
    try:
        tensor = tensors.described(value)
    except ValueError as error:
        raise _Refused(f"is {error}") from None
    if tensor is not None:
        package, dtype, array = tensor
        return lambda _, out, depth: (
            _TENSOR,
            package,
            dtype,
            _write_array(array, out, _deeper(depth)),
        )
    raise _Refused(
        f"is a {type(value).__module__}.{type(value).__qualname__}: only {ALLOWED} travel by "
        f"RPC{how_to_convert(value)}"
    )


_CONVERSIONS: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((dict,), "dict(x)"),
    ((enum.Enum,), "x.name or x.value"),
    ((set, frozenset, deque, range), "list(x)"),
    ((datetime.date, datetime.time), "x.isoformat(), or np.datetime64(x)"),
    ((datetime.timedelta,), "np.timedelta64(x)"),
    ((list, tuple), "list(x)"),
    ((decimal.Decimal, uuid.UUID, os.PathLike, str), "str(x)"),
)
"""What a user can write in place of a value `x` of a type that is refused."""


def how_to_convert(value: Any) -> str:
    """Return what a user can write in place of a value that is refused, as the end of a sentence."""
    if isinstance(value, np.ndarray):
        return f"; {how_to_make_plain(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "; pass dataclasses.asdict(x), of which Class(**fields) makes it again"
    return next((f"; pass {how}" for types, how in _CONVERSIONS if isinstance(value, types)), "")


def _deeper(depth: int) -> int:
    if depth >= DEPTH_MAX:
        raise _TooDeep(f"is nested deeper than {DEPTH_MAX} levels, or contains itself")
    return depth + 1


def _write_tuple(value: tuple[Any, ...], out: _Writer, depth: int) -> Any:
    depth = _deeper(depth)
    if out.plain.issuperset(map(type, value)):
        return (_TUPLE, *value)
    return (_TUPLE, *[_node(item, out, depth) for item in value])


def _write_list(value: list[Any], out: _Writer, depth: int) -> Any:
    depth = _deeper(depth)
    if out.plain.issuperset(map(type, value)):
        return (_LIST, *value)
    return (_LIST, *[_node(item, out, depth) for item in value])


def _write_dict(value: dict[Any, Any], out: _Writer, depth: int) -> Any:
    depth = _deeper(depth)
    if not out.careful and _STR.issuperset(map(type, value)):
        if out.plain.issuperset(map(type, value.values())):
            return value
        return {key: _node(item, out, depth) for key, item in value.items()}
    items: list[Any] = [_DICT]
    for key, item in value.items():
        if not _is_key(key):
            raise _Refused(
                f"has a key of type {type(key).__qualname__}: keys are scalars, str, bytes and "
                f"tuples of these"
            )
        items.append(_node(key, out, depth))
        items.append(_node(item, out, depth))
    return items


def _is_key(key: Any) -> bool:
    cls = type(key)
    if cls in _PLAIN or cls is complex:
        return True
    if cls is tuple:
        return all(map(_is_key, key))
    return isinstance(key, np.generic) and not isinstance(key, np.void)


def _write_named(value: Any, out: _Writer, depth: int) -> Any:
    depth = _deeper(depth)
    name, fields = type(value).__name__, value._fields
    if not is_valid_kind(name, fields) or len(fields) != len(value):
        raise _Refused(f"is a {type(value).__qualname__}, which has no proper names for its fields")
    return (_NAMED, name, fields, *[_node(item, out, depth) for item in value])


def _described(dtype: np.dtype[Any], kind: str) -> Any:
    try:
        return dtype_to_json(dtype)
    except BadArray as error:
        raise _Refused(f"is {kind} that zmqdist does not send: {error}") from None


def _write_array(value: Any, out: _Writer, depth: int) -> Any:
    described = _described(value.dtype, "an array")
    fortran = is_fortran(value)
    node: Any
    nbytes = value.nbytes
    if out.is_inline(nbytes):
        out.inline_bytes += nbytes
        if out.inline_bytes > _CAREFUL_BYTES and not out.careful:
            raise _TooManyBytes
        node = (_ARRAY, described, value.shape, fortran, value.tobytes("F" if fortran else "C"))
    else:
        node = (_ARRAY, described, value.shape, fortran, out.large(bytes_of(value), nbytes))
    return (_FROZEN, node) if is_frozen(value) else node


def _write_scalar(value: Any, out: _Writer, depth: int) -> Any:
    # np.asarray and str(value) would drop the zeros at the end of a string.
    if isinstance(value, np.str_):
        return (_SCALAR, "U", str.encode(value, "utf-8", "surrogatepass"))
    if isinstance(value, np.bytes_):
        return (_SCALAR, "S", bytes(value))
    _, described, _, _, data = _write_array(np.asarray(value), _Writer(careful=False), depth)
    if type(data) is not bytes:
        raise _Refused(f"is a scalar of {value.nbytes} bytes: make it an array")
    return (_SCALAR, described, data)


def _write_int(value: int, out: _Writer, depth: int) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return (_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_str(value: str, out: _Writer, depth: int) -> Any:
    # a str may hold halves of surrogate pairs, as some file names do
    data = value.encode("utf-8", "surrogatepass")
    return (_TEXT, data if out.is_inline(len(data)) else out.large(data, len(data)))


def _write_bytes(value: Any, out: _Writer, depth: int) -> Any:
    data = value if type(value) is bytes else bytes(value)
    if out.careful and not out.is_inline(len(data)):
        return (_BYTES, out.large(data, len(data)))
    return data


_WRITERS: dict[type, Callable[[Any, _Writer, int], Any]] = {
    tuple: _write_tuple,
    list: _write_list,
    dict: _write_dict,
    np.ndarray: _write_array,
    np.memmap: _write_array,
    complex: lambda value, out, depth: (_COMPLEX, value.real, value.imag),
    int: _write_int,
    str: _write_str,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    memoryview: _write_bytes,
    TensorSpec: lambda spec, out, depth: (
        _SPEC,
        spec.shape,
        _described(spec.dtype, "a TensorSpec"),
        spec.name,
    ),
}


def _explain(value: Any, refused: _Refused) -> NoReturn:
    """Raise the error for a refused value, with the place of the refused part. To find the place,
    encode the parts one by one."""
    path, text = "value", str(refused)
    searching = not isinstance(refused, _TooDeep)
    while searching:
        searching = False
        for where, part in _parts(value):
            try:
                _node(part, _Writer(careful=True), 0)
            except _Refused as deeper:
                # only the text is kept, because the exception would hold stack frames in a
                # reference cycle
                path, value, text, searching = path + where, part, str(deeper), True
                break
    _invalid(f"{path} {text}")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((f"[{key!r}]", item) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ((f".{field}", item) for field, item in zip(value._fields, value, strict=False))
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    return iter(())


def _invalid(message: str) -> NoReturn:
    raise InvalidArgumentError(message)


# -- decoding --------------------------------------------------------------------------------------


class _Reader:
    """The state while one value is decoded: the unused frames, and the kinds of namedtuple that
    were met so far."""

    __slots__ = ("_frames", "_joined", "_kinds", "_last", "frames_left")

    def __init__(self, frames: Sequence[Any]) -> None:
        self._frames = iter(frames)
        self._last = frames[-1] if frames else b""
        self._joined: memoryview | None = None
        self.frames_left = len(frames)
        self._kinds: dict[tuple[str, tuple[str, ...]], type] = {}

    def frame(self) -> Any:
        """Return the next frame. Each frame is used once, so that no two arrays share memory."""
        if self.frames_left == 0:
            raise ValueError("a frame is missing")
        self.frames_left -= 1
        return next(self._frames)

    def from_joined(self, nbytes: int) -> memoryview:
        """Return the next bytes of the joined frame."""
        if self._joined is None:
            if self.frames_left == 0:
                raise ValueError("the joined frame is missing")
            self.frames_left -= 1
            self._joined = memoryview(self._last).cast("B")
        part, self._joined = self._joined[:nbytes], self._joined[nbytes:]
        if not 0 <= nbytes == part.nbytes:
            raise ValueError("a part that is not in the joined frame")
        return part

    def check_end(self) -> None:
        """Raise ValueError if a frame, or a part of one, was not used."""
        if self.frames_left:
            raise ValueError(f"{self.frames_left} frames are not used")
        if self._joined:
            raise ValueError(f"{self._joined.nbytes} bytes of the joined frame are not used")

    def kind(self, name: Any, fields: Any) -> Any:
        """Return the namedtuple class with a name and fields. The number of such classes in a value
        is bounded, because making a class takes a third of a millisecond.
        """
        if type(fields) is not list or not _STR.issuperset(map(type, [name, *fields])):
            raise ValueError("a namedtuple whose name or fields are no texts")
        key = (name, tuple(fields))
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= NAMEDTUPLE_KINDS_MAX or not is_valid_kind(*key):
                raise ValueError(
                    f"more than {NAMEDTUPLE_KINDS_MAX} kinds of namedtuple, or improper names of "
                    f"a namedtuple or its fields"
                )
            kind = self._kinds[key] = generic_namedtuple(*key)
        return kind


def decode(body: bytes | memoryview, frames: Sequence[Any], peer: str) -> Any:
    """Return the value that a body and its frames encode.

    Arrays belong to the caller and are writable. A writable frame becomes the memory of its array
    without a copy, so pass only frames that no other code uses. A read-only frame is copied, unless
    it is a NumPy array. A read-only NumPy array is frozen memory, and the decoded array over it is
    read-only.

    Args:
      frames: objects with the buffer protocol, as many as `encode` returned.
      peer: name of the sender, for errors.

    Raises:
      WireError: the bytes do not encode a value.
    """
    if len(body) > HEADER_BYTES_MAX:
        raise WireError(
            peer, f"a value of {len(body)} bytes, at most {HEADER_BYTES_MAX} are allowed"
        )
    try:
        node = unpack(body)
        if not frames:  # the fast path, for most replies and the arguments of most calls
            cls = type(node)
            if cls in _PLAIN:
                return node
            if (
                cls is list
                and node
                and type(node[0]) is int
                and node[0] == _TUPLE
                and _PLAIN.issuperset(map(type, node))
            ):
                return tuple(node[1:])
        reader = _Reader(frames)
        value = _value(node, reader, 0)
        reader.check_end()
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(peer, f"not a value of the safe codec: {error}") from None
    return value


def single_array_layout(
    body: bytes | memoryview, peer: str
) -> tuple[np.dtype[Any], tuple[int, ...], bool] | None:
    """Return (dtype, shape, whether in Fortran order) if a body encodes a single array whose bytes
    are in a frame; None for any other value.

    Raises:
      WireError: the body is not MessagePack, or encodes an array of an unknown dtype. The rest of
        the body is not checked.
    """
    try:
        node = unpack(body)
        if type(node) is list and len(node) == 2 and node[0] == _FROZEN:
            node = node[1]
        match node:
            case [int(tag), described, [*shape], bool(fortran), None] if tag == _ARRAY:
                return dtype_from_json(described), tuple(shape), fortran
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(peer, f"not a value of the safe codec: {error}") from None
    return None


def _value(node: Any, reader: _Reader, depth: int) -> Any:
    cls = type(node)
    if cls in _PLAIN:
        return node
    if cls is list and node:
        read = _READERS.get(node[0]) if type(node[0]) is int else None
        if read is not None:
            return read(node, reader, depth)
    elif cls is dict:
        return _read_map(node, reader, depth)
    raise ValueError("an unknown tag")


def _step(depth: int) -> int:
    if depth >= DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
    return depth + 1


def _read_map(node: dict[Any, Any], reader: _Reader, depth: int) -> Any:
    depth = _step(depth)
    if not _STR.issuperset(map(type, node)):
        raise ValueError("a map with keys that are not str")
    if not _PLAIN.issuperset(map(type, node.values())):
        for key, item in node.items():
            node[key] = _value(item, reader, depth)
    return node


def _read_list(node: list[Any], reader: _Reader, depth: int) -> Any:
    depth = _step(depth)
    if _PLAIN.issuperset(map(type, node)):
        del node[0]
        return node
    return [_value(item, reader, depth) for item in node[1:]]


def _read_tuple(node: list[Any], reader: _Reader, depth: int) -> Any:
    if len(node) == 2:  # the arguments of most calls with an array
        return (_value(node[1], reader, _step(depth)),)
    return tuple(_read_list(node, reader, depth))


def _read_dict(node: list[Any], reader: _Reader, depth: int) -> Any:
    items = _read_list(node, reader, depth)
    keys = items[::2]
    kinds = set(map(type, keys))
    if not (kinds <= _PLAIN or all(map(_is_key, keys))):
        raise ValueError("a dict has a key of a type that is not allowed for keys")
    return dict_of(keys, items[1::2], kinds)


def _read_named(node: list[Any], reader: _Reader, depth: int) -> Any:
    depth = _step(depth)
    _, name, fields, *items = _at_least(node, 3)
    kind = reader.kind(name, fields)
    if len(items) != len(fields):
        raise ValueError("a namedtuple with another number of items than fields")
    return kind._make([_value(item, reader, depth) for item in items])


def _read_array(node: list[Any], reader: _Reader, depth: int) -> Any:
    _, described, shape, fortran, data = _exactly(node, 5)
    if type(fortran) is not bool:
        raise ValueError("an array without an order")
    if data is None:
        data = reader.frame()
        if type(data) is not np.ndarray and memoryview(data).readonly:
            data = bytearray(data)
    else:
        data = bytearray(reader.from_joined(data) if type(data) is int else _bytes_in(data))
    return rebuild(dtype_from_json(described), shape, fortran, data)


def _read_frozen(node: list[Any], reader: _Reader, depth: int) -> Any:
    array = _value(_exactly(node, 2)[1], reader, _step(depth))
    if type(array) is not np.ndarray:
        raise ValueError("a frozen value that is not an array")
    return frozen(array)


def _read_scalar(node: list[Any], reader: _Reader, depth: int) -> Any:
    _, described, data = _exactly(node, 3)
    data = _bytes_in(data)
    if described == "U":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if described == "S":
        return np.bytes_(data)
    return rebuild(dtype_from_json(described), [], False, bytearray(data))[()]


def _read_complex(node: list[Any], reader: _Reader, depth: int) -> Any:
    _, real, imag = _exactly(node, 3)
    if type(real) is not float or type(imag) is not float:
        raise ValueError("a complex number whose parts are not floats")
    return complex(real, imag)


def _read_text(node: list[Any], reader: _Reader, depth: int) -> Any:
    data = _exactly(node, 2)[1]
    return (_bytes_in(data) if type(data) is bytes else _framed(data, reader)).decode(
        "utf-8", "surrogatepass"
    )


def _framed(data: Any, reader: _Reader) -> bytes:
    if data is not None and type(data) is not int:
        raise ValueError("another value where the place of bytes in the frames belongs")
    return bytes(reader.frame() if data is None else reader.from_joined(data))


def _read_tensor(node: list[Any], reader: _Reader, depth: int) -> Any:
    _, package, dtype, array = _exactly(node, 4)
    if type(package) is not str or type(dtype) is not str:
        raise ValueError("a tensor without a package or dtype")
    array = _value(array, reader, _step(depth))
    if type(array) is not np.ndarray:
        raise ValueError("a tensor that is no array")
    return tensors.tensor_of(package, dtype, array)


def _read_spec(node: list[Any], reader: _Reader, depth: int) -> Any:
    _, shape, described, name = _exactly(node, 4)
    if not (shape is None or type(shape) is list) or not (name is None or type(name) is str):
        raise ValueError("a TensorSpec without a proper shape or name")
    return TensorSpec(shape, dtype_from_json(described), name)


_READERS: dict[int, Callable[[list[Any], _Reader, int], Any]] = {
    _TUPLE: _read_tuple,
    _LIST: _read_list,
    _DICT: _read_dict,
    _NAMED: _read_named,
    _ARRAY: _read_array,
    _SCALAR: _read_scalar,
    _COMPLEX: _read_complex,
    _BIG_INT: lambda node, reader, depth: int.from_bytes(
        _bytes_in(_exactly(node, 2)[1]), "little", signed=True
    ),
    _TEXT: _read_text,
    _BYTES: lambda node, reader, depth: _framed(_exactly(node, 2)[1], reader),
    _SPEC: _read_spec,
    _FROZEN: _read_frozen,
    _TENSOR: _read_tensor,
}


def _exactly(node: list[Any], count: int) -> list[Any]:
    if len(node) != count:
        raise ValueError(f"a part of {len(node)} items where {count} belong")
    return node


def _at_least(node: list[Any], count: int) -> list[Any]:
    if len(node) < count:
        raise ValueError(f"a part of {len(node)} items where at least {count} belong")
    return node


def _bytes_in(data: Any) -> bytes:
    if type(data) is not bytes:
        raise ValueError("another value where bytes belong")
    return data
