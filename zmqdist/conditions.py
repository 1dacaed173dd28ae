"""Condition variables whose lock an interrupt by Ctrl-C cannot leave held.

`with condition:` of the standard library calls functions written in Python. If Ctrl-C arrives in
one of them, KeyboardInterrupt is raised while the lock is held, nothing releases the lock, and all
threads that need it wait for ever. Here the lock's own functions are called, which are written in C
and which no signal interrupts.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque


class Condition(_thread.RLock, threading.Condition):  # type: ignore[misc]  # final for type checkers
    """A condition variable that is its own reentrant lock, with the methods of
    `threading.Condition`.

    >>> changed = Condition()
    >>> with changed:
    ...     changed.notify_all()
    """

    def __init__(self) -> None:
        self._waiters: deque[_thread.LockType] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for `notify`, and take the lock again. Return False if `timeout`
        seconds have passed. The lock must be held once."""
        if not self._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("cannot wait on un-acquired lock")
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        notified = False
        try:
            self.release()
            notified = waiter.acquire(True, -1 if timeout is None else max(0.0, timeout))
        finally:
            try:
                self.acquire()
            except BaseException:  # Ctrl-C came while this waited for the lock, or just after
                if not self._is_owned():  # type: ignore[attr-defined]
                    self.acquire()
                raise
            if not notified and waiter in self._waiters:
                self._waiters.remove(waiter)
        return notified
