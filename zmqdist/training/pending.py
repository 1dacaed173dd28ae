"""What was asked for and may not be there yet: `get_value()` waits for it, and raises what went wrong.

So several can be asked first, and waited for afterwards; what a parameter server's client gives is one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Pending(Protocol):
    """A value to come."""

    def get_value(self) -> Any:
        """Wait for it; the same each time."""


class Ready:
    """It is here already."""

    __slots__ = ("_value",)

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def get_value(self) -> Any:
        return self._value


class Then:
    """What `fn` makes of another one's value, once."""

    __slots__ = ("_fn", "_pending", "_value")

    def __init__(self, pending: Pending, fn: Callable[[Any], Any]) -> None:
        self._pending: Pending | None = pending
        self._fn = fn
        self._value: Any = None

    def get_value(self) -> Any:
        if self._pending is not None:
            self._value = self._fn(self._pending.get_value())
            self._pending = None
        return self._value


def all_values(pending: Iterable[Pending]) -> list[Any]:
    """Wait for all of them, also when one has failed; then the first error is raised."""
    values, failed = [], None
    for each in list(pending):
        try:
            values.append(each.get_value())
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return values
