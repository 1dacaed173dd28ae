"""The transfer of messages with large parts through one connection, in either direction. Both sides
use the same code.

Rules
    Parts that amount to one chunk at most travel as frames of their message, which costs least. The
    link decides how large a chunk is, CHUNK_BYTES at most (pace.py), because on a slow link a frame
    of half a megabyte would delay a heartbeat for too long. Larger parts travel
        as a handle   of shared memory, if the other side has shown that it can open this process's memory; or else
        in chunks     between which small messages pass (bulk_machine.py).
    If the other side can open this process's memory, parts above LENT_BYTES_MIN travel as handles.
    The bytes to send belong to the message: no code changes them until the transfer is over
    (rpc/payload.py). Parts of up to CHUNK_BYTES in all are copied in `send`, so that callers need
    not know which way the parts travel.
    The sender takes a handle back if its message was not sent, if the connection is lost, or when
    the call is over. A receiver that has claimed the handle keeps the memory; a later claim is
    refused. A receiver that does not want the memory claims the handle and gives the memory back.
    A result that is the memory which the call has lent, and to which no other reference exists,
    goes back without a copy: its handle travels, with the mode RETURNED. The client keeps the lent
    blocks until the call is over, so it needs no other lease. A server does so only if the hello of
    the client has the feature `RETURNS`.
    Parts that a Call message announces as held back stay with the sender until the receiver sends
    SendParts.
    A message is delivered as a whole, when the last byte of its last part has arrived.

A process shares its memory with a peer that has sent the nonce from this process's table, because
only a process that can open the memory can know the nonce. A server sends the client's nonce in its
hello, and a client sends the server's nonce in SharedMemoryAccepted.

Not here: the meaning of the parts, and the code that uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.clock import monotonic
from zmqdist.errors import OpError, ResourceExhaustedError, WireError
from zmqdist.limits import (
    ARRAY_BYTES_MAX,
    CHUNK_BYTES,
    FRAMES_MAX,
    LENT_BYTES_MIN,
    RECEIVING_BYTES_MAX,
)
from zmqdist.messages import Call, Chunk, Credit, Message, Part, Reply, SendParts
from zmqdist.transport.bulk_machine import DONE, WRONG, Transfers, TransferState
from zmqdist.transport.calls_machine import nbytes_of
from zmqdist.transport.shm_pool import (
    EXCLUSIVE,
    RETURNED,
    Block,
    ExclusiveMemory,
    Handle,
    PeerPool,
    ShmPool,
    memory_for,
    open_peer,
    this_pool,
)
from zmqdist.wire.hello import RETURNS, Hello, host_identity

log = logging.getLogger("zmqdist.transport")

Source: TypeAlias = "bytes | memoryview | NDArray[np.uint8] | Block | ExclusiveMemory"
"""A large part to send: a flat buffer of bytes, a block of this process's pool, or in a reply the
memory that the peer has lent for the call."""
Frames: TypeAlias = Sequence[Any]
Allocator: TypeAlias = "Callable[[list[int]], list[Any]]"
"""A function that returns a flat writable array for each size, or any object for a size of 0. It
may raise OpError or MemoryError."""
OnArrived: TypeAlias = "Callable[[list[Any] | None, str], object]"
"""A function that is called with the parts of a message and "" or, if the parts did not arrive,
with None and the reason."""

_HANDLE_NUMBERS = 8
_IN_SHARED_MEMORY = frozenset({Block, ExclusiveMemory})


def is_large(sources: Sequence[Source], lends: bool) -> bool:
    """Return whether these parts should not travel as frames of their message even on a fast link.

    Args:
      lends: whether the peer can open this process's shared memory.
    """
    return nbytes_of(sources) > (LENT_BYTES_MIN if lends else CHUNK_BYTES)


def announced_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes of all parts of a received message, as its sender has announced them."""
    return sum(
        max(0, part[0] if len(part) == 1 else part[4])
        for part in parts
        if len(part) in (1, _HANDLE_NUMBERS)
    )


def allocate_fresh(sizes: list[int]) -> list[Any]:
    """Return an array of private memory for each size, and None for a size of 0. This is the usual
    Allocator."""
    return [memory_for(size) if size else None for size in sizes]


class BulkChannel:
    """The large parts that travel through one connection. One thread at a time uses the channel.
    The connection's owner calls `connection_lost`.

    Attributes:
      transfers: the chunks that are on the way, in either direction. While `transfers.sending`, a
        thread must read the peer's Credit and SendParts messages, which permit the next chunks.
      shares_memory: whether the peer can open this process's shared memory. Any thread may read it.
      tracked: the transfers that are on the way, by the number of their call; empty while the
        connection carries only small messages.
      faults: number of messages from the peer that broke the protocol.
    """

    def __init__(
        self,
        peer: str,
        send_message: Callable[[Message, Frames], bool],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Make the channel of a new connection.

        Args:
          send_message: a function that sends a message without waiting, and returns False if the
            connection is lost.
        """
        self.shares_memory = False
        self.transfers = Transfers()
        self.tracked = self.transfers.tracked
        self.faults = 0
        self._peer = peer
        self._send_message = send_message
        self._clock = clock
        self._returns = False
        self._pool: ShmPool | None = None
        self._peer_pool: PeerPool | None = None

    # -- shared memory -----------------------------------------------------------------------------

    def open_offered_memory(self, hello: Hello) -> int:
        """Open the shared memory that the peer's hello offers. Return the nonce to send to the
        peer; 0 if the memory cannot be opened."""
        if hello.memory is None or hello.host != host_identity() or this_pool() is None:
            return 0
        self._returns = RETURNS in hello.features
        self._peer_pool = open_peer(hello.memory)
        if self._peer_pool is None:
            log.info(
                "cannot open the shared memory of %s; large arrays travel by the socket", self._peer
            )
            return 0
        return int(self._peer_pool.nonce)

    def memory_accepted(self, nonce: int) -> None:
        """Record the nonce that the peer has sent. The right nonce proves that the peer can open
        this process's memory."""
        self._pool = this_pool()
        self.shares_memory = self._pool is not None and nonce == self._pool.nonce

    def call_of(self, id: int) -> object:
        """Return an object that identifies a call of this peer; None if the reply to the call may
        not return the call's memory."""
        return (self.transfers, id) if self._returns else None

    # -- out ---------------------------------------------------------------------------------------

    @property
    def undelivered(self) -> int:
        """Bytes of chunks that are unsent or not acknowledged, plus 1 for each handle that the peer
        has not claimed. The value is 0 when all large parts have reached the peer.
        """
        pool = self._pool
        handles = [handle for transfer in self.tracked.values() for handle in transfer.lent]
        return self.transfers.bytes_left + (
            0 if pool is None else sum(map(pool.is_unclaimed, handles))
        )

    def send(self, message: Call | Reply, sources: Sequence[Source]) -> bool:
        """Send a message with its parts, in the cheapest way. Return False if nothing was sent,
        because the connection is lost."""
        nbytes = nbytes_of(sources)
        if nbytes <= CHUNK_BYTES and not (
            self.shares_memory and not _IN_SHARED_MEMORY.isdisjoint(map(type, sources))
        ):
            plain: list[Any] = [
                source.array() if isinstance(source, (Block, ExclusiveMemory)) else source
                for source in sources
            ]
            # as frames of the message they cost least, and delay no heartbeat
            if nbytes <= self.transfers.pace.chunk_bytes:
                return self._send_message(message, plain)
            # copied, so that callers need not know which way the parts travel
            sources = [bytes(source) for source in plain]
        handles: list[Handle] = []
        blocks: list[Any] = []
        buffers: list[Any] = []
        parts: list[Part] = []
        for source in sources:
            if isinstance(source, ExclusiveMemory):
                assert source.handle is not None
                buffers.append(None)
                parts.append((*source.handle[:-1], RETURNED))
                continue
            handle = source.lend() if isinstance(source, Block) and self.shares_memory else None
            if handle is not None:
                handles.append(handle)
                blocks.append(source)
                buffers.append(None)
                parts.append(handle)
            else:
                view = memoryview(source.array() if isinstance(source, Block) else source)  # type: ignore[arg-type]
                buffers.append(view)
                parts.append((view.nbytes,))
        message.parts = tuple(parts)
        if not self._send_message(message, ()):
            self._take_back(handles)
            return False
        if self.tracked:
            self._forget_claimed()
            # if a faulty peer uses the number of a call twice, this ends the earlier transfer
            self.call_ended(message.id)
        sizes = [0 if view is None else view.nbytes for view in buffers]
        if not handles and not any(sizes):
            return True
        transfer = self.transfers.send(
            message.id, sizes, handles, held=type(message) is Call and message.held
        )
        transfer.buffers = buffers
        if type(message) is Call:
            transfer.blocks = blocks
        self._send_chunks()
        return True

    def send_held_parts(self, message: SendParts) -> None:
        """Send the parts that a call holds back, because the peer has room for them now. Do nothing
        if the call is over."""
        self.transfers.ask(message.id)
        self._send_chunks()

    def credited(self, message: Credit) -> None:
        """Record that the peer has taken chunks out of its queue, and send the next chunks."""
        self.faults += not self.transfers.pace.acknowledged(message.nbytes, self._clock())
        self._send_chunks()

    def _send_chunks(self) -> None:
        while (piece := self.transfers.next_chunk(self._clock())) is not None:
            transfer, part, offset, nbytes = piece
            if not self._send_message(
                Chunk(transfer.id, part, offset),
                (transfer.buffers[part][offset : offset + nbytes],),
            ):
                return  # the connection is lost, and its owner will notice
            if transfer.state is not TransferState.SENDING:
                transfer.buffers = []

    # -- in ----------------------------------------------------------------------------------------

    def receive(
        self, id: int, parts: Sequence[Part], allocate: Allocator, on_arrived: OnArrived
    ) -> list[Any] | None:
        """Return the parts of a message that has arrived. Return None if chunks are still awaited;
        then `on_arrived` gets the parts later, unless the call ends first.

        Raises:
          WireError: the announced parts break the protocol.
          UnavailableError: the owner of lent memory has taken it back, or has ended.
          ResourceExhaustedError: with these parts, this side would await more than
            RECEIVING_BYTES_MAX bytes.
          OpError, MemoryError: `allocate` has raised this error.
        """
        sizes = self._sizes(id, parts)
        # a peer could announce more memory than it ever fills
        if self.transfers.announced + sum(sizes) > RECEIVING_BYTES_MAX:
            raise ResourceExhaustedError(
                f"{self._peer} has announced more than {RECEIVING_BYTES_MAX} bytes that have not "
                f"arrived: send fewer at a time"
            )
        frames = allocate(sizes)
        for number, part in enumerate(parts):
            if not sizes[number]:
                frames[number] = self._attach(part, id)
        if not any(sizes):
            self.transfers.stop_sending(id)
            return frames
        transfer = self.transfers.receive(id, sizes)
        transfer.buffers, transfer.on_arrived = frames, on_arrived
        return None

    def decline(self, parts: Sequence[Part]) -> None:
        """Give back the lent memory of a message that this side does not want."""
        for part in parts:
            with suppress(OpError):  # the owner has taken the memory back already
                if len(part) == _HANDLE_NUMBERS and part[-1] != RETURNED:
                    self._attach(part, 0)

    def chunk_arrived(self, message: Chunk, frames: Frames) -> None:
        """Store a chunk if its transfer still needs it, and acknowledge it in any case."""
        id, part, offset = message.id, message.part, message.offset
        nbytes = len(frames[0]) if len(frames) == 1 else 0
        transfer = self.tracked.get(id)
        if transfer is not None and 0 < nbytes <= self.transfers.room_at(id, part, offset):
            transfer.buffers[part][offset : offset + nbytes] = np.frombuffer(frames[0], np.uint8)
        outcome = self.transfers.arrived(id, part, offset, nbytes)
        credit = self.transfers.credit_after(nbytes)
        if credit:
            self._send_message(Credit(credit), ())
        if transfer is not None and outcome in (DONE, WRONG):
            self.faults += outcome == WRONG
            end, transfer.on_arrived = transfer.on_arrived, None
            whole, transfer.buffers = transfer.buffers, []
            end(whole if outcome == DONE else None, self.transfers.problem)

    def _sizes(self, id: int, parts: Sequence[Part]) -> list[int]:
        """Check the announced parts. Return the bytes of each part that travels in chunks, and 0
        for each part in shared memory."""
        sizes = [part[0] if len(part) == 1 else 0 for part in parts]
        if len(parts) >= FRAMES_MAX or any(
            not 0 < part[0] <= ARRAY_BYTES_MAX if len(part) == 1 else len(part) != _HANDLE_NUMBERS
            for part in parts
        ):
            raise WireError(self._peer, "a message announces parts of impossible sizes")
        if self.transfers.is_receiving(id):
            raise WireError(self._peer, "a message announces parts that were announced before")
        return sizes

    def _attach(self, part: Part, id: int) -> Any:
        if self._peer_pool is None:
            raise WireError(
                self._peer, "a handle of shared memory from a peer that has offered none"
            )
        if part[-1] == RETURNED:
            return self._peer_pool.returned(self._taken_back(part, id))
        array: Any = self._peer_pool.attach(part)  # type: ignore[arg-type]
        if isinstance(array.base, ExclusiveMemory):
            array.base.call = self.call_of(id)
        return array

    def _taken_back(self, part: Part, id: int) -> Block:
        """Return the block of a handle that was lent for this call, once."""
        transfer = self.tracked.get(id)
        if transfer is not None:
            for block, handle in zip(transfer.blocks, transfer.lent, strict=False):
                if block is not None and handle == (*part[:-1], EXCLUSIVE):
                    transfer.blocks[transfer.blocks.index(block)] = None
                    return block  # type: ignore[no-any-return]
        raise WireError(self._peer, "a reply returns memory that its call has not lent")

    # -- ends --------------------------------------------------------------------------------------

    def call_ended(self, id: int) -> bool:
        """End the transfers of a call. Return whether this side must inform the peer that the call
        is over, because the peer still sends or awaits parts.
        """
        transfer = self.tracked.get(id)
        if transfer is not None:
            self._take_back(transfer.lent)
        unfinished = self.transfers.end(id)
        if owed := self.transfers.idle_credit():
            self._send_message(Credit(owed), ())
        return unfinished

    def connection_lost(self) -> None:
        """End all transfers, because the connection is lost, and close the peer's shared memory.

        This channel and its owner refer to each other, so without the second step only the garbage
        collector would close it.
        """
        self.shares_memory = False
        for id, transfer in list(self.tracked.items()):
            self._take_back(transfer.lent)
            self.transfers.end(id)
        self._peer_pool = None

    def finalize(self) -> None:
        """End all transfers from a finalizer. The next use of the shared-memory pool takes the
        handles back. The channel is not used afterwards.
        """
        for transfer in self.tracked.values():
            for handle in transfer.lent:
                assert self._pool is not None
                self._pool.to_take_back.append(handle)
        self._peer_pool = None
        self.transfers = Transfers()
        self.tracked = self.transfers.tracked

    def _take_back(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            assert self._pool is not None
            self._pool.take_back(handle)

    def _forget_claimed(self) -> None:
        """Forget the transfers whose handles were all claimed. A server gets no other sign that a
        client has received its reply."""
        for id, transfer in list(self.tracked.items()):
            if transfer.state is TransferState.LENT:
                assert self._pool is not None
                if not any(map(self._pool.is_unclaimed, transfer.lent)):
                    self.transfers.end(id)
