"""After which errors a question is asked again, and how long after. Shared by readers, workers and clients of the data service."""

from __future__ import annotations

from typing import Final

from zmqdist.errors import ABORTED, CANCELLED, RESOURCE_EXHAUSTED, UNAVAILABLE

RETRIABLE: Final = frozenset({UNAVAILABLE, ABORTED, CANCELLED})
"""Codes after which the same question may be asked again: the other side was not there, or gave up."""

PATIENT: Final = RETRIABLE | {RESOURCE_EXHAUSTED}
"""For questions in the middle of reading: a dispatcher whose disk is full refuses them until there is room again."""

TRANSIENT: Final = PATIENT - {ABORTED}
"""For what a reader tells the dispatcher: ABORTED there means that another reader has taken over."""

FIRST_PAUSE_S: Final = 0.001
PAUSE_GROWS: Final = 1.3
PAUSE_S_MAX: Final = 1.0
"""A reader asks a worker or dispatcher that does not answer at least so often."""


def next_pause_s(pause_s: float) -> float:
    """The next pause of a reader after one of `pause_s`; 0: after none."""
    return min(PAUSE_S_MAX, max(FIRST_PAUSE_S, pause_s * PAUSE_GROWS))
