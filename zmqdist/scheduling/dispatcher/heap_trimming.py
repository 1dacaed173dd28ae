"""Giving memory back to the system after a long queue has been worked off.

Python and the C library keep what was freed for the next use; after a million queued pieces of work that is some 60 MB which may never be
used again. One call after the queue has emptied returns most of it.
"""

from __future__ import annotations

from collections.abc import Callable

from zmqdist.transport.malloc_trim import trim_heap

TRIM_WORTH_ITEMS = 50_000
"""A queue that was shorter than this leaves nothing worth returning."""


class HeapTrimmer:
    """Notices that a long queue has been worked off."""

    def __init__(self) -> None:
        self._longest = 0

    def update(self, queued: int, idle: Callable[[], bool]) -> None:
        """Called after each event: how much waits, and whether nothing is out (asked only when it matters)."""
        if queued > self._longest:
            self._longest = queued
        elif not queued and self._longest >= TRIM_WORTH_ITEMS and idle():
            self._longest = 0
            trim_heap()
