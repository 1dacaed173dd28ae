"""Users' callbacks, one after the other, in a thread of their own: they may wait, and the loop may not."""

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

    def put(self, calls: Calls) -> None:
        """Call each function with its value. From any thread."""
        if not calls:
            return
        with self._lock:
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                thread = threading.Thread(target=_serve, args=(self._queue,), name="zmqdist-callbacks", daemon=True)
                thread.start()
        for call in calls:
            self._queue.put(call)

    def close(self) -> None:
        """End the thread when it has made the calls that it was given."""
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)
                self._queue = None


def _serve(calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any] | None]) -> None:
    while (call := calls.get()) is not None:
        fn, value = call
        try:
            fn(value)
        except Exception:
            log.exception("a done callback of %r failed", value)
        del call, fn, value  # while it waits, nothing is kept alive
