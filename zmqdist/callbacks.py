"""Threads that run callbacks one after the other, because a callback may wait, and the threads that
read and settle results must not.

Rules
    The thread of the program that registers the first callback starts the callback thread, and gets
    the error if that is impossible. The thread that queues the callbacks therefore need not start a
    thread.
    All exceptions of a callback are logged, even SystemExit, because the callback thread must go on
    for other callbacks. No result is read or settled in a thread that runs the program's callbacks.
    So a callback may wait for any result.
"""

from __future__ import annotations

import logging
import queue
import threading
from _thread import get_ident
from collections.abc import Callable
from typing import Any, TypeAlias

from zmqdist.conditions import Signals

log = logging.getLogger("zmqdist")

Call: TypeAlias = "tuple[Callable[[Any], object], Any]"


class NotAFuture:
    """The base of awaitable values that are no Futures of the standard library: its functions for
    Futures would fail, or wait for ever."""

    __slots__ = ()

    @property
    def _condition(self) -> Any:
        name = type(self).__name__
        raise TypeError(
            f"concurrent.futures waits for Futures, and a {name} is none: pass Futures of an "
            f"Executor, or await the {name}"
        )


def check_callback(fn: Callable[[Any], object]) -> None:
    """Raise TypeError if this is no function, or if asyncio.wait has passed it: such a callback may
    be called only in the thread of the event loop.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}, wants a function")
    if getattr(fn, "__module__", None) == "asyncio.tasks":
        raise TypeError(
            "asyncio.wait takes tasks and asyncio's futures: pass asyncio.ensure_future(value), "
            "or asyncio.wrap_future(future)"
        )


class Callbacks:
    """One callback thread, which starts when the first callback is registered."""

    def __init__(self, name: str = "zmqdist-callbacks") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Call | None] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread unless it runs. Call `start` before you register a callback. Raises
        RuntimeError if no thread can be started."""
        if self._queue is None:
            with self._lock:
                self._open_queue()

    def put(self, fn: Callable[[Any], object], value: Any) -> None:
        """Have the callback thread call `fn(value)`. Any thread may call this.

        Raises RuntimeError if the callback thread does not run yet and cannot be started.
        """
        with self._lock:
            self._open_queue().put((fn, value))
            if self._closed:
                self._end()

    def wait_called(self) -> None:
        """Wait until the callbacks that are queued now have been called.

        In a callback, also in one of another `Callbacks`, return at once: two callbacks could
        otherwise wait for each other.
        """
        if self._queue is not None and get_ident() not in _threads:
            called = Signals()
            self.put(lambda _: called.release(), None)
            called.acquire()

    def close(self) -> None:
        """End the thread once it has run all queued callbacks. A later `put` starts a new thread
        for its own callback only."""
        with self._lock:
            self._closed = True
            self._end()

    def _open_queue(self) -> queue.SimpleQueue[Call | None]:
        if self._queue is None:
            calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), name=self._name, daemon=True).start()
            # Set `_queue` only after the start, because the start may fail: later callbacks would
            # then wait in a queue without a thread.
            self._queue = calls
        return self._queue

    def _end(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


_threads: set[int] = set()
"""The callback threads of this process."""


def _serve(calls: queue.SimpleQueue[Call | None]) -> None:
    _threads.add(get_ident())
    while (call := calls.get()) is not None:
        fn, value = call
        try:
            fn(value)
        except BaseException:
            log.exception("a done callback of %r failed", value)
        # drop the references, so that this thread keeps no value alive while it waits
        del call, fn, value
    _threads.discard(get_ident())
