"""The worker's side of distributed snapshots. It requests streams from the dispatcher, and writes
each stream in a thread or a process.

Everything except the threads of streams runs in the worker's loop thread. One request "streams",
which lists the streams that the worker writes, is always pending at the dispatcher (service.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zmqdist.data.service.retry import RETRIABLE
from zmqdist.errors import OpError
from zmqdist.process.bound_children import SpawnChild
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.rpc.internal_client import LoopClient
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop

if TYPE_CHECKING:  # most workers write no stream, and these modules import all operators
    from zmqdist.data.service.snapshots.stream import SnapshotStream, StreamProcess
    from zmqdist.data.service.snapshots.writer import SnapshotTaskProgress

log = logging.getLogger("zmqdist.data.snapshots")

AGAIN_S: Final = 0.05
"""Seconds before the worker sends a failed request again."""


def report_until_replied(
    loop: Loop,
    calls: LoopClient,
    method: str,
    args: Callable[[], tuple[Any, ...]],
    matters: Callable[[], bool],
    then: Callable[[], None],
) -> None:
    """Call a method of the dispatcher, and repeat the call until the dispatcher replies with
    success or a permanent error, or until `matters()` is False. Call `then` after the reply.
    """

    def send() -> None:
        if matters():
            calls.call(method, args(), replied)

    def replied(value: Any, error: OpError | None) -> None:
        if error is None or error.error_code not in RETRIABLE:
            then()
        else:
            loop.set_timer(send, loop.now() + AGAIN_S, send)

    send()


class SnapshotWorker:
    """Writes the streams of one worker. It is a part of the worker's data service.

    Args:
      timeout_s: seconds for which a stream repeats requests to a dispatcher that does not reply.

    Attributes:
      processes: a function that forks a process for a stream (stream.py). None means that
        streams run in threads.
    """

    def __init__(
        self,
        loop: Loop,
        calls: LoopClient,
        dispatcher: str,
        credentials: Credentials,
        incarnation: int,
        timeout_s: float,
        chunk_bytes_max: int,
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._dispatcher = dispatcher
        self._credentials = credentials
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._chunk_bytes_max = chunk_bytes_max
        self._request = 0
        self.processes: SpawnChild | None = None
        self._writing: dict[str, SnapshotStream | StreamProcess] = {}
        self._ending: set[SnapshotStream | StreamProcess] = set()
        """Streams that were stopped and have not ended yet."""
        self._completed: dict[tuple[str, int], SnapshotTaskProgress] = {}
        self._client: ZmqClient | None = None
        self._left: Callable[[], None] | None = None
        loop.on_stop(self.close)

    @property
    def writing(self) -> int:
        """The number of streams that the worker writes."""
        return len(self._writing)

    def drain(self, then: Callable[[], None]) -> None:
        """Have each stream commit its elements so far and end, so that other workers continue the
        streams. Call `then` each time a stream has ended. Call this in the loop thread.
        """
        self._left = then
        self._request += 1
        for stream in self._writing.values():
            stream.leave()

    def progresses(self) -> list[SnapshotTaskProgress]:
        """Return the progress of the current streams, and of the streams that were completed in
        this incarnation. Call this in the loop thread.
        """
        return [
            *self._completed.values(),
            *(stream.progress() for stream in self._writing.values()),
        ]

    def registered(self) -> None:
        """Record that the dispatcher has registered this worker, for the first time or again."""
        # a leaving worker takes no further streams
        if self._left is None:
            self._ask()

    def _ask(self) -> None:
        self._request += 1
        has = {path: stream.index for path, stream in self._writing.items()}
        self._calls.call(
            "zmqdist.data.streams",
            (self._incarnation, has),
            partial(self._streams_received, self._request),
        )

    def _streams_received(
        self, request: int, streams: dict[str, int] | None, error: OpError | None
    ) -> None:
        if request != self._request:
            return  # a later request has replaced this one
        if error is not None or streams is None:
            self._loop.set_timer(self, self._loop.now() + AGAIN_S, self._ask_again)
            return
        for path, stream in list(self._writing.items()):
            if streams.get(path) != stream.index:
                # Record here whether the stream is complete, because the dispatcher may learn of
                # its end before `_note_end` runs.
                self._note_completed(stream)
                stream.stop()
                self._ending.add(stream)
                del self._writing[path]
        for path, index in streams.items():
            if path not in self._writing:
                try:
                    self._begin(path, index)
                except BaseException as failure:
                    self._fail(path, index, failure)
                    return
        self._ask()

    def _fail(self, path: str, index: int, error: BaseException) -> None:
        """Report to the dispatcher that a stream cannot be begun, so that its snapshot fails. A
        little later, request streams again."""
        log.exception("stream %d of the snapshot %s cannot be begun", index, path)
        self._writing.pop(path, None)
        code, message = code_and_message(error)
        text = f"{path}: stream {index} cannot be begun: {message}"
        self._calls.call(
            "zmqdist.data.stream_ended",
            (self._incarnation, path, index, code, text),
            lambda value, error: None,
        )
        self._loop.set_timer(self, self._loop.now() + AGAIN_S, self._ask_again)

    def _ask_again(self) -> None:
        """Request streams if the dispatcher is connected. After a reconnect, `registered` requests
        them."""
        if self._calls.connected:
            self._ask()

    def _begin(self, path: str, index: int) -> None:
        from zmqdist.data.service.snapshots.stream import SnapshotStream, StreamProcess, StreamTerms

        terms = StreamTerms(
            self._dispatcher,
            self._incarnation,
            path,
            index,
            self._timeout_s,
            self._chunk_bytes_max,
        )
        if self.processes is not None:
            self._writing[path] = StreamProcess(
                self._loop, self.processes, terms, self._note_end, self._report_failure
            )
            return
        if self._client is None:
            security = self._credentials.client(self._dispatcher, "worker")
            self._client = ZmqClient(self._dispatcher, "snapshots", security=security)
        stream = self._writing[path] = SnapshotStream(self._client, terms, self._report_end)
        stream.thread.start()

    def _report_end(self, stream: SnapshotStream) -> None:
        """Have the loop thread call `_note_end` for a stream that has ended. Called in the
        stream's thread."""
        with suppress(OpError):  # the loop refuses the call, because the worker has ended
            self._loop.call_soon(self._note_end, stream)

    def _report_failure(
        self, stream: StreamProcess, code: int, message: str, then: Callable[[], None]
    ) -> None:
        report_until_replied(
            self._loop,
            self._calls,
            "zmqdist.data.stream_ended",
            lambda: (self._incarnation, stream.path, stream.index, code, message),
            lambda: self._writing.get(stream.path) is stream,
            then,
        )

    def _note_end(self, stream: SnapshotStream | StreamProcess) -> None:
        self._ending.discard(stream)
        self._note_completed(stream)
        if self._writing.get(stream.path) is stream:
            del self._writing[stream.path]
            if self._left is not None:
                self._left()
            else:
                self._ask_again()

    def _note_completed(self, stream: SnapshotStream | StreamProcess) -> None:
        progress = stream.progress()
        # an unfinished stream goes on in another worker
        if progress.completed:
            self._completed[stream.path, stream.index] = progress

    def close(self) -> None:
        """End all streams. The loop calls this when it stops. The thread of a stream ends only at
        its next element, but a worker that takes over the stream need not wait for that.
        """
        for stream in (*self._writing.values(), *self._ending):
            stream.close()
        self._writing.clear()
        self._ending.clear()
        if self._client is not None:
            self._client.close()
