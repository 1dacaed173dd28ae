"""A stream of a snapshot in a thread of the worker. The thread writes chunks, and sends the
stream's requests to the dispatcher."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from zmqdist.data.service.snapshots.writer import StreamWriter
from zmqdist.data.service.split_requests import call_until_answered
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.handler_errors import code_and_message

log = logging.getLogger("zmqdist.data.snapshots")


class SnapshotTaskProgress(NamedTuple):
    """The progress of a stream that this worker writes or has written. `chunks` and `elements`
    count only committed chunks and elements."""

    snapshot_task_base_path: str
    snapshot_task_stream_index: int
    completed: bool
    chunks: int
    elements: int


class SnapshotStream:
    """Writes one stream in a thread of its own.

    Args:
      ended: `ended(stream)` is called in the thread when this worker has nothing more to do for the
        stream.
    """

    def __init__(
        self,
        client: ZmqClient,
        incarnation: int,
        path: str,
        index: int,
        timeout_s: float,
        chunk_bytes_max: int,
        ended: Any,
    ) -> None:
        self.path = path
        self.index = index
        self._client = client
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._ended = ended
        self._writer = StreamWriter(path, index, self._positions, chunk_bytes_max)
        self._thread = threading.Thread(
            target=self._run, name=f"zmqdist-snapshot-{index}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()

    def progress(self) -> SnapshotTaskProgress:
        """Return the number of chunks and elements that are committed so far."""
        done = self._writer.progress
        return SnapshotTaskProgress(
            self.path, self.index, done.completed, done.chunks, done.elements
        )

    def leave(self) -> None:
        """Have the thread commit the elements so far and end, so that another worker continues the
        stream. Does not block."""
        self._writer.leave()

    def stop(self) -> None:
        """Have the thread end at its next element, without a report to the dispatcher. Does not
        block."""
        self._stopped.set()
        self._writer.cancel()

    def close(self) -> None:
        """Do the same as `stop`, because a thread cannot be ended at once."""
        self.stop()

    def _positions(self, source: int, repetition: int, taken: int, count: int) -> Sequence[int]:
        start, length = self._call("positions", self._timeout_s, source, repetition, taken, count)
        return range(start, start + length)

    def _call(self, method: str, timeout_s: float, *args: Any) -> Any:
        stream, what = (
            (self._incarnation, self.path, self.index),
            f"stream {self.index} of {self.path}",
        )
        return call_until_answered(
            self._client,
            method,
            *stream,
            *args,
            what=what,
            stopped=self._stopped,
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
        self._ended(self)
