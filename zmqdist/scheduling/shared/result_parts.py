"""Results in parts: a function with `num_returns=n` returns n items, each packed on its own, so that
each consumer fetches only the part that it needs.

A small result is one MessagePack list: for each part the list of its buffers. A large result is a
list of buffers: a MessagePack list with the number of buffers of each part, then these buffers. The
reference to such a result has the head inside, because the head is small and comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

import msgspec

from zmqdist.errors import ResourceExhaustedError, WireError
from zmqdist.limits import FRAMES_MAX, INLINE_BYTES_MAX
from zmqdist.scheduling.shared.references import Held, decode_reference, encode_reference
from zmqdist.wire.trusted import Packed, type_name

T = TypeVar("T")

COUNT_BYTES: Final = 2
"""The bytes of the number of parts, after the mark PARTS of a payload."""

_HEAD: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])
_SMALL: msgspec.msgpack.Decoder[list[list[bytes]]] = msgspec.msgpack.Decoder(list[list[bytes]])


def pack_parts(pack: Callable[[Any], Packed], count: int, value: Any) -> Packed:
    """Pack the items of a result by `pack`, each on its own.

    Raises ValueError if the result is no tuple or list of `count` items, ResourceExhaustedError if
    the items contain too many arrays for one message, and the errors of `pack`.
    """
    if not isinstance(value, (tuple, list)) or len(value) != count:
        size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        raise ValueError(
            f"the function returned a {type_name(value)}{size}, but its option "
            f"num_returns={count} wants a tuple or list of {count}"
        )
    packed_items = [pack(item) for item in value]
    parts = [packed if isinstance(packed, list) else [packed] for packed in packed_items]
    buffers = [buffer for part in parts for buffer in part]
    if sum(memoryview(buffer).nbytes for buffer in buffers) <= INLINE_BYTES_MAX:
        return msgspec.msgpack.encode([list(map(bytes, part)) for part in parts])
    if len(buffers) >= FRAMES_MAX:
        raise ResourceExhaustedError(
            f"the {count} items that the function returned have {len(buffers)} buffers, but "
            f"one result has {FRAMES_MAX - 1} at most: return fewer arrays, or larger ones"
        )
    return [msgspec.msgpack.encode(list(map(len, parts))), *buffers]


def split_parts(packed: Any, count: int) -> list[Any]:
    """Return the packed items of a result. Raises WireError if the bytes are damaged, or if there
    are not `count` items."""
    if isinstance(packed, list):
        return [packed[start:end] for start, end in _ranges(bytes(packed[0]), count, len(packed))]
    parts = _decoded(_SMALL, packed, count)
    return [part[0] if len(part) == 1 else part for part in parts]


def part_reference(encoded: bytes, part: int, count: int) -> bytes:
    """Return the reference to one part of a kept result. Raises WireError as `split_parts`."""
    whole = decode_reference(encoded)
    head, *large = whole.parts
    if isinstance(head, Held):
        raise WireError(whole.address, "the head of a result in parts is not in its reference")
    if large:
        start, end = _ranges(head, count, len(whole.parts))[part]
        buffers = whole.parts[start:end]
    else:
        buffers = tuple(_decoded(_SMALL, head, count)[part])
    return encode_reference(msgspec.structs.replace(whole, parts=buffers))


def _ranges(head: bytes, count: int, end: int) -> list[tuple[int, int]]:
    """Return where the buffers of each part begin and end, of a result with `end` buffers."""
    sizes = _decoded(_HEAD, head, count)
    if sum(sizes) != end - 1:
        raise WireError("?", f"parts of {sum(sizes)} buffers in a result of {end - 1}")
    return list(pairwise(accumulate(sizes, initial=1)))


def _decoded(decoder: msgspec.msgpack.Decoder[list[T]], packed: bytes, count: int) -> list[T]:
    try:
        parts = decoder.decode(packed)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError("?", f"damaged parts of a result: {error}") from None
    if len(parts) != count or not all(parts):
        raise WireError("?", f"a result has {len(parts)} parts in place of {count}")
    return parts
