"""Header frames: a message of `zmqdist.messages` as MessagePack, and back.

Any bytes give a message or a WireError, nothing else. A decoded header takes at most about 16 times its bytes, and no more
than `HEADER_BYTES_MAX` of them are looked at.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from zmqdist.errors import WireError
from zmqdist.limits import HEADER_BYTES_MAX
from zmqdist.messages import ALL, Message

_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[ALL])  # noqa: UP007

encode = msgspec.msgpack.Encoder().encode
"""`encode(message) -> bytes`."""


def decode(header: bytes | memoryview, peer: str) -> Message:
    """The message in a header.

    Args:
      peer: whom to blame in an error.

    Raises:
      WireError: unknown tag, wrong field type, truncated or too long.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise WireError(peer, f"header of {len(header)} bytes, at most {HEADER_BYTES_MAX} are allowed")
    try:
        message: Message = _DECODER.decode(header)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(peer, f"not a message of this protocol: {error}") from None
    return message
