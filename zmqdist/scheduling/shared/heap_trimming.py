"""HeapTrimmer, which returns memory to the operating system after a long queue has become empty.

Python and the C library retain freed memory for later use: about 60 MB after a million queued work
items, although the process may never need that memory again. A call of `trim_heap` after the queue
has become empty returns most of this memory.
"""

from __future__ import annotations

from collections.abc import Callable

from zmqdist.transport.memory_limits import trim_heap

TRIM_WORTH_ITEMS = 50_000
"""The heap is trimmed only after a queue of at least this length, because a shorter queue leaves
too little memory to return."""


class HeapTrimmer:
    """Trims the heap once a long queue has become empty."""

    def __init__(self) -> None:
        self._longest = 0

    def update(self, queued: int, idle: Callable[[], bool]) -> None:
        """Trim the heap if the queue is empty, was long before, and `idle()` is True. Call this
        after each event.

        Args:
          queued: the present length of the queue.
          idle: returns whether no worker has work. It is called only if the queue is empty and was
            long.
        """
        if queued > self._longest:
            self._longest = queued
        elif not queued and self._longest >= TRIM_WORTH_ITEMS and idle():
            self._longest = 0
            trim_heap()
