"""How many functions a worker runs at a time while others in its slots wait for results. Worker and
dispatcher compute the same figures.

While few functions wait, a worker runs as many others as it has slots. It is at its *bound* when
half of its extra slots are in use. Then it begins only work that is deeper than each function that
waits there, and fewer at a time: the deepest waiting function can always have its work run, and
each further level of recursion takes one more slot.
"""

from __future__ import annotations

from typing import Final

LEVELS_SPARE: Final = 16
"""Levels of recursion for which a worker at its bound keeps slots, for each function that runs."""


def at_bound(waiting: int, extra_max: int) -> bool:
    """Return whether a worker with `waiting` waiting functions is at its bound of `extra_max` extra
    slots."""
    return waiting > 0 and waiting >= extra_max // 2


def places(slots: int, waiting: int, extra_max: int) -> int:
    """Return how many functions may run at a time, not counting those that wait."""
    if not at_bound(waiting, extra_max):
        return slots
    return min(slots, max(1, (slots + extra_max - waiting) // LEVELS_SPARE))
