"""Values as the payload of a call or a reply. The safe codec encodes them; an object with
`__array__`, `__dlpack__` or a buffer travels as an array.

Snapshots: arguments and results are sent as they were at the time of the call. A large part that
its owner could still change is copied.
    If the peer can open this process's shared memory, a large part travels in shared memory. Unless
    the part is frozen, it is copied there, and this copy is the snapshot.
    For any other peer a part is copied only if its owner could write to it before it is sent. This
    copy, too, is made in the pool of shared memory, because the pool's pages are mapped already.
    The caller of a blocking call cannot write to its arguments while it waits. No code can write to
    a result to which no other reference exists.

Not here: the types that may travel (wire/safe.py), how large parts travel (transport/transfers.py),
small parts, which ZeroMQ copies when their message is sent.

An OutputArray is the array into which a caller wants the reply to be written (`out=`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import GeneratorType, NoneType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zmqdist import nest
from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import CALL_INLINE_BYTES_MAX, DEPTH_MAX, LENT_BYTES_MIN
from zmqdist.tensors import described
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.shm_pool import (
    ExclusiveMemory,
    ReceivedMemory,
    memory_for,
    this_pool,
    whole_memory,
)
from zmqdist.transport.transfers import Source, allocate_fresh, is_large
from zmqdist.wire import safe
from zmqdist.wire.arrays import is_fortran
from zmqdist.wire.safe import single_array_layout


def pack(value: Any) -> tuple[bytes, list[Any]]:
    """Return the body and the large parts of a value.

    The parts may be views of the arrays in `value`, so copy or send the parts before the arrays
    change.

    Raises:
      InvalidArgumentError: `value` contains an object that cannot travel; the message names the
        place and the allowed types.
    """
    try:
        return safe.encode(value, CALL_INLINE_BYTES_MAX)
    except InvalidArgumentError as error:
        try:
            arrays = nest.map_structure(_as_array, value)
            unchanged = all(
                new is old
                for new, old in zip(nest.flatten(arrays), nest.flatten(value), strict=True)
            )
        except (TypeError, ValueError, BufferError, RecursionError):
            # A dict has keys that cannot be sorted, the nesting is too deep, or `__array__` raises.
            # `error` names what cannot travel.
            raise error from None
        if unchanged:
            raise
        return safe.encode(arrays, CALL_INLINE_BYTES_MAX)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a structure, for a call that sends them as a flat list.

    Raises:
      InvalidArgumentError: the structure contains itself, or is nested too deeply.
    """
    try:
        return nest.flatten(value)
    except RecursionError:
        raise InvalidArgumentError(
            f"value is nested deeper than {DEPTH_MAX} levels, or contains itself"
        ) from None


def unpack(body: bytes, parts: Sequence[Any], peer: str) -> Any:
    """Return the value that a body and its large parts encode. Its arrays are either private and
    writable, or frozen.

    Raises:
      WireError: the bytes are not a value.
    """
    return safe.decode(body, parts, peer)


def _as_array(leaf: Any) -> Any:
    cls = type(leaf)
    if isinstance(leaf, (np.ndarray, np.generic, type)) or described(leaf) is not None:
        return leaf
    if hasattr(cls, "__array__") or hasattr(leaf, "__array_interface__"):
        return np.asarray(leaf)
    if hasattr(cls, "__dlpack__"):
        return np.from_dlpack(leaf)
    return np.asarray(memoryview(leaf)) if cls.__module__ in ("array", "mmap") else leaf


_GENERATOR: Final = (
    "the method returned a generator, which cannot be sent: register the generator function "
    "itself (with def and yield), whose calls are "
    "streams, and not a function or lambda that calls it"
)


def snapshot(
    parts: Sequence[Any], *, lends: bool, still: bool, call: object = None
) -> Sequence[Source]:
    """Return the large parts as sources (transport/transfers.py) whose content will not change. If
    their total size is small, return them as they are, because sending copies them.

    Args:
      parts: the large parts that `payload.pack` has returned.
      lends: whether the peer can open this process's shared memory, so that this process lends it
        the parts.
      still: whether the caller promises not to write to the parts until they have been sent.
      call: a call of the peer. A part that is memory which this call has lent goes back to the peer
        without a copy. No other code may refer to it.
    """
    if not is_large(parts, lends):
        return parts
    return [_source_of(part, lends, still or type(part) is bytes, call) for part in parts]


def _source_of(part: Any, lends: bool, still: bool, call: object) -> Source:
    memory = None if call is None else whole_memory(part)
    if memory is not None and memory.call == call:
        return memory
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


def pack_result(
    box: list[Any], *, lends: bool, at_once: bool = False, call: object = None
) -> tuple[bytes, Sequence[Source]]:
    """Return the value in `box`, packed as a body and sources. The handler may keep and change the
    value afterwards.

    Args:
      box: a list whose only item is the value. No other code refers to the list, so that
        `is_temporary` can recognise a temporary value.
      at_once: whether small parts are sent, and so copied, before the handler can run again.
      call: the call of the peer whose result the value is, if it may return the call's memory.

    Raises:
      InvalidArgumentError: the value contains an object that cannot travel.
    """
    # parts that are lent are copied in any case, unless they are memory of the call
    still = not (lends and call is None) and is_temporary(box)
    try:
        body, parts = pack(box[0])
    except InvalidArgumentError:
        if type(box[0]) is GeneratorType:
            raise InvalidArgumentError(_GENERATOR) from None
        raise
    if not parts:
        return body, parts
    sources = snapshot(parts, lends=lends, still=still, call=call if still else None)
    if sources is parts and not at_once:
        sources = [bytes(part) for part in parts]
    return body, sources


# -- temporaries -----------------------------------------------------------------------------------

_ITEMS_MAX: Final = 64
"""Number of items. A list, tuple or dict with more items is not searched for temporary arrays, so
its arrays are always copied."""
_ATOMS: Final = (NoneType, bool, int, float, complex, str, bytes, np.generic)


def is_temporary(box: list[Any]) -> bool:
    """Return whether the value in `box` has large arrays to which no other reference exists, so
    that no code can write to them any more.

    The value is one array, or one list, tuple or dict of arrays. Reference counts decide: an object
    to which only its holder (the box, or the list, tuple or dict in it) refers has a count of two,
    because the argument of `getrefcount` is a second reference. A variable would be a further
    reference, so this code reaches each object through its holder. An array over the memory of
    another array, such as a received array, is temporary if the other array has no further
    reference either. The result False is always safe, because it causes a copy. A raw pointer in C
    code cannot be detected.
    """
    kind = type(box[0])
    if kind is np.ndarray:
        return box[0].nbytes > LENT_BYTES_MIN and _is_ours(box, 0)
    if kind not in (list, tuple, dict) or len(box[0]) > _ITEMS_MAX:
        return False
    keys: list[Any] = list(box[0]) if kind is dict else list(range(len(box[0])))
    if not any(
        type(box[0][key]) is np.ndarray and box[0][key].nbytes > LENT_BYTES_MIN for key in keys
    ):
        return False
    if sys.getrefcount(box[0]) != _ONE:
        return False
    return all(
        isinstance(box[0][key], _ATOMS)
        or (type(box[0][key]) is np.ndarray and _is_ours(box[0], key))
        for key in keys
    )


def _is_ours(holder: Any, key: Any) -> bool:
    # The parameter `holder` adds a reference to the list, tuple or dict, whose count was checked
    # before, and none to the items.
    if sys.getrefcount(holder[key]) != _ONE or weakref.getweakrefcount(holder[key]):
        return False
    if holder[key].base is None:
        return bool(holder[key].flags.owndata)
    # The array shows the memory of another array, as received arrays do.
    if type(holder[key].base) is not np.ndarray or sys.getrefcount(holder[key].base) != _ONE:
        return False
    if weakref.getweakrefcount(holder[key].base):
        return False
    if holder[key].base.base is None:
        return bool(holder[key].base.flags.owndata)
    return (
        type(holder[key].base.base) in (ReceivedMemory, ExclusiveMemory)
        and sys.getrefcount(holder[key].base.base) == _ONE
    )


_ONE = 2


def _works_here() -> bool:
    """Return whether reference counts distinguish temporary from referenced values on this
    interpreter. Other interpreters may count in other ways.
    """
    size = LENT_BYTES_MIN + 1
    referenced = np.empty(size, np.uint8)
    view = np.empty(size, np.uint8)
    slice_of_view = view[1:]
    box = [np.empty(size, np.uint8)]
    received = memory_for(2**20)
    temporary = [
        [np.empty(size, np.uint8)],
        [np.ndarray((size,), np.uint8, np.empty(size, np.uint8))],
        [np.ndarray((2**20,), np.uint8, memory_for(2**20))],
        [(np.empty(size, np.uint8), 1)],
        [{"a": np.empty(size, np.uint8)}],
    ]
    referenced_boxes: list[list[Any]] = [
        [referenced],
        [view],
        [box],
        [[referenced]],
        [{"a": referenced}],
    ]
    referenced_boxes += [
        [np.ndarray((size,), np.uint8, referenced)],
        [np.ndarray((2**20,), np.uint8, received)],
        [received[1:]],
    ]
    return (
        all(map(is_temporary, temporary))
        and not any(map(is_temporary, referenced_boxes))
        and slice_of_view is not None
    )


if not _works_here():
    _ONE = -1
"""The result of `sys.getrefcount` for an object with one holder. It is -1 if counts are not
reliable on this interpreter, so that all values are copied.
"""


class OutputArray:
    """The caller's array: it provides the memory for a call's reply (transport/calls_machine.py)
    and reads the reply.

    A reply that travels in chunks and has the array's memory order is received directly into the
    array. Any other reply is copied into the array once. No byte of the array is written before the
    reply's header has shown that the reply is one array of the same shape and dtype.
    """

    def __init__(self, out: NDArray[Any]) -> None:
        """Use the array `out`. Raises InvalidArgumentError if `out` cannot receive an array."""
        if not isinstance(out, np.ndarray):
            raise InvalidArgumentError(f"out: wanted a NumPy array, given a {type(out).__name__}")
        if isinstance(out, np.ma.MaskedArray):
            raise InvalidArgumentError(
                "out: the mask of a masked array would hide what is received: pass out.data"
            )
        if not out.flags.writeable:
            raise InvalidArgumentError("out: the array is read-only")
        if not out.flags.forc:
            raise InvalidArgumentError("out: the array is not contiguous")
        if out.dtype.hasobject:
            raise InvalidArgumentError(f"out: no array of dtype {out.dtype} can be received")
        self._out = out
        # A view of class ndarray stays writable even if the caller changes the flags of `out`
        # itself.
        self._flat = np.ndarray.view(out, np.ndarray).reshape(-1, order="A").view(np.uint8)
        self._bytes: NDArray[np.uint8] | None = None

    def room(self, body: bytes, sizes: list[int]) -> list[Any]:
        """Return the memory for the large parts of a reply with this body: the caller's array, if
        the reply travels in chunks and has the array's memory order, otherwise other memory.
        `sizes` has the bytes of each part, or 0 for a part that is in shared memory.

        Raises:
          InvalidArgumentError: the reply does not fit the array.
        """
        header = single_array_layout(body, "server")
        if header is None:
            raise InvalidArgumentError("the reply is not one array, as `out` needs")
        dtype, shape, fortran = header
        self._check(dtype, shape)
        if sizes != [self._out.nbytes] or fortran != is_fortran(self._out):
            return allocate_fresh(sizes)
        self._bytes = self._flat
        return [self._bytes]

    def read(self, call: ClientCall, address: str) -> NDArray[Any]:
        """Return the caller's array with the reply in it. Copy the reply, unless its chunks were
        received directly into the array. Raises InvalidArgumentError if the reply does not fit.
        """
        if self._bytes is not None and len(call.frames) == 1 and call.frames[0] is self._bytes:
            return self._out
        value = unpack(call.body, call.frames, address)
        if type(value) is not np.ndarray:
            raise InvalidArgumentError(
                f"{call.method} returned a {type(value).__name__}, not one array, as `out` needs"
            )
        self._check(value.dtype, value.shape)
        np.copyto(
            self._flat.view(value.dtype).reshape(
                value.shape, order="F" if is_fortran(self._out) else "C"
            ),
            value,
        )
        return self._out

    def _check(self, dtype: Any, shape: tuple[int, ...]) -> None:
        out = self._out
        if (dtype, tuple(shape)) != (out.dtype, out.shape):
            text = f"the reply is an array of {dtype} and shape {tuple(shape)}, `out` has {out.dtype} and {out.shape}"
            raise InvalidArgumentError(text)
