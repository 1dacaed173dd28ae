"""The test vectors of docs/protocol.md: what the page shows as bytes is read as that value, and
written as those bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.wire.helpers import same
from zmqdist.messages import Call, Chunk, Credit, Replies, Reply
from zmqdist.specs import TensorSpec
from zmqdist.wire import headers, safe
from zmqdist.wire.hello import Hello, decode_hello, encode_hello, is_hello

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
VECTORS = PAGE.read_text().partition("## Test vectors")[2]
ROWS = re.findall(r"^- `(.+)`:\s+`([0-9a-f]+)`$", VECTORS, re.MULTILINE)
MESSAGE = re.compile(r"(Call|Chunk|Credit|Hello|Replies|Reply)\(")


def pack(value: Any) -> bytes:
    return safe.encode(value)[0]


def meant(text: str) -> Any:
    """Return the value that the page means."""
    names = {
        "Call": Call,
        "Chunk": Chunk,
        "Credit": Credit,
        "Hello": Hello,
        "Replies": Replies,
        "Reply": Reply,
        "TensorSpec": TensorSpec,
        "encode": headers.encode,
        "ml_dtypes": ml_dtypes,
        "np": np,
        "pack": pack,
    }
    return eval(text, names)


def test_page_has_vectors_of_values_and_messages() -> None:
    messages = [text for text, _ in ROWS if MESSAGE.match(text)]
    assert len(messages) >= 10
    assert len(ROWS) - len(messages) >= 35
    assert len(ROWS) == sum(line.startswith("- ") for line in VECTORS.splitlines())


@pytest.mark.parametrize(("text", "digits"), [row for row in ROWS if not MESSAGE.match(row[0])])
def test_value_has_bytes_of_page(text: str, digits: str) -> None:
    value, body = meant(text), bytes.fromhex(digits)
    written, frames = safe.encode(value)
    assert written == body
    read = safe.decode(body, [bytearray(frame) for frame in frames], "page")
    assert same(value, read)
    if isinstance(value, np.ndarray):
        assert value.flags.f_contiguous == read.flags.f_contiguous


@pytest.mark.parametrize(("text", "digits"), [row for row in ROWS if MESSAGE.match(row[0])])
def test_message_has_bytes_of_page(text: str, digits: str) -> None:
    message, frame = meant(text), bytes.fromhex(digits)
    if is_hello(frame):
        assert encode_hello(message) == frame
        assert decode_hello(frame, "page") == message
    else:
        assert headers.encode(message) == frame
        assert headers.decode(frame, "page") == message
