"""The end of the program: it waits for submitted work, as with the executors of the standard
library.

Rules
    The interpreter calls `_finish` before it waits for threads and before the `atexit` handlers
    close clusters, even after `sys.exit` or an uncaught error. `_finish` waits for each Executor
    that has unfinished work.
    If Ctrl-C has ended the program, or arrives while `_finish` waits, `_finish` gives up all
    unfinished work.
    At this stage only `os._exit` can change the exit code. A program that has lost its cluster
    therefore calls `os._exit(LOST_CODE)` as soon as all `atexit` handlers have run.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from typing import Protocol
from weakref import WeakSet

log = logging.getLogger("zmqdist.coordinator")

LOST_CODE = 1
"""The exit code of a program that ends without the results of submitted work."""


class SubmittedWork(Protocol):
    """The methods of an Executor that this module calls."""

    def _finish(self) -> list[BaseException]: ...

    def _give_up(self) -> int: ...


_executors: WeakSet[SubmittedWork] = WeakSet()
_come: list[bool] = []


def watch(executor: SubmittedWork) -> None:
    """Have the program wait for this executor before it ends. This module holds only a weak
    reference to the executor."""
    _executors.add(executor)


def has_come() -> bool:
    """Return whether the program is ending, so that no more work may be submitted."""
    return bool(_come)


def _finish() -> None:
    _come.append(True)
    waiting = list(_executors)
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        _give_up(waiting)
        return
    try:
        lost = [error for executor in waiting for error in executor._finish()]
    except KeyboardInterrupt:
        _give_up(waiting)
        atexit.register(_leave, -signal.SIGINT)
        return
    if lost:
        functions = f"{len(lost)} function{'' if len(lost) == 1 else 's'}"
        log.error(
            "the program ends without the results of %s that it has submitted: %s",
            functions,
            lost[0],
        )
        atexit.register(_leave, LOST_CODE)


def _give_up(executors: list[SubmittedWork]) -> None:
    count = sum([executor._give_up() for executor in executors])
    if count:
        log.warning(
            "the program was interrupted: %d submitted functions that had not ended were given up",
            count,
        )


def _leave(code: int) -> None:
    """Run all other exit handlers, and end the process with this exit code. With code -n, end the
    process by signal n.

    `_leave` is the exit handler that was registered last, so the interpreter calls it first. It
    runs the remaining handlers itself.
    """
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the stream is closed, or is None
            pass
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


threading._register_atexit(_finish)  # type: ignore[attr-defined]
