"""What a running function can ask about itself: `zmqdist.cancelled()`, and whether it was scheduled.

Whoever runs a function says so here for its thread; everything else is asked through `current()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_here = threading.local()
_process_wide: Callable[[], bool] | None = None


def enter(cancelled: Callable[[], bool], scheduled: bool = False) -> None:
    """The present thread begins to run a function; `cancelled` tells whether it should end."""
    _here.cancelled = cancelled
    _here.scheduled = scheduled


def leave() -> None:
    """The present thread runs nothing any more."""
    _here.cancelled = None
    _here.scheduled = False


def enter_process(cancelled: Callable[[], bool]) -> None:
    """In a slot process one function runs at a time: threads that it starts may ask, too."""
    global _process_wide
    _process_wide = cancelled


def cancelled() -> bool:
    """Whether somebody wants the running function to end: its RemoteValue was cancelled, or its round has ended.

    In a method of an RPC server: nobody waits for its answer any more - cancelled, gone, or out of time.

    A function that runs for long may look now and then and return early; what it returns is dropped. In a slot process
    it is otherwise cut off after `cancel_grace_s`; in a thread nobody can end it, so there the others wait for it.

    Returns:
      False outside a function that zmqdist runs.
    """
    asked = getattr(_here, "cancelled", None) or _process_wide
    return bool(asked()) if asked is not None else False


def scheduled() -> bool:
    """Whether the present thread runs a function that a coordinator has scheduled."""
    return _process_wide is not None or getattr(_here, "scheduled", False)


def inherit() -> Callable[[], None]:
    """For threads that a function starts: called in one of them, what this function may ask is true there, too."""
    asked, was_scheduled = getattr(_here, "cancelled", None), getattr(_here, "scheduled", False)

    def enter_here() -> None:
        _here.cancelled, _here.scheduled = asked, was_scheduled

    return enter_here
