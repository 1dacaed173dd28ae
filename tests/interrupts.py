"""Ctrl-C at each call of an operation, after which Python can raise KeyboardInterrupt."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def interrupted_runs(operation: Callable[[], object]) -> Iterator[int]:
    """Run the operation again and again, in run n with a SIGINT at its point n: at the begin of a
    Python function, or after a C function. Yield n after each run, until one has ended before its
    point. For the main thread."""
    for point in itertools.count():
        points = itertools.count()

        def interrupt(frame: FrameType, event: str, arg: Any) -> None:
            if (
                event in ("call", "c_return")
                and not _resumes_past_handlers(frame, event)
                and not _is_gap_of_python(frame)
                and next(points) == point  # noqa: B023
            ):
                signal.raise_signal(signal.SIGINT)

        try:
            sys.setprofile(interrupt)
            operation()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        yield point
        if next(points) <= point:
            return


def _resumes_past_handlers(frame: FrameType, event: str) -> bool:
    """Return whether an error here would end a generator of Python 3.10 without its except clauses,
    as a real interrupt never does."""
    return sys.version_info < (3, 11) and event == "call" and frame.f_lasti >= 0


def _is_gap_of_python(frame: FrameType | None) -> bool:
    """Return whether an interrupt here, while a thread starts another one, would leave a lock of
    Python's own Condition held or released, or the other thread in its list without ever starting
    it. From Python 3.13 on, which reports other calls, this is said of the whole start."""
    starts = threading.Thread.start.__code__
    name = None if frame is None else frame.f_code.co_name
    gaps = ("start", "__enter__", "__exit__", "_release_save", "_acquire_restore")
    if name not in gaps and sys.version_info < (3, 13):
        return False
    while frame is not None and frame.f_code is not starts:
        frame = frame.f_back
    return frame is not None
