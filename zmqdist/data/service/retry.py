"""The error codes after which readers, workers and clients of the data service repeat a request,
and the pauses between the attempts."""

from __future__ import annotations

from typing import Final

from zmqdist.errors import ABORTED, CANCELLED, RESOURCE_EXHAUSTED, UNAVAILABLE

RETRIABLE: Final = frozenset({UNAVAILABLE, ABORTED, CANCELLED})
"""Codes after which the same request may succeed later, because the peer was away or the request
was cancelled."""

PATIENT: Final = RETRIABLE | {RESOURCE_EXHAUSTED}
"""Codes after which a request in the middle of reading is repeated. A dispatcher whose disk is full
refuses requests with RESOURCE_EXHAUSTED until the disk has room."""

TRANSIENT: Final = PATIENT - {ABORTED}
"""Codes after which a reader repeats a report to the dispatcher. ABORTED is not one of them,
because it means that another reader has taken over."""

FIRST_PAUSE_S: Final = 0.001
PAUSE_GROWS: Final = 1.3
PAUSE_S_MAX: Final = 1.0
"""The first pause after a failed request in seconds, the factor from one pause to the next, and the
longest pause in seconds."""


def next_pause_s(pause_s: float) -> float:
    """Return the length in seconds of the pause that follows a pause of `pause_s` seconds.
    `pause_s` is 0 before the first pause."""
    return min(PAUSE_S_MAX, max(FIRST_PAUSE_S, pause_s * PAUSE_GROWS))
