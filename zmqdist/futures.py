"""Futures: `get_value()` waits for a value or raises the error. A caller can start several
operations and then wait for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Future(Protocol):
    """A value that may not be ready yet."""

    def get_value(self) -> Any:
        """Wait for the value and return it. Each call returns the same object. If the operation has
        failed, this raises its error."""


class ReadyValue:
    """A future whose value is ready."""

    __slots__ = ("_value",)

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def get_value(self) -> Any:
        return self._value


class Then:
    """A future whose value is `fn(value)`, where `value` is the value of another future.
    `get_value` calls `fn`, but not again after `fn` has returned.
    """

    __slots__ = ("_fn", "_future", "_value")

    def __init__(self, future: Future, fn: Callable[[Any], Any]) -> None:
        self._future: Future | None = future
        self._fn = fn
        self._value: Any = None

    def get_value(self) -> Any:
        future = self._future  # another thread may set it to None meanwhile
        if future is not None:
            self._value = self._fn(future.get_value())
            self._future = None
        return self._value


class Gathered:
    """A future that is ready when all of several futures are ready."""

    def __init__(
        self, futures: Iterable[Future], combine: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """Start all operations. If one cannot be started, wait until the started operations have
        ended, and then raise the error.

        Args:
          futures: an iterable that starts an operation in each step, and yields its future.
          combine: a function that makes the value of this future from the list of all values. None
            means that the value is None.
        """
        self._futures: list[Future] = []
        self._combine = combine
        try:
            for future in futures:
                self._futures.append(future)
        except Exception:
            _outcomes(self._futures)
            raise

    def get_value(self) -> Any:
        """Wait for all futures, and return the combined value. If some futures have failed, raise
        the first error after all have ended."""
        values = all_values(self._futures)
        return None if self._combine is None else self._combine(values)


def all_values(futures: Iterable[Future]) -> list[Any]:
    """Wait for all futures, even if one fails. Return their values, or raise the error of that
    failed future which is first in order."""
    values, failed = _outcomes(list(futures))
    if failed is not None:
        raise failed
    return values


def _outcomes(futures: list[Future]) -> tuple[list[Any], Exception | None]:
    values: list[Any] = []
    failed: Exception | None = None
    for future in futures:
        try:
            values.append(future.get_value())
        except Exception as error:
            failed = failed or error
    return values, failed
