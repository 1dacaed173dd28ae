"""A queue of numbers that any thread, or a finalizer, hands to the loop, and that the loop takes all at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class CoalescedQueue:
    """Takes no lock, because a finalizer runs in any thread, whichever locks that thread holds.

    Args:
      call_in_loop: has the loop call a function.
      take: called in the loop with the numbers put since its last call; never with an empty list.
    """

    def __init__(self, call_in_loop: Callable[..., Any], take: Callable[[list[int]], object]) -> None:
        self._call_in_loop = call_in_loop
        self._take = take
        self._numbers: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, number: int) -> None:
        """Add a number and schedule a call of `take`."""
        self._numbers.append(number)
        self._call_in_loop(self._take_all)

    def _take_all(self) -> None:
        numbers = [self._numbers.popleft() for _ in range(len(self._numbers))]  # safe while other threads append
        if numbers:
            self._take(numbers)
