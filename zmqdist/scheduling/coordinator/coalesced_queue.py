"""A queue for numbers: any thread, or a finalizer, puts numbers into it, and the coordinator's loop takes all of them at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class CoalescedQueue:
    """Numbers on their way to the loop. It takes no lock, because a finalizer may run in a thread that holds any lock.

    Args:
      call_in_loop: has the loop call a function.
      take: called in the loop with the numbers that were put since its last call; the list is never empty.
    """

    def __init__(self, call_in_loop: Callable[..., Any], take: Callable[[list[int]], object]) -> None:
        self._call_in_loop = call_in_loop
        self._take = take
        self._numbers: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, number: int) -> None:
        """Add a number, and have the loop call `take` soon."""
        self._numbers.append(number)
        self._call_in_loop(self._take_all)

    def _take_all(self) -> None:
        numbers = [self._numbers.popleft() for _ in range(len(self._numbers))]  # safe while other threads append
        if numbers:
            self._take(numbers)
