"""A check for gevent and eventlet, whose monkey patches replace threads by greenlets of one thread.

A loop that waits for its sockets would then stop the whole process. An error says so, before any
thread or process is started.
"""

from __future__ import annotations

import _thread
import queue
import select
import sys
from typing import Any

from zmqdist.errors import FailedPreconditionError


def check_threads() -> None:
    """Raise FailedPreconditionError if gevent or eventlet has replaced the threads, queues or polls
    of this process."""
    functions: tuple[Any, ...] = (
        _thread.start_new_thread,
        queue.SimpleQueue,
        getattr(select, "epoll", None),
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
