"""Compression of batches of elements. A worker compresses a batch just before it sends the batch,
and a reader decompresses the batch just after it has received it.

A compressed batch is the tuple (name of the codec, number of bytes of the body, body, parts), and
each part is (number of bytes, content). The safe codec encodes the structure of the batch into the
body, and each large array into a part. The numbers are those before compression. A body or part
that does not shrink by a tenth is sent unchanged, with 0 in place of its number of bytes. A batch
without compression is the value itself, and not such a tuple.

"AUTO" means no compression if the reader is on the worker's host, because compression then takes
more time than it saves. Otherwise it means the built-in fast codec.
"""

from __future__ import annotations

from operator import index
from typing import Any, Final

import numpy as np

from zmqdist.data.service.compression import NAMES, codec_of
from zmqdist.errors import ResourceExhaustedError, WireError
from zmqdist.limits import FRAMES_MAX, HEADER_BYTES_MAX
from zmqdist.transport.memory_limits import check_room
from zmqdist.wire import safe

AUTO_CODEC: Final = "SNAPPY"
BYTES_MAX: Final = 1 << 36
"""The largest number of bytes of all parts of a batch after decompression. A receiver refuses to
decompress more, or more than it has memory for."""


def codec_for(compression: str, *, near: bool) -> str:
    """Return the name of the codec for a reader that has requested `compression`; "" means no
    compression. `near` tells whether the reader is on this host.
    """
    if compression == "AUTO":
        return "" if near else AUTO_CODEC
    return compression


def compress_batch(value: Any, name: str) -> Any:
    """Compress a value that `elements.pack` has returned, by the codec `name`. If `name` is "",
    return the value unchanged.

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
    """Return (number of bytes before compression, compressed bytes), or (0, the unchanged bytes) if
    compression does not pay off."""
    compressed = codec.compress(buffer)
    if compressed is None:
        return 0, np.frombuffer(buffer, np.uint8)
    return buffer.nbytes, np.frombuffer(compressed, np.uint8)


def decompress_batch(value: Any, peer: str) -> Any:
    """Return the value that was passed to `compress_batch`. Raises WireError, which names the peer,
    if `value` is malformed."""
    if not (isinstance(value, tuple) and len(value) == 4 and value[0] in NAMES):
        return value
    codec = codec_of(value[0])
    try:
        _, nbytes, content, parts = value
        # Check all sizes before anything is decompressed: a few bytes from a peer must not become
        # more than a batch may have.
        sizes = [index(size) for size, _ in parts]
        _check_bytes(nbytes, HEADER_BYTES_MAX, peer)
        _check_bytes(sum(sizes), BYTES_MAX, peer)
        if min(sizes, default=0) < 0 or len(sizes) >= FRAMES_MAX:
            raise WireError(
                peer,
                f"a batch of more than {FRAMES_MAX - 1} parts, or with a part of a negative size",
            )
        check_room(sum(sizes), f"the decompressed elements of {peer}")
        body = bytes(_plain(codec, nbytes, content, peer))
        return safe.decode(
            body,
            [_plain(codec, size, data, peer) for size, (_, data) in zip(sizes, parts, strict=True)],
            peer,
        )
    except (WireError, ResourceExhaustedError):
        raise
    except (TypeError, ValueError) as error:
        raise WireError(peer, f"not a compressed batch: {error}") from error


def _check_bytes(nbytes: int, bound: int, peer: str) -> None:
    if not 0 <= index(nbytes) <= bound:
        raise WireError(
            peer, f"a compressed batch says that a part of it has {nbytes} bytes, not 0 to {bound}"
        )


def _plain(codec: Any, nbytes: int, content: Any, peer: str) -> Any:
    data = memoryview(content).cast("B")
    return memoryview(codec.decompress(data, int(nbytes), peer)) if nbytes else data
