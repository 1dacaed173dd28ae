"""Frames between a process and its children: frames cut anywhere, parts for which there is no
memory, and a pipe that ends early."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.helpers import until
from zmqdist.errors import ResourceExhaustedError
from zmqdist.transport import pipe as pipe_module
from zmqdist.transport.loop import Loop
from zmqdist.transport.pipe import (
    BYTES,
    RECEIVE_BYTES,
    BlockingPipe,
    FrameReader,
    LoopPipe,
    Parts,
    PipeCodec,
    frame,
)

MIB = 2**20

Message = tuple[bytes, list[bytes]]


def framed(messages: Sequence[Message]) -> bytes:
    return b"".join(b"".join([frame(message, parts), *parts]) for message, parts in messages)


def read(
    reader: FrameReader[bytes], data: bytes, sizes: Iterator[int]
) -> list[tuple[bytes, Parts]]:
    """Return a reader of these bytes, which gets at most so many at a time."""
    found: list[tuple[bytes, Parts]] = []
    rest = memoryview(data)
    while rest:
        room = reader.room()
        count = min(next(sizes), len(rest), len(room))
        room[:count] = rest[:count]
        rest = rest[count:]
        found.extend(reader.received(count))
    return found


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop("zmqdist-test")
    loop.start()
    yield loop
    loop.stop()


@pytest.fixture
def child_of(loop: Loop) -> Iterator[Callable[..., tuple[LoopPipe[bytes], BlockingPipe[bytes]]]]:
    """Both ends of a pipe; the function gets the child's messages."""
    ends: list[tuple[LoopPipe[bytes], BlockingPipe[bytes]]] = []

    def make(
        heard: Callable[[bytes, Parts], object] = lambda *_: None,
    ) -> tuple[LoopPipe[bytes], BlockingPipe[bytes]]:
        parent = loop.run(LoopPipe, loop, BYTES, heard)
        ends.append((parent, BlockingPipe(parent.theirs, BYTES)))
        return ends[-1]

    yield make
    for parent, child in ends:
        loop.run(parent.close)
        child.close()


@given(
    st.lists(
        st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=3)), max_size=6
    ),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_cut_frames_are_read_whole(messages: list[Message], sizes: list[int]) -> None:
    assert read(FrameReader(BYTES), framed(messages), itertools.cycle(sizes)) == messages


def test_part_is_read_into_own_memory() -> None:
    part = os.urandom(3 * RECEIVE_BYTES)
    ((_, parts), _) = read(
        FrameReader(BYTES), framed([(b"head", [part]), (b"next", [])]), itertools.repeat(MIB)
    )
    assert isinstance(parts, list)
    assert parts == [part]
    parts[0][0] ^= 1  # it belongs to the receiver alone: it is writable, and has no other bytes
    assert len(parts[0]) == len(part)


@pytest.mark.parametrize(("size", "kib"), [(1, 8), (7, 8), (1000, 2048), (MIB, 2048)])
def test_parts_without_memory_are_skipped(
    monkeypatch: pytest.MonkeyPatch, size: int, kib: int
) -> None:
    def small_only(given: Any = b"") -> bytearray:
        if isinstance(given, int) and given > 1000:
            raise MemoryError
        return bytearray(given)

    reader = FrameReader(PipeCodec(bytes, bytes, "what was asked for"))
    monkeypatch.setattr(pipe_module, "bytearray", small_only, raising=False)
    messages: list[Message] = [
        (b"large", [bytes(3), bytes(kib << 10), bytes(5)]),
        (b"small", [b"x"]),
        (b"last", []),
    ]
    (large, error), *others = read(reader, framed(messages), itertools.repeat(size))
    assert large == b"large"
    assert isinstance(error, ResourceExhaustedError)
    assert f"no memory for what was asked for: {kib >> 10} MiB" in str(error)
    assert others == messages[1:]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 12, 16, 18, 20, 25])
def test_end_within_frame_is_end(cut: int) -> None:
    ours, theirs = BlockingPipe.pair(BYTES)
    os.write(theirs, framed([(b"whole", [])]) + framed([(b"half", [b"part!!"])])[:cut])
    os.close(theirs)
    try:
        assert ours.receive() == (b"whole", [])
        for _ in range(2):
            with pytest.raises(EOFError, match="closed it, or ended"):
                ours.receive()
        assert ours.poll(0)
    finally:
        ours.close()


@pytest.mark.timeout(20)
def test_pipe_with_unread_bytes_ends() -> None:
    ours, theirs = BlockingPipe.pair(BYTES)
    ours.send(b"unread")
    os.write(theirs, framed([(b"whole", [])]))
    os.close(theirs)  # the kernel resets the connection
    try:
        assert ours.receive() == (b"whole", [])
        with pytest.raises(EOFError):
            ours.receive()
    finally:
        ours.close()


@pytest.mark.timeout(20)
def test_messages_of_two_threads_do_not_mix() -> None:
    ours, theirs = BlockingPipe.pair(BYTES)
    other = BlockingPipe(theirs, BYTES)

    def send(name: bytes) -> None:
        for _ in range(20):
            other.send(name, [np.full(MIB // 8, name[0], np.uint8), name * 5])

    threads = [threading.Thread(target=send, args=(name,)) for name in (b"a", b"b")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            name, parts = ours.receive()
            assert parts == [name * (MIB // 8), name * 5]
        assert not ours.poll(0)
    finally:
        ours.close()
        for thread in threads:
            thread.join()
        other.close()


def test_message_to_closed_pipe_is_error() -> None:
    ours, theirs = BlockingPipe.pair(BYTES)
    os.close(theirs)
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(b"word")
    ours.close()
    ours.close()


def test_grandchildren_do_not_inherit_pipe() -> None:
    ours, theirs = BlockingPipe.pair(BYTES)
    os.set_inheritable(theirs, True)
    other = BlockingPipe(theirs, BYTES)
    assert not os.get_inheritable(theirs)
    ours.close()
    other.close()


@pytest.mark.timeout(20)
def test_late_reader_gets_messages_then_end(loop: Loop, child_of: Any) -> None:
    parent, child = child_of()
    messages = [bytes([number]) * MIB for number in range(5)]
    for message in messages:
        loop.run(parent.send, message)
    assert loop.run(parent.end)
    loop.run(parent.send, b"too late")
    assert [child.receive()[0] for _ in messages] == messages
    with pytest.raises(EOFError):
        child.receive()
    assert loop.run(parent.end)  # again: the reader has reported it, and the child may still send
    loop.run(parent.close)
    assert not loop.run(parent.end)


@pytest.mark.timeout(20)
def test_loop_gets_messages_with_parts_in_order(loop: Loop, child_of: Any) -> None:
    heard: list[tuple[bytes, Parts]] = []
    _, child = child_of(lambda *message: heard.append(message))
    large = os.urandom(4 * MIB)
    for number in range(10):
        child.send(b"%d" % number, [large, b"", b"end"] if number % 2 else [])
    until(lambda: len(heard) == 10)
    assert heard == [
        (b"%d" % number, [large, b"", b"end"] if number % 2 else []) for number in range(10)
    ]


@pytest.mark.timeout(20)
def test_last_messages_arrive_after_end_of_child(loop: Loop) -> None:
    heard: list[bytes] = []

    def ended() -> None:
        parent = LoopPipe(loop, BYTES, lambda message, _: heard.append(message))
        child = BlockingPipe(parent.theirs, BYTES)
        parent.send(b"unread")
        child.send(b"first")
        child.send(b"last")
        child.close()
        parent.drain()
        parent.drain()
        parent.send(b"to nobody")
        parent.close()
        parent.close()

    loop.run(ended)
    assert heard == [b"first", b"last"]
    assert loop.faults == 0


@pytest.mark.timeout(20)
def test_pipe_closed_by_message_receives_no_more(loop: Loop, child_of: Any) -> None:
    heard: list[bytes] = []

    def hear(message: bytes, _: Parts) -> None:
        heard.append(message)
        if message == b"stop":
            parent.close()

    def say() -> None:  # in the loop, so that all messages have arrived when the loop reads
        for message in (b"go", b"stop", b"more"):
            child.send(message)

    parent, child = child_of(hear)
    loop.run(say)
    until(lambda: b"stop" in heard)
    loop.run(parent.drain)
    assert heard == [b"go", b"stop"]
    assert loop.faults == 0


def test_queued_parts_have_values_of_send(loop: Loop, child_of: Any) -> None:
    """The sender may write to its parts as soon as `send` has returned, also while the other end
    does not read, and all messages arrive in order."""
    parent, child = child_of()
    part = bytearray(300_000)
    for number in range(4):
        part[:] = bytes([number]) * len(part)
        assert loop.run(parent.send, b"%d" % number, [part, b""])
    part[:] = b"x" * len(part)
    assert loop.run(lambda: parent.unsent_bytes) > 0
    for number in range(4):
        message, parts = child.receive()
        assert (message, parts) == (b"%d" % number, [bytes([number]) * len(part), b""])
    until(lambda: not loop.run(lambda: parent.unsent_bytes))


def test_flush_waits_for_reader(loop: Loop, child_of: Any) -> None:
    parent, child = child_of()
    assert loop.run(parent.send, b"large", [bytes(MIB)])
    reader = threading.Timer(0.05, child.receive)
    reader.start()
    loop.run(parent.flush, 20.0)
    assert parent.unsent_bytes == 0
    reader.join(20)


def test_many_messages_leave_turns_to_others(loop: Loop, child_of: Any) -> None:
    heard: list[bytes] = []
    turns: list[int] = []

    def hear(message: bytes, _: Parts) -> None:
        heard.append(message)
        if len(heard) == 1:
            loop.call_soon(lambda: turns.append(len(heard)))

    _, child = child_of(hear)
    messages = [b"%d" % number for number in range(200)]
    loop.run(lambda: [child.send(message) for message in messages])
    until(lambda: len(heard) == 200)
    assert heard == messages
    assert turns[0] < 100


@pytest.mark.parametrize("data", [framed([(bytes(200), [])]), struct.pack("<IIQ", 0, 1, 2**40)])
def test_too_long_message_ends_the_pipe(loop: Loop, data: bytes) -> None:
    ended = threading.Event()
    heard: list[bytes] = []
    ours, theirs = socket.socketpair()
    pipe = loop.run(lambda: LoopPipe(loop, BYTES, lambda *one: heard.append(one), ended.set, ours))
    loop.run(pipe.bound, 100)
    theirs.sendall(framed([(bytes(50), [])]) + data)
    assert ended.wait(20)
    assert heard == [(bytes(50), [])]
    loop.run(pipe.close)
    theirs.close()


def test_closed_pipe_ends_beside_a_copy(loop: Loop, child_of: Any) -> None:
    """A child that the program has forked has a copy of this end."""
    ours, theirs = socket.socketpair()
    pipe = loop.run(lambda: LoopPipe(loop, BYTES, lambda *_: None, own=ours))
    with ours.dup(), theirs:
        loop.run(pipe.close)
        assert theirs.recv(1) == b""


def test_refused_parts_leave_no_trace(loop: Loop, child_of: Any) -> None:
    parent, child = child_of()
    with pytest.raises(TypeError):
        loop.run(parent.send, b"refused", [memoryview(bytes(4))[::2]])
    assert loop.run(parent.send, b"next")
    assert child.receive() == (b"next", [])


def test_send_after_end_of_reader_fails(loop: Loop) -> None:
    ended = threading.Event()
    ours, theirs = socket.socketpair()
    pipe = loop.run(lambda: LoopPipe(loop, BYTES, lambda *_: None, ended.set, ours))
    theirs.close()
    assert ended.wait(20)
    assert not loop.run(pipe.send, b"late")
    loop.run(pipe.close)
