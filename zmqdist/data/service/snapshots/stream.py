"""A stream of a snapshot at the worker, in a thread (SnapshotStream) or in a process of its own
(StreamProcess), so that a crash of the pipeline stops only its own stream. The thread writes
chunks, and sends the stream's requests to the dispatcher.

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
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

import msgspec

from zmqdist.data.service.snapshots.writer import SnapshotTaskProgress, StreamWriter
from zmqdist.data.service.split_requests import call_until_answered
from zmqdist.data.service.task_errors import describe_exit
from zmqdist.errors import UNKNOWN
from zmqdist.process.bound_children import SpawnChild
from zmqdist.process.zygote import SILENT
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.pipe import BYTES, BlockingPipe, LoopPipe, Parts

log = logging.getLogger("zmqdist.data.snapshots")

CRASHES_MAX: Final = 3

END_S: Final = 5.0
"""Seconds that a stopped stream may take to clean up before the worker kills its process."""

REPORT_S: Final = 0.5
"""Seconds between two reports of the process's progress to the worker."""

LEAVE: Final = b"leave"


class StreamTerms(msgspec.Struct, array_like=True):
    """Which stream a worker writes, and how. The worker's first message to the process of the
    stream."""

    dispatcher: str
    incarnation: int
    path: str
    index: int
    timeout_s: float
    chunk_bytes_max: int


class SnapshotStream:
    """Writes one stream in a thread of its own.

    Attributes:
      thread: the thread, which the caller starts.

    Args:
      on_end: `on_end(stream)` is called in the thread when this worker has nothing more to do for the
        stream.
    """

    def __init__(
        self,
        client: ZmqClient,
        terms: StreamTerms,
        on_end: Callable[[SnapshotStream], None],
    ) -> None:
        self.path, self.index = terms.path, terms.index
        self._client = client
        self._terms = terms
        self._stop_event = threading.Event()
        self._on_end = on_end
        self._writer = StreamWriter(self.path, self.index, self._positions, terms.chunk_bytes_max)
        self.thread = threading.Thread(
            target=self._run, name=f"zmqdist-snapshot-{self.index}", daemon=True
        )

    def progress(self) -> SnapshotTaskProgress:
        """Return the number of chunks and elements that are committed so far."""
        return self._writer.progress

    def leave(self) -> None:
        """Have the thread commit the elements so far and end, so that another worker continues the
        stream. Does not block."""
        self._writer.leave()

    def stop(self) -> None:
        """Have the thread end at its next element, without a report to the dispatcher. Does not
        block."""
        self._stop_event.set()
        self._writer.cancel()

    close = stop
    """A thread cannot be ended at once."""

    def _positions(self, source: int, repetition: int, offset: int, count: int) -> Sequence[int]:
        start, length = self._call(
            "positions", self._terms.timeout_s, source, repetition, offset, count
        )
        return range(start, start + length)

    def _call(self, method: str, timeout_s: float, *args: Any) -> Any:
        stream = self._terms.incarnation, self.path, self.index
        return call_until_answered(
            self._client,
            method,
            *stream,
            *args,
            purpose=f"stream {self.index} of {self.path}",
            stop_event=self._stop_event,
            timeout_s=timeout_s,
        )

    def _run(self) -> None:
        code, message = 0, ""
        try:
            self._writer.run()
        except BaseException as error:  # catch every error, because the dispatcher has to get it
            code, message = code_and_message(error)
            log.log(
                logging.WARNING if self._writer.failed else logging.INFO,
                "stream %d of %s: %s",
                self.index,
                self.path,
                message,
            )
        # Report to the dispatcher only that the stream is complete or has failed. If the writer has
        # stopped for another reason, another worker continues the stream, or the snapshot is over.
        if not code or self._writer.failed:
            try:
                self._call("stream_ended", inf, code, message)
            except BaseException as error:
                log.info("stream %d of %s: %s", self.index, self.path, code_and_message(error)[1])
        self._on_end(self)


class StreamProcess:
    """The worker's side of a stream that a child process writes. It has the methods of
    `SnapshotStream`, which the worker's loop thread calls.

    Args:
      spawn: a function that forks the child process and reports the exit code when the child ends.
        The code is SILENT if the zygote ended the child because this worker was suspended.
      on_end: called when this worker has nothing more to do for the stream.
      failed: `failed(stream, code, message, then)` reports an error to the dispatcher, and then
        calls `then`.
    """

    def __init__(
        self,
        loop: Loop,
        spawn: SpawnChild,
        begin: StreamTerms,
        on_end: Callable[[Any], None],
        failed: Callable[[Any, int, str, Callable[[], None]], None],
    ) -> None:
        self.path, self.index = begin.path, begin.index
        self._loop = loop
        self._spawn = spawn
        self._begin = begin
        self._on_end = on_end
        self._failed = failed
        self._progress = SnapshotTaskProgress(self.path, self.index)
        self._over = self._stopping = self._leaving = self._closed = False
        self._crashes = 0
        self._fork()

    def _fork(self) -> None:
        self._pipe = LoopPipe(self._loop, BYTES, self._receive)
        self._pipe.send(msgspec.msgpack.encode(self._begin))
        if self._leaving:
            self._pipe.send(LEAVE)
        self._child = self._spawn([self._pipe.theirs], self._exited)

    def _receive(self, message: bytes, _: Parts) -> None:
        report = msgspec.msgpack.decode(message, type=tuple[SnapshotTaskProgress, bool])
        # only crashes in a row without a commit count
        if report[0].chunks > self._progress.chunks:
            self._crashes = 0
        self._progress, self._over = report

    def _exited(self, code: int) -> None:
        self._loop.set_timer(self, None, self._child.kill)
        if self._closed:
            return
        self._pipe.drain()
        self._pipe.close()
        # the process has reported its end, or the worker wants no more
        if self._over or self._stopping:
            self._on_end(self)
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
                self._failed(self, UNKNOWN, why, lambda: self._on_end(self))
                return
        self._fork()

    def progress(self) -> SnapshotTaskProgress:
        """Return the numbers of committed chunks and elements in the last report of the process."""
        return self._progress

    def leave(self) -> None:
        """Have the process commit the elements so far and end, so that another worker continues the
        stream."""
        self._leaving = True
        self._pipe.send(LEAVE)

    def stop(self) -> None:
        """Have the process end without a report to the dispatcher. Kill the process if it still
        runs after END_S."""
        if self._stopping:
            return
        self._stopping = True
        if self._pipe.end():
            self._loop.set_timer(self, self._loop.now() + END_S, self._child.kill)

    def close(self) -> None:
        """Ignore the process from now on, and close the pipe to it. The process ends because of
        that, or because the zygote ends."""
        self._stopping = self._closed = True
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
        with contextlib.suppress(OSError):  # the pipe is broken, because the worker has ended
            pipe.send(msgspec.msgpack.encode((stream.progress(), over)))

    def end(_: SnapshotStream) -> None:
        report(True)
        os._exit(0)

    stream = SnapshotStream(client, begin, end)
    stream.thread.start()
    with contextlib.suppress(EOFError):
        while True:
            if pipe.poll(REPORT_S):
                pipe.receive()
                stream.leave()
            else:
                report(False)
    stream.stop()
    stream.thread.join()
    os._exit(0)
