"""Batches of elements, compressed or not: what the worker does last and the reader first.

A compressed batch is the tuple (codec, bytes of the body, body, parts), each part (bytes, content): the body and the large arrays of the
batch as the safe codec makes them. What does not shrink is in it as it was. A batch that is not compressed is itself.

"AUTO" means: not for readers on the same host, where bytes are cheaper than time; the built-in fast codec for the others.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from zmqdist.data.service.compression import NAMES, codec_of
from zmqdist.errors import WireError
from zmqdist.wire import safe

AUTO_CODEC: Final = "SNAPPY"
BYTES_MAX: Final = 1 << 36
"""A receiver makes no batch larger than this."""


def codec_for(compression: str, *, near: bool) -> str:
    """The codec for a reader, who is on this host or not; "" for none."""
    if compression == "AUTO":
        return "" if near else AUTO_CODEC
    return compression


def compress_batch(value: Any, name: str) -> Any:
    """Compress what `elements.pack` made. Raises FailedPreconditionError where the codec's package is missing here."""
    if not name:
        return value
    codec = codec_of(name)
    assert codec is not None
    body, parts = safe.encode(value)
    compressed_parts = [_compressed(codec, memoryview(part).cast("B")) for part in parts]
    return (name, *_compressed(codec, memoryview(body)), compressed_parts)


def _compressed(codec: Any, buffer: memoryview) -> tuple[int, Any]:
    """(0, the bytes as they are) or (how many they are, compressed)."""
    compressed = codec.compress(buffer)
    if compressed is None:
        return 0, np.frombuffer(buffer, np.uint8)
    return buffer.nbytes, np.frombuffer(compressed, np.uint8)


def decompress_batch(value: Any, peer: str) -> Any:
    """The value as `squeeze` got it. Raises WireError for anything malformed."""
    if not (isinstance(value, tuple) and len(value) == 4 and value[0] in NAMES):
        return value
    codec = codec_of(value[0])
    try:
        _, nbytes, content, parts = value
        body = bytes(_plain(codec, nbytes, content, peer))
        return safe.decode(body, [_plain(codec, size, data, peer) for size, data in parts], peer)
    except (TypeError, ValueError) as error:
        raise WireError(peer, f"not a compressed batch: {error}") from error


def _plain(codec: Any, nbytes: int, content: Any, peer: str) -> Any:
    if not nbytes:
        return memoryview(content).cast("B")
    if not 0 < nbytes <= BYTES_MAX:
        raise WireError(peer, f"a batch of {nbytes} bytes")
    return memoryview(codec.decompress(memoryview(content).cast("B"), int(nbytes), peer))
