"""Numbers for functions: each goes to the cluster once, and is forgotten there when it has not been used for long.

A function is recognised by its pickle: one that captures nothing mutable is pickled once (wire/functions.py), one that does is pickled
each time, and has its old number as long as the bytes are the same. Its pickle is marked, so that slots, too, have it anew for each run.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from zmqdist.coordinator import metrics
from zmqdist.dispatch.references import CHANGING
from zmqdist.limits import FUNCTIONS_KEPT_MAX, INLINE_BYTES_MAX
from zmqdist.wire.functions import FunctionCache
from zmqdist.wire.trusted import describe


class FunctionNumbers:
    """Not thread-safe: one thread at a time calls `pickled`; the others are called under the coordinator's lock.

    Args:
      hold: keeps what is too large for a message while a piece of work needs it, and gives what stands for it.
    """

    def __init__(self, hold: Callable[[int, list[Any]], bytes]) -> None:
        self._hold = hold
        self._cache = FunctionCache()
        self._took_s = 0.0
        self._numbers = itertools.count(1)
        self._kept: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._defined: list[tuple[int, bytes]] = []
        self._dropped: list[int] = []

    def __len__(self) -> int:
        """Functions that the cluster knows by a number."""
        return len(self._kept)

    @property
    def pickles(self) -> int:
        """How often a function was pickled."""
        return self._cache.pickles

    def pickled(self, fn: Callable[..., Any]) -> bytes:
        """The function as it is now. Raises InvalidArgumentError where it cannot be pickled."""
        if metrics.enable_metrics:
            began = time.perf_counter()
            blob, stable = self._cache.lookup(fn)
            self._took_s = time.perf_counter() - began
        else:
            blob, stable = self._cache.lookup(fn)
        return blob if stable or len(blob) >= INLINE_BYTES_MAX else CHANGING + blob

    def number(self, fn: Callable[..., Any], blob: bytes, work: int) -> tuple[int, str]:
        """The number and the name of a function for a piece of work that is about to be handed in."""
        if len(blob) > INLINE_BYTES_MAX:
            # Too large for a message, and too large to compare: it serves this one piece of work.
            number = next(self._numbers)
            self._defined.append((number, self._hold(work, [blob])))
            self._dropped.append(number)
            return number, describe(fn)
        known = self._kept.get(blob)
        if known is not None:
            self._kept.move_to_end(blob)
            return known
        if metrics.enable_metrics:
            metrics.HISTOGRAMS["function_tracing"].add(self._took_s)
        known = self._kept[blob] = (next(self._numbers), describe(fn))
        self._defined.append((known[0], blob))
        if len(self._kept) > FUNCTIONS_KEPT_MAX:
            self._dropped.append(self._kept.popitem(last=False)[1][0])
        return known

    def fresh(self) -> int:
        """A number that is no function's: for something else that slots know under a number of this coordinator."""
        return next(self._numbers)

    def take(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """What was defined and what was dropped since the last call."""
        taken = self._defined, self._dropped
        self._defined, self._dropped = [], []
        return taken
