"""Memory that was freed, and that the C library keeps for the next use: back to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Takes milliseconds, for gigabytes a tenth of a second. Does nothing where the C library has no `malloc_trim`."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
