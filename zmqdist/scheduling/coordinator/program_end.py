"""What becomes of submitted work when the program ends: it is carried out, as that of the standard library's executors.

Rules
    The interpreter calls us before it waits for threads and before `atexit` closes clusters; so it does after `sys.exit` and after an
    uncaught error. We wait for each Executor that has unfinished work.
    A Ctrl-C while we wait, or one that has ended the program, gives all of it up.
    Python has no way to change the exit code that late but to leave at once. So a program that has lost its cluster leaves as soon as all
    that is registered with `atexit` has been called.
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
"""The exit code of a program whose submitted work was not carried out."""


class SubmittedWork(Protocol):
    """What an Executor has to do at the end of the program."""

    def finish(self) -> list[BaseException]: ...

    def give_up(self) -> int: ...


_executors: WeakSet[SubmittedWork] = WeakSet()
_come: list[bool] = []


def watch(executor: SubmittedWork) -> None:
    """Wait for it at the end of the program. It is not kept alive."""
    _executors.add(executor)


def has_come() -> bool:
    """Whether the program ends: nothing may be submitted any more."""
    return bool(_come)


def _finish() -> None:
    _come.append(True)
    waiting = list(_executors)
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        _give_up(waiting)
        return
    try:
        lost = [error for executor in waiting for error in executor.finish()]
    except KeyboardInterrupt:
        _give_up(waiting)
        atexit.register(_leave, -signal.SIGINT)
        return
    if lost:
        functions = f"{len(lost)} function{'' if len(lost) == 1 else 's'}"
        log.error("the program ends without the results of %s that it has submitted: %s", functions, lost[0])
        atexit.register(_leave, LOST_CODE)


def _give_up(executors: list[SubmittedWork]) -> None:
    count = sum([executor.give_up() for executor in executors])
    if count:
        log.warning("the program was interrupted: %d submitted functions that had not ended were given up", count)


def _leave(code: int) -> None:
    """End the process with this exit code, negative for a signal, when all else is done. Registered last, it is called first."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or there is none
            pass
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


threading._register_atexit(_finish)  # type: ignore[attr-defined]
