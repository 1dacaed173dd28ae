"""Decides which calls of a batched method run together, and when. This module uses no arrays, clock
or threads.

Theory of operation
    Calls of one kind are collected in a batch. Calls are of one kind if their arguments can be
    joined, which the runtime decides. A batch is closed when it has `rows_max` rows, or when the
    next call does not fit; a call with more than `rows_max` rows is a batch by itself. A batch may
    run once it is closed, or once its first call has waited for `delay_s`. While one batch runs,
    further calls join the open batches.

Promises, checked by tests/rpc/test_batching_machine.py and in simulation (tests/sim/test_rpc.py)
    P1  each call is in exactly one batch, with calls of its kind only, in the order of arrival
    P2  a batch has at most `rows_max` rows, or one call
    P3  an open batch waits at most `delay_s` for further calls; a closed batch waits for no calls
    P4  of the batches that may run, the batch whose first call arrived first runs next, even if
        that call was dropped
    P5  no state is kept of a call that was dropped before it ran

Not here: how arguments are compared, joined and split (service.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class CallBatch(Generic[T]):
    """Calls that run together. Only this file uses its attributes."""

    __slots__ = ("calls", "kind", "rows", "since")

    def __init__(self, kind: Hashable, since: float) -> None:
        self.kind = kind
        self.since = since
        self.rows = 0
        self.calls: dict[T, int] = {}  # rows of each call, in the order of arrival


class Batches(Generic[T]):
    """The waiting calls of one method; the module's docstring has the rules."""

    def __init__(self, rows_max: int, delay_s: float) -> None:
        self._rows_max = rows_max
        self._delay_s = delay_s
        # open batches in the order of their first calls
        self._open: dict[Hashable, CallBatch[T]] = {}
        # A heap of closed batches, ordered by the arrival of their first call. `_drop_empty`
        # removes empty batches from its front.
        self._closed: list[tuple[float, int, CallBatch[T]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Return the number of calls that wait for their batch to run."""
        return sum(map(len, self._present()))

    def arrived(self, call: T, kind: Hashable, rows: int, now: float) -> CallBatch[T]:
        """Add a call with `rows` rows. Return the call's batch, which `dropped` needs as an
        argument."""
        batch = self._open.get(kind)
        if batch is not None and batch.rows + rows > self._rows_max:
            self._close(kind)
            batch = None
        if batch is None:
            batch = self._open[kind] = CallBatch(kind, now)
        batch.calls[call] = rows
        batch.rows += rows
        if batch.rows >= self._rows_max:
            self._close(kind)
        return batch

    def _close(self, kind: Hashable) -> None:
        batch = self._open.pop(kind)
        heapq.heappush(self._closed, (batch.since, next(self._numbers), batch))

    def dropped(self, call: T, batch: CallBatch[T]) -> None:
        """Remove a call whose reply is no longer wanted. Do nothing if `ready` has already returned
        the call's batch."""
        batch.rows -= batch.calls.pop(call, 0)
        if not batch.calls:
            if self._open.get(batch.kind) is batch:
                del self._open[batch.kind]
            self._drop_empty()

    def ready(self, now: float) -> list[T]:
        """Return the calls of the batch that runs next, or an empty list if no batch may run
        yet.
        """
        kind, oldest = next(iter(self._open.items()), (None, None))
        if oldest is not None and now < oldest.since + self._delay_s:
            oldest = None
        if self._closed and (oldest is None or self._closed[0][0] <= oldest.since):
            _, _, closed = heapq.heappop(self._closed)
            self._drop_empty()
            return list(closed.calls)
        if oldest is None:
            return []
        del self._open[kind]
        return list(oldest.calls)

    @property
    def deadline(self) -> float:
        """The time from which `ready` returns a batch. `inf` means that no call waits."""
        if self._closed:
            return -inf
        oldest = next(iter(self._open.values()), None)
        return inf if oldest is None else oldest.since + self._delay_s

    def drain(self) -> list[list[T]]:
        """Return the calls of every batch, closed or not, and forget all batches."""
        batches = self._present()
        self._closed.clear()
        self._open.clear()
        return batches

    def _present(self) -> list[list[T]]:
        """Return the calls of each batch that is not empty."""
        batches = [*(batch for *_, batch in sorted(self._closed)), *self._open.values()]
        return [list(batch.calls) for batch in batches if batch.calls]

    def _drop_empty(self) -> None:
        """Remove empty batches from the front of the closed batches. *Invariant*: the first closed
        batch has calls."""
        while self._closed and not self._closed[0][2].calls:
            heapq.heappop(self._closed)
