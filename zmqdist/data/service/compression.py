"""Codecs for the bytes of elements on their way from a worker to a reader, by name.

    None                nothing is compressed
    "SNAPPY"            the built-in fast one (zlib at level 1); the name is TensorFlow's
    "ZLIB", "GZIP"      zlib's default level
    "LZ4", "ZSTD"       with the packages of the extra `compression`

What does not become smaller by a tenth is not worth the receiver's time and is sent as it is. Of a large buffer some samples are tried
first, so that what cannot be compressed (pictures, noise) costs little.

Not here: who decides for a dataset; how a batch tells which of its buffers are compressed, and how many bytes they have. The receiver
holds that number against its own bounds before it calls `decompress`, which makes no more than it.
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
"""Samples at even distances, each larger than what a codec needs to find its feet."""

_SAMPLED_BYTES_MIN: Final = 16 * _SAMPLES * _SAMPLE_BYTES
"""A buffer from this size on is sampled first: a failed try then costs a sixteenth of it."""

_LZ4_BYTES_MAX: Final = 0x7E000000
"""LZ4's own bound of a block. Larger buffers are sent as they are."""


class Codec(NamedTuple):
    """One way to compress. Any thread may use it.

    Attributes:
      name: one of NAMES.
      squeeze, unfold: its package's functions; unfold makes at most as many bytes as it is told, and raises one of `failures`.
    """

    name: str
    compress_batch: Callable[[Any], bytes]
    unfold: Callable[[Any, int], bytes | bytearray]
    failures: tuple[type[Exception], ...]

    def compress(self, buffer: Buffer) -> bytes | None:
        """The compressed bytes, or None where it is not worth it. The buffer is contiguous."""
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
        """The `nbytes` bytes that were compressed, writable and the caller's own.

        Raises WireError, naming the peer, when the data are damaged, or hold fewer or more bytes: more are never made.
        """
        try:
            made = self.unfold(data, nbytes)
        except self.failures as error:
            raise WireError(peer, f"{self.name} data are damaged: {error}") from error
        if len(made) != nbytes:
            raise WireError(peer, f"{self.name} data do not hold the {nbytes} bytes that were told")
        return made if isinstance(made, bytearray) else bytearray(made)


def codec_of(name: str | None) -> Codec | None:
    """The codec with this name; None for None.

    Raises:
      ValueError: there is none of that name.
      FailedPreconditionError: its package is not installed; says which extra has it.
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
        made = unpacking.decompress(data, nbytes + 1)  # room for one too many: then the end of the data is reached, too
        if len(made) == nbytes and (not unpacking.eof or unpacking.unused_data):
            raise zlib.error("it is cut, or something follows it")
        return made

    return Codec(name, compress_batch, unfold, (zlib.error,))


def _lz4() -> Codec:
    block: Any = importlib.import_module("lz4.block")  # its stubs do not export what it offers

    def compress_batch(buffer: Any) -> bytes:
        return bytes(block.compress(buffer, store_size=False))

    def unfold(data: Any, nbytes: int) -> bytearray:
        if not nbytes:
            raise ValueError("nothing is never compressed")  # 0 would let the block tell its size
        made: bytearray = block.decompress(data, uncompressed_size=nbytes, return_bytearray=True)
        return made

    return Codec("LZ4", compress_batch, unfold, (block.LZ4BlockError, ValueError, OverflowError))


def _zstd() -> Codec:
    import zstandard

    def compress_batch(buffer: Any) -> bytes:
        return bytes(zstandard.ZstdCompressor().compress(buffer))  # one of these is not for several threads

    def unfold(data: Any, nbytes: int) -> bytes:
        if zstandard.frame_content_size(data) != nbytes:  # so many are allocated, whatever is really there
            raise zstandard.ZstdError("its header tells another number of bytes")
        return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))

    return Codec("ZSTD", compress_batch, unfold, (zstandard.ZstdError,))


_MADE: Final[dict[str, Callable[[], Codec]]] = {
    "SNAPPY": lambda: _zlib("SNAPPY", 1, zlib.MAX_WBITS),
    "ZLIB": lambda: _zlib("ZLIB", -1, zlib.MAX_WBITS),
    "GZIP": lambda: _zlib("GZIP", -1, 16 + zlib.MAX_WBITS),
    "LZ4": _lz4,
    "ZSTD": _zstd,
}
