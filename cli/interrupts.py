"""Handling of Ctrl-C while the command imports modules.

Python's own handler raises KeyboardInterrupt. During an import, Python would print the traceback of
this exception, or would drop the exception in a callback of an import lock. `importing` therefore
gives SIGINT its default action, which ends the process at once. During these imports the command
has no work that needs an orderly end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Return a context manager in which SIGINT has its default action. It changes nothing outside
    the main thread, or if SIGINT has a handler other than Python's own.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
