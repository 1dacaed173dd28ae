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
    A process that needs a part maps the part (Fetcher), requests it from the holder, or has the
    dispatcher read it in ranges.

Not here: how long a payload is needed. The owner of the store decides that and calls `free`.

The Fetcher gets the parts of a payload from their holder, the process that holds them
    A part in shared memory of this host is mapped: no byte is copied, and the holder gets no
    request.
    Any other part is the reply to one request to the holder, and is received into memory that was
    allocated once. If this process cannot reach the holder (for example behind a router), the
    dispatcher reads the part in ranges over the holder's own connection. The size of the ranges
    adapts to the speed of the connection (transport/pace.py).
    A transfer during which bytes arrive has no time limit. A holder from which nothing has arrived
    for STALLED_S counts as lost. The caller of Fetcher owns the returned parts and may write to
    them, except to the memory of frozen arrays.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from _thread import get_ident
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.limits import BULK_WINDOW_BYTES, CHUNK_BYTES, INLINE_BYTES_MAX
from zmqdist.messages import Read, ReadDone
from zmqdist.rpc import internal_client, payload
from zmqdist.rpc.client import StatusOrResult, ZmqClient
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.scheduling.shared.references import Held, Memory, Reference
from zmqdist.transport import memory_limits, shm_pool
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.pace import Pace
from zmqdist.transport.shm_pool import Block, Handle, PeerPool, open_peer, this_pool

log = logging.getLogger("zmqdist.scheduling")

Part: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.uint8] | Block"

READ = "zmqdist_bulk_read"
"""Each holder's RPC method (bulk) -> bytes. These are the bytes of the part with this number."""
UNCHANGED_MAX = 4
"""How many parts of `unchanged` the store remembers, and keeps alive."""
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
        # by thread, the parts that it holds in `unchanged`, by address and size
        self._unchanged: dict[int, OrderedDict[tuple[int, int], tuple[Part, Held]]] = {}
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

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context manager in which no part changes that this thread holds, so that it need
        not be compared when it is held again."""
        parts = self._unchanged[get_ident()] = OrderedDict()
        try:
            yield
        finally:
            del self._unchanged[get_ident()]
            self.free([held.bulk for _, held in parts.values()])

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
            raise errors.NotFoundError(
                f"payload {bulk} is no longer held here: its owner has freed it"
            )
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
        except errors.NotFoundError as error:
            return ReadDone(read.request, errors.NOT_FOUND, error.message), []

    def _hold(self, part: Part, size: int, shared: bool) -> Held:
        if isinstance(part, Block):
            return self.keep(part, shared=shared)
        source = np.frombuffer(part, np.uint8)
        frozen = None if self._pool is None else self._pool.find_frozen(source)
        if not shared:
            # the borrower may write to this part, so it cannot stand for a later part with the same
            # bytes
            return self.keep(
                self._snapshot(part, source) if frozen is None else frozen, shared=False
            )
        address, unchanged = shm_pool.address_of(source), self._unchanged.get(get_ident())
        if unchanged is None:
            return self._hold_equal(part, source, frozen)
        if (address, size) in unchanged:
            _, held = unchanged[address, size]
        else:
            held = self._hold_equal(part, source, frozen)
            # while `part` is alive, no other part can have its address
            unchanged[address, size] = (part, held)
            if len(unchanged) > UNCHANGED_MAX:
                self.free([unchanged.popitem(last=False)[1][1].bulk])
        self.hold_again([held.bulk])
        return held

    def _hold_equal(self, part: Part, source: NDArray[np.uint8], frozen: Block | None) -> Held:
        """Hold a part for any number of processes, and copy it only if no part with the same bytes
        is held."""
        address, size = shm_pool.address_of(source), source.nbytes
        keys: list[tuple[int | bytes, int]] = [(address, size)]
        if frozen is None:
            keys.append((source[:ENDS_BYTES].tobytes() + source[-ENDS_BYTES:].tobytes(), size))
        for bulk in dict.fromkeys(map(self._recent.get, keys)):
            equal_part = self._held_before(bulk, address, frozen)
            if equal_part is not None:
                return equal_part
        equal_part = self.keep(self._snapshot(part, source) if frozen is None else frozen)
        with self._lock:
            for key in keys:
                self._recent[key] = equal_part.bulk
                self._recent.move_to_end(key)
            while len(self._recent) > RECENT_MAX:
                self._recent.popitem(last=False)
        return equal_part

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
            is_equal = shm_pool.same_bytes(address, shm_pool.address_of(entry.view()), entry.nbytes)
        else:
            is_equal = entry.block is not None and entry.block.shows_same(frozen)
        if is_equal:
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


RELAY = "zmqdist_bulk_relay"
"""The dispatcher's RPC method (store, bulk, offset, length) -> bytes. The dispatcher reads these
bytes from the holder."""

STALLED_S = 20.0
"""Seconds of silence after which a holder counts as lost."""

POLL_S = 1.0
"""Seconds between two checks whether bytes have arrived and whether the payload is still wanted."""

REACH_S = 3.0
"""Seconds without a reply to the first small request after which this process counts a holder as
unreachable."""

UNREACHABLE_S = 60.0
"""Seconds for which an unreachable address is not tried again."""

CLIENTS_KEPT = 8
"""The largest number of idle connections to holders that a process keeps open. Each takes four
descriptors."""

PEER_POOLS_KEPT = 64
"""The largest number of processes whose shared memory is kept open. Each takes a descriptor and a
page table."""


class LocalMemories:
    """The shared memory of holders on this host, kept open between fetches. Any thread may call the
    methods."""

    def __init__(self) -> None:
        self._peer_pools: OrderedDict[int, PeerPool | None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of holders whose memory is open."""
        return sum(peer_pool is not None for peer_pool in list(self._peer_pools.values()))

    def attach(self, reference: Reference) -> list[Any]:
        """Return the parts of a payload: mapped parts where possible, and a `Held` for each other
        part."""
        return [
            self._part(reference, part) if isinstance(part, Held) else part
            for part in reference.parts
        ]

    def _part(self, reference: Reference, part: Held) -> Any:
        peer_pool = self._peer_pool(reference) if part.handle is not None else None
        if peer_pool is None or part.handle is None:
            return part
        try:
            return peer_pool.attach(part.handle)
        except errors.OpError as error:
            # The part was freed, or its holder has ended. The caller's request to the holder will
            # show which of the two is the case.
            log.debug("part %d of %s: %s", part.bulk, reference.address, error)
            return part

    def _peer_pool(self, reference: Reference) -> PeerPool | None:
        if reference.store not in self._peer_pools:
            for store, peer_pool in list(self._peer_pools.items()):
                if peer_pool is not None and not peer_pool.alive:
                    # Arrays over this memory stay valid: the memory is unmapped when the last array
                    # over it is garbage-collected.
                    self._peer_pools.pop(store, None)
            self._peer_pools[reference.store] = self._open(reference)
            if len(self._peer_pools) > PEER_POOLS_KEPT:
                self._peer_pools.popitem(last=False)
        return self._peer_pools.get(reference.store)

    def _open(self, reference: Reference) -> PeerPool | None:
        """Open a holder's memory. Return None if it cannot be opened, or if its nonce is not the
        nonce in the reference: then a process on this host has the same numbers as the holder,
        which is on another host."""
        if reference.memory is None:
            return None
        *offer, nonce = reference.memory
        peer_pool = open_peer((offer[0], offer[1], offer[2]))
        return peer_pool if peer_pool is not None and peer_pool.nonce == nonce else None


class HolderClients:
    """Connections to holders, one connection for each address. Any thread may use them.

    At most CLIENTS_KEPT idle connections are kept open for later payloads, because otherwise
    connections to processes that have left would pile up.

    Args:
      role: the role of this process at the holders: "worker" or "submit".
    """

    def __init__(self, credentials: Credentials, role: str) -> None:
        self._credentials = credentials
        self._role = role
        self._holders: dict[tuple[str, bytes], Holder] = {}
        self._unreachable: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._holders)

    @property
    def unreachable(self) -> list[str]:
        """The addresses that are not tried for now, because no holder has replied there lately."""
        now = time.monotonic()
        with self._lock:
            return [address for address, until in self._unreachable.items() if until > now]

    def close(self) -> None:
        """Close all connections. Fetches in progress and later ones fail with UnavailableError."""
        with self._lock:
            self._closed = True
            holders, self._holders = list(self._holders.values()), {}
        for holder in holders:
            holder.client.close()

    @contextmanager
    def use(self, address: str, key: bytes = b"") -> Iterator[Holder]:
        """Yield the connection to an address, for a with-statement. Blocks up to REACH_S when the
        connection is new.

        After an error in the with-statement the connection is closed, and the next `use` makes a
        new connection.

        Args:
          key: the public key of the process at the address, for example from a reference; empty for
            the dispatcher and without CURVE.

        Raises:
          Unreachable: no process replies at this address.
          UnauthenticatedError: `key` does not belong to this cluster, or the process at the address
            has another key.
        """
        endpoint = address, key
        with self._lock:
            if self._closed:
                raise errors.UnavailableError("this process has closed its connections")
            if self._unreachable.get(address, 0.0) > time.monotonic():
                raise Unreachable(f"no process replies at {address}")
            holder = self._holders.pop(endpoint, None)
            if holder is None:
                security = self._credentials.client(address, self._role, key)
                holder = Holder(ZmqClient(address, security=security))
            # Insert the connection at the end, so that the least recently used connections are
            # first.
            self._holders[endpoint] = holder
            holder.users += 1
        try:
            self._reach(holder, address)
            yield holder
        except BaseException:
            with self._lock:
                if self._holders.get(endpoint) is holder:
                    del self._holders[endpoint]
            raise
        finally:
            with self._lock:
                holder.users -= 1
                closing_holders = (
                    [] if self._holders.get(endpoint) is holder or holder.users else [holder]
                )
                idle = [
                    name for name, idle_holder in self._holders.items() if not idle_holder.users
                ]
                closing_holders += [
                    self._holders.pop(name)
                    for name in idle[: max(0, len(self._holders) - CLIENTS_KEPT)]
                ]
            for closing_holder in closing_holders:
                closing_holder.client.close()

    def _reach(self, holder: Holder, address: str) -> None:
        if holder.reached:
            return
        try:
            internal_client.reach(holder.client, time.monotonic() + REACH_S)
        except internal_client.NotListeningError:
            # A holder listens before other processes know its address, so this holder has ended.
            raise Unreachable(
                f"no process listens at {address}: the connection was refused"
            ) from None
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            raise self._note_unreachable(address, error.message) from None
        holder.reached = True

    def _note_unreachable(self, address: str, reason: str) -> Unreachable:
        """Record that an address cannot be reached, so that it is not tried for UNREACHABLE_S.
        Return the error to raise."""
        with self._lock:
            self._unreachable[address] = time.monotonic() + UNREACHABLE_S
        log.warning(
            "the data port %s cannot be reached from %s (%s): for the next %g s large payloads "
            "from that port go through the dispatcher, "
            "which is slower; open that port between the two hosts",
            address,
            socket.gethostname(),
            reason,
            UNREACHABLE_S,
        )
        return Unreachable(f"no process replies at {address}: {reason}")


class Unreachable(errors.UnavailableError):
    """This process cannot reach the holder. The dispatcher may still reach it."""


class Holder:
    """A connection to one holder, or to the dispatcher.

    Attributes:
      users: the number of threads that use the connection now.
      reached: whether the holder has replied once.
    """

    def __init__(self, client: ZmqClient) -> None:
        self.client = client
        self.users = 0
        self.reached = False


class Fetcher:
    """Fetches the payloads that one process needs. Any thread may call the methods.

    Args:
      role: the role of this process at the holders: "worker" or "submit".
      dispatcher: the dispatcher's address, for holders that this process cannot reach.
    """

    def __init__(self, credentials: Credentials, role: str, dispatcher: str) -> None:
        self.memories = LocalMemories()
        self.clients = HolderClients(credentials, role)
        self._dispatcher = dispatcher

    def close(self) -> None:
        self.clients.close()

    def fetch(self, reference: Reference, needed: Callable[[], bool] = lambda: True) -> list[Any]:
        """Return the parts of a payload. Blocks while bytes arrive. Does not free the payload at
        its holder.

        Args:
          wanted: returns whether the payload is still needed; called about once a second.

        Raises:
          CancelledError: `wanted` returned False.
          NotFoundError: the holder has freed the payload.
          UnavailableError: the holder has ended, or neither this process nor the dispatcher can
            reach it.
          DeadlineExceededError: the holder has stopped replying.
        """
        parts = self.memories.attach(reference)
        far = [index for index, part in enumerate(parts) if isinstance(part, Held)]
        if far:
            buffers = [np.empty(parts[index].size, np.uint8) for index in far]
            self.read(reference, [parts[index] for index in far], buffers, needed)
            for index, buffer in zip(far, buffers, strict=True):
                parts[index] = buffer
        return parts

    def read(
        self,
        reference: Reference,
        held_parts: Sequence[Held],
        into: Sequence[NDArray[np.uint8]],
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Read these parts into arrays of the same sizes. Raises the errors of `fetch`."""
        try:
            with self.clients.use(reference.address, reference.key) as holder:
                read_parts(holder.client, held_parts, into, needed)
                return
        except Unreachable as error:
            unreachable = error
        try:
            with self.clients.use(self._dispatcher) as holder:
                _read_by_relay(holder.client, reference.store, held_parts, into)
        except errors.NotFoundError:
            raise
        except errors.OpError as error:
            raise errors.UnavailableError(
                f"{unreachable.message}; and through the dispatcher: {error.message}"
            ) from None


def read_parts(
    client: ZmqClient,
    held_parts: Sequence[Held],
    into: Sequence[NDArray[np.uint8]],
    needed: Callable[[], bool] = lambda: True,
) -> None:
    """Read parts from their holder, with one RPC call for each part. The reply for a part is
    received into the part's array in `into`.

    Raises:
      OpError: the error with which a call ended.
      DeadlineExceededError: nothing has arrived for STALLED_S.
      CancelledError: `wanted` returned False.
    """
    calls = [
        internal_client.start(client, READ, part.bulk, out=buffer, waits_for_server=False)
        for part, buffer in zip(held_parts, into, strict=True)
    ]
    try:
        for call in calls:
            _wait(client, call, needed)
            call.get_value()
    finally:
        for call in calls:
            call.cancel()


def _wait(client: ZmqClient, call: StatusOrResult, needed: Callable[[], bool]) -> None:
    """Wait until an RPC call has ended. Silence is counted in polls, so that time in which this
    process is stopped does not count."""
    end_event = threading.Event()
    call.add_done_callback(lambda _: end_event.set())
    received, silent_s = -1, 0.0
    while not end_event.wait(POLL_S):
        if not needed():
            raise errors.CancelledError("this payload is no longer needed")
        received, before = client.snapshot().messages_received, received
        silent_s = 0.0 if received != before else silent_s + POLL_S
        if silent_s >= STALLED_S:
            raise errors.DeadlineExceededError(
                f"no bytes have arrived from {client.address} for {STALLED_S:g} s"
            )


def _read_by_relay(
    client: ZmqClient, store: int, held_parts: Sequence[Held], into: Sequence[NDArray[np.uint8]]
) -> None:
    """Read parts in ranges through the dispatcher. Raises the error of an RPC call that failed."""
    pace = Pace(BULK_WINDOW_BYTES, CHUNK_BYTES)
    on_the_way: deque[tuple[int, StatusOrResult]] = deque()
    for part, whole in zip(held_parts, into, strict=True):
        offset = 0
        while offset < part.size:
            buffer = whole[offset : offset + pace.chunk_bytes]
            if not pace.fits(buffer.nbytes):
                nbytes, call = on_the_way.popleft()
                call.get_value()
                pace.acknowledged(nbytes, time.monotonic())
                continue
            pace.sent(buffer.nbytes, time.monotonic())
            due = time.monotonic() + STALLED_S
            call = internal_client.start(
                client, RELAY, store, part.bulk, offset, buffer.nbytes, due=due, out=buffer
            )
            on_the_way.append((buffer.nbytes, call))
            offset += buffer.nbytes
    for _, call in on_the_way:
        call.get_value()
