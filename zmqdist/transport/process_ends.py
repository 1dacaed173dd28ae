"""The ends of processes on this host, which their peers learn from /proc."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Final

from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import is_alive

PROCESS_END_PAUSE_S: Final = 0.005
"""Seconds between the end of a process's connection and the second check whether the process has
ended. The connections of a killed process end shortly before the process itself. Each later pause
is twice as long as the pause before it."""


def watch_process_end(
    loop: Loop,
    key: Hashable,
    pid: int,
    is_missed: Callable[[], bool],
    ended: Callable[[], object],
    pause_s: float = PROCESS_END_PAUSE_S,
) -> None:
    """Call `ended` once when a process on this host has ended. Call this in the loop's thread.

    Args:
      key: the key of the loop's timer for further checks.
      is_missed: returns False when the watch is over, for example because the process has
        connected again.
    """
    if not is_missed():
        return
    if not is_alive(pid):
        ended()
        return
    check = partial(watch_process_end, loop, key, pid, is_missed, ended, 2 * pause_s)
    loop.set_timer(key, loop.now() + pause_s, check)
