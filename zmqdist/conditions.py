"""Condition variables and semaphores whose lock an interrupt by Ctrl-C cannot leave held.

The standard library enters the lock of its Condition, Event and Semaphore by functions written in
Python. If Ctrl-C arrives in one of them, KeyboardInterrupt is raised while the lock is held, nothing
releases the lock, and all threads that need it wait for ever. Here the lock is entered and left in
C, with KeyboardInterrupt only before it is taken or after it is free.
"""

from __future__ import annotations

import _thread
import queue
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
            if waiter in self._waiters:  # not notified, or Ctrl-C has interrupted `notify`
                self._waiters.remove(waiter)
        return notified


class Signals(queue.SimpleQueue[None]):
    """A semaphore that begins with 0.

    >>> signals = Signals()
    >>> signals.release()
    >>> signals.acquire(), signals.acquire(timeout=0.1)
    (True, False)
    """

    def release(self) -> None:
        self.put(None)

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait for a `release`. Return False if `timeout` seconds have passed."""
        try:
            self.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return False
        return True
