"""Compressed batches of a worker that lies about sizes: they are refused before memory is taken for
them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from zmqdist.data.service import compression
from zmqdist.data.service.compression import BYTES_MAX, codec_of, compress_batch, decompress_batch
from zmqdist.errors import ResourceExhaustedError, WireError
from zmqdist.limits import FRAMES_MAX, HEADER_BYTES_MAX
from zmqdist.transport import memory_limits

CODECS = ["SNAPPY", "GZIP", "LZ4", "ZSTD"]
LARGE = 4 * HEADER_BYTES_MAX


def small(name: str) -> tuple[Any, ...]:
    packed: tuple[Any, ...] = compress_batch([3, np.zeros(10_000)], name)
    return packed


def zeros(name: str, nbytes: int) -> Any:
    codec = codec_of(name)
    assert codec is not None
    packed = codec.compress(bytes(nbytes))
    assert packed is not None
    return np.frombuffer(packed, np.uint8)


LIES: dict[str, tuple[Any, str]] = {
    "a body above the bound of a value": (
        lambda c, n, b, p: (c, LARGE, zeros(c, LARGE), p),
        "67108864 bytes, not 0 to",
    ),
    "a body that cannot hold so much": (
        lambda c, n, b, p: (c, HEADER_BYTES_MAX, b[:3], p),
        "cannot hold|damaged|header",
    ),
    "a part that cannot hold so much": (
        lambda c, n, b, p: (c, n, b, [(2**31, p[0][1][:9])]),
        "cannot hold|damaged|header",
    ),
    "parts that are too large together": (
        lambda c, n, b, p: (c, n, b, [(2**35, p[0][1])] * 3),
        f"{3 * 2**35} bytes, not 0 to {BYTES_MAX}",
    ),
    "a negative size": (
        lambda c, n, b, p: (c, n, b, [(-1, p[0][1]), (1, p[0][1])]),
        "negative size",
    ),
    "a negative size of the body": (lambda c, n, b, p: (c, -1, b, p), "has -1 bytes"),
    "too many parts": (lambda c, n, b, p: (c, n, b, p * FRAMES_MAX), "more than 1023 parts"),
    "a size that is no number": (lambda c, n, b, p: (c, "5", b, p), "not a compressed batch"),
    "parts that are no pairs": (lambda c, n, b, p: (c, n, b, [5]), "not a compressed batch"),
    "no parts": (lambda c, n, b, p: (c, n, b, None), "not a compressed batch"),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("lie", "problem"), LIES.values(), ids=LIES)
def test_false_size_is_refused_before_allocation(lie: Any, problem: str, name: str) -> None:
    packed = lie(*small(name))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=f"peer worker.*({problem})"):
            decompress_batch(packed, "worker")
        assert tracemalloc.get_traced_memory()[1] < 2 * HEADER_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_elements_above_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = compress_batch([np.zeros(2**23)], "SNAPPY")
    assert decompress_batch(packed, "worker")[0].shape == (2**23,)
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 2**25)
    with pytest.raises(ResourceExhaustedError, match="the decompressed elements of worker"):
        decompress_batch(packed, "worker")


@pytest.mark.parametrize("name", CODECS)
def test_codecs_allow_their_largest_ratio(name: str) -> None:
    value = [np.zeros(2**22)]
    assert np.array_equal(
        decompress_batch(compression.compress_batch(value, name), "worker")[0], value[0]
    )
