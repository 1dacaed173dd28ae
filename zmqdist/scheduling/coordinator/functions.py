"""Numbers for functions: the cluster gets each function once, and drops a function that has not
been used for long.

A function is identified by its pickle. A function that captures nothing mutable is pickled once
(wire/functions.py). Any other function is pickled for each work item, and has the same number as
long as its pickle has the same bytes. Such a pickle is marked, so that slots unpickle it again for
each run.

The coordinator's store holds a large pickle, as it holds large arguments
(scheduling/shared/store.py), and messages carry a reference to the pickle. The reference and the
function's number stay the same as long as the store holds these bytes. When the store has released
the bytes, the number is dropped, because no later message will contain the reference.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from zmqdist import clock as time
from zmqdist.limits import FUNCTION_NAME_CHARS_MAX, FUNCTIONS_KEPT_MAX, INLINE_BYTES_MAX
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.shared.references import MUTABLE
from zmqdist.wire.functions import FunctionCache
from zmqdist.wire.trusted import Packed, describe, is_importable_module

log = logging.getLogger("zmqdist.coordinator")


class FunctionNumbers:
    """The functions of one coordinator and their numbers.

    Not thread-safe: only one thread at a time may call `pickled`, and the callers of other methods
    must hold the coordinator's lock.

    Args:
      is_held: returns whether the coordinator's store holds the part with this number.
    """

    def __init__(self, is_held: Callable[[int], bool]) -> None:
        self._is_held = is_held
        self._cache = FunctionCache()
        self._took_s = 0.0
        self._numbers = itertools.count(1)
        self._small: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._latest: tuple[bytes, tuple[int, str]] = (b"", (0, ""))
        """The last entry of `_small`."""
        self._large: OrderedDict[bytes, tuple[int, str, int]] = OrderedDict()
        """The functions whose pickle the store holds: reference -> (number, name, the store's
        number of the first part)."""
        self._defined: list[tuple[int, bytes]] = []
        self._names: list[str] = []
        self._dropped: list[int] = []
        self._specs: dict[str, Any] = {}
        """The spec of each function's module, by module name. `importlib.reload` gives a module a
        new spec, which reveals the reload."""

    def __len__(self) -> int:
        """Return how many functions of this coordinator the cluster knows."""
        return len(self._small) + len(self._large)

    @property
    def pickles(self) -> int:
        """How many times a function was pickled."""
        return self._cache.pickles

    def pickled(self, fn: Callable[..., Any]) -> Packed:
        """Pickle a function in its present state. If this returns a list of parts, the caller must
        have the store hold them.

        Raises InvalidArgumentError if the function cannot be pickled.
        """
        began, pickles = time.perf_counter() if metrics.enable_metrics else 0.0, self._cache.pickles
        packed: Packed | None = self._cache.pack_constant(fn)
        if packed is None:
            packed = self._cache.pack_changing(fn)
            if isinstance(packed, bytes):
                packed = MUTABLE + packed if len(packed) < INLINE_BYTES_MAX else [packed]
        elif len(packed) > INLINE_BYTES_MAX:
            packed = [packed]
        if self._cache.pickles != pickles:
            self._warn_if_reloaded(fn)
        if metrics.enable_metrics:
            self._took_s = time.perf_counter() - began
        return packed

    def _warn_if_reloaded(self, fn: Callable[..., Any]) -> None:
        """Warn if a function's module was reloaded, because worker processes that imported it
        before the reload have the old function."""
        name = getattr(fn, "__module__", None)
        module = sys.modules.get(name or "")
        spec = getattr(module, "__spec__", None)
        # A function of a module that cannot be imported is sent by value, so workers get its
        # present code, and a reload does no harm.
        if module is None or not is_importable_module(module):
            return
        if name and spec is not None and self._specs.setdefault(name, spec) is not spec:
            self._specs[name] = spec
            log.warning(
                "module %s was reloaded in this program: worker processes that have imported it "
                "run its functions as they were before;"
                " start these workers again",
                name,
            )

    def number(self, fn: Callable[..., Any], blob: bytes, bulks: list[int]) -> tuple[int, str]:
        """Return the number and the name of the function of a work item that the caller is about to
        enqueue.

        Args:
          blob: the pickle of the function, or the reference to the pickle.
          bulks: the numbers under which the store holds the pickle, at least until the work item
            has ended.
        """
        if bulks:
            return self._number_of_large(fn, blob, bulks[0])
        if blob is self._latest[0]:
            return self._latest[1]
        definition = self._small.get(blob)
        if definition is not None:
            self._small.move_to_end(blob)
        else:
            definition = self._small[blob] = self._define(fn, blob)
            if len(self._small) > FUNCTIONS_KEPT_MAX:
                self._dropped.append(self._small.popitem(last=False)[1][0])
        self._latest = blob, definition
        return definition

    def _number_of_large(self, fn: Callable[..., Any], blob: bytes, bulk: int) -> tuple[int, str]:
        definition = self._large.get(blob)
        if definition is not None:
            self._large.move_to_end(blob)
            return definition[:2]
        while self._large:
            oldest, (number, _, part) = next(iter(self._large.items()))
            if self._is_held(part) and len(self._large) < FUNCTIONS_KEPT_MAX:
                break
            del self._large[oldest]
            self._dropped.append(number)
        number, name = self._define(fn, blob)
        self._large[blob] = (number, name, bulk)
        return number, name

    def _define(self, fn: Callable[..., Any], blob: bytes) -> tuple[int, str]:
        if metrics.enable_metrics:
            metrics.HISTOGRAMS["function_tracing"].add(self._took_s)
        number = next(self._numbers)
        name = describe(fn)
        self._defined.append((number, blob))
        self._names.append(name[:FUNCTION_NAME_CHARS_MAX])
        return number, name

    def fresh(self) -> int:
        """Return a new number for a per-worker resource, different from the numbers of all
        functions."""
        return next(self._numbers)

    def take(self) -> tuple[list[tuple[int, bytes]], tuple[str, ...], list[int]]:
        """Return the functions that were defined, their names, and the numbers that were dropped
        since `take` was last called."""
        changes = self._defined, tuple(self._names), self._dropped
        self._defined, self._names, self._dropped = [], [], []
        return changes
