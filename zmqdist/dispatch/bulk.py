"""Payloads that are too large for a message: held where they were made, fetched by whoever needs them.

The holder offers two RPC methods on its own port; the fetcher reads in chunks, several at a time, into memory that it allocated
once. So no frame is large, and beats and small calls pass in between. What is held is a snapshot that nobody writes any more.

A reference travels in place of the payload. It starts with a byte that neither a pickle nor MessagePack starts with.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from zmqdist.core.credit import ByteWindow
from zmqdist.dispatch.credentials import Credentials
from zmqdist.errors import NotFoundError, WireError
from zmqdist.limits import ARRAY_BYTES_MAX, BULK_WINDOW_BYTES, CHUNK_BYTES
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.result import StatusOrResult
from zmqdist.rpc.service import RpcService

if TYPE_CHECKING:
    import numpy.typing as npt

Buffer: TypeAlias = "bytes | bytearray | memoryview"

MARK = b"\xc1"
READ = "zmqdist_bulk_read"
LET_GO = "zmqdist_bulk_let_go"
CHUNK_TIMEOUT_MS = 20_000
"""A holder that does not send a chunk for so long cannot be reached from here."""

CLIENTS_KEPT = 8
"""Connections that a process keeps to those it fetched from: four descriptors each."""


class Reference(msgspec.Struct, array_like=True, frozen=True):
    """Where a payload is: the holder's address, its number there, and the bytes of each part."""

    address: str
    bulk: int
    sizes: tuple[int, ...]


_DECODER = msgspec.msgpack.Decoder(Reference)


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
    if any(size < 0 for size in reference.sizes) or sum(reference.sizes) > ARRAY_BYTES_MAX:
        raise WireError(reference.address, f"a payload of parts of {reference.sizes} bytes")
    return reference


class BulkStore:
    """Payloads held by this process. `hold` and `free` may be called from any thread.

    Args:
      service: where the two methods are registered, before it starts; `roles` may call them.
      address: the holder's address as its peers know it.
      on_let_go: gets the number of a payload that a fetcher has let go of, in the loop's thread.
    """

    def __init__(
        self,
        service: RpcService,
        roles: frozenset[str],
        on_let_go: Callable[[int], None] = lambda bulk: None,
    ) -> None:
        self.address = ""
        self._parts: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._numbers = itertools.count(1)
        self._on_let_go = on_let_go
        service.register(READ, self._read, inline=True, roles=roles)
        service.register(LET_GO, self._let_go, inline=True, roles=roles)

    def __len__(self) -> int:
        return len(self._parts)

    def hold(self, parts: Sequence[Buffer]) -> Reference:
        """Keep these until they are freed. Nobody may write to them from now on."""
        bulk = next(self._numbers)
        views = [np.frombuffer(part, np.uint8) if memoryview(part).nbytes else np.empty(0, np.uint8) for part in parts]
        for view in views:
            view.flags.writeable = False
        self._parts[bulk] = views
        return Reference(self.address, bulk, tuple(view.nbytes for view in views))

    def free(self, bulk: int) -> None:
        """Let go of a payload; one that is gone already is fine."""
        self._parts.pop(bulk, None)

    def _read(self, bulk: int, part: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        parts = self._parts.get(bulk)
        if parts is None or not 0 <= part < len(parts):
            raise NotFoundError(None, None, f"payload {bulk} is not held here any more")
        return parts[part][offset : offset + min(length, CHUNK_BYTES)]

    def _let_go(self, bulk: int) -> None:
        self.free(bulk)
        self._on_let_go(bulk)


def fetch(client: ZmqClient, reference: Reference) -> list[bytearray]:
    """Fetch a payload, part by part; the result is the caller's own.

    Raises:
      NotFoundError: the holder has freed it.
      UnavailableError: the holder has gone.
      DeadlineExceededError: nobody answers at its address.
    """
    parts = [bytearray(size) for size in reference.sizes]
    wanted = ((number, offset) for number, size in enumerate(reference.sizes) for offset in range(0, size, CHUNK_BYTES))
    window = ByteWindow(BULK_WINDOW_BYTES)
    on_the_way: deque[tuple[int, int, StatusOrResult]] = deque()
    for number, offset in wanted:
        while not window.take(min(CHUNK_BYTES, reference.sizes[number] - offset)):
            window.arrived(_take(parts, *on_the_way.popleft()))
        asked = client.call(READ, (reference.bulk, number, offset, CHUNK_BYTES), timeout_in_ms=CHUNK_TIMEOUT_MS)
        on_the_way.append((number, offset, asked))
    while on_the_way:
        _take(parts, *on_the_way.popleft())
    return parts


def _take(parts: list[bytearray], number: int, offset: int, answer: StatusOrResult) -> int:
    """Put one chunk where it belongs; its bytes."""
    (chunk,) = answer.get_value()
    end = min(offset + CHUNK_BYTES, len(parts[number]))
    if len(chunk) != end - offset:
        raise WireError("holder", f"a chunk of {len(chunk)} bytes where {end - offset} were asked for")
    memoryview(parts[number])[offset:end] = memoryview(chunk)
    return end - offset


class Fetcher:
    """Clients to the holders that this process fetches from, one for each address. Any thread may use it.

    Clients that nobody uses are kept for the next payload, but not many: coordinators and workers come and go.

    Args:
      role: what this process is to the holders: "worker" or "submit".
    """

    def __init__(self, credentials: Credentials, role: str) -> None:
        self._credentials = credentials
        self._role = role
        self._lines: dict[str, _Line] = {}
        self._lock = threading.Lock()

    def fetch(self, reference: Reference, *, let_go: bool) -> list[bytearray]:
        """Fetch a payload and, with `let_go`, tell the holder that it may free it. Errors as `fetch`."""
        with self._client(reference.address) as client:
            parts = fetch(client, reference)
            if let_go:
                _let_go(client, reference)
            return parts

    def let_go(self, reference: Reference) -> None:
        """Tell the holder that nobody here wants a payload."""
        with self._client(reference.address) as client:
            _let_go(client, reference)

    def close(self) -> None:
        """End all clients; who uses one gets an error."""
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.client.close()

    @contextmanager
    def _client(self, address: str) -> Iterator[ZmqClient]:
        """A client for the time of the with-statement. After an error the next one begins with a new connection."""
        with self._lock:
            line = self._lines.pop(address, None)
            if line is None:
                security = self._credentials.client(address, self._role)
                line = _Line(ZmqClient(address, security=security))
            self._lines[address] = line  # the longest unused are at the front
            line.users += 1
        try:
            yield line.client
        except BaseException:
            with self._lock:
                if self._lines.get(address) is line:
                    del self._lines[address]
            raise
        finally:
            with self._lock:
                line.users -= 1
                ended = [] if self._lines.get(address) is line or line.users else [line]
                idle = [name for name, other in self._lines.items() if not other.users]
                ended += [self._lines.pop(name) for name in idle[: max(0, len(self._lines) - CLIENTS_KEPT)]]
            for each in ended:
                each.client.close()


class _Line:
    """One client, and how many threads use it at present."""

    def __init__(self, client: ZmqClient) -> None:
        self.client = client
        self.users = 0


def _let_go(client: ZmqClient, reference: Reference) -> None:
    client.call(LET_GO, (reference.bulk,), timeout_in_ms=CHUNK_TIMEOUT_MS)
