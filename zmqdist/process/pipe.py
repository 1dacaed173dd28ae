"""Messages between a worker and its slot processes: MessagePack and raw parts over a socket pair.

A message is `[bytes of the head: u32][head][part]*`; the head is one of the structs below, and says how long the parts are. The slot's
end blocks; the worker's end belongs to the loop and never does.

Only a worker and its own children speak this: there is no version and no distrust.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from zmqdist.messages import ERROR
from zmqdist.transport.arena import Handle, Offer
from zmqdist.transport.loop import Loop
from zmqdist.transport.shortage import exhausted
from zmqdist.wire.trusted import pack_error

Buffer: TypeAlias = "bytes | bytearray | memoryview"

RECEIVE_BYTES = 256 * 1024
"""Taken at a time, into memory that is used again: fresh memory of this size would be mapped and unmapped for each message."""


class SlotWork(msgspec.Struct, array_like=True, tag=1, gc=False):
    """To a slot: functions that are new to it, (coordinator, fn, pickled), items to run, functions to forget."""

    functions: list[tuple[int, int, bytes]]
    items: list[tuple[int, int, int, bytes]]
    forget: list[tuple[int, int]]


class SlotReport(msgspec.Struct, array_like=True, tag=2, gc=False):
    """From a slot: outcomes, (position, kind, payload). A bulk outcome comes alone, with its parts.

    Each part is a handle in the slot's shared memory, or a number of bytes, which follow.
    """

    outcomes: list[tuple[int, int, bytes]]
    parts: list[int | Handle] = []


class SlotStarted(msgspec.Struct, array_like=True, tag=3, gc=False):
    """From a slot: it has started, and this is how its shared memory is found."""

    pid: int
    memory: Offer | None = None


class SlotWelcome(msgspec.Struct, array_like=True, tag=4, gc=False):
    """To a slot, first of all: the address and the public key of its worker."""

    worker: str
    key: bytes = b""


PipeMessage: TypeAlias = SlotWork | SlotReport | SlotStarted | SlotWelcome

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PipeMessage] = msgspec.msgpack.Decoder(PipeMessage)
_LENGTH = struct.Struct("<I")


def _receive_room() -> memoryview:
    """Mapped, not allocated: only the pages that a message has needed are there, so that thousands of slots cost little."""
    return memoryview(mmap.mmap(-1, RECEIVE_BYTES))


def encode(message: PipeMessage) -> bytes:
    head = _ENCODER.encode(message)
    return _LENGTH.pack(len(head)) + head


class BlockingPipe:
    """The slot's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._room = _receive_room()

    def send(self, message: PipeMessage, parts: Sequence[Buffer] = ()) -> None:
        """Send all of it. Raises OSError when the worker is gone."""
        self._socket.sendall(encode(message))
        for part in parts:
            self._socket.sendall(part)

    def receive(self) -> PipeMessage | None:
        """The next message; None when the worker is gone. Nothing is sent to a slot with parts."""
        while True:
            if len(self._buffer) >= 4:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if len(self._buffer) >= 4 + length:
                    head = bytes(self._buffer[4 : 4 + length])
                    del self._buffer[: 4 + length]
                    return _DECODER.decode(head)
            try:
                count = self._socket.recv_into(self._room)
            except OSError:
                return None
            if not count:
                return None
            self._buffer += self._room[:count]


class LoopPipe:
    """The worker's end: all in the loop's thread.

    The slot's end is not told here: the template sees the process end.

    Args:
      on_message: gets a message and those of its parts that came as bytes, which are its own.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[PipeMessage, list[bytearray]], Any],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._socket = sock
        self._on_message = on_message
        self._room = _receive_room()
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._report: SlotReport | None = None
        self._parts: list[bytearray] = []
        self._filled = 0
        self._offset = 0
        self._skip = 0
        """Bytes of parts for which there was no memory here, that are still to come."""
        self._closed = self._clogged = False
        loop.add_fd(sock.fileno(), self._read, self._write)

    def send(self, message: PipeMessage) -> None:
        """Queue a message; it leaves at once where the socket takes it."""
        if self._closed:
            return
        waiting = bool(self._out)
        self._out.append(memoryview(encode(message)))
        if not waiting:
            self._write()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_fd(self._socket.fileno())
            self._socket.close()

    def _write(self) -> None:
        out = self._out
        while out and not self._closed:
            try:
                sent = self._socket.send(out[0])
            except BlockingIOError:
                self._watch(True)
                return
            except OSError:  # the slot is gone: its end comes through _read
                out.clear()
                return
            if sent == len(out[0]):
                out.popleft()
            else:
                out[0] = out[0][sent:]
        if self._clogged:
            self._watch(False)

    def _watch(self, clogged: bool) -> None:
        """Most messages leave at once, and then the loop need not be told anything."""
        if clogged != self._clogged and not self._closed:
            self._clogged = clogged
            self._loop.watch_writable(self._socket.fileno(), clogged)

    def drain(self) -> None:
        """The slot has ended: take what it still said."""
        while self._read_some():
            pass

    def _read(self) -> None:
        for _ in range(16):  # then the others have their turn
            count = self._read_some()
            if not count or (count < RECEIVE_BYTES and self._report is None):
                return  # that was all

    def _read_some(self) -> int:
        """Bytes that were read; 0 where there are none, or none will come."""
        if self._closed:
            return 0
        try:
            count = self._read_heads() if self._report is None else self._read_parts()
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        if not count:
            self.close()
        return count

    def _read_heads(self) -> int:
        count = self._socket.recv_into(self._room)
        self._in += self._room[:count]
        self._skip_parts()
        self._parse()
        return count

    def _parse(self) -> None:
        buffer = self._in
        while self._report is None and len(buffer) >= 4:
            (length,) = _LENGTH.unpack_from(buffer)
            if len(buffer) < 4 + length:
                return
            message = _DECODER.decode(bytes(buffer[4 : 4 + length]))
            del buffer[: 4 + length]
            if isinstance(message, SlotReport) and any(type(part) is int for part in message.parts):
                self._begin_parts(message)
            else:
                self._on_message(message, [])

    def _skip_parts(self) -> None:
        skipped = min(self._skip, len(self._in))
        if skipped:
            self._skip -= skipped
            del self._in[:skipped]

    def _begin_parts(self, report: SlotReport) -> None:
        """Parts are read straight into their own memory; what came with the head already is taken over."""
        sizes = [part for part in report.parts if isinstance(part, int)]
        try:
            self._parts = [bytearray(size) for size in sizes]
        except MemoryError:
            self._skip = sum(sizes)
            self._skip_parts()
            error = exhausted(sum(sizes), "the result of a function at its worker")
            self._on_message(SlotReport([(report.outcomes[0][0], ERROR, pack_error(error))]), [])
            return
        self._report = report
        self._filled = 0
        early = self._in
        self._in = bytearray()
        view = memoryview(early)
        for number, part in enumerate(self._parts):
            count = min(len(part), len(view))
            part[:count] = view[:count]
            view = view[count:]
            self._filled = number
            if count < len(part):
                self._offset = count
                return
        rest = bytes(view)
        self._end_parts(rest)

    def _read_parts(self) -> int:
        part = self._parts[self._filled]
        count = self._socket.recv_into(memoryview(part)[self._offset :])
        self._offset += count
        while self._offset == len(self._parts[self._filled]):
            self._filled += 1
            self._offset = 0
            if self._filled == len(self._parts):
                self._end_parts(b"")
                break
        return count

    def _end_parts(self, rest: bytes) -> None:
        report, parts = self._report, self._parts
        assert report is not None
        self._report, self._parts = None, []
        self._on_message(report, parts)
        self._in += rest
        self._parse()
