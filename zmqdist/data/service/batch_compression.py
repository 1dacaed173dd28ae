"""Compression of batches of elements: the worker's last step, and the reader's first.

A compressed batch is the tuple (codec, bytes of the body, body, parts), and each part is (bytes, content). The safe codec encodes the
structure of the batch into the body, and each large array into a part. A body or part that compression does not shrink is sent as it is,
with 0 as its number of bytes. A batch without compression is the value itself.

"AUTO" stands for no compression if the reader is on the same host, where compression costs more time than it saves, and otherwise for the
built-in fast codec.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from zmqdist.data.service.compression import NAMES, codec_of
from zmqdist.errors import WireError
from zmqdist.wire import safe

AUTO_CODEC: Final = "SNAPPY"
BYTES_MAX: Final = 1 << 36
"""The most bytes of a decompressed part. A receiver refuses to decompress a larger one."""


def codec_for(compression: str, *, near: bool) -> str:
    """Return the name of the codec for a reader; "" for none. `near`: the reader is on this host."""
    if compression == "AUTO":
        return "" if near else AUTO_CODEC
    return compression


def compress_batch(value: Any, name: str) -> Any:
    """Return a value of `elements.pack`, compressed with the codec `name`; "": unchanged.

    Raises:
      FailedPreconditionError: the codec's package is not installed.
    """
    if not name:
        return value
    codec = codec_of(name)
    assert codec is not None
    body, parts = safe.encode(value)
    compressed_parts = [_compressed(codec, memoryview(part).cast("B")) for part in parts]
    return (name, *_compressed(codec, memoryview(body)), compressed_parts)


def _compressed(codec: Any, buffer: memoryview) -> tuple[int, Any]:
    """Return (number of bytes, compressed bytes), or (0, the bytes themselves) if compression does not pay off."""
    compressed = codec.compress(buffer)
    if compressed is None:
        return 0, np.frombuffer(buffer, np.uint8)
    return buffer.nbytes, np.frombuffer(compressed, np.uint8)


def decompress_batch(value: Any, peer: str) -> Any:
    """Return the value that `compress_batch` was given. Raises WireError, which names the peer, for a malformed value."""
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
        raise WireError(peer, f"a part of a batch has {nbytes} bytes, not 1 to {BYTES_MAX}")
    return memoryview(codec.decompress(memoryview(content).cast("B"), int(nbytes), peer))
