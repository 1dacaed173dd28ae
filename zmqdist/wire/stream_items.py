"""Several items of a stream as the body of one reply.

Each item is a value that the safe codec has encoded when the generator yielded the item. The large
parts of all items are the payload frames of the reply, in the order of the items.
"""

from __future__ import annotations

import msgspec

from zmqdist.errors import WireError


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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Items).decode


def encode_items(items: Items) -> bytes:
    """Return the items as bytes."""
    return _encode(items)


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
