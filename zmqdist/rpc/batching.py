"""Methods whose concurrent calls run as one: their arguments are joined along axis 0, and the
result is split again.

Rules
    Every argument is an array, or a structure of arrays, and all arrays of a call have the same
    number of rows (their axis 0). Calls are joined leaf by leaf if their structures, dtypes and row
    shapes are equal; other calls form another batch. The function runs once for each batch, and one
    batch of a method runs at a time. The function must return arrays, in any structure, with as
    many rows as it received. If it returns anything else, every call of the batch ends with
    UNKNOWN. An exception of the function becomes the error of every call of the batch.
    A call whose caller no longer waits is left out of the batch.

Not here: which calls are joined, and when (batching_machine.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np

from zmqdist import clock as time
from zmqdist import nest
from zmqdist.errors import DeadlineExceededError, InvalidArgumentError, OpError, UnknownError
from zmqdist.rpc.batching_machine import Batches
from zmqdist.rpc.methods import Method
from zmqdist.rpc.pending_call import PendingCall
from zmqdist.rpc.service_protocol import AnsweringService
from zmqdist.task_context import enter, leave


class _WaitingCall:
    """One call that waits for its batch, with its arguments as (tuple, dict) and their number of
    rows."""

    __slots__ = ("arguments", "call", "rows")

    def __init__(self, call: PendingCall, arguments: Any, rows: int) -> None:
        self.call = call
        self.arguments = arguments
        self.rows = rows


def check_options(method: Method, rows_max: Any, delay_ms: Any) -> None:
    """Raise ValueError if the calls of `method` cannot be batched with these bounds."""
    if method.inline or method.streaming:
        raise ValueError(
            f"{method.name}: neither an inline method nor a generator function can be batched"
        )
    is_number = isinstance(delay_ms, (int, float, np.integer, np.floating))
    if not (type(rows_max) is int and rows_max > 0 and is_number and 0 <= delay_ms < inf):
        raise ValueError(
            f"{method.name}: max_batch is an int of 1 or more, and max_delay_ms 0 or more "
            f"milliseconds, not "
            f"{rows_max!r} and {delay_ms!r}"
        )


class Batched:
    """The calls of one batched method. The loop calls `called` and `close`."""

    def __init__(
        self, service: AnsweringService, method: Method, rows_max: int, delay_s: float
    ) -> None:
        self.name = method.name
        self._service = service
        self._method = method
        self._fn: Callable[..., Any] = method.fn
        self._batches: Batches[_WaitingCall] = Batches(rows_max, delay_s)
        self._running = False
        self._one_at_a_time = threading.Lock()

    def called(self, call: PendingCall, *args: Any, **named: Any) -> None:
        """Queue a call of this method for a batch. Raises InvalidArgumentError if the call's
        arguments are not arrays with the same number of rows.
        """
        arguments = (args, named)
        rows: set[int] = set()
        kind = _kind(arguments, rows)
        if len(rows) != 1:
            row_counts = (
                f"with {' and '.join(map(str, sorted(rows)))} rows" if rows else "none at all"
            )
            raise InvalidArgumentError(
                f"{self._method.name}: wanted arrays of the same number of rows, given {row_counts}"
            )
        waiting = _WaitingCall(call, arguments, rows.pop())
        batch = self._batches.arrived(waiting, kind, waiting.rows, time.monotonic())
        call.on_dropped(partial(self._batches.dropped, waiting, batch))
        self._run_next()

    def __len__(self) -> int:
        """Return the number of calls whose batch still collects calls, or waits until another batch
        has run. The loop calls this."""
        return len(self._batches)

    def close(self) -> None:
        """Run all waiting calls without further delay, because the server stops."""
        for batch in self._batches.all():
            for waiting in batch:
                waiting.call.begun()
            self._service.submit(self._run, batch, refuse=partial(_refuse, batch))

    def _run_next(self) -> None:
        while not self._running:
            batch = self._batches.ready(time.monotonic())
            if not batch:
                deadline = self._batches.deadline
                self._service.set_timer(self, None if deadline == inf else deadline, self._run_next)
                return
            wanted = [waiting for waiting in batch if waiting.call.wanted()]
            for waiting in batch:
                waiting.call.begun()
                if not waiting.call.wanted():
                    waiting.call.fail(
                        DeadlineExceededError(
                            "the deadline passed before the batch of this call ran"
                        )
                    )
            if wanted:
                self._running = True
                self._service.submit(self._run, wanted, refuse=partial(_refuse, wanted))

    def _ran(self) -> None:
        self._running = False
        self._run_next()

    # -- in a thread of the pool -------------------------------------------------------------------

    def _run(self, batch: list[_WaitingCall]) -> None:
        enter(lambda: not any(waiting.call.wanted() for waiting in batch))
        try:
            with self._one_at_a_time:
                args, named = _joined([waiting.arguments for waiting in batch])
                result = self._method.result(self._fn(*args, **named))
            parts = self._parts(result, [waiting.rows for waiting in batch])
            for waiting, part in zip(batch, parts, strict=True):
                waiting.call.reply(part)
        except BaseException as error:
            for waiting in batch:
                waiting.call.fail(error)
        finally:
            leave()
            self._service.soon(self._ran)

    def _parts(self, result: Any, rows: list[int]) -> Iterator[Any]:
        """Yield the part of the joined result that belongs to each call, as views."""
        total = sum(rows)
        leaves = nest.flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (total,):
                shown = (
                    f"an array of shape {leaf.shape}"
                    if isinstance(leaf, np.ndarray)
                    else f"a {type(leaf).__name__}"
                )
                raise UnknownError(
                    f"{self._method.name} was given a batch of {total} rows, and returned "
                    f"{shown}, which does not have as many rows",
                )
        ends = np.cumsum(rows).tolist()
        return (
            nest.pack_sequence_as(result, [leaf[end - count : end] for leaf in leaves])
            for end, count in zip(ends, rows, strict=True)
        )


def _refuse(batch: Sequence[_WaitingCall], error: OpError) -> None:
    for waiting in batch:
        waiting.call.fail(error)


def _joined(calls: list[Any]) -> Any:
    if len(calls) == 1:
        return calls[0]
    columns = zip(*map(nest.flatten, calls), strict=True)
    return nest.pack_sequence_as(calls[0], [np.concatenate(column) for column in columns])


def _kind(value: Any, rows: set[int]) -> Hashable:
    """Return a key of a call's arguments. Two calls can be joined if and only if their keys are
    equal. Add the row counts of all arrays to `rows`.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        rows.add(len(value))
        return value.dtype, value.shape[1:]
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (str(type(key)), key))
        return dict, *((key, _kind(value[key], rows)) for key in keys)
    if isinstance(value, (list, tuple)):
        return (
            isinstance(value, list),
            getattr(value, "_fields", None),
            *(_kind(item, rows) for item in value),
        )
    shown = (
        "an array without rows" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    )
    raise InvalidArgumentError(
        f"calls of this method are joined along axis 0: wanted arrays, given {shown}"
    )
