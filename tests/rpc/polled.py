"""Waiting for a condition, for the tests of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """The first true value of `condition`; fails when there was none for `within_s`."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        pause.wait(0.002)
    return value
