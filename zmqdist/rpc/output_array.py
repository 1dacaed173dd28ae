"""The array into which a caller wants the reply to its call to be written (`out=`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import InvalidArgumentError
from zmqdist.rpc import payload
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.transfers import allocate_fresh
from zmqdist.wire.arrays import is_fortran
from zmqdist.wire.safe import single_array_layout


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
        value = payload.unpack(call.body, call.frames, address)
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
