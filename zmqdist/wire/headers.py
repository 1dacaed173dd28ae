"""Header frames: conversion of a message of `zmqdist.messages` to MessagePack and back.

A header of more than HEADER_PIECE_BYTES travels in several frames, because ZeroMQ sends no
heartbeat within a frame. The first frame then begins with a byte that no message begins with, and
with the number of frames.

Decoding any bytes either returns a message or raises WireError. A decoded header takes at most
about 16 times the memory of its bytes, and a header of more than `HEADER_BYTES_MAX` bytes is
refused.

Several items of a stream as the body of one reply.

Each item is a value that the safe codec has encoded when the generator yielded the item. The large
parts of all items are the payload frames of the reply, in the order of the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import msgspec

from zmqdist.errors import WireError
from zmqdist.limits import HEADER_BYTES_MAX, HEADER_PIECE_BYTES
from zmqdist.messages import ALL, Message

_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[ALL])  # noqa: UP007

encode = msgspec.msgpack.Encoder().encode
"""`encode(message) -> bytes`: return the header of a message."""


_IN_PIECES = b"\xc1"
"""MessagePack never uses this byte."""
_MARK_BYTES = 3


def split_header(header: bytes, frames: Sequence[Any]) -> tuple[bytes, Sequence[Any]]:
    """Return the first frame of a message with a long header, and all other frames: the other
    pieces of the header, then `frames`."""
    pieces = [
        header[at : at + HEADER_PIECE_BYTES] for at in range(0, len(header), HEADER_PIECE_BYTES)
    ]
    return _IN_PIECES + (len(pieces) - 1).to_bytes(_MARK_BYTES - 1, "big") + pieces[0], [
        *pieces[1:],
        *frames,
    ]


def pieces_after(first: bytes) -> int:
    """Return how many of the frames after the first frame of a message belong to its header."""
    return int.from_bytes(first[1:_MARK_BYTES], "big") if first[:1] == _IN_PIECES else 0


def join_header(first: bytes, pieces: Sequence[Any]) -> bytes:
    """Return the header of which `split_header` made these pieces."""
    return b"".join((memoryview(first)[_MARK_BYTES:], *pieces)) if pieces else first


def decode(header: bytes | memoryview, peer: str) -> Message:
    """Return the message that a header encodes.

    Args:
      peer: name of the sender, for errors.

    Raises:
      WireError: the header has an unknown tag or a field of a wrong type, or the header is
        truncated or too long.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise WireError(
            peer, f"header of {len(header)} bytes, at most {HEADER_BYTES_MAX} are allowed"
        )
    try:
        message: Message = _DECODER.decode(header)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(peer, f"not a message of this protocol: {error}") from None
    return message


class Items(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The next items of a stream.

    Attributes:
      bodies: the bodies of the items, in order.
      parts: number of large parts of each item; empty if no item has large parts.
      end: None if the stream continues, (0, "") if it has ended, or (code, message) of the error
        that has ended it.
    """

    bodies: list[bytes]
    parts: list[int] = []
    end: tuple[int, str] | None = None


encode_items = msgspec.msgpack.Encoder().encode
"""`encode_items(items) -> bytes`: return the items as bytes."""
_decode = msgspec.msgpack.Decoder(Items).decode


def decode_items(body: bytes, frames: int, peer: str) -> Items:
    """Return the items in the body of a reply with `frames` payload frames. Raises WireError if the
    body does not encode items, or if the items have more or fewer large parts than the reply has
    frames.
    """
    try:
        items = _decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(peer, f"not items of a stream: {error}") from None
    if (
        min(items.parts, default=0) < 0
        or len(items.parts) not in (0, len(items.bodies))
        or sum(items.parts) != frames
    ):
        raise WireError(peer, "items of a stream with another number of parts than they say")
    return items
