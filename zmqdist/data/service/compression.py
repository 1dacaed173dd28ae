"""The codecs, by name, with which workers compress the bytes of elements for readers.

    None                no compression
    "SNAPPY"            the built-in fast codec (zlib at level 1); the name is TensorFlow's
    "ZLIB", "GZIP"      zlib at its default level
    "LZ4", "ZSTD"       the packages of the extra `compression`

A buffer that does not shrink by a tenth is sent uncompressed, because decompressing it would take
the receiver more time than it saves. A codec first compresses samples of a large buffer, so that
incompressible data such as pictures cost little time.

`decompress` never returns more bytes than the number that is passed to it. A receiver checks this
number against a bound before the call.

A compressed batch of elements is the tuple (name of the codec, number of bytes of the body, body,
parts), and each part is (number of bytes, content). The safe codec encodes the structure of the batch into the
body, and each large array into a part. The numbers are those before compression. A body or part
that does not shrink by a tenth is sent unchanged, with 0 in place of its number of bytes. A batch
without compression is the value itself, and not such a tuple.

"AUTO" means no compression if the reader is on the worker's host, because compression then takes
more time than it saves. Otherwise it means the built-in fast codec.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from operator import index
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from zmqdist.errors import FailedPreconditionError, ResourceExhaustedError, WireError, needs
from zmqdist.limits import FRAMES_MAX, HEADER_BYTES_MAX
from zmqdist.transport.memory_limits import check_room
from zmqdist.wire import safe

Buffer: TypeAlias = "bytes | bytearray | memoryview"

NAMES: Final = ("SNAPPY", "ZLIB", "GZIP", "LZ4", "ZSTD")

_SAMPLES: Final = 4
_SAMPLE_BYTES: Final = 8192
"""How many samples a codec takes of a large buffer, and the bytes of each sample. The samples are
at equal distances, and show how much the buffer would shrink."""

_SAMPLED_BYTES_MIN: Final = 16 * _SAMPLES * _SAMPLE_BYTES
"""A codec samples a buffer of at least this many bytes. For an incompressible buffer this takes at
most a sixteenth of the time that compressing the whole buffer would take."""

_LZ4_BYTES_MAX: Final = 0x7E000000
"""LZ4's bound for the size of a block. Larger buffers are sent uncompressed."""


class Codec(NamedTuple):
    """A codec. Any thread may call its methods.

    Attributes:
      name: one of NAMES.
      compress_batch: a function that compresses a whole buffer, without sampling it.
      ratio_max: how many bytes one compressed byte can become at most. A peer that promises more
        lies.
      unfold: `unfold(data, nbytes)` decompresses to at most about `nbytes` bytes, and raises one of
        `failures` if the data are damaged.
    """

    name: str
    compress_batch: Callable[[Any], bytes]
    ratio_max: int
    unfold: Callable[[Any, int], bytes | bytearray]
    failures: tuple[type[Exception], ...]

    def compress(self, buffer: Buffer) -> bytes | None:
        """Return the compressed bytes of a contiguous buffer, or None if compression does not pay
        off."""
        view = memoryview(buffer).cast("B")
        if self.name == "LZ4" and view.nbytes > _LZ4_BYTES_MAX:
            return None
        if view.nbytes >= _SAMPLED_BYTES_MIN:
            step = (view.nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1)
            sample = b"".join(
                view[index_of_sample * step :][:_SAMPLE_BYTES]
                for index_of_sample in range(_SAMPLES)
            )
            if not _worth(self.compress_batch(sample), len(sample)):
                return None
        packed = self.compress_batch(view)
        return packed if _worth(packed, view.nbytes) else None

    def decompress(self, data: Buffer, nbytes: int, peer: str = "sender") -> bytearray:
        """Decompress `data` to `nbytes` bytes, which the caller owns.

        Raises:
          WireError: the data are damaged, or do not decompress to `nbytes` bytes. The error text
            names the peer.
        """
        if nbytes > self.ratio_max * len(data):
            raise WireError(
                peer,
                f"{len(data)} bytes of {self.name} data cannot hold {nbytes} bytes, as their "
                f"sender says",
            )
        try:
            plain = self.unfold(data, nbytes)
        except self.failures as error:
            raise WireError(peer, f"{self.name} data are damaged: {error}") from error
        if len(plain) != nbytes:
            raise WireError(
                peer, f"{self.name} data do not hold {nbytes} bytes, as their sender says"
            )
        return plain if isinstance(plain, bytearray) else bytearray(plain)


def codec_of(name: str | None) -> Codec | None:
    """Return the codec with this name, or None if `name` is None.

    Raises:
      ValueError: there is no such codec.
      FailedPreconditionError: the codec's package is not installed. The error text names the
        package.
    """
    if name is None:
        return None
    if name not in NAMES:
        raise ValueError(f"compression should be None or one of {', '.join(NAMES)}. Got {name!r}.")
    try:
        return _MADE[name]()
    except ImportError as error:
        package = {"LZ4": "lz4", "ZSTD": "zstandard"}[name]
        raise FailedPreconditionError(
            f"{needs(f'compression {name}', package)}, on workers and readers"
        ) from error


def _worth(packed: bytes, nbytes: int) -> bool:
    return len(packed) * 10 <= nbytes * 9


def _zlib(name: str, level: int, wbits: int) -> Codec:
    def compress_batch(buffer: Any) -> bytes:
        packing = zlib.compressobj(level, zlib.DEFLATED, wbits)
        return packing.compress(buffer) + packing.flush()

    def unfold(data: Any, nbytes: int) -> bytes:
        unpacking = zlib.decompressobj(wbits)
        # Allow one byte more than expected, so that the decompressor reaches the end of the data.
        plain = unpacking.decompress(data, nbytes + 1)
        if len(plain) == nbytes and (not unpacking.eof or unpacking.unused_data):
            raise zlib.error("the stream is truncated, or bytes follow it")
        return plain

    return Codec(name, compress_batch, 1032, unfold, (zlib.error,))


def _lz4() -> Codec:
    # Import by name, because the type stubs of lz4 do not export its functions.
    block: Any = importlib.import_module("lz4.block")

    def compress_batch(buffer: Any) -> bytes:
        return bytes(block.compress(buffer, store_size=False))

    def unfold(data: Any, nbytes: int) -> bytearray:
        if not nbytes:
            # `compress` never compresses an empty buffer
            raise ValueError("an empty buffer is never sent compressed")
        plain: bytearray = block.decompress(data, uncompressed_size=nbytes, return_bytearray=True)
        return plain

    return Codec(
        "LZ4", compress_batch, 255, unfold, (block.LZ4BlockError, ValueError, OverflowError)
    )


def _zstd() -> Codec:
    import zstandard

    def compress_batch(buffer: Any) -> bytes:
        # Each call creates a compressor, because threads cannot share one.
        return bytes(zstandard.ZstdCompressor().compress(buffer))

    def unfold(data: Any, nbytes: int) -> bytes:
        # Check the header first, because the package allocates as many bytes as the header states.
        if zstandard.frame_content_size(data) != nbytes:
            raise zstandard.ZstdError(
                f"the header does not state {nbytes} bytes, as the sender does"
            )
        return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))

    # a block of 4 bytes, header included, makes at most 128 KiB
    return Codec("ZSTD", compress_batch, 2**15, unfold, (zstandard.ZstdError,))


_MADE: Final[dict[str, Callable[[], Codec]]] = {
    "SNAPPY": lambda: _zlib("SNAPPY", 1, zlib.MAX_WBITS),
    "ZLIB": lambda: _zlib("ZLIB", -1, zlib.MAX_WBITS),
    "GZIP": lambda: _zlib("GZIP", -1, 16 + zlib.MAX_WBITS),
    "LZ4": _lz4,
    "ZSTD": _zstd,
}


# -- batches of elements ---------------------------------------------------------------------------

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
