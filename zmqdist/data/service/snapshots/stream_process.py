"""A stream of a snapshot in a process of its own: a pipeline that crashes takes nobody down but its stream.

The process is forked from the worker's zygote, asks the dispatcher itself, and says over a pipe how far it is, and when it has ended. The
worker says LEAVE there, or closes its end: then the stream stops.

When the process dies by itself, another goes on where it was last committed; whoever takes a stream over need not know what became of
the one before (writer.py). After CRASHES_MAX of them without a commit between, the snapshot has failed, with an error that tells how.
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
"""So long a stream that is stopped may take to clean up, before it is killed."""

REPORT_S: Final = 0.5
"""How often the worker hears how far the stream is."""

LEAVE: Final = b"leave"


class StreamTerms(msgspec.Struct, array_like=True):
    """What the process is for: the arguments of a SnapshotStream."""

    dispatcher: str
    incarnation: int
    path: str
    index: int
    timeout_s: float
    chunk_bytes_max: int


class StreamProcess:
    """A stream from its worker's side; as a `SnapshotStream`. Everything here runs in the worker's loop.

    Args:
      spawn: forks the process; SILENT is the exit code of one that was ended because this worker did not run.
      ended: called when there is nothing more to do for the stream.
      failed: `failed(stream, code, message, then)` tells the dispatcher, and then calls `then`.
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
                why = f"This was death number {self._crashes} without a commit between them: the snapshot has failed.\n{text}"
                self._failed(self, UNKNOWN, why, lambda: self._ended(self))
                return
        self._fork()

    def progress(self) -> SnapshotTaskProgress:
        """What is committed, as it was told last."""
        return SnapshotTaskProgress(self.path, self.index, *self._figures)

    def leave(self) -> None:
        """Commit what is there, and end."""
        self._leaving = True
        self._pipe.send(LEAVE)

    def stop(self) -> None:
        """End it, without a word to the dispatcher."""
        if self._stopped:
            return
        self._stopped = True
        if self._pipe.end():
            self._loop.set_timer(self, self._loop.now() + END_S, self._child.kill)

    def close(self) -> None:
        """The same, and keep nothing: the process ends with the zygote, too."""
        self._stopped = self._closed = True
        self._loop.set_timer(self, None, self._child.kill)
        self._pipe.close()


def main(pipe_fd: int) -> None:
    """In the process: write until it is over, or the worker says so. Does not return."""
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
            pass  # the worker has gone

    def ended(_: SnapshotStream) -> None:
        report(True)
        os._exit(0)

    stream = SnapshotStream(
        client, begin.incarnation, begin.path, begin.index, begin.timeout_s, begin.chunk_bytes_max, ended
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
