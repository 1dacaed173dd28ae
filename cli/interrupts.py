"""Ctrl-C while modules are imported: Python would print a traceback, or lose the interrupt in a callback of its import locks.

During imports SIGINT therefore has its default action and ends the process at once. At that time the command has begun no work that
would need an orderly end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Give SIGINT its default action inside the with-statement. Change nothing outside the main thread or if another handler is set."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
