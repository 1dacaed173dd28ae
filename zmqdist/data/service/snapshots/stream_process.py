"""A stream of a snapshot in a process of its own, so that a crash of the pipeline stops only its
own stream.

The worker's zygote forks the process. The process sends its requests to the dispatcher directly,
and reports its progress and its end to the worker over a pipe. The worker stops the stream by
sending LEAVE on that pipe, or by closing its end of the pipe.

When the process crashes, another process continues from the last commit, and need not know how the
earlier process ended (writer.py). After CRASHES_MAX crashes without a commit in between, the
snapshot fails with an error that says how the process died.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, Final

import msgspec

from zmqdist.data.service.snapshots.stream import SnapshotStream, SnapshotTaskProgress
from zmqdist.data.service.task_errors import describe_exit
from zmqdist.errors import UNKNOWN
from zmqdist.process.bound_children import SpawnChild
from zmqdist.process.pipe import BYTES, BlockingPipe, LoopPipe, Parts
from zmqdist.process.zygote import SILENT
from zmqdist.rpc.client import ZmqClient
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.data.snapshots")

CRASHES_MAX: Final = 3

END_S: Final = 5.0
"""Seconds that a stopped stream may take to clean up before the worker kills its process."""

REPORT_S: Final = 0.5
"""Seconds between two reports of the process's progress to the worker."""

LEAVE: Final = b"leave"


class StreamTerms(msgspec.Struct, array_like=True):
    """The worker's first message to the process of a stream: the arguments of the SnapshotStream
    that the process runs."""

    dispatcher: str
    incarnation: int
    path: str
    index: int
    timeout_s: float
    chunk_bytes_max: int


class StreamProcess:
    """The worker's side of a stream that a child process writes. It has the methods of
    `SnapshotStream`, which the worker's loop thread calls.

    Args:
      spawn: a function that forks the child process and reports the exit code when the child ends.
        The code is SILENT if the zygote ended the child because this worker was suspended.
      ended: called when this worker has nothing more to do for the stream.
      failed: `failed(stream, code, message, then)` reports an error to the dispatcher, and then
        calls `then`.
    """

    def __init__(
        self,
        loop: Loop,
        spawn: SpawnChild,
        begin: StreamTerms,
        ended: Callable[[Any], None],
        failed: Callable[[Any, int, str, Callable[[], None]], None],
    ) -> None:
        self.path, self.index = begin.path, begin.index
        self._loop = loop
        self._spawn = spawn
        self._begin = begin
        self._ended = ended
        self._failed = failed
        self._figures = (False, 0, 0)
        self._over = self._stopped = self._leaving = self._closed = False
        self._crashes = 0
        self._fork()

    def _fork(self) -> None:
        self._pipe = LoopPipe(self._loop, BYTES, self._receive)
        self._pipe.send(msgspec.msgpack.encode(self._begin))
        if self._leaving:
            self._pipe.send(LEAVE)
        self._child = self._spawn([self._pipe.theirs], self._exited)

    def _receive(self, message: bytes, _: Parts) -> None:
        *figures, self._over = msgspec.msgpack.decode(message)
        if figures[1] > self._figures[1]:
            self._crashes = 0
        self._figures = figures[0], figures[1], figures[2]

    def _exited(self, code: int) -> None:
        self._loop.set_timer(self, None, self._child.kill)
        if self._closed:
            return
        self._pipe.drain()
        self._pipe.close()
        if self._over or self._stopped:
            self._ended(self)
            return
        if code != SILENT:
            self._crashes += 1
            text = (
                f"the process that wrote stream {self.index} of {self.path} {describe_exit(code)}\n"
                f"Its standard error ended with:\n{self._child.tail() or '(nothing)'}"
            )
            log.warning("%s", text)
            if self._crashes >= CRASHES_MAX:
                why = f"This was crash number {self._crashes} in a row without a commit: the snapshot has failed.\n{text}"
                self._failed(self, UNKNOWN, why, lambda: self._ended(self))
                return
        self._fork()

    def progress(self) -> SnapshotTaskProgress:
        """Return the numbers of committed chunks and elements in the last report of the process."""
        return SnapshotTaskProgress(self.path, self.index, *self._figures)

    def leave(self) -> None:
        """Have the process commit the elements so far and end, so that another worker continues the
        stream."""
        self._leaving = True
        self._pipe.send(LEAVE)

    def stop(self) -> None:
        """Have the process end without a report to the dispatcher. Kill the process if it still
        runs after END_S."""
        if self._stopped:
            return
        self._stopped = True
        if self._pipe.end():
            self._loop.set_timer(self, self._loop.now() + END_S, self._child.kill)

    def close(self) -> None:
        """Ignore the process from now on, and close the pipe to it. The process ends because of
        that, or because the zygote ends."""
        self._stopped = self._closed = True
        self._loop.set_timer(self, None, self._child.kill)
        self._pipe.close()


def main(pipe_fd: int) -> None:
    """Run the child process: write the stream to its end, or until the worker stops it. Does not
    return."""
    pipe = BlockingPipe(pipe_fd, BYTES)
    first, _ = pipe.receive()
    begin = msgspec.msgpack.decode(first, type=StreamTerms)
    security = Credentials.from_environment().client(begin.dispatcher, "worker")
    client = ZmqClient(begin.dispatcher, "snapshots", security=security)

    def report(over: bool) -> None:
        _, _, *figures = stream.progress()
        try:
            pipe.send(msgspec.msgpack.encode([*figures, over]))
        except OSError:
            pass  # the pipe is broken, because the worker has ended

    def ended(_: SnapshotStream) -> None:
        report(True)
        os._exit(0)

    stream = SnapshotStream(
        client,
        begin.incarnation,
        begin.path,
        begin.index,
        begin.timeout_s,
        begin.chunk_bytes_max,
        ended,
    )
    stream.start()
    with contextlib.suppress(EOFError):
        while True:
            if pipe.poll(REPORT_S):
                pipe.receive()
                stream.leave()
            else:
                report(False)
    stream.stop()
    stream.join()
    os._exit(0)
