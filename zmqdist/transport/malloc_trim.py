"""A function that returns to the system the freed memory that the C library keeps for later use."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return the freed memory of this process to the system. The call takes milliseconds, or a
    tenth of a second for gigabytes.

    Does nothing if the C library has no `malloc_trim`.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
