"""Messages between a process and its child processes, over a socket pair, or between processes of
one user and host (shortcut.py).

A frame is `[bytes of the message: u32][number of parts: u32][bytes of a part:
u64]*[message][part]*`. A codec encodes and decodes the message. The parts are buffers, and are sent
unchanged.

The reader's promises
    Each part is read directly into new memory, which belongs to the receiver.
    If there is no memory for the parts of a message, the reader skips their bytes, and the receiver
    gets the message with an error in place of the parts.
    If the other process ends in the middle of a frame, the reader drops the incomplete frame and
    raises no error for it.

There are two classes, with the same frames, because threads wait for messages in two ways.
`BlockingPipe` is for a thread that has no other work until the next message. Such a thread is in a
child, or in a parent that has one thread for each child. `LoopPipe` is for a parent whose loop
thread serves thousands of children, and never waits.

The format has no version and the reader trusts its input, because only processes of one user use
a pipe; `bound` is for an end that is not known yet.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from zmqdist.errors import ResourceExhaustedError
from zmqdist.files import fill_standard_streams
from zmqdist.transport.memory_limits import memory_exhausted

if TYPE_CHECKING:  # the loop imports ZeroMQ, which a child may not need
    from zmqdist.transport.loop import Loop

M = TypeVar("M")

Parts: TypeAlias = "list[bytearray] | ResourceExhaustedError"
"""The parts of a message, which belong to the receiver, or an error if there was no memory for
them."""

RECEIVE_BYTES: Final = 256 * 1024
"""Bytes that are received at a time. Their memory is reused, because the C library would map and
unmap new memory of this size for each message."""

READS_PER_TURN: Final = 16
"""How often a pipe is read before the loop thread serves other file descriptors."""

MESSAGES_PER_TURN_MAX: Final = 32
"""Messages of a pipe that are delivered before the loop thread serves others."""

_LENGTHS: Final = struct.Struct("<II")


@dataclass(frozen=True)
class PipeCodec(Generic[M]):
    """The functions that encode and decode the messages of a pipe.

    Attributes:
      parts: a phrase that names the parts of a message, in the error about missing memory for them.
    """

    encode: Callable[[M], bytes]
    decode: Callable[[bytes], M]
    parts: str = "the parts of a message"


BYTES: Final[PipeCodec[bytes]] = PipeCodec(bytes, bytes)
"""The codec for messages that are already bytes."""


def frame(message: bytes, parts: Sequence[Any] = ()) -> bytes:
    """Return the beginning of a frame, up to its parts. The caller sends this and then the
    parts.
    """
    lengths = _LENGTHS.pack(len(message), len(parts))
    if not parts:
        return lengths + message
    return (
        lengths
        + struct.pack(f"<{len(parts)}Q", *(memoryview(part).nbytes for part in parts))
        + message
    )


class FrameReader(Generic[M]):
    """Decodes frames, without a socket. The caller reads bytes into `room()`, and passes the number
    of bytes that it has read to `received`.
    """

    def __init__(self, codec: PipeCodec[M]) -> None:
        self._codec = codec
        # A mapping uses memory only for the pages that were written, so that thousands of pipes
        # cost little.
        self._room = memoryview(mmap.mmap(-1, RECEIVE_BYTES))
        self._buffer = bytearray()
        """The beginning of an incomplete frame."""
        self._unfilled: deque[memoryview] = deque()
        """The memory for those bytes of a message's parts that were not yet read."""
        self._filling: list[tuple[M, Parts]] = []
        """The message to which the memory in `_unfilled` belongs. Empty if no parts are being
        read.
        """
        self.bytes_max = inf
        """The most bytes of a message. After a longer one `broken` is set, and nothing is read."""
        self.broken = False
        self._skip = 0
        """The number of bytes of parts that must still be read and dropped, because there was no
        memory for these parts."""

    @property
    def in_parts(self) -> bool:
        """Whether the next bytes belong to the parts of a message."""
        return bool(self._unfilled)

    def room(self) -> memoryview:
        """Return the memory into which the caller reads the next bytes. It is never empty."""
        return self._unfilled[0] if self._unfilled else self._room

    def received(self, count: int) -> Iterator[tuple[M, Parts]]:
        """Yield the messages that are complete now that the caller has read `count` more bytes into
        `room()`."""
        if self._unfilled:
            rest = self._unfilled.popleft()[count:]
            if rest:
                self._unfilled.appendleft(rest)
            elif not self._unfilled:
                yield self._filling.pop()
            return
        buffer = self._buffer
        buffer += self._room[:count]
        while True:
            if self._skip:
                skipped = min(self._skip, len(buffer))
                self._skip -= skipped
                del buffer[:skipped]
            if len(buffer) < _LENGTHS.size:
                return
            message_bytes, parts_count = _LENGTHS.unpack_from(buffer)
            begin = _LENGTHS.size + 8 * parts_count
            end = begin + message_bytes
            if end > self.bytes_max:
                self.broken = True
                return
            if len(buffer) < end:
                return
            message = self._codec.decode(bytes(buffer[begin:end]))
            if not parts_count:
                del buffer[:end]
                yield message, []
                continue
            sizes = struct.unpack_from(f"<{parts_count}Q", buffer, _LENGTHS.size)
            if sum(sizes) > self.bytes_max:
                self.broken = True
                return
            del buffer[:end]
            parts = self._begin_parts(sizes)
            if self._unfilled:
                self._filling.append((message, parts))
                return
            yield message, parts

    def _begin_parts(self, sizes: Sequence[int]) -> Parts:
        """Allocate the parts of a message, and copy into them the bytes of the parts that were read
        together with the message."""
        try:
            parts = [bytearray(size) for size in sizes]
        except MemoryError:
            self._skip = sum(sizes)
            return memory_exhausted(self._skip, self._codec.parts)
        for part in parts:
            early = min(len(part), len(self._buffer))
            part[:early] = self._buffer[:early]
            del self._buffer[:early]
            if early < len(part):
                self._unfilled.append(memoryview(part)[early:])
        return parts


def close_for_all(end: socket.socket) -> None:
    """Close a socket, also for a forked child, which has a copy of its descriptor."""
    with contextlib.suppress(OSError):  # the other end has closed it
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class BlockingPipe(Generic[M]):
    """One end of a pipe, with methods that block. Any thread may send. Only one thread at a time
    may receive.

    Args:
      fd: the file descriptor of a stream socket. The pipe takes ownership of the descriptor, and
        child processes do not inherit it.
    """

    def __init__(self, fd: int, codec: PipeCodec[M]) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._codec = codec
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._frames = FrameReader(codec)
        self._whole: deque[tuple[M, Parts]] = deque()

    @classmethod
    def pair(cls, codec: PipeCodec[M]) -> tuple[BlockingPipe[M], int]:
        """Return one end of a new pipe as a BlockingPipe, and the other end as a file
        descriptor.
        """
        fill_standard_streams()
        ours, theirs = socket.socketpair()
        return cls(ours.detach(), codec), theirs.detach()

    def send(self, message: M, parts: Sequence[Any] = ()) -> None:
        """Send a message, and wait until all of its bytes are sent. `parts` are contiguous buffers.
        Raises OSError if the other end is closed.
        """
        head = frame(self._codec.encode(message), parts)
        with self._sending:
            self._socket.sendall(head)
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> tuple[M, Parts]:
        """Wait for the next message. Raises EOFError if the other end is closed."""
        while not self._whole:
            # A thread that blocked in recv would also be woken whenever the other end reads.
            self._poll.poll()
            try:
                count = self._socket.recv_into(self._frames.room())
            except OSError:
                count = 0
            if not count:
                raise EOFError("the process at the other end of the pipe has closed it, or ended")
            self._whole.extend(self._frames.received(count))
        return self._whole.popleft()

    def poll(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for bytes. Return whether bytes have arrived or the other end is
        closed."""
        if self._whole:
            return True
        return bool(self._poll.poll(ceil(timeout_s * 1000)))

    def close(self) -> None:
        """Close this end. Idempotent. Do not call this while a thread waits in `receive`: closing
        the socket does not wake the thread."""
        self._socket.close()


class LoopPipe(Generic[M]):
    """An end of a pipe that a loop owns. Only the loop thread uses it.

    Args:
      on_message: a function that is called with each message and its parts.
      on_end: a function that is called when the other end is closed. For a child it does nothing,
        because the zygote reports the child's end to the code that has ordered it.
      own: this end; by default the pipe makes a pair, and keeps the child's end as `theirs`.

    Attributes:
      theirs: the file descriptor of the child's end; -1 if there is no child. `BoundChildren` sends
        this descriptor to the zygote, and then closes it here.
    """

    def __init__(
        self,
        loop: Loop,
        codec: PipeCodec[M],
        on_message: Callable[[M, Parts], object],
        on_end: Callable[[], object] = lambda: None,
        own: socket.socket | None = None,
    ) -> None:
        self.theirs = -1
        if own is None:
            own, theirs = socket.socketpair()
            self.theirs = theirs.detach()
        self._socket = own
        self._socket.setblocking(False)
        self._on_end = on_end
        self._loop = loop
        self._codec = codec
        self._on_message = on_message
        self._frames = FrameReader(codec)
        self._out: deque[memoryview] = deque()
        self._arrived: Iterator[tuple[M, Parts]] = iter(())
        """The messages that were read and not delivered."""
        self._blocked = self._ending = self._closed = self._goes_on = False
        self._finished = False
        """Whether the child has ended or this end is closed, so that no more bytes are read or
        written."""
        loop.add_fd(self._socket.fileno(), self._read, self._write)

    @property
    def unsent_bytes(self) -> int:
        """The bytes for which the socket has had no room."""
        return sum(map(len, self._out))

    def send(self, message: M, parts: Sequence[Any] = ()) -> bool:
        """Send a message, or queue a copy if the socket has no room. Return False if the other end
        is closed."""
        if self._finished or self._ending:
            return False
        if self._blocked:
            views = [memoryview(bytes(part)) for part in parts]
        else:
            views = [memoryview(part).cast("B") for part in parts]
        self._out.append(memoryview(frame(self._codec.encode(message), parts)))
        self._out.extend(views)
        if self._blocked:
            return True
        self._write()
        if parts and self._out:
            self._out = deque(memoryview(bytes(rest)) for rest in self._out)
        return True

    def flush(self, timeout_s: float) -> None:
        """Wait at most so long until the queued messages are sent."""
        if self._out:
            self._socket.settimeout(max(0.0, timeout_s))
            with contextlib.suppress(OSError):  # the other end is closed, or reads too slowly
                self._socket.sendall(b"".join(self._out))
            self._out.clear()

    def end(self) -> bool:
        """Close the sending direction after the queued messages are sent, so that `receive` in the
        child raises EOFError. Return False if this end is already closed.
        """
        if self._closed:
            return False
        self._ending = True
        self._write()
        return True

    def drain(self) -> None:
        """Read all messages that have arrived from the child, even if the child has ended."""
        while self._read_once():
            pass

    def bound(self, bytes_max: float) -> None:
        """Treat a longer message from now on as the other end's end."""
        self._frames.bytes_max = bytes_max

    def close(self) -> None:
        """Close this end and drop the queued messages. Idempotent."""
        if not self._closed:
            self._closed = self._finished = True
            self._loop.remove_fd(self._socket.fileno())
            close_for_all(self._socket)

    def _write(self) -> None:
        out = self._out
        while out:
            try:
                sent = self._socket.send(out[0])
            except BlockingIOError:
                break
            except OSError:  # the child has ended, and _read notices that
                out.clear()
                break
            if sent == len(out[0]):
                out.popleft()
            else:
                out[0] = out[0][sent:]
        if self._ending and not out:
            with contextlib.suppress(OSError):  # the child has ended
                self._socket.shutdown(socket.SHUT_WR)
        blocked = bool(out)
        # Most messages are sent at once, so the pipe calls the loop only when it begins or stops to
        # wait for room in the socket.
        if blocked != self._blocked and not self._finished:
            self._blocked = blocked
            self._loop.watch_writable(self._socket.fileno(), blocked)

    def _read(self) -> None:
        if self._goes_on:
            return
        for _ in range(READS_PER_TURN):
            count = self._read_once(MESSAGES_PER_TURN_MAX)
            if not count or (count < RECEIVE_BYTES and not self._frames.in_parts):
                return  # the socket is empty

    def _go_on(self) -> None:
        self._goes_on = False
        self._read()

    def _read_once(self, messages_max: int | None = None) -> int:
        """Read once, and return the number of bytes that were read. 0 means that no bytes have
        arrived, that the child has ended, or that messages are left for the next turn."""
        if self._finished or not self._deliver(messages_max):
            return 0
        try:
            count = self._socket.recv_into(self._frames.room())
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        if not count:
            self._ended()
            return 0
        self._arrived = self._frames.received(count)
        return count if self._deliver(messages_max) else 0

    def _deliver(self, messages_max: int | None) -> bool:
        """Deliver messages that were read. Return whether there are no more."""
        for delivered, (message, parts) in enumerate(self._arrived, 1):
            self._on_message(message, parts)
            if self._closed:
                return False
            if delivered == messages_max:
                if not self._goes_on:
                    self._goes_on = True
                    self._loop.call_soon(self._go_on)
                return False
        if self._frames.broken and not self._finished:
            self._ended()
        return True

    def _ended(self) -> None:
        self._finished = True
        self._out.clear()
        self._loop.remove_fd(self._socket.fileno())
        self._on_end()
