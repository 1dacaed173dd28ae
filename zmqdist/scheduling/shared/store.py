"""The store of a process: payloads that are too large for a message, held by the process that made
them until they are freed.

Rules
    The store holds snapshots, which do not change, in blocks of shared memory if possible,
    otherwise in memory of the process. The same bytes are held once, even if they are handed in
    again and again, so that a large array for many work items is copied once. The store compares
    the bytes each time, because the caller may have changed them. It compares them with the last
    snapshot of the same address in the caller's memory. It also compares them with the last part
    that has the same first and last bytes, because a pickle is at a different address each time. A
    frozen array is identified by its address alone.
    A process that needs a part maps the part (fetch.py), requests it from the holder, or has the
    dispatcher read it in ranges.

Not here: how long a payload is needed. The owner of the store decides that and calls `free`.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import NOT_FOUND, NotFoundError
from zmqdist.limits import CHUNK_BYTES, INLINE_BYTES_MAX
from zmqdist.messages import Read, ReadDone
from zmqdist.rpc import payload
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.scheduling.shared.references import Held, Memory, Reference
from zmqdist.transport import memory_limits, shm_pool
from zmqdist.transport.shm_pool import Block, Handle, this_pool

Part: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.uint8] | Block"

READ = "zmqdist_bulk_read"
"""Each holder's RPC method (bulk) -> bytes. These are the bytes of the part with this number."""
RECENT_MAX = 128
"""How many keys the store remembers, each with the last snapshot that had this key. A key is an
address, or the first and last bytes of a part."""

ENDS_BYTES = 64
"""The number of bytes at each end of a part that form a key. It is small, because these bytes are
copied for each comparison."""


class Holdings(NamedTuple):
    """The parts that a store holds at one moment.

    Attributes:
      parts: the number of arrays and other large parts.
      bytes: the total size of the parts.
      copies: how often a part was copied since the store was made. Frozen arrays and shared blocks
        are not copied.
    """

    parts: int
    bytes: int
    copies: int


class _Entry:
    """One held part. `uses` counts the references to the part, which is freed when the count is
    0.
    """

    __slots__ = ("block", "bytes", "handle", "nbytes", "uses")

    def __init__(self, part: NDArray[np.uint8] | Block, handle: Handle | None) -> None:
        self.block = part if isinstance(part, Block) else None
        self.bytes = None if isinstance(part, Block) else part
        self.nbytes = part.nbytes
        self.handle = handle
        self.uses = 1

    def view(self) -> NDArray[np.uint8]:
        if self.bytes is None:
            assert self.block is not None
            self.bytes = self.block.array()
        return self.bytes


class BulkStore:
    """The parts that this process holds. Any thread may call the methods.

    Args:
      service: the RPC service at which the store registers the method READ, before the service
        starts.
      roles: the roles that may call READ.
      number: a random number that identifies this store.

    Attributes:
      address: "host:port" of the service, as its peers know it; set before the first `hold`.
      holder: the name of the task that owns the store, for error texts of other processes; ""
        without a name.
      key: the public key of the service; empty without CURVE.
      memory: how other processes open the shared memory of this process; None without shared
        memory.
      copies: how often a part was copied.
    """

    def __init__(self, service: RpcService, roles: frozenset[str], number: int) -> None:
        self.address = ""
        self.holder = ""
        self.key = b""
        self.number = number
        self.copies = 0
        self._pool = this_pool()
        self.memory: Memory | None = (
            None if self._pool is None else (*self._pool.offer, self._pool.nonce)
        )
        self._entries: dict[int, _Entry] = {}
        self._recent: OrderedDict[tuple[int | bytes, int], int] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        service.register_later(READ, self._send_part, roles=roles)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def holdings(self) -> Holdings:
        """An immutable record of the parts that the store holds now."""
        with self._lock:
            return Holdings(
                len(self._entries),
                sum(entry.nbytes for entry in self._entries.values()),
                self.copies,
            )

    def hold(
        self, parts: Sequence[Part], *, shared: bool, inline_max: int = INLINE_BYTES_MAX
    ) -> Reference:
        """Hold the parts of a payload until they are freed, and return the reference to send.

        Large parts are copied, except frozen arrays and blocks of shared memory, which must not
        change any more. Small parts are sent inside the reference.

        Args:
          shared: whether any number of processes may map the parts, each with private pages. If
            False, a single process may map the parts, and then owns them.
          inline_max: the number of bytes, for all parts together, that may be sent inside the
            reference.

        Raises:
          ResourceExhaustedError: there is not enough memory for a copy. No part is held then.
        """
        held_parts: list[bytes | Held] = []
        room = inline_max
        try:
            for part in parts:
                size = part.nbytes if isinstance(part, Block) else memoryview(part).nbytes  # type: ignore[arg-type]
                if size <= room and not isinstance(part, Block):
                    held_parts.append(bytes(part))
                    room -= size
                else:
                    held_parts.append(self._hold(part, size, shared))
        except BaseException:
            self.free([part.bulk for part in held_parts if isinstance(part, Held)])
            raise
        return Reference(
            self.number, self.address, self.memory, tuple(held_parts), self.holder, self.key
        )

    def keep(self, part: NDArray[np.uint8] | Block, *, shared: bool = True) -> Held:
        """Hold one part without a copy. The caller must not change the part any more. `shared` has
        the same meaning as for `hold`."""
        handle = None
        if isinstance(part, Block):
            handle = part.publish() if shared else part.lend()
        with self._lock:
            bulk = next(self._numbers)
            self._entries[bulk] = _Entry(part, handle)
        return Held(bulk, part.nbytes, handle)

    def view(self, bulk: int) -> NDArray[np.uint8]:
        """Return the bytes of a part, which the caller must not change. Raises NotFoundError if the
        part was freed."""
        entry = self._entries.get(bulk)
        if entry is None:
            raise NotFoundError(f"payload {bulk} is no longer held here: its owner has freed it")
        return entry.view()

    def free(self, bulks: Sequence[int]) -> None:
        """Drop one reference to each of these parts. Parts that were freed already are ignored."""
        with self._lock:
            for bulk in bulks:
                entry = self._entries.get(bulk)
                if entry is None:
                    continue
                entry.uses -= 1
                if not entry.uses:
                    del self._entries[bulk]
                    self._end(entry)

    def hold_again(self, bulks: Sequence[int]) -> None:
        """Add one reference to each of these parts. A call of `free` drops it again. Parts that
        were freed already are ignored."""
        with self._lock:
            for bulk in bulks:
                entry = self._entries.get(bulk)
                if entry is not None:
                    entry.uses += 1

    def holds(self, bulk: int) -> bool:
        return bulk in self._entries

    def size_of(self, bulk: int) -> int:
        """Return the size of a part in bytes; 0 if the part was freed."""
        entry = self._entries.get(bulk)
        return 0 if entry is None else entry.nbytes

    def close(self) -> None:
        """Free all parts. Processes that have mapped a part keep their mapping."""
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        if entry.handle is not None and self._pool is not None:
            self._pool.take_back(entry.handle)

    def read_reply(self, read: Read) -> tuple[ReadDone, list[memoryview]]:
        """Return this process's reply to a Read, which the dispatcher has sent on behalf of another
        process."""
        try:
            first, length = max(0, read.offset), min(max(0, read.length), CHUNK_BYTES)
            piece = self.view(read.bulk)[first : first + length]
            return ReadDone(read.request, 0, ""), [memoryview(piece)]  # type: ignore[arg-type]
        except NotFoundError as error:
            return ReadDone(read.request, NOT_FOUND, error.message), []

    def _hold(self, part: Part, size: int, shared: bool) -> Held:
        if isinstance(part, Block):
            return self.keep(part, shared=shared)
        source = np.frombuffer(part, np.uint8)
        frozen = None if self._pool is None else self._pool.find_frozen(source)
        address = shm_pool.address_of(source)
        if not shared:
            # the borrower may write to this part, so it cannot stand for a later part with the same
            # bytes
            return self.keep(
                self._snapshot(part, source) if frozen is None else frozen, shared=False
            )
        keys: list[tuple[int | bytes, int]] = [(address, size)]
        if frozen is None:
            keys.append((source[:ENDS_BYTES].tobytes() + source[-ENDS_BYTES:].tobytes(), size))
        for bulk in dict.fromkeys(map(self._recent.get, keys)):
            held = self._held_before(bulk, address, frozen)
            if held is not None:
                return held
        held = self.keep(self._snapshot(part, source) if frozen is None else frozen)
        with self._lock:
            for key in keys:
                self._recent[key] = held.bulk
                self._recent.move_to_end(key)
            while len(self._recent) > RECENT_MAX:
                self._recent.popitem(last=False)
        return held

    def _held_before(self, bulk: int | None, address: int, frozen: Block | None) -> Held | None:
        """Add a reference to the part `bulk` and return the part, if its bytes are equal to those
        at `address`. Otherwise return None."""
        with self._lock:
            entry = None if bulk is None else self._entries.get(bulk)
            if bulk is None or entry is None:
                return None
            # this reference keeps other threads from freeing the part during the comparison
            entry.uses += 1
        if frozen is None:
            same = shm_pool.same_bytes(address, shm_pool.address_of(entry.view()), entry.nbytes)
        else:
            same = entry.block is not None and entry.block.shows_same(frozen)
        if same:
            return Held(bulk, entry.nbytes, entry.handle)
        self.free([bulk])
        return None

    def _snapshot(self, part: Any, source: NDArray[np.uint8]) -> NDArray[np.uint8] | Block:
        block = None if self._pool is None else self._pool.copy_in(source)
        self.copies += 1
        if block is not None:
            return block
        if isinstance(part, bytes):
            return source
        purpose = "a copy of a large array outside of shared memory"
        memory_limits.check_room(source.nbytes, purpose)
        try:
            copy: NDArray[np.uint8] = source.copy()
        except MemoryError:
            raise memory_limits.memory_exhausted(source.nbytes, purpose) from None
        return copy

    def _send_part(self, call: PendingCall, bulk: int) -> None:
        """Reply to READ with a whole part, without a copy, because a held part does not change."""
        body, parts = payload.pack(self.view(bulk))
        call.reply_packed(body, parts)
