"""References: a message carries a reference in place of a payload that is too large for the
message.

A payload may begin with a mark: a byte with which neither a pickle nor a MessagePack value of this protocol begins.
    MARK     the payload is a reference
    INPUTS   the payload begins with results of other work items, followed by the arguments
    KEEP     the result stays with its worker; this mark precedes the next three
    PARTS    the result is packed in parts; their number in two bytes follows (result_parts.py)
    MUTABLE  the payload is a function that captures a mutable object, so it is unpickled for each run
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import msgspec

from zmqdist.errors import WireError
from zmqdist.limits import ARRAY_BYTES_MAX, FRAMES_MAX

MARK = b"\xc1"
KEEP = b"\xc2"
INPUTS = b"\xc3"
MUTABLE = b"\xc4"
PARTS = b"\xc6"

Handle: TypeAlias = tuple[int, int, int, int, int, int, int, int]
Memory: TypeAlias = tuple[int, int, int, int]


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A part that its holder keeps: the holder's number for the part, the size in bytes, and a
    handle if the part is in shared memory."""

    bulk: int
    size: int
    handle: Handle | None = None


class Reference(msgspec.Struct, array_like=True, frozen=True):
    """The place of a payload. The process that has its parts is its *holder*.

    Attributes:
      store: the number of the holder's store, random and unique.
      address: the holder's "host:port".
      memory: how to open the holder's shared memory (transport/shm_pool.py: offer and nonce); None
        without shared memory.
      parts: the parts of the payload, each as its bytes or as a Held.
      holder: the name of the holder for error texts, such as "worker:1"; "" if the holder has no
        name.
      key: the holder's public key (transport/security.py); empty without CURVE.
    """

    store: int
    address: str
    memory: Memory | None
    parts: tuple[bytes | Held, ...]
    holder: str = ""
    key: bytes = b""

    @property
    def bulks(self) -> list[int]:
        """The numbers of the held parts."""
        return [part.bulk for part in self.parts if isinstance(part, Held)]

    @property
    def nbytes(self) -> int:
        """The size of the held parts."""
        return sum(part.size for part in self.parts if isinstance(part, Held))


class PartsFetcher(Protocol):
    """An object that fetches payloads. The caller owns the returned parts and may write to them,
    except to parts of frozen arrays.

    Attributes:
      clients: the connections to other processes (`HolderClients` of store.py).
    """

    clients: Any

    def fetch(self, reference: Reference) -> list[Any]: ...


_DECODER = msgspec.msgpack.Decoder(Reference)
_ENCODER = msgspec.msgpack.Encoder()
_INPUTS: msgspec.msgpack.Decoder[tuple[list[tuple[int, bytes]], bytes]] = msgspec.msgpack.Decoder(
    tuple[list[tuple[int, bytes]], bytes]
)


def is_reference(payload: bytes) -> bool:
    return payload[:1] == MARK


def encode_reference(reference: Reference) -> bytes:
    return MARK + msgspec.msgpack.encode(reference)


def decode_reference(payload: bytes) -> Reference:
    """Decode a reference. Raises WireError if the reference is damaged, or names more bytes than an
    array may have."""
    try:
        reference = _DECODER.decode(memoryview(payload)[1:])
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError("?", f"damaged reference to a payload: {error}") from None
    sizes = [part.size for part in reference.parts if isinstance(part, Held)]
    if (
        any(size < 0 for size in sizes)
        or sum(sizes) > ARRAY_BYTES_MAX
        or not 0 < len(reference.parts) <= FRAMES_MAX
    ):
        raise WireError(
            reference.address,
            f"a reference to parts of {sizes[:8]} bytes, which no payload can have",
        )
    return reference


def encode_inputs(inputs: dict[int, bytes], packed: bytes) -> bytes:
    """Encode results (packed or as references, by work number) and packed arguments. The caller
    puts the mark INPUTS before the bytes."""
    return _ENCODER.encode((list(inputs.items()), packed))


def decode_inputs(payload: bytes) -> tuple[dict[int, bytes], bytes]:
    """Decode the bytes that `encode_inputs` has returned. Raises WireError if they are damaged."""
    try:
        inputs, packed = _INPUTS.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError("?", f"damaged inputs of a payload: {error}") from None
    return dict(inputs), packed
