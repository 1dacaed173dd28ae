"""Compression: what comes out is what went in, never more than was told; what is not worth it is
left alone."""

from __future__ import annotations

import sys
import tracemalloc
import zlib

import numpy as np
import pytest

from zmqdist.data.service.compression import NAMES, Codec, codec_of
from zmqdist.errors import FailedPreconditionError, WireError

PACKAGES = {"LZ4": "lz4.block", "ZSTD": "zstandard"}
NOISE = np.random.default_rng(3).bytes(3_000_000)


@pytest.fixture(params=NAMES)
def codec(request: pytest.FixtureRequest) -> Codec:
    if request.param in PACKAGES:
        pytest.importorskip(PACKAGES[request.param])
    made = codec_of(request.param)
    assert made is not None
    return made


@pytest.mark.parametrize("nbytes", [100, 8192, 524_287, 524_288, 3_000_001])
def test_decompressed_bytes_equal_input_and_are_writable(codec: Codec, nbytes: int) -> None:
    source = (b"some words that come again " * (nbytes // 20))[:nbytes]
    packed = codec.compress(source)
    assert packed is not None
    assert len(packed) < nbytes
    out = codec.decompress(memoryview(packed), nbytes)
    assert out == source
    out[0] = 0


def test_arrays_are_buffers_too(codec: Codec) -> None:
    array = np.zeros((300, 400), np.float64)
    packed = codec.compress(array.data)
    assert packed is not None
    assert np.array_equal(
        np.frombuffer(codec.decompress(packed, array.nbytes)).reshape(array.shape), array
    )


@pytest.mark.parametrize("nbytes", [0, 1, 1000, len(NOISE)])
def test_incompressible_bytes_stay_uncompressed(codec: Codec, nbytes: int) -> None:
    assert codec.compress(NOISE[:nbytes]) is None


def test_large_incompressible_buffer_is_only_sampled(codec: Codec) -> None:
    tried: list[int] = []

    def compress_batch(buffer: bytes | memoryview) -> bytes:
        tried.append(len(buffer))
        return codec.compress_batch(buffer)

    counted = codec._replace(compress_batch=compress_batch)
    assert counted.compress(NOISE) is None
    assert sum(tried) <= len(NOISE) // 16


def test_decompression_bomb_is_wire_error(codec: Codec) -> None:
    bomb = codec.compress(bytes(50_000_000))
    assert bomb is not None
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="peer worker 3:"):
            codec.decompress(bomb, 1000, "worker 3")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_damaged_data_are_a_wire_error(codec: Codec) -> None:
    source = b"".join(b"%d, " % number for number in range(5000))
    packed = codec.compress(source)
    assert packed is not None
    for data in (b"", b"text", packed[:-5], packed[: len(packed) // 2], bytes(100)):
        with pytest.raises(WireError, match=codec.name):
            codec.decompress(data, len(source))
    for nbytes in (0, 1, len(source) - 1, len(source) + 1):
        with pytest.raises(WireError, match=codec.name):
            codec.decompress(packed, nbytes)
    if codec.name != "LZ4":  # its blocks have no end of their own
        with pytest.raises(WireError):
            codec.decompress(packed + b"and more", len(source))


def test_snappy_is_zlib_level_one() -> None:
    codec = codec_of("SNAPPY")
    assert codec is not None
    packed = codec.compress(b"abc" * 1000)
    assert packed == zlib.compress(b"abc" * 1000, 1)


def test_codec_of_none_is_none() -> None:
    assert codec_of(None) is None
    with pytest.raises(ValueError, match=r"one of SNAPPY, ZLIB, GZIP, LZ4, ZSTD\. Got 'zip'"):
        codec_of("zip")


@pytest.mark.parametrize("name", list(PACKAGES))
def test_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(
        FailedPreconditionError,
        match=f"compression {name} needs (lz4|zstandard): pip install (lz4|zstandard), on workers",
    ):
        codec_of(name)
