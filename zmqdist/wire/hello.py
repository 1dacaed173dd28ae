"""The first message of each side: who speaks, and which protocol.

It is the one message that every version can read: four magic bytes, the protocol's major and minor number as a byte each,
then a MessagePack array whose first fields never change their meaning. A peer of another major version is answered with
our own hello all the same, so that both sides can name both versions.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache

import msgspec

from zmqdist._version import __version__
from zmqdist.errors import ProtocolMismatchError, WireError

MAGIC = b"ZMQD"
PROTOCOL: tuple[int, int] = (2, 0)
HELLO_BYTES_MAX = 4096


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """What a side says of itself.

    Attributes:
      kind: what it wants to be: "client", "coordinator", "worker" or "server".
      incarnation: random number of one life of the process, never 0.
      name: for people: "worker:0", "host:pid"; not an identity.
      host: identity of the host, see `host_identity`; only a hint until shared memory has been tried.
      python: (major, minor) of the interpreter, because pickled functions carry byte code.
      protocol: filled in by `decode_hello`.
      memory: where the sender's shared memory is (transport/shm_pool.py); None without any.
      nonce: the number that the sender has read in the memory that our hello offered; 0 for none.
      version: of zmqdist, whose own functions and classes pickles name.
    """

    kind: str
    incarnation: int
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
    """The hello of this process."""
    python = sys.version_info[0], sys.version_info[1]
    return Hello(kind, incarnation, name, host_identity(), python, version=__version__)


def pickles_differ(ours: Hello, theirs: Hello) -> list[tuple[str, str, str]]:
    """Which versions of the two sides keep either from reading what the other has pickled: (of what, theirs, ours).

    Functions are pickled as byte code, which each minor version of Python changes, and name what zmqdist has inside, which each minor
    version of zmqdist may change. A side that does not name a version is believed to have ours.
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
    return MAGIC + bytes(hello.protocol) + _ENCODER.encode(hello)


def is_hello(header: bytes) -> bool:
    """Whether a header is a hello, of any version: no other message starts with these bytes."""
    return header[:4] == MAGIC


def decode_hello(header: bytes, peer: str) -> Hello:
    """Read a hello.

    Raises:
      ProtocolMismatchError: the peer's major version is another one; the rest was not read.
      WireError: not a hello, or a damaged one. Nothing large has been allocated.
    """
    if not is_hello(header) or len(header) < 6:
        raise WireError(peer, "its first message is not a zmqdist hello")
    theirs = (header[4], header[5])
    if theirs[0] != PROTOCOL[0]:
        raise ProtocolMismatchError(peer, PROTOCOL, theirs)
    if len(header) > HELLO_BYTES_MAX:
        raise WireError(peer, f"hello of {len(header)} bytes, at most {HELLO_BYTES_MAX} are allowed")
    try:
        hello = _DECODER.decode(memoryview(header)[6:])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(peer, f"damaged hello: {error}") from None
    return msgspec.structs.replace(hello, protocol=theirs)


@lru_cache(maxsize=1)
def host_identity() -> str:
    """Boot id, pid namespace and user namespace: equal for processes that can share memory. Not the host name, which lies."""
    parts = []
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", _read),
        ("/proc/self/ns/pid", os.readlink),
        ("/proc/self/ns/user", os.readlink),
    ):
        try:
            parts.append(read(path).strip())
        except OSError:
            parts.append("?")
    return " ".join(parts)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
