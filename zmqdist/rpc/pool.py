"""Threads for handlers: as many as are needed, up to a bound; further work waits in line.

They are daemons: a handler that never ends must not keep the process from ending. `concurrent.futures` joins its threads at
exit, and makes a Future for each piece of work that nobody looks at here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

log = logging.getLogger("zmqdist.rpc")


class Pool:
    """`submit` is called by one thread, and by none after `stop`."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._threads = 0
        self._lock = threading.Condition()
        self._unfinished = 0
        self._work: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()

    def submit(self, fn: Callable[..., None], *args: Any) -> None:
        """Have a thread call `fn(*args)`, in order of submission."""
        with self._lock:
            self._unfinished += 1
            more = self._threads < min(self._unfinished, self._threads_max)
        self._work.put((fn, args))
        if more:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()

    def counts(self) -> tuple[int, int, int, int]:
        """What waits for a thread, what threads are busy with, threads, and their bound. From any thread."""
        with self._lock:
            unfinished = self._unfinished
        queued = min(self._work.qsize(), unfinished)
        return queued, min(unfinished - queued, self._threads), self._threads, self._threads_max

    def stop(self) -> None:
        """Let the threads end when they have nothing to do; what was submitted is still done. Nothing may be submitted after."""
        for _ in range(self._threads):
            self._work.put(None)

    @property
    def unfinished(self) -> int:
        """Pieces of work that were submitted and are not done."""
        return self._unfinished

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything that was submitted is done; False when it is not after `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: self._unfinished == 0, timeout_s)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            fn, args = work
            try:
                fn(*args)
            except BaseException:  # this thread is the pool's: what ends it here would be missed by all further work
                log.exception("a bug in zmqdist: the work of a handler thread raised")
            with self._lock:
                self._unfinished -= 1
                if not self._unfinished:
                    self._lock.notify_all()
            del work, fn, args  # an idle thread keeps nothing alive
