"""Values to come: `get_value()` waits for one, and raises what went wrong. So several can be asked for first, and waited for afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Future(Protocol):
    """A value to come."""

    def get_value(self) -> Any:
        """Wait for it; the same each time."""


class ReadyValue:
    """A value that is here already."""

    __slots__ = ("_value",)

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def get_value(self) -> Any:
        return self._value


class Then:
    """What `fn` makes of the value of another future, once."""

    __slots__ = ("_fn", "_future", "_value")

    def __init__(self, future: Future, fn: Callable[[Any], Any]) -> None:
        self._future: Future | None = future
        self._fn = fn
        self._value: Any = None

    def get_value(self) -> Any:
        if self._future is not None:
            self._value = self._fn(self._future.get_value())
            self._future = None
        return self._value


class Gathered:
    """Several futures that were begun together, and what is made of their values."""

    def __init__(self, futures: Iterable[Future], combine: Callable[[list[Any]], Any] | None = None) -> None:
        """Begin all. When one cannot begin, those before it have ended before its error is raised.

        Args:
          futures: begins the next one with each step.
          combine: makes the value of those of all; None where there is none.
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
        """Wait for all. Raises the error of the first that failed, once all have ended."""
        values = all_values(self._futures)
        return None if self._combine is None else self._combine(values)


def all_values(futures: Iterable[Future]) -> list[Any]:
    """Wait for all of them, also when one has failed; then the first error is raised."""
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
