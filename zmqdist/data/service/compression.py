"""Codecs that compress the bytes of elements on their way from a worker to a reader, by name.

    None                no compression
    "SNAPPY"            the built-in fast codec (zlib at level 1); the name is TensorFlow's
    "ZLIB", "GZIP"      zlib at its default level
    "LZ4", "ZSTD"       the packages of the extra `compression`

A buffer that does not shrink by a tenth is sent as it is, because it is not worth the receiver's time. A codec tries samples of a large
buffer first, so that incompressible data (pictures, noise) cost little.

Not here: which codec a dataset has; how a batch marks its compressed buffers with their numbers of bytes (batch_compression.py). The
receiver checks that number against its own bound before it calls `decompress`, which never returns more bytes than that.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist.errors import FailedPreconditionError, WireError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

NAMES: Final = ("SNAPPY", "ZLIB", "GZIP", "LZ4", "ZSTD")

_SAMPLES: Final = 4
_SAMPLE_BYTES: Final = 8192
"""The number of samples, which lie at even distances, and their length, with which a codec shows its ratio."""

_SAMPLED_BYTES_MIN: Final = 16 * _SAMPLES * _SAMPLE_BYTES
"""A buffer of this size or more is sampled first, because a failed attempt with samples costs a sixteenth of a full one."""

_LZ4_BYTES_MAX: Final = 0x7E000000
"""LZ4's own bound for a block. Larger buffers are sent as they are."""


class Codec(NamedTuple):
    """A codec. Any thread may use it.

    Attributes:
      name: one of NAMES.
      compress_batch: compresses a buffer.
      unfold: `unfold(data, nbytes)` decompresses to at most about `nbytes` bytes, and raises one of `failures` for damaged data.
    """

    name: str
    compress_batch: Callable[[Any], bytes]
    unfold: Callable[[Any, int], bytes | bytearray]
    failures: tuple[type[Exception], ...]

    def compress(self, buffer: Buffer) -> bytes | None:
        """Return the compressed bytes of a contiguous buffer, or None if compression does not pay off."""
        view = memoryview(buffer).cast("B")
        if self.name == "LZ4" and view.nbytes > _LZ4_BYTES_MAX:
            return None
        if view.nbytes >= _SAMPLED_BYTES_MIN:
            step = (view.nbytes - _SAMPLE_BYTES) // (_SAMPLES - 1)
            sample = b"".join(view[place * step :][:_SAMPLE_BYTES] for place in range(_SAMPLES))
            if not _worth(self.compress_batch(sample), len(sample)):
                return None
        packed = self.compress_batch(view)
        return packed if _worth(packed, view.nbytes) else None

    def decompress(self, data: Buffer, nbytes: int, peer: str = "sender") -> bytearray:
        """Return the `nbytes` bytes that were compressed; the caller owns them.

        Raises:
          WireError: the data are damaged, or decompress to another number of bytes; the text names the peer.
        """
        try:
            made = self.unfold(data, nbytes)
        except self.failures as error:
            raise WireError(peer, f"{self.name} data are damaged: {error}") from error
        if len(made) != nbytes:
            raise WireError(peer, f"{self.name} data do not hold {nbytes} bytes, as their sender says")
        return made if isinstance(made, bytearray) else bytearray(made)


def codec_of(name: str | None) -> Codec | None:
    """Return the codec with this name, or None if `name` is None.

    Raises:
      ValueError: there is no such codec.
      FailedPreconditionError: its package is not installed; the text names the extra.
    """
    if name is None:
        return None
    if name not in NAMES:
        raise ValueError(f"compression should be None or one of {', '.join(NAMES)}. Got {name!r}.")
    try:
        return _MADE[name]()
    except ImportError as error:
        raise FailedPreconditionError(
            f"compression {name} needs a package ({error}): pip install 'zmqdist[compression]', on workers and readers",
        ) from error


def _worth(packed: bytes, nbytes: int) -> bool:
    return len(packed) * 10 <= nbytes * 9


def _zlib(name: str, level: int, wbits: int) -> Codec:
    def compress_batch(buffer: Any) -> bytes:
        packing = zlib.compressobj(level, zlib.DEFLATED, wbits)
        return packing.compress(buffer) + packing.flush()

    def unfold(data: Any, nbytes: int) -> bytes:
        unpacking = zlib.decompressobj(wbits)
        # One byte more than expected, so that the end of the data is reached.
        made = unpacking.decompress(data, nbytes + 1)
        if len(made) == nbytes and (not unpacking.eof or unpacking.unused_data):
            raise zlib.error("the stream is truncated, or bytes follow it")
        return made

    return Codec(name, compress_batch, unfold, (zlib.error,))


def _lz4() -> Codec:
    block: Any = importlib.import_module("lz4.block")  # the package's type stubs do not export its functions

    def compress_batch(buffer: Any) -> bytes:
        return bytes(block.compress(buffer, store_size=False))

    def unfold(data: Any, nbytes: int) -> bytearray:
        if not nbytes:
            raise ValueError("an empty buffer is never sent compressed")  # `compress` returns None for an empty buffer
        made: bytearray = block.decompress(data, uncompressed_size=nbytes, return_bytearray=True)
        return made

    return Codec("LZ4", compress_batch, unfold, (block.LZ4BlockError, ValueError, OverflowError))


def _zstd() -> Codec:
    import zstandard

    def compress_batch(buffer: Any) -> bytes:
        # Each call creates a compressor, because threads cannot share one.
        return bytes(zstandard.ZstdCompressor().compress(buffer))

    def unfold(data: Any, nbytes: int) -> bytes:
        if zstandard.frame_content_size(data) != nbytes:  # the package allocates as many bytes as the header says
            raise zstandard.ZstdError("the header has another number of bytes")
        return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))

    return Codec("ZSTD", compress_batch, unfold, (zstandard.ZstdError,))


_MADE: Final[dict[str, Callable[[], Codec]]] = {
    "SNAPPY": lambda: _zlib("SNAPPY", 1, zlib.MAX_WBITS),
    "ZLIB": lambda: _zlib("ZLIB", -1, zlib.MAX_WBITS),
    "GZIP": lambda: _zlib("GZIP", -1, 16 + zlib.MAX_WBITS),
    "LZ4": _lz4,
    "ZSTD": _zstd,
}
