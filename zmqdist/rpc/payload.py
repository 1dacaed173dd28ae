"""Values as the payload of a call or an answer: the safe codec, and large arrays in pieces.

Rules
    A frame holds at most PIECE_BYTES, and one that holds exactly so many is continued by the next: a buffer of 40 MiB is
    three frames, one of 32 MiB two and an empty one. The receiver joins them in one allocation.
    What lends itself to an array (has `__array__`) travels as one.

Not here: which types travel (wire/safe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqdist import nest
from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError, WireError
from zmqdist.limits import FRAMES_MAX, PIECE_BYTES
from zmqdist.wire import safe


def pack(value: Any) -> tuple[bytes, list[Any]]:
    """A value as body and frames. The frames may be views of the arrays in `value`: copy or send them before it changes.

    Raises:
      InvalidArgumentError: something in it does not travel; the message names the place and what is allowed.
      ResourceExhaustedError: it needs more frames than a message may have.
    """
    try:
        body, buffers = safe.encode(value)
    except InvalidArgumentError:
        arrays = nest.map_structure(_as_array, value)
        if all(new is old for new, old in zip(nest.flatten(arrays), nest.flatten(value), strict=True)):
            raise
        body, buffers = safe.encode(arrays)
    if not buffers:
        return body, buffers
    frames = [piece for buffer in buffers for piece in _pieces(memoryview(buffer))]
    if len(frames) >= FRAMES_MAX:
        raise ResourceExhaustedError(
            None,
            None,
            f"the value needs {len(frames)} frames, a message has at most {FRAMES_MAX - 1}: send it in parts",
        )
    return body, frames


def unpack(body: bytes, frames: Sequence[Any], peer: str) -> Any:
    """The value in a body and the frames that came with it. Its arrays are private and writable.

    Raises:
      WireError: the bytes are no value.
    """
    return safe.decode(body, _joined(frames, peer) if frames else frames, peer)


def _as_array(leaf: Any) -> Any:
    if hasattr(leaf, "__array__") and not isinstance(leaf, (np.ndarray, np.generic, type)):
        return np.asarray(leaf)
    return leaf


def _pieces(buffer: memoryview) -> list[memoryview]:
    if buffer.nbytes < PIECE_BYTES:
        return [buffer]
    flat = buffer.cast("B")
    return [flat[start : start + PIECE_BYTES] for start in range(0, flat.nbytes + 1, PIECE_BYTES)]


def _joined(frames: Sequence[Any], peer: str) -> list[Any]:
    buffers: list[Any] = []
    pieces: list[Any] = []
    for frame in frames:
        pieces.append(frame)
        if len(frame) < PIECE_BYTES:
            buffers.append(_join(pieces) if len(pieces) > 1 else frame)
            pieces = []
    if pieces:
        raise WireError(peer, "the last piece of a large buffer is missing")
    return buffers


def _join(pieces: list[Any]) -> memoryview:
    whole = memoryview(np.empty(sum(map(len, pieces)), np.uint8))  # type: ignore[arg-type]
    start = 0
    for piece in pieces:
        whole[start : start + len(piece)] = piece
        start += len(piece)
    return whole
