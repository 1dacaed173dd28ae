"""The errors after which readers, workers and clients of the data service repeat a request, and the pauses between the attempts."""

from __future__ import annotations

from typing import Final

from zmqdist.errors import ABORTED, CANCELLED, RESOURCE_EXHAUSTED, UNAVAILABLE

RETRIABLE: Final = frozenset({UNAVAILABLE, ABORTED, CANCELLED})
"""Codes after which the same request may succeed later: the peer was away, or gave up."""

PATIENT: Final = RETRIABLE | {RESOURCE_EXHAUSTED}
"""Codes after which a request in the middle of reading is repeated: a dispatcher whose disk is full refuses it until there is room."""

TRANSIENT: Final = PATIENT - {ABORTED}
"""Codes after which a reader repeats a report to the dispatcher. For a report, ABORTED means that another reader has taken over."""

FIRST_PAUSE_S: Final = 0.001
PAUSE_GROWS: Final = 1.3
PAUSE_S_MAX: Final = 1.0
"""The pauses of a reader between requests that fail: the first one, the factor from one to the next, and the longest, in seconds."""


def next_pause_s(pause_s: float) -> float:
    """Return the length of the pause after one of `pause_s` seconds; `pause_s` is 0 before the first pause."""
    return min(PAUSE_S_MAX, max(FIRST_PAUSE_S, pause_s * PAUSE_GROWS))
