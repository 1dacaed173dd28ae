"""How the large parts of messages travel by one connection, whichever end this is.

Rules
    Up to a chunk in all they are frames of their message, which costs least. How much a chunk is, CHUNK_BYTES at most, follows the
    link (pace.py): a frame of half a megabyte takes longer on a slow one than a heartbeat may. More of them move
        as a handle   of shared memory, where the other side has shown that it can open ours; or else
        in chunks     between which small messages pass (bulk_machine.py).
    What is to be sent belongs to the message: nobody changes it until the transfer is over (rpc/snapshots.py). Up to CHUNK_BYTES it is
    copied here, so nobody need know which way it goes.
    A handle is taken back when its message was not sent, the connection has gone, or its call is over. Who has claimed it by then
    keeps the memory, whoever comes later is refused. Who does not want what was lent claims it and lets go.
    What a Call holds back, and its receiver has not let in, stays with its sender.
    Nothing is delivered half: the parts are given on when the last byte of the last one is here.

Shared memory is used towards a peer that has named the number that stands in our table: then it has really opened it. In a server's
hello that number is one of the fields, a client sends SharedMemoryAccepted.

Not here: what the parts are, and whom they are for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqdist.errors import OpError, ResourceExhaustedError, WireError
from zmqdist.limits import ARRAY_BYTES_MAX, CHUNK_BYTES, FRAMES_MAX, RECEIVING_BYTES_MAX
from zmqdist.messages import Call, Chunk, Credit, Message, Part, Reply, SendParts
from zmqdist.transport.bulk_machine import DONE, WRONG, Inbound, Outbound
from zmqdist.transport.calls_machine import nbytes_of
from zmqdist.transport.receive_buffers import memory_for
from zmqdist.transport.shm_peer import PeerArena, open_peer
from zmqdist.transport.shm_pool import Arena, Block, Handle, this_arena
from zmqdist.wire.hello import Hello, host_identity

log = logging.getLogger("zmqdist.transport")

Source: TypeAlias = "bytes | memoryview | NDArray[np.uint8] | Block"
"""A large part to be sent: a flat buffer of bytes, or a block of our arena."""
Frames: TypeAlias = Sequence[Any]
Room: TypeAlias = "Callable[[list[int]], list[Any]]"
"""Gives a flat writable array for each size, anything for a 0. May raise OpError or MemoryError."""
End: TypeAlias = "Callable[[list[Any] | None, str], object]"
"""Gets the parts, or None and why they did not arrive."""

_HANDLE_NUMBERS = 8


def is_large(sources: Sequence[Source]) -> bool:
    """Whether these move by a lane of their own on any link, not as frames of their message."""
    return nbytes_of(sources) > CHUNK_BYTES


def nbytes_told(parts: Sequence[Part]) -> int:
    """What the parts of a message that has arrived have together, by what their sender says."""
    return sum(max(0, part[0] if len(part) == 1 else part[4]) for part in parts if len(part) in (1, _HANDLE_NUMBERS))


def fresh(sizes: list[int]) -> list[Any]:
    """The usual Room: memory that nobody else has."""
    return [memory_for(size) if size else None for size in sizes]


class _Transfer:
    """What belongs to one call in either direction.

    Attributes:
      handles: what was lent with its message.
      views: what leaves in chunks; `held`: after SendParts.
      frames: what has arrived, or is arriving in chunks; `end` is told.
    """

    __slots__ = ("end", "frames", "handles", "held", "views")

    def __init__(self) -> None:
        self.held = False
        self.handles: list[Handle] = []
        self.views: list[Any] = []
        self.frames: list[Any] = []
        self.end: End | None = None


class Lanes:
    """The large parts on their way by one connection. Used by one thread at a time; whoever owns the connection calls `gone`.

    Attributes:
      lends: the other side can open our shared memory. May be read by any thread.
      tracked: what is under way, by the number of its call; empty in the life of a connection of small messages.
      faults: things that the other side should not have sent.
    """

    def __init__(
        self, peer: str, put: Callable[[Message, Frames], bool], clock: Callable[[], float] = monotonic
    ) -> None:
        """Args:
        put: sends a message without waiting; False when the connection has gone.
        """
        self.lends = False
        self.tracked: dict[int, _Transfer] = {}
        self.faults = 0
        self._peer = peer
        self._put = put
        self._clock = clock
        self._arena: Arena | None = None
        self._theirs: PeerArena | None = None
        self._out = Outbound()
        self._in = Inbound()
        self._held = 0

    def met(self, hello: Hello) -> None:
        """The other side's hello, which says whether a network is between. Who lies there makes its own connection worse."""
        if hello.host == host_identity():
            self._out.pace.widen()

    # -- shared memory ----------------------------------------------------------------------------------------------------

    def offered(self, hello: Hello) -> int:
        """The other side's hello: the number to name in return, 0 where its memory cannot be opened from here."""
        self.met(hello)
        if hello.memory is None or hello.host != host_identity() or this_arena() is None:
            return 0
        self._theirs = open_peer(hello.memory)
        if self._theirs is None:
            log.info("%s: its shared memory cannot be opened from here; large arrays travel by the socket", self._peer)
            return 0
        return int(self._theirs.nonce)

    def shares(self, nonce: int) -> None:
        """The other side has named a number of our memory."""
        self._arena = this_arena()
        self.lends = self._arena is not None and nonce == self._arena.nonce

    # -- out --------------------------------------------------------------------------------------------------------------

    @property
    def sending(self) -> bool:
        """Whether chunks are left to be sent: somebody must read what the other side acknowledges, or lets in."""
        return len(self._out) > 0 or self._held > 0

    @property
    def left(self) -> int:
        """How much of what was sent the other side does not have yet: bytes of chunks, and handles. Changes while it reads."""
        arena = self._arena
        handles = [handle for transfer in self.tracked.values() for handle in transfer.handles]
        return self._out.left + (0 if arena is None else sum(map(arena.unclaimed, handles)))

    @property
    def unacknowledged(self) -> int:
        """Bytes of chunks that were sent and not acknowledged."""
        return self._out.pace.unacknowledged

    def receiving(self, id: int) -> bool:
        """Whether chunks of this call are still to come."""
        return id in self._in

    def send(self, message: Call | Reply, sources: Sequence[Source]) -> bool:
        """Send a message with its parts, by the best way there is. False: nothing was sent; the sources are as before."""
        nbytes = nbytes_of(sources)
        if nbytes <= self._out.pace.chunk_bytes:
            return self._put(message, sources)
        if nbytes <= CHUNK_BYTES:
            sources = [bytes(source) for source in sources]  # type: ignore[arg-type]
        transfer = _Transfer()
        parts: list[Part] = []
        for source in sources:
            handle = source.lend() if isinstance(source, Block) and self.lends else None
            if handle is not None:
                transfer.handles.append(handle)
                transfer.views.append(None)
                parts.append(handle)
            else:
                view = memoryview(source.array() if isinstance(source, Block) else source)  # type: ignore[arg-type]
                transfer.views.append(view)
                parts.append((view.nbytes,))
        message.parts = tuple(parts)
        if not self._put(message, ()):
            self._take_back(transfer)
            return False
        if transfer.handles:
            self._forget_claimed()
        self.over(message.id)  # only a peer that uses a number twice has one
        self.tracked[message.id] = transfer
        if any(view is not None for view in transfer.views):
            if type(message) is Call and message.held:
                transfer.held = True
                self._held += 1
            else:
                self._begin(message.id, transfer)
        return True

    def let_in(self, message: SendParts) -> None:
        """The other side has room for what was held; for a call that is over it had."""
        transfer = self.tracked.get(message.id)
        if transfer is not None and transfer.held:
            transfer.held = False
            self._held -= 1
            self._begin(message.id, transfer)

    def _begin(self, id: int, transfer: _Transfer) -> None:
        self._out.begun(id, [0 if view is None else view.nbytes for view in transfer.views])
        self._pump()

    def credited(self, message: Credit) -> None:
        """The other side has taken chunks out of its queue."""
        self.faults += not self._out.acknowledged(message.nbytes, self._clock())
        self._pump()

    def _pump(self) -> None:
        while (piece := self._out.next(self._clock())) is not None:
            transfer = self.tracked[piece.id]
            view = transfer.views[piece.part]
            chunk = Chunk(piece.id, piece.part, piece.offset)
            if not self._put(chunk, (view[piece.offset : piece.offset + piece.nbytes],)):
                return  # the connection has gone, and its owner is about to notice
            if piece.id not in self._out:
                transfer.views = []
                if not transfer.handles:
                    del self.tracked[piece.id]

    # -- in ---------------------------------------------------------------------------------------------------------------

    def receive(self, id: int, parts: Sequence[Part], room: Room, end: End) -> list[Any] | None:
        """The parts of a message that has arrived; None when `end` will be called later, unless the transfer is `over` before.

        Raises:
          WireError: such parts cannot be.
          UnavailableError: what was lent has been taken back, or its owner has ended.
          OpError, MemoryError: from `room`.
        """
        sizes = self._sizes(id, parts)
        if self._in.announced + sum(sizes) > RECEIVING_BYTES_MAX:
            told = f"{self._peer} has announced more than {RECEIVING_BYTES_MAX} bytes that have not come: send fewer at a time"
            raise ResourceExhaustedError(told)
        frames = room(sizes)
        for number, part in enumerate(parts):
            if not sizes[number]:
                frames[number] = self._attached(part)
        self._out.ended(id)
        if not any(sizes):
            return frames
        transfer = self.tracked.setdefault(id, _Transfer())
        transfer.views, transfer.frames, transfer.end = [], frames, end
        self._in.begun(id, sizes)
        return None

    def decline(self, parts: Sequence[Part]) -> None:
        """Nobody wants the parts of a message that has arrived: what was lent goes back."""
        for part in parts:
            try:
                if len(part) == _HANDLE_NUMBERS:
                    self._attached(part)
            except OpError:  # it has been taken back
                pass

    def chunk(self, message: Chunk, frames: Frames) -> None:
        """A chunk has arrived, wanted or not."""
        id, part, offset = message.id, message.part, message.offset
        nbytes = len(frames[0]) if len(frames) == 1 else 0
        if 0 < nbytes <= self._in.room(id, part, offset):
            target = self.tracked[id].frames[part]
            target[offset : offset + nbytes] = np.frombuffer(frames[0], np.uint8)
        outcome = self._in.arrived(id, part, offset, nbytes)
        credit = self._in.credit(nbytes)
        if credit:
            self._put(Credit(credit), ())
        if outcome in (DONE, WRONG):
            transfer = self.tracked[id]
            end, transfer.end = transfer.end, None
            whole, transfer.frames = transfer.frames, []
            if not transfer.handles:
                del self.tracked[id]
            assert end is not None
            self.faults += outcome == WRONG
            end(whole if outcome == DONE else None, self._in.problem)

    def _sizes(self, id: int, parts: Sequence[Part]) -> list[int]:
        """Bytes of each part, 0 for one that is lent."""
        sizes = [part[0] if len(part) == 1 else 0 for part in parts]
        if len(parts) >= FRAMES_MAX or any(
            not 0 < part[0] <= ARRAY_BYTES_MAX if len(part) == 1 else len(part) != _HANDLE_NUMBERS for part in parts
        ):
            raise WireError(self._peer, "parts of a message that cannot be")
        if id in self._in:
            raise WireError(self._peer, "parts that were announced twice")
        return sizes

    def _attached(self, part: Part) -> Any:
        if self._theirs is None:
            raise WireError(self._peer, "shared memory of a peer that has offered none")
        return self._theirs.attach(part)  # type: ignore[arg-type]

    # -- ends -------------------------------------------------------------------------------------------------------------

    def over(self, id: int) -> bool:
        """A call is over, however: nothing more is sent or written for it. True: the other side is still to be told."""
        told = self._over(id)
        if owed := self._in.owed():
            self._put(Credit(owed), ())
        return told

    def _over(self, id: int) -> bool:
        transfer = self.tracked.pop(id, None)
        if transfer is None:
            return False
        self._take_back(transfer)
        sending, receiving = self._out.ended(id), self._in.ended(id)
        self._held -= transfer.held
        return sending or receiving or transfer.held

    def gone(self) -> None:
        """The connection has gone."""
        self.lends = False
        for id in list(self.tracked):
            self._over(id)

    def dropped(self) -> None:
        """The same from a finalizer, after which nothing else is done here."""
        for transfer in self.tracked.values():
            for handle in transfer.handles:
                assert self._arena is not None
                self._arena.take_back_soon(handle)
        self.tracked.clear()
        self._held = 0
        self._out, self._in = Outbound(), Inbound()

    def _take_back(self, transfer: _Transfer) -> None:
        for handle in transfer.handles:
            assert self._arena is not None
            self._arena.take_back(handle)

    def _forget_claimed(self) -> None:
        """A server is not told that an answer has arrived."""
        arena = self._arena
        assert arena is not None
        for id, transfer in list(self.tracked.items()):
            if (
                transfer.end is None
                and not transfer.held
                and id not in self._out
                and not any(map(arena.unclaimed, transfer.handles))
            ):
                del self.tracked[id]
