"""Header frames: conversion of a message of `zmqdist.messages` to MessagePack and back.

Decoding any bytes either returns a message or raises WireError. A decoded header takes at most about 16 times the memory of its bytes, and
a header of more than `HEADER_BYTES_MAX` bytes is refused.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from zmqdist.errors import WireError
from zmqdist.limits import HEADER_BYTES_MAX
from zmqdist.messages import ALL, Message

_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[ALL])  # noqa: UP007

encode = msgspec.msgpack.Encoder().encode
"""`encode(message) -> bytes`: return the header of a message."""


def decode(header: bytes | memoryview, peer: str) -> Message:
    """Return the message that a header encodes.

    Args:
      peer: name of the sender, for errors.

    Raises:
      WireError: the header has an unknown tag or a field of a wrong type, or the header is truncated or too long.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise WireError(peer, f"header of {len(header)} bytes, at most {HEADER_BYTES_MAX} are allowed")
    try:
        message: Message = _DECODER.decode(header)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(peer, f"not a message of this protocol: {error}") from None
    return message
