"""Streams of snapshots at a worker: which ones to write, a thread for each, and what the dispatcher is asked for them.

All but the threads runs in the worker's loop. One question, "streams", is always with the dispatcher, and tells it what is being written
here; see service.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

from zmqdist.data_service.dealing import insist
from zmqdist.data_service.snapshots.writer import StreamWriter
from zmqdist.errors import OpError
from zmqdist.net.credentials import Credentials
from zmqdist.net.loop import Loop
from zmqdist.rpc import asking
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.looped import LoopCalls

log = logging.getLogger("zmqdist.data.snapshots")

AGAIN_S: Final = 0.05
"""After a refused question for streams."""


class SnapshotTaskProgress(NamedTuple):
    """How far a stream is that this worker writes, or wrote."""

    snapshot_task_base_path: str
    snapshot_task_stream_index: int
    completed: bool
    chunks: int
    elements: int


class SnapshotWorker:
    """See the module's docstring. Hosted by a worker.

    Args:
      timeout_s: how long a stream waits for a dispatcher that does not answer.
    """

    def __init__(
        self,
        loop: Loop,
        calls: LoopCalls,
        dispatcher: str,
        credentials: Credentials,
        life: int,
        timeout_s: float,
        chunk_bytes_max: int,
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._dispatcher = dispatcher
        self._credentials = credentials
        self._life = life
        self._timeout_s = timeout_s
        self._chunk_bytes_max = chunk_bytes_max
        self._asking = 0
        self._writing: dict[str, _Stream] = {}
        self._completed: dict[tuple[str, int], SnapshotTaskProgress] = {}
        self._client: ZmqClient | None = None
        self._left: Callable[[], None] | None = None
        loop.on_stop(self.close)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written."""
        return not self._writing

    def drain(self, then: Callable[[], None]) -> None:
        """Commit what is there, leave the streams to others, and call `then` when that is done. In the loop."""
        self._left = then
        self._asking += 1
        for stream in self._writing.values():
            stream.leave()

    def progresses(self) -> list[SnapshotTaskProgress]:
        """Of the streams that are being written, and of those that were completed in this life. In the loop."""
        return [*self._completed.values(), *(stream.progress() for stream in self._writing.values())]

    def registered(self) -> None:
        """The dispatcher has taken this worker: now, or again."""
        if self._left is None:
            self._ask()

    def _ask(self) -> None:
        self._asking += 1
        has = {path: stream.index for path, stream in self._writing.items()}
        self._calls.ask("zmqdist.data.streams", (self._life, has), partial(self._told, self._asking))

    def _told(self, asking: int, found: dict[str, int] | None, error: OpError | None) -> None:
        if asking != self._asking:
            return  # there is a later question
        if error is not None or found is None:
            self._loop.set_timer(self, self._loop.now() + AGAIN_S, self._ask_again)
            return
        for path, stream in list(self._writing.items()):
            if found.get(path) != stream.index:
                self._note_completed(stream)  # the dispatcher may know of its end before `_ended` is heard here
                stream.stop()
                del self._writing[path]
        for path, index in found.items():
            if path not in self._writing:
                self._begin(path, index)
        self._ask()

    def _ask_again(self) -> None:
        """Only while there is a connection: else `registered` comes."""
        if self._calls.connected:
            self._ask()

    def _begin(self, path: str, index: int) -> None:
        if self._client is None:
            security = self._credentials.client(self._dispatcher, "worker")
            self._client = ZmqClient(self._dispatcher, "snapshots", security=security)
        self._writing[path] = _Stream(
            self._client, self._life, path, index, self._timeout_s, self._chunk_bytes_max, self._ended
        )

    def _ended(self, stream: _Stream) -> None:
        """In the stream's thread: there is nothing more to do for it."""
        try:
            self._loop.call_soon(self._note_ended, stream)
        except OpError:
            pass  # the worker has ended

    def _note_ended(self, stream: _Stream) -> None:
        self._note_completed(stream)
        if self._writing.get(stream.path) is stream:
            del self._writing[stream.path]
            if self._left is not None:
                self._left()
            else:
                self._ask_again()

    def _note_completed(self, stream: _Stream) -> None:
        progress = stream.progress()
        if progress.completed:
            self._completed[stream.path, stream.index] = progress

    def close(self) -> None:
        """In the loop, when it ends. Threads end with their next element; whoever takes their streams over need not wait for that."""
        for stream in self._writing.values():
            stream.stop()
        self._writing.clear()
        if self._client is not None:
            self._client.close()


class _Stream:
    """One stream and its thread."""

    def __init__(
        self,
        client: ZmqClient,
        life: int,
        path: str,
        index: int,
        timeout_s: float,
        chunk_bytes_max: int,
        ended: Any,
    ) -> None:
        self.path = path
        self.index = index
        self._client = client
        self._life = life
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._ended = ended
        self._writer = StreamWriter(path, index, self._positions, chunk_bytes_max)
        threading.Thread(target=self._run, name=f"zmqdist-snapshot-{index}", daemon=True).start()

    def progress(self) -> SnapshotTaskProgress:
        """What is committed."""
        done = self._writer.progress
        return SnapshotTaskProgress(self.path, self.index, done.completed, done.chunks, done.elements)

    def leave(self) -> None:
        """Commit what is there, and end."""
        self._writer.leave()

    def stop(self) -> None:
        """End it, without a word to the dispatcher."""
        self._stopped.set()
        self._writer.cancel()

    def _positions(self, source: int, repetition: int, taken: int, count: int) -> Sequence[int]:
        start, length = self._asked("positions", self._timeout_s, source, repetition, taken, count)
        return range(start, start + length)

    def _asked(self, method: str, timeout_s: float, *args: Any) -> Any:
        def question() -> Any:
            what = (self._life, self.path, self.index, *args)
            return asking.start(self._client, f"zmqdist.data.{method}", *what).get_value()

        return insist(question, timeout_s, self._stopped, f"stream {self.index} of {self.path}")

    def _run(self) -> None:
        code, message = 0, ""
        try:
            self._writer.run()
        except OpError as error:
            code, message = error.error_code, str(error)
            log.log(
                logging.WARNING if self._writer.failed else logging.INFO,
                "stream %d of %s: %s",
                self.index,
                self.path,
                error,
            )
        if not code or self._writer.failed:  # else somebody else writes it, or the snapshot is over
            try:
                self._asked("stream_ended", inf, code, message)
            except OpError as error:
                log.info("stream %d of %s: %s", self.index, self.path, error)
        self._ended(self)
