"""The encoding of the hello, the first message of each side."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqdist.errors import ProtocolMismatchError, WireError
from zmqdist.wire import headers
from zmqdist.wire.hello import (
    HELLO_BYTES_MAX,
    MAGIC,
    PROTOCOL,
    Hello,
    decode_hello,
    encode_hello,
    host_identity,
    is_hello,
    our_hello,
)

VERSION = bytes(PROTOCOL)


def decoded(header: bytes) -> None:
    """Check that these bytes give a hello, or one of the two errors for other headers."""
    try:
        assert isinstance(decode_hello(header, "peer"), Hello)
    except (WireError, ProtocolMismatchError):
        pass


def test_hello_round_trip() -> None:
    hello = our_hello("worker", 2**64 - 1, "worker:0")
    assert decode_hello(encode_hello(hello), "peer") == hello
    assert decode_hello(memoryview(encode_hello(hello)), "peer") == hello  # type: ignore[arg-type]
    assert (hello.kind, hello.name, hello.protocol) == ("worker", "worker:0", PROTOCOL)
    assert hello.host == host_identity()


def test_hello_offers_memory_and_nonce() -> None:
    hello = msgspec.structs.replace(
        our_hello("server", 5), memory=(2**22, 2**30, 2**63), nonce=2**62
    )
    assert decode_hello(encode_hello(hello), "peer") == hello


def test_newer_minor_version_is_accepted() -> None:
    header = (
        MAGIC
        + bytes([PROTOCOL[0], 99])
        + msgspec.msgpack.encode(
            ["client", 7, "n", "h", [3, 12], ["x"], [1, 99], None, 5, "new", 8]
        )
    )
    hello = decode_hello(header, "peer")
    assert (hello.kind, hello.incarnation, hello.features) == ("client", 7, ("x",))
    assert hello.protocol == (PROTOCOL[0], 99)


@pytest.mark.parametrize(
    "rest", [b"", b"\xff", b"anything of another version", bytes(HELLO_BYTES_MAX)]
)
def test_major_version_mismatch_is_named(rest: bytes) -> None:
    with pytest.raises(
        ProtocolMismatchError,
        match=rf"peer speaks zmqdist protocol {PROTOCOL[0] + 1}\.7, this side "
        rf"{PROTOCOL[0]}\.{PROTOCOL[1]}",
    ):
        decode_hello(MAGIC + bytes([PROTOCOL[0] + 1, 7]) + rest, "peer")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "not a zmqdist hello"),
        (MAGIC, "not a zmqdist hello"),
        (MAGIC + VERSION[:1], "not a zmqdist hello"),
        (b"GET / HTTP/1.1", "not a zmqdist hello"),
        (MAGIC + VERSION, "damaged hello"),
        (MAGIC + VERSION + b"\x90", "damaged hello"),
        (MAGIC + VERSION + b"\xdd\xff\xff\xff\xff", "damaged hello"),
        (MAGIC + VERSION + msgspec.msgpack.encode(["client", "no number"]), "damaged hello"),
        (MAGIC + VERSION + b"\x92\xa1\xff\x01", "damaged hello"),
        (MAGIC + VERSION + bytes(HELLO_BYTES_MAX), "at most"),
    ],
    ids=lambda value: "",
)
def test_invalid_hello_error_names_peer(header: bytes, problem: str) -> None:
    with pytest.raises(WireError, match=f"peer the peer: .*{problem}"):
        decode_hello(header, "the peer")


few = settings(max_examples=50, deadline=None)


@few
@given(st.binary(max_size=40))
def test_random_bytes_are_hello_or_error(data: bytes) -> None:
    decoded(data)
    decoded(MAGIC + VERSION + data)


@few
@given(st.integers(0, 80), st.integers(0, 2), st.binary(max_size=3))
def test_damaged_hello_is_hello_or_error(place: int, cut: int, put: bytes) -> None:
    header = encode_hello(Hello("worker", 5, "worker:0", "host", (3, 10), ("a",)))
    decoded(header[:place] + put + header[place + cut :])


def test_messages_do_not_look_like_hello() -> None:
    assert is_hello(encode_hello(our_hello("client", 1)))
    with pytest.raises(WireError):
        headers.decode(encode_hello(our_hello("client", 1)), "peer")
