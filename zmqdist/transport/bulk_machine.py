"""Large payloads in chunks: the sending and the receiving side of one connection's bulk channel,
without I/O.

Rule 1: each side of a connection has one `Transfers`, for the parts that it sends and for those that
it receives.
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

Promises, checked by tests/transport/test_bulk_machine.py and in simulation (tests/sim/test_rpc.py)
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

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from zmqdist.limits import CHUNK_BYTES
from zmqdist.transitions import enter
from zmqdist.transport.pace import Pace


class TransferState(enum.Enum):
    """The state of a transfer, which is the large parts of one call that are on the way."""

    NEW = enum.auto()
    HELD = enum.auto()
    """This side sends no chunk until the peer asks for the parts."""
    SENDING = enum.auto()
    """This side has chunks left to send."""
    RECEIVING = enum.auto()
    """This side awaits chunks."""
    LENT = enum.auto()
    """No chunk is left, but this side has lent shared memory to the peer."""
    OVER = enum.auto()


TRANSITIONS: Final[Mapping[TransferState, frozenset[TransferState]]] = {
    TransferState.NEW: frozenset(
        {
            TransferState.HELD,
            TransferState.SENDING,
            TransferState.RECEIVING,
            TransferState.LENT,
        }
    ),
    # RECEIVING: the reply has come, so that the arguments of its call need not be sent any more
    TransferState.HELD: frozenset(
        {TransferState.SENDING, TransferState.RECEIVING, TransferState.OVER}
    ),
    TransferState.SENDING: frozenset(
        {TransferState.RECEIVING, TransferState.LENT, TransferState.OVER}
    ),
    TransferState.RECEIVING: frozenset({TransferState.LENT, TransferState.OVER}),
    TransferState.LENT: frozenset({TransferState.RECEIVING, TransferState.OVER}),
    TransferState.OVER: frozenset(),
}


class Transfer:
    """The large parts of one call that are on the way, in either direction.

    Attributes:
      sizes, total: bytes of each part that travels in chunks, 0 for another part; and their sum.
      part, offset: the place that the transfer has reached: `offset` bytes of part `part` and all
        bytes of the parts before it were transferred. `part` is len(sizes) when all parts are
        complete.
      lent: the leases of shared memory that were made for the message of the call.
      blocks: for the runtime, the lent blocks of a call, which its reply may return.
      buffers: for the runtime, the buffers of the parts. Chunks are read from them, or fill them.
      on_arrived: for the runtime, the function that gets the buffers at the end.
    """

    __slots__ = (
        "blocks",
        "buffers",
        "id",
        "lent",
        "offset",
        "on_arrived",
        "part",
        "sizes",
        "state",
        "total",
    )

    def __init__(self, id: int) -> None:
        self.id = id
        self.state = TransferState.NEW
        self.lent: Sequence[Any] = ()
        self.blocks: list[Any] = []
        self.buffers: list[Any] = []
        self.on_arrived: Any = None
        self.sizes: Sequence[int] = ()
        self.total = self.part = self.offset = 0

    def start(self, sizes: Sequence[int]) -> None:
        """Go to the first byte of parts of these sizes."""
        self.sizes = sizes
        self.total = sum(sizes)
        self.part = self.offset = 0
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


class OutgoingChunk(NamedTuple):
    """The chunk to send next: `nbytes` bytes of part `part` of a transfer, starting at `offset`."""

    transfer: Transfer
    part: int
    offset: int
    nbytes: int


LATE: Final = 0
"""The transfer of the chunk is over: discard the chunk."""
MORE: Final = 1
"""The chunk was accepted; further chunks of the transfer will follow."""
DONE: Final = 2
"""The chunk was accepted and was the last one: the transfer is complete."""
WRONG: Final = 3
"""The chunk does not fit: the transfer has failed, and `problem` says why."""


class Transfers:
    """The transfers of one side of one connection.

    Attributes:
      tracked: the transfers that are not over, by the number of their call.
      turns: the transfers that send chunks, in the order of their turns.
      pace: the Pace that decides how many bytes may be unacknowledged, and counts them.
      announced: bytes of all transfers that this side receives, including the bytes that have
        arrived.
      late: number of chunks that arrived after their transfer was over.
      problem: why the last WRONG chunk did not fit.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        self.tracked: dict[int, Transfer] = {}
        self.turns: dict[int, Transfer] = {}
        self.pace = Pace() if pace is None else pace
        self.announced = 0
        self.late = 0
        self.problem = ""
        self._held = self._receiving = self._uncredited = 0

    def _enter(self, transfer: Transfer, state: TransferState) -> None:
        before = transfer.state
        transfer.state = enter(TRANSITIONS, before, state, "transfer", transfer.id)
        if before is TransferState.SENDING:
            del self.turns[transfer.id]
        elif before is TransferState.RECEIVING:
            self._receiving -= 1
            self.announced -= transfer.total
        elif before is TransferState.HELD:
            self._held -= 1
        if state is TransferState.OVER:
            del self.tracked[transfer.id]
        elif state is TransferState.SENDING:
            self.turns[transfer.id] = transfer
        elif state is TransferState.RECEIVING:
            self._receiving += 1
            self.announced += transfer.total
        elif state is TransferState.HELD:
            self._held += 1

    def end(self, id: int) -> bool:
        """End the transfer of a call. Return whether chunks were still to be sent or to arrive;
        False if there is no such transfer."""
        transfer = self.tracked.get(id)
        if transfer is None:
            return False
        # lent memory needs no message, because the lease shows whether the peer has claimed it
        unfinished = transfer.state is not TransferState.LENT
        self._enter(transfer, TransferState.OVER)
        return unfinished

    def _complete(self, transfer: Transfer) -> None:
        self._enter(transfer, TransferState.LENT if transfer.lent else TransferState.OVER)

    # -- out ---------------------------------------------------------------------------------------

    @property
    def sending(self) -> bool:
        """Whether chunks are left to send, now or when the peer asks for them."""
        return len(self.turns) > 0 or self._held > 0

    def send(
        self, id: int, sizes: Sequence[int], lent: Sequence[Any] = (), *, held: bool = False
    ) -> Transfer:
        """Record that the header of a transfer was sent.

        Args:
          id: a number that is not in use.
          sizes: bytes of each part; 0 for a part that does not travel in chunks.
          lent: the leases of shared memory of the other parts.
          held: whether the chunks wait until `ask`.
        """
        assert id not in self.tracked
        transfer = self.tracked[id] = Transfer(id)
        transfer.lent = lent
        transfer.start(sizes)
        chunked = TransferState.HELD if held else TransferState.SENDING
        self._enter(transfer, chunked if transfer.total else TransferState.LENT)
        return transfer

    def ask(self, id: int) -> None:
        """Record that the peer asks for parts that are held back. Does nothing if none are."""
        transfer = self.tracked.get(id)
        if transfer is not None and transfer.state is TransferState.HELD:
            self._enter(transfer, TransferState.SENDING)

    def stop_sending(self, id: int) -> None:
        """Send no further chunk of a call, because its reply has arrived."""
        if id in self.turns:
            self._complete(self.turns[id])

    @property
    def bytes_left(self) -> int:
        """Bytes of large parts that are unsent, or sent and not acknowledged."""
        return self.pace.unacknowledged + sum(
            sum(transfer.sizes[transfer.part :]) - transfer.offset
            for transfer in self.turns.values()
        )

    def next_chunk(self, now: float) -> OutgoingChunk | None:
        """Return the chunk to send now and count it as sent; None if nothing is left or the window
        is full."""
        for id, transfer in self.turns.items():
            nbytes = min(transfer.part_bytes_left, self.pace.chunk_bytes)
            if not self.pace.fits(nbytes):
                return None
            piece = OutgoingChunk(transfer, transfer.part, transfer.offset, nbytes)
            self.pace.sent(nbytes, now)
            # this transfer moves to the end, so that the other transfers send a chunk first (P3)
            del self.turns[id]
            self.turns[id] = transfer
            if transfer.advance(nbytes):
                self._complete(transfer)
            return piece
        return None

    # -- in ----------------------------------------------------------------------------------------

    def is_receiving(self, id: int) -> bool:
        """Return whether this side awaits chunks of this call."""
        transfer = self.tracked.get(id)
        return transfer is not None and transfer.state is TransferState.RECEIVING

    def receive(self, id: int, sizes: Sequence[int]) -> Transfer:
        """Record that the header of a transfer has arrived. At least one size is not 0. Parts of
        the same call that this side still sends, or holds back, are not sent any more."""
        transfer = self.tracked.get(id)
        if transfer is None:
            transfer = self.tracked[id] = Transfer(id)
        transfer.start(sizes)
        self._enter(transfer, TransferState.RECEIVING)
        return transfer

    def room_at(self, id: int, part: int, offset: int) -> int:
        """Return how many bytes of a chunk the caller may store at this offset of the part; 0 if
        the chunk is late or wrong."""
        transfer = self.tracked.get(id)
        if transfer is None or (transfer.part, transfer.offset) != (part, offset):
            return 0
        return transfer.part_bytes_left if transfer.state is TransferState.RECEIVING else 0

    def arrived(self, id: int, part: int, offset: int, nbytes: int) -> int:
        """Record that the caller has taken a chunk out of the queue. Return LATE, MORE, DONE or
        WRONG. Whatever the result, call `credit_after` next.

        The caller stores the bytes of the chunk before it calls this, if `room_at` permits it.
        """
        transfer = self.tracked.get(id)
        if transfer is None or transfer.state is not TransferState.RECEIVING:
            # P4: the chunks of an ended transfer that were on the way change nothing
            self.late += 1
            return LATE
        left = transfer.part_bytes_left
        if (transfer.part, transfer.offset) != (part, offset) or not 0 < nbytes <= left:
            # P4: the bytes after a gap would be stored in the wrong place
            self.problem = (
                f"a chunk of {nbytes} bytes at {offset} of part {part}, "
                f"where at most {left} at {transfer.offset} of part {transfer.part} belong"
            )
            self._complete(transfer)
            return WRONG
        if transfer.advance(nbytes):
            self._complete(transfer)
            return DONE
        return MORE

    def credit_after(self, nbytes: int) -> int:
        """Return how many bytes to acknowledge after a chunk of `nbytes`; 0 if the chunk is
        acknowledged together with the next chunk (P5).
        """
        if self._uncredited == 0 and nbytes == CHUNK_BYTES and self._receiving:
            self._uncredited = nbytes
            return 0
        credit, self._uncredited = self._uncredited + nbytes, 0
        return credit

    def idle_credit(self) -> int:
        """Return how many bytes to acknowledge because a transfer has ended: those of a chunk whose
        acknowledgment waited for a next chunk (P5), if this side now awaits no chunk. Return 0
        otherwise.
        """
        if self._receiving:
            return 0
        credit, self._uncredited = self._uncredited, 0
        return credit
