"""The time-outs that every public wait takes or refuses alike."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from concurrent import futures
from decimal import Decimal
from fractions import Fraction
from math import inf, nan
from typing import Any, Final

import numpy as np
import pytest

from zmqdist import errors

Wait = Callable[[Any], Any]

OVER: Final[list[Any]] = [
    0,
    -1,
    -inf,
    np.float32(0.01),
    np.int64(-5),
    Fraction(1, 100),
    Decimal("0.01"),
]
LONG: Final[list[Any]] = [
    None,
    inf,
    60,
    1e10,
    2**63,
    10**400,
    threading.TIMEOUT_MAX * 2,
    np.float64(1e300),
]
REFUSED: Final[list[Any]] = [
    nan,
    True,
    np.bool_(True),
    "3",
    b"3",
    [1],
    np.arange(2),
    datetime.timedelta(seconds=3),
]


def check_over(wait: Wait, timeout: Any) -> None:
    """The wait for what does not come ends: it returns False, or raises a TimeoutError."""
    try:
        assert wait(timeout) is False
    except (TimeoutError, futures.TimeoutError):
        pass


def check_refused(wait: Wait, timeout: Any) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match="a time-out is a number of seconds, or None, not"
    ):
        wait(timeout)


def check_long(wait: Wait, timeout: Any, comes: Callable[[], object]) -> None:
    """The wait ends when what it waits for has come."""
    outcome: list[Any] = []

    def waits() -> None:
        try:
            outcome.append(wait(timeout))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    comes()
    thread.join(30)
    assert outcome, f"still waiting for {wait}"
    assert not isinstance(outcome[0], BaseException), outcome
