"""Threads for the blocking part of finalizers, and the entry point of threads that run one
function.

The garbage collector runs a finalizer in any thread, between any two lines, and while the thread
holds any locks. While a finalizer runs, the process collects no other garbage. A finalizer
therefore must not wait for a reply or a lock. It must not even wait until a thread has started, as
`threading.Thread.start` does.

`check_threads` refuses gevent and eventlet, whose monkey patches replace threads by greenlets of one
thread. A loop that waits for its sockets would then stop the whole process. An error says so,
before any thread or process is started.
"""

from __future__ import annotations

import _thread
import logging
import queue
import select
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import platforms
from zmqdist.errors import FailedPreconditionError

log = logging.getLogger("zmqdist")

_unfinished: Final[set[threading.Event]] = set()
platforms.register_at_fork(after_in_child=_unfinished.clear)


def in_background(name: str, fn: Callable[..., object], *args: Any) -> None:
    """Have a new daemon thread of this name call `fn(*args)`, without waiting for the thread. While
    Python shuts down, this does nothing.
    """
    if not sys.is_finalizing():
        end_event = threading.Event()
        calls: list[Callable[[], object]] = [partial(fn, *args)]
        _unfinished.add(end_event)
        try:
            start_new_thread(_begin, (name, calls, end_event))
        except BaseException:
            _unfinished.discard(end_event)
            raise


def logged(fn: Callable[..., object], *args: Any) -> None:
    """Call `fn(*args)` and log every exception, including SystemExit, because a thread would
    otherwise lose it. Use this function as the target of a thread.
    """
    try:
        fn(*args)
    except BaseException:
        log.exception("%s failed", threading.current_thread().name)


def wait_finished(within_s: float) -> bool:
    """Wait at most `within_s` seconds for the threads that finalizers have started so far. A thread
    that has ended no longer refers to its function or to its arguments. Do not call `wait_finished`
    from a finalizer.

    Returns:
      True if no such thread runs any more.
    """
    until = time.monotonic() + within_s
    return all(
        end_event.wait(max(0.0, until - time.monotonic())) for end_event in tuple(_unfinished)
    )


def _begin(name: str, calls: list[Callable[[], object]], end_event: threading.Event) -> None:
    """Start a `threading.Thread` that makes the only call in `calls`.

    The new thread has a name in log records and `threading.enumerate`. The calling thread has none,
    because `_thread` started it.
    """
    try:
        threading.Thread(target=_run, args=(calls, end_event), name=name, daemon=True).start()
    except RuntimeError:  # the system allows no second thread: run the function in this one
        _run(calls, end_event)


def _run(calls: list[Callable[[], object]], end_event: threading.Event) -> None:
    try:
        # once `end_event` is set, no frame and no thread may refer to the arguments
        logged(calls.pop())
    finally:
        _unfinished.discard(end_event)
        end_event.set()


def check_threads() -> None:
    """Raise FailedPreconditionError if gevent or eventlet has replaced the threads, queues or polls
    of this process."""
    functions: tuple[Any, ...] = (
        _thread.start_new_thread,
        queue.SimpleQueue,
        getattr(select, "epoll", None if platforms.IS_LINUX else queue.SimpleQueue),
    )
    for library in ("gevent", "eventlet"):
        if library in sys.modules and any(
            fn is None or fn.__module__.startswith(library) for fn in functions
        ):
            raise FailedPreconditionError(
                f"{library} has replaced Python's threads in this process (monkey patching), and "
                f"zmqdist needs them: use zmqdist in "
                "another process, which is not patched"
            )
