"""The callback thread, which runs the program's callbacks one after the other, because a callback may wait and the loop must not.

Rules
    The thread of the program that registers the first callback starts the callback thread, and gets the error if that is impossible. The
    loop, which queues the callbacks, therefore need not start a thread.
    All exceptions of a callback are logged, even SystemExit, because the callback thread must go on for other values of its coordinator.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

log = logging.getLogger("zmqdist.coordinator")

Calls: TypeAlias = "list[tuple[Callable[[Any], object], Any]]"


class Callbacks:
    """The callback thread of one coordinator, which starts when the first callback is registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread unless it runs. Call `start` before you register a callback. Raises RuntimeError if no thread can be started."""
        if self._queue is None:
            with self._lock:
                self._started()

    def put(self, calls: Calls) -> None:
        """Have the callback thread call these functions with their values. Any thread may call this.

        Raises RuntimeError if the callback thread does not run yet and cannot be started.
        """
        if not calls:
            return
        with self._lock:
            calls_queue = self._started()
            for call in calls:
                calls_queue.put(call)
            if self._closed:
                self._end()

    def close(self) -> None:
        """End the thread once it has run all queued callbacks. A later `put` starts a new thread for its own callbacks only."""
        with self._lock:
            self._closed = True
            self._end()

    def _started(self) -> queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None]:
        if self._queue is None:
            calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), name="zmqdist-callbacks", daemon=True).start()
            # Set `_queue` only after the start, because the start may fail: later callbacks would then wait in a queue without a thread.
            self._queue = calls
        return self._queue

    def _end(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _serve(calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None]) -> None:
    while (call := calls.get()) is not None:
        fn, value = call
        try:
            fn(value)
        except BaseException:
            log.exception("a done callback of %r failed", value)
        del call, fn, value  # drop the references, so that this thread keeps no value alive while it waits
