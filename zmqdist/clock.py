"""The clocks of this process, and time-outs. Import this module in place of `time`.

Test libraries such as freezegun replace the functions of the module `time`, also where a module has
imported them by name, and stop or set their clocks. Time-outs, heartbeats and leases must go on
meanwhile. No test library replaces CLOCK_MONOTONIC, from which `monotonic` and `perf_counter` read
here.
"""

from __future__ import annotations

import time as _time
from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any, Final

from zmqdist.errors import InvalidArgumentError
from zmqdist.platforms import IS_WINDOWS

# Windows has no `clock_gettime`
monotonic: Final[Callable[[], float]] = (
    _time.perf_counter if IS_WINDOWS else partial(_time.clock_gettime, _time.CLOCK_MONOTONIC)
)
perf_counter: Final = monotonic
thread_time: Final[Callable[[], float]] = (
    _time.thread_time if IS_WINDOWS else partial(_time.clock_gettime, _time.CLOCK_THREAD_CPUTIME_ID)
)
time: Final[Callable[[], float]] = (
    _time.time if IS_WINDOWS else partial(_time.clock_gettime, _time.CLOCK_REALTIME)
)
sleep: Final = _time.sleep

FOREVER_S: Final = 1e9
"""Seconds (32 years) from which on a time-out counts as no time-out, because the functions that
wait have bounds of several kinds."""


def number(value: Any) -> float:
    """Convert a number of any kind, NumPy's and Decimal included, to a float. Return NaN for any
    other object, and for a bool."""
    try:
        return (
            nan
            if isinstance(value, str | bytes) or type(value).__name__.startswith("bool")
            else float(value)
        )
    except (TypeError, ValueError):
        return nan
    except OverflowError:  # an int that is too large for a float
        return inf if value > 0 else -inf


def seconds(timeout: Any) -> float | None:
    """Return a time-out in seconds that every function accepts that waits. None means that the wait
    has no limit.

    A number below 0 counts as 0, as in the standard library. `inf` and very large numbers count as
    None.

    Raises:
      InvalidArgumentError (a ValueError): `timeout` is no number, or it is NaN.
    """
    if timeout is None:
        return None
    limit_s = number(timeout)
    if limit_s != limit_s:
        hint = ": pass its total_seconds()" if hasattr(timeout, "total_seconds") else ""
        raise InvalidArgumentError(
            f"a time-out is a number of seconds, or None, not {repr(timeout)[:100]}{hint}"
        )
    return None if limit_s >= FOREVER_S else max(0.0, limit_s)


def duration(name: str, value: Any) -> float:
    """Return a duration in seconds, at most FOREVER_S. Raises InvalidArgumentError if it is no
    number, NaN or negative."""
    if not (duration_s := number(value)) >= 0:
        raise InvalidArgumentError(f"{name} is {value!r}, wants 0 s or more")
    return min(duration_s, FOREVER_S)


def deadline(timeout: Any) -> float | None:
    """Return the time on the clock of `monotonic` at which a time-out is over that begins now; None
    means never. Raises as `seconds`."""
    left_s = seconds(timeout)
    return None if left_s is None else monotonic() + left_s


def left(until: float | None) -> float | None:
    """Return the seconds until the time that `deadline` has returned, 0 if it has passed."""
    return None if until is None else max(0.0, until - monotonic())
