"""Arguments and results are sent as they were at the call: large parts are copied if their owner could change them before they
leave.

Rules
    Where possible the one copy that a large part needs anyway is the snapshot: into shared memory, if the peer can open ours. A
    frozen array needs none.
    For other peers a copy is made only if the owner could write to the part meanwhile. It too uses the pool of shared memory,
    whose pages are already mapped.
    The caller of a blocking call cannot write meanwhile. A result with no other reference cannot be written to at all.

Not here: small parts, which are copied when their message is sent.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import GeneratorType, NoneType
from typing import Any, Final

import numpy as np

from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import CHUNK_BYTES
from zmqdist.rpc import payload
from zmqdist.transport.receive_buffers import ReceivedMemory, memory_for
from zmqdist.transport.shm_pool import this_pool
from zmqdist.transport.transfers import Source, is_large

_GENERATOR: Final = (
    "the method returned a generator, which does not travel: register the generator function itself (with def and yield), whose calls are "
    "streams, and not a function or lambda that calls it"
)


def snapshot(parts: Sequence[Any], *, lends: bool, still: bool) -> Sequence[Source]:
    """Return sources for transport/transfers.py that will not change. Small parts are returned as they are.

    Args:
      parts: from `payload.pack`.
      lends: whether the peer can open our shared memory.
      still: whether the caller promises not to write to the parts until they have been sent.
    """
    if not is_large(parts):
        return parts
    return [_one(part, lends, still or type(part) is bytes) for part in parts]


def _one(part: Any, lends: bool, still: bool) -> Source:
    pool = this_pool()
    if pool is None:
        return part if still else _copied(part)
    frozen = pool.find_frozen(part)
    if frozen is not None:
        return frozen
    if still and not lends:
        return part  # type: ignore[no-any-return]
    block = pool.copy_in(part)
    if block is not None:
        return block
    return part if still else _copied(part)


def _copied(part: Any) -> Source:
    source = np.frombuffer(part, np.uint8)
    copy = memory_for(source.nbytes)
    np.copyto(copy, source)
    return copy


def pack_result(box: list[Any], *, lends: bool) -> tuple[bytes, Sequence[Source]]:
    """Return the value in `box` as body and sources. The handler may keep and change the value afterwards.

    Args:
      box: a list of one item with no other reference to it, so that a temporary value can be recognised (`is_temporary`).

    Raises:
      InvalidArgumentError: as `payload.pack`.
    """
    still = is_temporary(box)
    try:
        body, parts = payload.pack(box[0])
    except InvalidArgumentError:
        if type(box[0]) is GeneratorType:
            raise InvalidArgumentError(_GENERATOR) from None
        raise
    if not parts:
        return body, parts
    if not is_large(parts):
        return body, [bytes(part) for part in parts]
    return body, snapshot(parts, lends=lends, still=still)


# -- temporaries ------------------------------------------------------------------------------------------------------

_ITEMS_MAX: Final = 64
"""Items of the largest container that is searched; the arrays of a larger one are always copied."""
_ATOMS: Final = (NoneType, bool, int, float, complex, str, bytes, np.generic)


def is_temporary(box: list[Any]) -> bool:
    """Return whether the value in a box has large arrays and no other reference exists, so that no code can write to them any more.

    Reference counts decide, for an array or for one list, tuple or dict of arrays: one for the holder and one for the argument of
    `getrefcount`. Each object is therefore reached through its holder, since a variable would count as another reference. An
    array over the memory of another (as received ones are) counts as temporary if that other has no further reference either.
    False is always safe: it means a copy. A raw pointer kept by C code cannot be detected.
    """
    kind = type(box[0])
    if kind is np.ndarray:
        return box[0].nbytes > CHUNK_BYTES and _is_ours(box, 0)
    if kind not in (list, tuple, dict) or len(box[0]) > _ITEMS_MAX:
        return False
    keys: list[Any] = list(box[0]) if kind is dict else list(range(len(box[0])))
    if not any(type(box[0][key]) is np.ndarray and box[0][key].nbytes > CHUNK_BYTES for key in keys):
        return False
    if sys.getrefcount(box[0]) != _ONE:
        return False
    return all(
        isinstance(box[0][key], _ATOMS) or (type(box[0][key]) is np.ndarray and _is_ours(box[0], key)) for key in keys
    )


def _is_ours(holder: Any, key: Any) -> bool:
    # `holder` is a second reference to the container, but not to its items.
    if sys.getrefcount(holder[key]) != _ONE or weakref.getweakrefcount(holder[key]):
        return False
    if holder[key].base is None:
        return bool(holder[key].flags.owndata)
    # An array over the memory of another array, as received ones are.
    if type(holder[key].base) is not np.ndarray or sys.getrefcount(holder[key].base) != _ONE:
        return False
    if weakref.getweakrefcount(holder[key].base):
        return False
    if holder[key].base.base is None:
        return bool(holder[key].base.flags.owndata)
    return type(holder[key].base.base) is ReceivedMemory and sys.getrefcount(holder[key].base.base) == _ONE


_ONE = 2


def _works_here() -> bool:
    """Return whether reference counts on this interpreter tell temporaries from referenced values; interpreters count differently."""
    size = CHUNK_BYTES + 1
    referenced = np.empty(size, np.uint8)
    view = np.empty(size, np.uint8)
    slice_of_view = view[1:]
    held = [np.empty(size, np.uint8)]
    received = memory_for(2**20)
    temporary = [
        [np.empty(size, np.uint8)],
        [np.ndarray((size,), np.uint8, np.empty(size, np.uint8))],
        [np.ndarray((2**20,), np.uint8, memory_for(2**20))],
        [(np.empty(size, np.uint8), 1)],
        [{"a": np.empty(size, np.uint8)}],
    ]
    others: list[list[Any]] = [[referenced], [view], [held], [[referenced]], [{"a": referenced}]]
    others += [[np.ndarray((size,), np.uint8, referenced)], [np.ndarray((2**20,), np.uint8, received)], [received[1:]]]
    return all(map(is_temporary, temporary)) and not any(map(is_temporary, others)) and slice_of_view is not None


if not _works_here():
    _ONE = -1
"""The `sys.getrefcount` of an object with one holder; -1 if counts are not reliable here, so that everything is copied."""
