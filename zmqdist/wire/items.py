"""Several items of a stream as the body of one answer.

Each item is a value of the safe codec, made when it was yielded. Their large parts are the payload frames of the answer, item after item.
"""

from __future__ import annotations

import msgspec

from zmqdist.errors import WireError


class Items(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What came next in a stream.

    Attributes:
      bodies: of the items, in order.
      parts: how many large parts each has; empty when none has any.
      end: nothing follows: (0, "") for the end, else the code and message of the error that ended it. None: it goes on.
    """

    bodies: list[bytes]
    parts: list[int] = []
    end: tuple[int, str] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Items).decode


def encode_items(items: Items) -> bytes:
    """As bytes."""
    return _encode(items)


def decode_items(body: bytes, frames: int, peer: str) -> Items:
    """The items in a body that came with so many frames. Raises WireError: there are none."""
    try:
        items = _decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(peer, f"no items of a stream: {error}") from None
    if min(items.parts, default=0) < 0 or len(items.parts) not in (0, len(items.bodies)) or sum(items.parts) != frames:
        raise WireError(peer, "items of a stream whose parts are not these")
    return items
