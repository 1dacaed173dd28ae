"""What a finalizer leaves to a thread, and the root of threads that do one thing.

The garbage collector runs finalizers in whatever thread it has borrowed, between any two lines of it and under any lock that it holds;
and as long as one of them runs, it collects nothing else in the whole process. So a finalizer waits for nothing: for no answer, for no
lock, and not even for the beginning of a thread, as `threading.Thread.start` does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger("zmqdist")

_unfinished: Final[set[threading.Event]] = set()
os.register_at_fork(after_in_child=_unfinished.clear)


def in_background(name: str, fn: Callable[..., object], *args: Any) -> None:
    """Have `fn(*args)` called in a daemon thread of this name. Waits for nothing. Does nothing when the interpreter ends."""
    if not sys.is_finalizing():
        ended = threading.Event()
        _unfinished.add(ended)
        try:
            start_new_thread(_begin, (name, fn, args, ended))
        except BaseException:
            _unfinished.discard(ended)
            raise


def logged(fn: Callable[..., object], *args: Any) -> None:
    """Call `fn(*args)`, as the root of a thread of ours: nobody else would hear of what it raises, a SystemExit included."""
    try:
        fn(*args)
    except BaseException:
        log.exception("%s failed", threading.current_thread().name)


def wait_finished(within_s: float) -> bool:
    """Wait for what finalizers have left to threads so far; whether there was anything and it has ended. Not for finalizers."""
    until = time.monotonic() + within_s
    unfinished = tuple(_unfinished)
    return bool(unfinished) and all(ended.wait(max(0.0, until - time.monotonic())) for ended in unfinished)


def _begin(name: str, fn: Callable[..., object], args: tuple[Any, ...], ended: threading.Event) -> None:
    """In a thread that `threading` does not know, and which log records and `threading.enumerate` could not name."""
    try:
        threading.Thread(target=_run, args=(fn, args, ended), name=name, daemon=True).start()
    except RuntimeError:  # there is no room for a second thread
        _run(fn, args, ended)


def _run(fn: Callable[..., object], args: tuple[Any, ...], ended: threading.Event) -> None:
    try:
        logged(fn, *args)
    finally:
        _unfinished.discard(ended)
        ended.set()
