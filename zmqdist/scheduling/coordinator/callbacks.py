"""The thread that runs the program's callbacks, one after the other, because callbacks may wait and the loop must not.

Rules
    The program's thread that registers the first callback starts the callback thread, and gets the error if no thread can be started.
    The loop, which queues the calls, therefore never has to start a thread.
    Exceptions of a callback are logged, SystemExit included, because the thread serves all values of its coordinator.
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
    """A thread for callbacks, started with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread unless it runs. Call this before registering a callback. Raises RuntimeError if no thread can be started."""
        if self._queue is None:
            with self._lock:
                self._started()

    def put(self, calls: Calls) -> None:
        """Have the thread call each function with its value. Any thread. Raises as `start` if the callback thread does not run yet."""
        if not calls:
            return
        with self._lock:
            calls_queue = self._started()
            for call in calls:
                calls_queue.put(call)
            if self._closed:
                self._end()

    def close(self) -> None:
        """End the thread once it has made all queued calls. A later `put` starts a thread for its own calls only."""
        with self._lock:
            self._closed = True
            self._end()

    def _started(self) -> queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None]:
        if self._queue is None:
            calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), name="zmqdist-callbacks", daemon=True).start()
            self._queue = calls  # not earlier: calls in a queue without a thread would never be made
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
        del call, fn, value  # so that this thread keeps no value alive while it waits
