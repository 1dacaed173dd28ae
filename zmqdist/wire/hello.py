"""The first message of each side of a connection: it describes the process, and names its version
of the protocol.

Every version of the protocol can read the beginning of a hello: four magic bytes, the protocol's
major and minor number as one byte each, and a MessagePack array whose first fields never change
their meaning. A peer of another major version also gets a hello in reply, so that each of the two
peers can report both versions.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from zmqdist._version import __version__
from zmqdist.errors import ProtocolMismatchError, WireError

MAGIC = b"ZMQD"
PROTOCOL: tuple[int, int] = (2, 0)
HELLO_BYTES_MAX = 4096
RETURNS = "returns"
"""The feature of a client that accepts a reply in the memory which it has lent for the call."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The description that one side of a connection sends of itself.

    Attributes:
      kind: "client", "coordinator" or "worker" from the side that connects; "server" from the side
        that accepts connections.
      incarnation: random number that the process drew when it started; never 0.
      name: name for log lines, such as "worker:0" or "host:pid". Two processes may have the same
        name.
      host: identity of the host (`host_identity`). Equal identities prove a common host only when
        the receiver has opened `memory`.
      python: (major, minor) of the interpreter, because pickled functions contain byte code.
      features: what the sender can do beyond the first version of the protocol.
      protocol: version of the protocol; `decode_hello` sets it.
      memory: the offer of the sender's shared memory (transport/shm_pool.py); None if the sender
        offers no memory.
      nonce: the number that the sender has read in the memory that the receiver's hello offered; 0
        if the sender has read none.
      version: version of zmqdist, because pickles contain names of its functions and classes.
    """

    kind: str
    incarnation: Annotated[int, msgspec.Meta(ge=1)]
    name: str = ""
    host: str = ""
    python: tuple[int, int] = (0, 0)
    features: tuple[str, ...] = ()
    protocol: tuple[int, int] = PROTOCOL
    memory: tuple[int, int, int] | None = None
    nonce: int = 0
    version: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Hello)


def our_hello(kind: str, incarnation: int, name: str = "") -> Hello:
    """Return the hello of this process."""
    python = sys.version_info[0], sys.version_info[1]
    return Hello(kind, incarnation, name, host_identity(), python, (RETURNS,), version=__version__)


def pickles_differ(ours: Hello, theirs: Hello) -> list[tuple[str, str, str]]:
    """Return the differences of versions that may keep a process from reading pickles of the other
    process, each as (name, theirs, ours).

    Pickled functions contain byte code, which each minor version of Python changes, and names
    inside zmqdist, which each minor version of zmqdist may change. A version that the hello
    `theirs` does not contain counts as equal to ours.
    """
    differ = []
    if theirs.python != ours.python and theirs.python != (0, 0):
        differ.append(("Python", _dotted(theirs.python), _dotted(ours.python)))
    if theirs.version and theirs.version.split(".")[:2] != ours.version.split(".")[:2]:
        differ.append(("zmqdist", theirs.version, ours.version))
    return differ


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def encode_hello(hello: Hello) -> bytes:
    """Return the header of a hello."""
    return MAGIC + bytes(hello.protocol) + _ENCODER.encode(hello)


def is_hello(header: bytes) -> bool:
    """Return whether a header is a hello of any version. No other message begins with these
    bytes.
    """
    return header[:4] == MAGIC


def decode_hello(header: bytes, peer: str) -> Hello:
    """Return the hello that a header encodes, without allocating much memory.

    Raises:
      ProtocolMismatchError: the peer has another major version of the protocol. The rest of the
        header was not read.
      WireError: the header is not a hello, or the hello is damaged.
    """
    if not is_hello(header) or len(header) < 6:
        raise WireError(peer, "its first message is not a zmqdist hello")
    theirs = (header[4], header[5])
    if theirs[0] != PROTOCOL[0]:
        raise ProtocolMismatchError(peer, PROTOCOL, theirs)
    if len(header) > HELLO_BYTES_MAX:
        raise WireError(
            peer, f"hello of {len(header)} bytes, at most {HELLO_BYTES_MAX} are allowed"
        )
    try:
        hello = _DECODER.decode(memoryview(header)[6:])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(peer, f"damaged hello: {error}") from None
    return msgspec.structs.replace(hello, protocol=theirs)


@lru_cache(maxsize=1)
def host_identity() -> str:
    """Return a text with boot id, pid namespace and user namespace. Only processes with equal texts
    try to share memory. Unlike equal host names, equal texts show that a pid means the same process
    to both.
    """
    parts = []
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", lambda path: Path(path).read_text()),
        ("/proc/self/ns/pid", os.readlink),
        ("/proc/self/ns/user", os.readlink),
    ):
        try:
            parts.append(read(path).strip())
        except OSError:
            parts.append("?")
    return " ".join(parts)
