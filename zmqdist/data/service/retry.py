"""After which errors a request is sent again, and after which pause; for readers, workers and clients of the data service."""

from __future__ import annotations

from typing import Final

from zmqdist.errors import ABORTED, CANCELLED, RESOURCE_EXHAUSTED, UNAVAILABLE

RETRIABLE: Final = frozenset({UNAVAILABLE, ABORTED, CANCELLED})
"""Codes after which the same request may succeed later: the other side was away, or gave up."""

PATIENT: Final = RETRIABLE | {RESOURCE_EXHAUSTED}
"""The same for requests in the middle of reading: a dispatcher whose disk is full refuses them until there is room again."""

TRANSIENT: Final = PATIENT - {ABORTED}
"""The same for reports of a reader to the dispatcher, where ABORTED means that another reader has taken over."""

FIRST_PAUSE_S: Final = 0.001
PAUSE_GROWS: Final = 1.3
PAUSE_S_MAX: Final = 1.0
"""The pauses of a reader between requests that fail: the first one, the factor from one to the next, and the longest, in seconds."""


def next_pause_s(pause_s: float) -> float:
    """Return the length of the pause after one of `pause_s` seconds; 0: there was none."""
    return min(PAUSE_S_MAX, max(FIRST_PAUSE_S, pause_s * PAUSE_GROWS))
