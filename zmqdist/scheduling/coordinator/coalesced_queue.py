"""CoalescedQueue: any thread or finalizer puts requests into the queue, and the coordinator's loop
takes all of them at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class CoalescedQueue:
    """A queue of requests for the loop. Its methods take no lock, because a finalizer may run in a
    thread that holds any lock.

    Args:
      call_in_loop: has the loop call a function.
      take: called in the loop with the requests that were put into the queue since `take` was last
        called. The list is never empty.
    """

    def __init__(
        self, call_in_loop: Callable[..., Any], take: Callable[[list[Any]], object]
    ) -> None:
        self._call_in_loop = call_in_loop
        self._take = take
        self._requests: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: Any) -> None:
        """Put a request into the queue, and have the loop call `take` soon."""
        self._requests.append(request)
        self._call_in_loop(self._take_all)

    def _take_all(self) -> None:
        # `popleft` rather than `clear`, because other threads may append meanwhile.
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        if requests:
            self._take(requests)
