"""Waiting for several RemoteValues: `wait` until some have ended, and `AsCompleted`, which yields
each when it has ended.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from zmqdist import errors
from zmqdist.clock import deadline, left, seconds
from zmqdist.conditions import Signals
from zmqdist.scheduling.coordinator.options import whole
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, forget_waiter, release_at_end
from zmqdist.scheduling.shared import own_cluster

T = TypeVar("T")


class AsCompleted(Iterator[RemoteValue[T]]):
    """Yields RemoteValues in the order in which their functions end.
    `ClusterCoordinator.as_completed` makes it.

    Values may be added during the loop, so that results decide what is submitted next:

    >>> search = coordinator.as_completed([coordinator.submit(abs, -9)])
    >>> for value in search:
    ...     print(value.result())
    ...     if value.result() > 2:
    ...         search.add(coordinator.submit(pow, value.result(), 1, 4))
    9
    1

    `len` is the number of values that it has yet to yield. Any thread may add and take values. When
    the `timeout` is over, `next` raises DeadlineExceededError, and the
    functions go on.
    """

    def __init__(self, values: Iterable[RemoteValue[T]], timeout: float | None) -> None:
        values = _checked(values, "as_completed")
        self._timeout, self._until = seconds(timeout), deadline(timeout)
        self._completed: queue.SimpleQueue[RemoteValue[T]] = queue.SimpleQueue()
        self._waiters: dict[RemoteValue[T], _CompletionWaiter] = {}
        self._added = 0
        # one thread at a time, so that none waits for the last value of another
        self._taking = threading.Lock()
        self.add_all(values)

    def add(self, value: RemoteValue[T]) -> None:
        """Yield this value, too. A value that is waited for already is yielded once. Raises
        TypeError as `add_all`.

        >>> search = coordinator.as_completed([])
        >>> search.add(coordinator.submit(abs, -3))
        >>> next(search).result()
        3
        """
        self.add_all((value,))

    def add_all(self, values: Iterable[RemoteValue[T]]) -> None:
        """Yield these values, too. Raises TypeError, and adds nothing, if one of them is not a
        RemoteValue.

        >>> search = coordinator.as_completed([])
        >>> search.add_all(coordinator.map(abs, [-3, 4]))
        >>> len(search)
        2
        """
        for value in _checked(values, "as_completed"):
            if value not in self._waiters:
                self._added += 1
                waiter = self._waiters[value] = _CompletionWaiter(self._completed, value)
                release_at_end(value, waiter)

    def __len__(self) -> int:
        return len(self._waiters)

    def __next__(self) -> RemoteValue[T]:
        with self._taking:
            if not self._waiters:
                raise StopIteration
            try:
                value = self._next_completed()
            except queue.Empty:
                problem = (
                    f"{len(self)} of {self._added} values have not ended after {self._timeout:g} s"
                )
                raise errors.DeadlineExceededError(problem) from None
            del self._waiters[value]
            return value

    def _next_completed(self) -> RemoteValue[T]:
        try:
            return self._completed.get_nowait()
        except queue.Empty:
            with own_cluster.waiting():
                return self._completed.get(timeout=left(self._until))


def wait_for(
    values: Iterable[RemoteValue[T]], count: int | None, timeout: float | None
) -> tuple[list[RemoteValue[T]], list[RemoteValue[T]]]:
    """Implement `ClusterCoordinator.wait`."""
    until, values = deadline(timeout), _checked(values, "wait")
    enough = len(values) if count is None else min(whole("count", count), len(values))
    if enough < 0:
        raise ValueError(f"count is {count}, wants 0 or more, or None for all values")
    pending = [value for value in values if not value.done()]
    missing = enough - (len(values) - len(pending))
    if missing > 0:
        end_signals = Signals()
        try:
            for value in pending:
                release_at_end(value, end_signals)
            with own_cluster.waiting():
                while missing and end_signals.acquire(timeout=left(until)):
                    missing -= 1
        finally:
            for value in pending:
                forget_waiter(value, end_signals)
    done = {value for value in values if value.done()}
    return [value for value in values if value in done], [
        value for value in values if value not in done
    ]


def _checked(values: Any, caller: str) -> list[Any]:
    """Return each RemoteValue once, in order. Raises TypeError if `values` is not an iterable of
    RemoteValues.
    """
    if isinstance(values, RemoteValue):
        raise TypeError(f"{caller} wants a list of RemoteValues, not one: {values!r:.200}")
    values = list(values) if isinstance(values, Iterable) else [values]
    for value in values:
        if not isinstance(value, RemoteValue):
            raise TypeError(
                f"{caller} wants RemoteValues, which submit and schedule return, not "
                f"{value!r:.200} in `values`"
            )
    return list(dict.fromkeys(values))


class _CompletionWaiter:
    """A waiter whose `release` puts a value into a queue, because the value's function has
    ended.
    """

    __slots__ = ("_queue", "_value")

    def __init__(self, completed: queue.SimpleQueue[Any], value: RemoteValue) -> None:
        self._queue = completed
        # weak, because the record of the pending work holds this waiter
        self._value = weakref.ref(value)

    def release(self) -> None:
        value = self._value()
        if value is not None:
            self._queue.put(value)
