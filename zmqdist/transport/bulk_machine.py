"""Large payloads in chunks: both ends of one connection's bulk lane, without I/O.

Rule 1: each end of a connection has one `OutboundTransfers` for what it sends and one `InboundTransfers` for what it receives.
Rule 2: the shell calls a method when something has happened; what it must do now is what the method returns.
Rule 3: a wrong chunk is an outcome, not an exception: it ends its own transfer and nothing else.

Theory of operation
    A transfer is the large parts of one message, announced with their sizes in its header: so the receiver allocates each part once. Its
    chunks follow as messages of their own, and between them other messages pass. Transfers take turns.

    The window belongs to the connection, not to a transfer: what has been sent and not acknowledged lies in queues in front of every
    small message, whichever transfer it is of. How large it is, and its chunks are, follows the link (pace.py). The receiver
    acknowledges what it has taken out of the queue, wanted or not. So the end of a transfer, on either side and at any moment, has
    nothing to settle.

Promises, checked by tests/machines/test_bulk.py and in simulation (tests/sim/test_rpc.py)
    P1  the chunks of a transfer leave in order and are its parts, each byte once; none is longer than its pace's
    P2  no chunk leaves that its pace has no room for, whatever the number of transfers
    P3  between two chunks of a transfer every other one that has chunks left has its turn
    P4  a transfer is complete when each byte of it has arrived in order; the first chunk that is doubled, out of order or too long fails
        it, once; nothing is accepted for a transfer that is complete, has failed or was ended
    P5  what arrives is acknowledged, also of transfers that are over: at once, for the sender measures the link by that, but for the
        first of two chunks of CHUNK_BYTES, which only a fast link has, and that only while more is awaited
    P6  nothing is left of a transfer that is over

Not here: the memory and the socket (transfers.py), what the parts are (rpc/payload.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zmqdist.limits import CHUNK_BYTES
from zmqdist.transport.pace import Pace


class OutgoingChunk(NamedTuple):
    """What to send next: `nbytes` of part `part` of transfer `id`, from `offset` on."""

    id: int
    part: int
    offset: int
    nbytes: int


class _Progress:
    """How far a transfer has come: `part` is the first that is not complete, len(sizes) at the end."""

    __slots__ = ("offset", "part", "sizes", "total")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.total = sum(sizes)
        self.part = 0
        self.offset = 0
        self.advance(0)

    @property
    def part_bytes_left(self) -> int:
        """Bytes of the present part."""
        return self.sizes[self.part] - self.offset

    def advance(self, nbytes: int) -> bool:
        """So many bytes of the present part are done; whether all are."""
        self.offset += nbytes
        while self.part < len(self.sizes) and self.offset == self.sizes[self.part]:
            self.part += 1
            self.offset = 0
        return self.part == len(self.sizes)


class OutboundTransfers:
    """The transfers that leave by one connection.

    Attributes:
      pace: how much may be on the way, and how much is.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = Pace() if pace is None else pace
        self._queue: dict[int, _Progress] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, id: int) -> bool:
        return id in self._queue

    def begun(self, id: int, sizes: Sequence[int]) -> None:
        """The header of a transfer has left.

        Args:
          id: not in use.
          sizes: bytes of each part, 0 for one that goes another way; at least one is more.
        """
        assert id not in self._queue
        self._queue[id] = _Progress(sizes)

    @property
    def bytes_left(self) -> int:
        """Bytes that have not been sent, or not acknowledged."""
        unsent = sum(sum(place.sizes[place.part :]) - place.offset for place in self._queue.values())
        return self.pace.unacknowledged + unsent

    def next_chunk(self, now: float) -> OutgoingChunk | None:
        """The chunk to send now, which counts as sent; None when nothing is left or the window is full."""
        for id, place in self._queue.items():
            nbytes = min(place.part_bytes_left, self.pace.chunk_bytes)
            if not self.pace.fits(nbytes):
                return None
            piece = OutgoingChunk(id, place.part, place.offset, nbytes)
            self.pace.sent(nbytes, now)
            del self._queue[id]
            if not place.advance(nbytes):
                self._queue[id] = place  # behind the others
            return piece
        return None

    def acknowledged(self, nbytes: int, now: float) -> bool:
        """The other side has taken so many bytes out of the queue; False: more than were sent, a fault of it that changes nothing."""
        return self.pace.acknowledged(nbytes, now)

    def ended(self, id: int) -> bool:
        """Nobody wants the rest of a transfer; False: all of it was sent, or it was none."""
        return self._queue.pop(id, None) is not None


LATE: Final = 0
"""Of a transfer that is over: throw the chunk away."""
MORE: Final = 1
"""Accepted; others will follow."""
DONE: Final = 2
"""Accepted; it was the last of its transfer, which is over."""
WRONG: Final = 3
"""Not what belongs here: the transfer has failed and is over; `problem` says why."""


class InboundTransfers:
    """The transfers that arrive by one connection.

    Attributes:
      announced: bytes of the transfers that have not ended, arrived or not.
      late: chunks that nobody wanted any more.
      problem: of the last WRONG.
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
        """The header of a transfer has arrived. Args as in `OutboundTransfers.begun`."""
        assert id not in self._progress
        place = self._progress[id] = _Progress(sizes)
        self.announced += place.total

    def room_at(self, id: int, part: int, offset: int) -> int:
        """How many bytes may arrive there now; 0: none, the chunk that says so is late or wrong."""
        place = self._progress.get(id)
        if place is None or (place.part, place.offset) != (part, offset):
            return 0
        return place.part_bytes_left

    def arrived(self, id: int, part: int, offset: int, nbytes: int) -> int:
        """A chunk was taken out of the queue: LATE, MORE, DONE or WRONG, and `credit_after` says what to acknowledge in any case.

        Its bytes were written only where there was `room_at`.
        """
        place = self._progress.get(id)
        if place is None:
            self.late += 1
            return LATE
        if (place.part, place.offset) != (part, offset) or not 0 < nbytes <= place.part_bytes_left:
            self.problem = (
                f"a chunk of {nbytes} bytes at {offset} of part {part}, "
                f"where at most {place.part_bytes_left} at {place.offset} of part {place.part} belong"
            )
            self.ended(id)
            return WRONG
        if place.advance(nbytes):
            self.ended(id)
            return DONE
        return MORE

    def credit_after(self, nbytes: int) -> int:
        """How many bytes to acknowledge after a chunk of so many; 0: none yet."""
        if self._uncredited == 0 and nbytes == CHUNK_BYTES and self._progress:
            self._uncredited = nbytes
            return 0
        taken, self._uncredited = self._uncredited + nbytes, 0
        return taken

    def idle_credit(self) -> int:
        """How many bytes to acknowledge although no chunk has arrived: nothing is awaited, so none will."""
        if self._progress:
            return 0
        taken, self._uncredited = self._uncredited, 0
        return taken

    def ended(self, id: int) -> bool:
        """Nobody wants the rest of a transfer; False: it is over, or was none."""
        place = self._progress.pop(id, None)
        if place is None:
            return False
        self.announced -= place.total
        return True
