"""Numbers that any thread hands to the loop, finalizers too, and that the loop takes all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class CoalescedQueue:
    """Takes no lock, since a finalizer runs in any thread, which may have any lock.

    Args:
      in_loop: has the loop call a function.
      take: gets what was put since the last time, in the loop; it is not called with nothing.
    """

    def __init__(self, call_in_loop: Callable[..., Any], take: Callable[[list[int]], object]) -> None:
        self._call_in_loop = call_in_loop
        self._take = take
        self._numbers: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, number: int) -> None:
        """One more."""
        self._numbers.append(number)
        self._call_in_loop(self._take_all)

    def _take_all(self) -> None:
        numbers = [self._numbers.popleft() for _ in range(len(self._numbers))]  # others append meanwhile
        if numbers:
            self._take(numbers)
