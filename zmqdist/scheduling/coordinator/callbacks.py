"""Users' callbacks, one after the other, in a thread of their own: they may wait, and the loop may not.

Rules
    The thread starts where a callback is registered, in the user's thread, which gets the error where none can be started. So
    the loop, which hands in the calls, starts none.
    Whatever a callback raises is logged, also a SystemExit: the thread serves all values of its coordinator, and goes on.
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
    """A thread that starts with the first callback."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] | None = None
        self._closed = False

    def start(self) -> None:
        """Have the thread, before a callback is registered. Raises RuntimeError: the process can have no more threads."""
        if self._queue is None:
            with self._lock:
                self._started()

    def put(self, calls: Calls) -> None:
        """Call each function with its value. From any thread. Raises as `start`, where that was not called before."""
        if not calls:
            return
        with self._lock:
            calls_queue = self._started()
            for call in calls:
                calls_queue.put(call)
            if self._closed:
                self._end()

    def close(self) -> None:
        """End the thread when it has made the calls that it was given. What comes later gets a thread for its own time."""
        with self._lock:
            self._closed = True
            self._end()

    def _started(self) -> queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None]:
        if self._queue is None:
            calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), name="zmqdist-callbacks", daemon=True).start()
            self._queue = calls  # once the thread is there: what is put where none serves is never called
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
        del call, fn, value  # while it waits, nothing is kept alive
