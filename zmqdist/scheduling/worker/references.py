"""What travels in place of a payload that is too large for a message: where its parts are.

A reference starts with a byte that neither a pickle nor MessagePack starts with. Work whose arguments are made of results of other work
has these before its arguments, after a byte of their own. The payload of work whose result is to stay with its worker has one byte more,
in front of all. A function that captures what may change has one, too.
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

Handle: TypeAlias = tuple[int, int, int, int, int, int, int, int]
Memory: TypeAlias = tuple[int, int, int, int]


class Held(msgspec.Struct, array_like=True, frozen=True):
    """A part that stays where it is: its number there, its bytes, and its handle in shared memory where it has one."""

    bulk: int
    size: int
    handle: Handle | None = None


class Reference(msgspec.Struct, array_like=True, frozen=True):
    """A payload.

    Attributes:
      store: the random number of the life of the holder's store: no two stores share one.
      address: the holder's "host:port".
      memory: how its shared-memory pool is found (transport/shm_pool.py: the offer and the nonce); None where it has none.
      parts: each as its bytes, or held.
      holder: whose store it is, as "worker:1", for errors; "" for one that does not say.
      key: the holder's public key, told with its address (transport/security.py); empty without CURVE.
    """

    store: int
    address: str
    memory: Memory | None
    parts: tuple[bytes | Held, ...]
    holder: str = ""
    key: bytes = b""

    @property
    def bulks(self) -> list[int]:
        """The numbers of the parts that are held."""
        return [part.bulk for part in self.parts if isinstance(part, Held)]


class PartsFetcher(Protocol):
    """Gets the parts of a payload: writable ones that are the caller's own, read-only arrays for frozen ones."""

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
    """Raises WireError for what is none, or one of more bytes than an array may have."""
    try:
        reference = _DECODER.decode(memoryview(payload)[1:])
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError("?", f"damaged reference to a payload: {error}") from None
    sizes = [part.size for part in reference.parts if isinstance(part, Held)]
    if any(size < 0 for size in sizes) or sum(sizes) > ARRAY_BYTES_MAX or not 0 < len(reference.parts) <= FRAMES_MAX:
        raise WireError(reference.address, f"a payload of parts of {sizes[:8]} bytes")
    return reference


def encode_inputs(inputs: dict[int, bytes], packed: bytes) -> bytes:
    """What follows the mark INPUTS: results by the number of their work, each packed or a reference, and the packed arguments."""
    return _ENCODER.encode((list(inputs.items()), packed))


def decode_inputs(payload: bytes) -> tuple[dict[int, bytes], bytes]:
    """Raises WireError for what is none."""
    try:
        inputs, packed = _INPUTS.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError("?", f"damaged inputs of a payload: {error}") from None
    return dict(inputs), packed
