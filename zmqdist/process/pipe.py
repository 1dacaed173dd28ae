"""Messages between a process and its children over a socket pair. All pipes have the same framing.

A frame is `[bytes of the message: u32][number of parts: u32][bytes of a part: u64]*[message][part]*`. A codec translates messages to bytes
and back; parts are buffers, and are sent unchanged.

The reader's promises
    A part is read directly into memory of its own, which belongs to the receiver.
    If there is no memory for the parts of a message, their bytes are skipped, and the receiver gets the message with an error in their
    place.
    If the other process ends in the middle of a frame, the incomplete frame is dropped without an error.

Both ends use the same frames. They are two classes because they wait differently. `BlockingPipe` is for a thread that has no other work
until the next message: in a child, or in a parent with one thread for each child. `LoopPipe` is for a parent whose loop has thousands of
children; it never waits.

Only a process and its own children use a pipe, so the format has no version, and the reader trusts its input.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from zmqdist.errors import ResourceExhaustedError
from zmqdist.transport.memory_limits import memory_exhausted

if TYPE_CHECKING:  # it imports ZeroMQ, which a child may not need
    from zmqdist.transport.loop import Loop

M = TypeVar("M")

Parts: TypeAlias = "list[bytearray] | ResourceExhaustedError"
"""The parts of a message, which belong to the receiver; or an error if there was no memory for them."""

RECEIVE_BYTES: Final = 256 * 1024
"""Bytes received at a time, into memory that is reused, because new memory of this size would be mapped and unmapped for each message."""

READS_PER_TURN: Final = 16
"""How often a pipe is read before other descriptors of the loop have their turn."""

_LENGTHS: Final = struct.Struct("<II")


@dataclass(frozen=True)
class PipeCodec(Generic[M]):
    """How the messages of a pipe become bytes.

    Attributes:
      parts: a name for the parts of a message, for the error if there is no memory for them.
    """

    encode: Callable[[M], bytes]
    decode: Callable[[bytes], M]
    parts: str = "the parts of a message"


BYTES: Final[PipeCodec[bytes]] = PipeCodec(bytes, bytes)
"""The codec for messages that are bytes already."""


def frame(message: bytes, parts: Sequence[Any] = ()) -> bytes:
    """Return the beginning of a frame, up to its parts. The caller sends the parts after it."""
    lengths = _LENGTHS.pack(len(message), len(parts))
    if not parts:
        return lengths + message
    return lengths + struct.pack(f"<{len(parts)}Q", *(memoryview(part).nbytes for part in parts)) + message


class FrameReader(Generic[M]):
    """Turns bytes into messages, without a socket: the caller reads into `room()`, and tells `received` how many bytes it has read."""

    def __init__(self, codec: PipeCodec[M]) -> None:
        self._codec = codec
        # Mapped, not allocated, because only the touched pages of a mapping use memory, so that thousands of pipes cost little.
        self._room = memoryview(mmap.mmap(-1, RECEIVE_BYTES))
        self._buffer = bytearray()
        """The beginning of an incomplete frame."""
        self._unfilled: deque[memoryview] = deque()
        """The memory for the bytes of a message's parts that were not read yet."""
        self._filling: list[tuple[M, Parts]] = []
        """The message to which the unread parts belong; empty if there is none."""
        self._skip = 0
        """The number of bytes still to be read and dropped, of parts for which there was no memory."""

    @property
    def in_parts(self) -> bool:
        """Whether more bytes of a message's parts are to be read."""
        return bool(self._unfilled)

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        return self._unfilled[0] if self._unfilled else self._room

    def received(self, count: int) -> Iterator[tuple[M, Parts]]:
        """Yield the messages that are complete with the `count` bytes that were read into `room()`."""
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
            if len(buffer) < end:
                return
            message = self._codec.decode(bytes(buffer[begin:end]))
            if not parts_count:
                del buffer[:end]
                yield message, []
                continue
            sizes = struct.unpack_from(f"<{parts_count}Q", buffer, _LENGTHS.size)
            del buffer[:end]
            parts = self._begin_parts(sizes)
            if self._unfilled:
                self._filling.append((message, parts))
                return
            yield message, parts

    def _begin_parts(self, sizes: Sequence[int]) -> Parts:
        """Allocate the parts, and copy into them the bytes that arrived together with the message."""
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


class BlockingPipe(Generic[M]):
    """An end of a pipe whose calls block. Any thread may send; one thread at a time receives.

    Args:
      fd: the descriptor of a stream socket. The pipe owns it from now on, and child processes do not inherit it.
    """

    def __init__(self, fd: int, codec: PipeCodec[M]) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._codec = codec
        self._sending = threading.Lock()
        self._frames = FrameReader(codec)
        self._whole: deque[tuple[M, Parts]] = deque()

    @classmethod
    def pair(cls, codec: PipeCodec[M]) -> tuple[BlockingPipe[M], int]:
        """Return one end as a pipe, and the other end as a descriptor."""
        ours, theirs = socket.socketpair()
        return cls(ours.detach(), codec), theirs.detach()

    def send(self, message: M, parts: Sequence[Any] = ()) -> None:
        """Send a message completely. `parts` are contiguous buffers. Raises OSError if the other end is closed."""
        head = frame(self._codec.encode(message), parts)
        with self._sending:
            self._socket.sendall(head)
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> tuple[M, Parts]:
        """Wait for the next message. Raises EOFError if the other end is closed."""
        while not self._whole:
            try:
                count = self._socket.recv_into(self._frames.room())
            except OSError:
                count = 0
            if not count:
                raise EOFError("the process at the other end of the pipe has closed it, or ended")
            self._whole.extend(self._frames.received(count))
        return self._whole.popleft()

    def poll(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether `receive` would return or raise without waiting for the first byte."""
        if self._whole:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(math.ceil(timeout_s * 1000)))

    def close(self) -> None:
        """Close this end. Idempotent. No thread may be receiving, because closing does not wake it."""
        self._socket.close()


class LoopPipe(Generic[M]):
    """The parent's end, used in the loop's thread only.

    Args:
      on_message: called with each message and its parts. It is not called when the child ends: the code that has forked the child notices
        the end.

    Attributes:
      theirs: the descriptor for the child. The code that forks the child closes it in this process.
    """

    def __init__(self, loop: Loop, codec: PipeCodec[M], on_message: Callable[[M, Parts], object]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self.theirs = theirs.detach()
        self._loop = loop
        self._codec = codec
        self._on_message = on_message
        self._frames = FrameReader(codec)
        self._out: deque[memoryview] = deque()
        self._blocked = self._ending = self._closed = False
        self._finished = False
        """Whether the child has ended, or this end is closed, so that no byte is read or written any more."""
        loop.add_fd(self._socket.fileno(), self._read, self._write)

    def send(self, message: M) -> None:
        """Queue a message; it is sent at once if the socket has room. Does nothing if the child has ended."""
        if self._finished or self._ending:
            return
        self._out.append(memoryview(frame(self._codec.encode(message))))
        if not self._blocked:
            self._write()

    def end(self) -> bool:
        """Close the sending direction after the queued messages, so that the child reads the end. Return False if this end is closed."""
        if self._closed:
            return False
        self._ending = True
        self._write()
        return True

    def drain(self) -> None:
        """Read all messages that the child has sent, also after its end."""
        while self._read_some():
            pass

    def close(self) -> None:
        """Close this end and drop the queued messages. Idempotent."""
        if not self._closed:
            self._closed = self._finished = True
            self._loop.remove_fd(self._socket.fileno())
            self._socket.close()

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
        # Most messages are sent at once, without a call to the loop.
        if blocked != self._blocked and not self._finished:
            self._blocked = blocked
            self._loop.watch_writable(self._socket.fileno(), blocked)

    def _read(self) -> None:
        for _ in range(READS_PER_TURN):
            count = self._read_some()
            if not count or (count < RECEIVE_BYTES and not self._frames.in_parts):
                return  # the socket is empty

    def _read_some(self) -> int:
        """Read once; return the number of bytes read. 0 means that there are none now, or that the child has ended."""
        if self._finished:
            return 0
        try:
            count = self._socket.recv_into(self._frames.room())
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        if not count:
            self._finished = True
            self._out.clear()
            self._loop.remove_fd(self._socket.fileno())
            return 0
        for message, parts in self._frames.received(count):
            self._on_message(message, parts)
            if self._closed:
                return 0
        return count
