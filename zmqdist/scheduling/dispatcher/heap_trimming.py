"""Returning memory to the operating system after a long queue has become empty.

Python and the C library keep freed memory for later use: about 60 MB after a million queued work items. That memory may never be used
again. One call after the queue has become empty returns most of it.
"""

from __future__ import annotations

from collections.abc import Callable

from zmqdist.transport.malloc_trim import trim_heap

TRIM_WORTH_ITEMS = 50_000
"""The length that a queue must have had: a shorter one leaves too little free memory to be worth the call."""


class HeapTrimmer:
    """Trims the heap once a long queue has become empty."""

    def __init__(self) -> None:
        self._longest = 0

    def update(self, queued: int, idle: Callable[[], bool]) -> None:
        """Note the length of the queue; call it after each event. `idle` returns whether no worker has work; called only if needed."""
        if queued > self._longest:
            self._longest = queued
        elif not queued and self._longest >= TRIM_WORTH_ITEMS and idle():
            self._longest = 0
            trim_heap()
