"""Ctrl-C while modules are imported: Python shows it with a traceback there, or loses it in a callback of its import locks.

So it ends the process at once, as it does one that has no handler: nothing has been begun yet.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """`with importing(): import something`; nothing else where somebody has a handler of their own, or outside the main thread."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
