"""Large payloads in chunks: the sending and the receiving side of one connection's bulk channel,
without I/O.

Rule 1: each side of a connection has one `OutboundTransfers` for the parts that it sends and one
`InboundTransfers` for those it receives.
Rule 2: the caller reports an event by a method call, and acts on the return value.
Rule 3: a wrong chunk raises no exception. `arrived` returns WRONG, and only the transfer of that
chunk fails.

Theory of operation
    A transfer is the large parts of one message. The header of the message announces their sizes,
    so that the receiver allocates each part once. The chunks of a transfer follow as messages of
    their own; other messages pass between them, and transfers take turns.

    A window bounds the unacknowledged bytes of all transfers of a connection together, because a
    small message queues behind the bytes of every transfer. The link decides how large the window
    and the chunks are (pace.py). The receiver acknowledges each chunk as soon as it has taken the
    chunk out of the queue, even if it does not want the chunk. So either side may end a transfer at
    any moment without further messages.

Promises, checked by tests/machines/test_bulk.py and in simulation (tests/sim/test_rpc.py)
    P1  The chunks of a transfer leave in order and contain each byte of its parts once; no chunk is
        longer than the pace allows.
    P2  A chunk leaves only if the connection's pace has room for it, whatever the number of
        transfers.
    P3  Between two chunks of one transfer, every other transfer that has chunks left sends a chunk.
    P4  A transfer is complete when each of its bytes has arrived in order. The first chunk that is
        repeated, out of order or too long makes the transfer fail, once. No chunk is accepted for a
        transfer that is complete or failed, or that was ended.
    P5  A chunk that arrives is acknowledged at once, even if its transfer is over, because the
        sender measures the link by acknowledgments. Chunks of CHUNK_BYTES, which travel only on a
        fast link, are an exception: while the receiver awaits more chunks, it acknowledges two of
        them together.
    P6  No state is left of a transfer that is over.

Not here: the memory and the socket (transfers.py), the meaning of the parts (rpc/payload.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zmqdist.limits import CHUNK_BYTES
from zmqdist.transport.pace import Pace


class OutgoingChunk(NamedTuple):
    """The chunk to send next: `nbytes` bytes of part `part` of transfer `id`, starting at
    `offset`.
    """

    id: int
    part: int
    offset: int
    nbytes: int


class _Progress:
    """The place that a transfer has reached: `offset` bytes of part `part` and all bytes of the
    parts before it were transferred. `part` is len(sizes) when all parts are complete.
    """

    __slots__ = ("offset", "part", "sizes", "total")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.total = sum(sizes)
        self.part = 0
        self.offset = 0
        self.advance(0)

    @property
    def part_bytes_left(self) -> int:
        """Bytes of the current part that are still to be transferred."""
        return self.sizes[self.part] - self.offset

    def advance(self, nbytes: int) -> bool:
        """Count `nbytes` bytes of the current part as transferred; return whether all parts are
        complete."""
        self.offset += nbytes
        while self.part < len(self.sizes) and self.offset == self.sizes[self.part]:
            self.part += 1
            self.offset = 0
        return self.part == len(self.sizes)


class OutboundTransfers:
    """The transfers that one connection sends.

    Attributes:
      pace: the Pace that decides how many bytes may be unacknowledged, and counts them.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = Pace() if pace is None else pace
        self._queue: dict[int, _Progress] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, id: int) -> bool:
        return id in self._queue

    def begun(self, id: int, sizes: Sequence[int]) -> None:
        """Record that the header of a transfer was sent.

        Args:
          id: a number that is not in use.
          sizes: bytes of each part; 0 for a part that does not travel in chunks. At least one size
            is not 0.
        """
        assert id not in self._queue
        self._queue[id] = _Progress(sizes)

    @property
    def bytes_left(self) -> int:
        """Bytes of large parts that are unsent, or sent and not acknowledged."""
        unsent = sum(
            sum(place.sizes[place.part :]) - place.offset for place in self._queue.values()
        )
        return self.pace.unacknowledged + unsent

    def next_chunk(self, now: float) -> OutgoingChunk | None:
        """Return the chunk to send now and count it as sent; None if nothing is left or the window
        is full."""
        for id, place in self._queue.items():
            nbytes = min(place.part_bytes_left, self.pace.chunk_bytes)
            if not self.pace.fits(nbytes):
                return None
            piece = OutgoingChunk(id, place.part, place.offset, nbytes)
            self.pace.sent(nbytes, now)
            del self._queue[id]
            if not place.advance(nbytes):
                # this transfer moves to the end of the queue, so that the other transfers send a
                # chunk first (P3)
                self._queue[id] = place
            return piece
        return None

    def acknowledged(self, nbytes: int, now: float) -> bool:
        """Record that the receiver has taken `nbytes` bytes. Return False, and change nothing, if
        fewer than that are unacknowledged.
        """
        return self.pace.acknowledged(nbytes, now)

    def ended(self, id: int) -> bool:
        """Drop the rest of a transfer; return False if it was sent completely, or the id is
        unknown."""
        return self._queue.pop(id, None) is not None


LATE: Final = 0
"""The transfer of the chunk is over: discard the chunk."""
MORE: Final = 1
"""The chunk was accepted; further chunks of the transfer will follow."""
DONE: Final = 2
"""The chunk was accepted and was the last one: the transfer is complete."""
WRONG: Final = 3
"""The chunk does not fit: the transfer has failed, and `problem` says why."""


class InboundTransfers:
    """The transfers that one connection receives.

    Attributes:
      announced: bytes of all transfers that have not ended, including the bytes that have arrived.
      late: number of chunks that arrived after their transfer was over.
      problem: why the last WRONG chunk did not fit.
    """

    def __init__(self) -> None:
        self.announced = 0
        self.late = 0
        self.problem = ""
        self._uncredited = 0
        self._progress: dict[int, _Progress] = {}

    def __len__(self) -> int:
        return len(self._progress)

    def __contains__(self, id: int) -> bool:
        return id in self._progress

    def begun(self, id: int, sizes: Sequence[int]) -> None:
        """Record that the header of a transfer has arrived. The arguments are those of
        `OutboundTransfers.begun`."""
        assert id not in self._progress
        place = self._progress[id] = _Progress(sizes)
        self.announced += place.total

    def room_at(self, id: int, part: int, offset: int) -> int:
        """Return how many bytes of a chunk the caller may store at this offset of the part; 0 if
        the chunk is late or wrong."""
        place = self._progress.get(id)
        if place is None or (place.part, place.offset) != (part, offset):
            return 0
        return place.part_bytes_left

    def arrived(self, id: int, part: int, offset: int, nbytes: int) -> int:
        """Record that the caller has taken a chunk out of the queue. Return LATE, MORE, DONE or
        WRONG. Whatever the result, call `credit_after` next.

        The caller stores the bytes of the chunk before it calls this, if `room_at` permits it.
        """
        place = self._progress.get(id)
        if place is None:
            self.late += 1
            return LATE
        if (place.part, place.offset) != (part, offset) or not 0 < nbytes <= place.part_bytes_left:
            self.problem = (
                f"a chunk of {nbytes} bytes at {offset} of part {part}, "
                f"where at most {place.part_bytes_left} at {place.offset} of part {place.part} "
                f"belong"
            )
            self.ended(id)
            return WRONG
        if place.advance(nbytes):
            self.ended(id)
            return DONE
        return MORE

    def credit_after(self, nbytes: int) -> int:
        """Return how many bytes to acknowledge after a chunk of `nbytes`; 0 if the chunk is
        acknowledged together with the next chunk (P5).
        """
        if self._uncredited == 0 and nbytes == CHUNK_BYTES and self._progress:
            self._uncredited = nbytes
            return 0
        taken, self._uncredited = self._uncredited + nbytes, 0
        return taken

    def idle_credit(self) -> int:
        """Return how many bytes to acknowledge because a transfer has ended: those of a chunk whose
        acknowledgment waited for a next chunk (P5), if this side now awaits no chunk. Return 0
        otherwise.
        """
        if self._progress:
            return 0
        taken, self._uncredited = self._uncredited, 0
        return taken

    def ended(self, id: int) -> bool:
        """Drop the rest of a transfer; return False if it was over already, or the id is
        unknown.
        """
        place = self._progress.pop(id, None)
        if place is None:
            return False
        self.announced -= place.total
        return True
