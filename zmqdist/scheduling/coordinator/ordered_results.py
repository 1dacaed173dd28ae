"""`OrderedResults`: the results of a function for the items of iterables, which may have no end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from zmqdist.scheduling.coordinator.options import whole
from zmqdist.scheduling.coordinator.remote_value import RemoteValue

T = TypeVar("T")

AHEAD: Final = 64
"""The number of functions that `imap` and `stream` have begun or ended and the program has not
taken, unless the program says otherwise."""


def checked_ahead(ahead: Any) -> int:
    """Return `ahead`. Raises TypeError or ValueError if it is no whole number above 0."""
    if whole("ahead", ahead) < 1:
        raise ValueError(f"ahead is {ahead}, wants 1 or more")
    return whole("ahead", ahead)


class OrderedResults(Iterator[T], Generic[T]):
    """Yields results in the order of their inputs; `ClusterCoordinator.imap` makes it.

    An error of a function, of the pickling of an item or of the iterable is raised at its place,
    and `next` then goes on. `close`, also as the end of a with-statement, cancels what was
    submitted, and so does the garbage collector when the program has dropped the iterator. One
    thread at a time may use it.

    >>> with coordinator.imap(abs, itertools.count(-2), ahead=4) as results:
    ...     [next(results) for _ in range(4)]
    [2, 1, 0, 1]
    """

    def __init__(
        self, submit: Callable[..., RemoteValue[T]], items: Iterator[tuple[Any, ...]], ahead: int
    ) -> None:
        self._pending: deque[RemoteValue[T] | Exception] = deque()
        self._submit, self._ahead = submit, checked_ahead(ahead)
        self._items: Iterator[tuple[Any, ...]] | None = items

    def __next__(self) -> T:
        while self._items is not None and len(self._pending) < self._ahead:
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None
            except Exception as error:
                self._items = None
                self._pending.append(error)
            else:
                try:
                    self._pending.append(self._submit(*item))
                except Exception as error:
                    self._pending.append(error)
        if not self._pending:
            raise StopIteration
        value = self._pending[0]
        if isinstance(value, RemoteValue):
            value.exception()  # waits: if Ctrl-C ends the wait, the value remains the next
        self._pending.popleft()
        if isinstance(value, Exception):
            raise value
        return value.result()

    def close(self) -> None:
        """Cancel the functions whose results were not taken, and end the iteration. Does not wait.

        >>> coordinator.imap(abs, [-1, -2]).close()
        """
        self._items = None
        while self._pending:
            value = self._pending.pop()
            if isinstance(value, RemoteValue):
                value.cancel()

    def __enter__(self) -> OrderedResults[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_pending" in self.__dict__:  # the constructor has not failed
            self.close()
