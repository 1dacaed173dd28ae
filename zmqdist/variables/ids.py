"""The sequence numbers of a client's updates, by which a ps recognizes a repeated update
(updates_machine.py)."""

from __future__ import annotations

import threading
from collections import deque

from zmqdist.rpc import StatusOrResult
from zmqdist.rpc.client import new_incarnation


class UpdateIds:
    """The sequence numbers of one client. This class also computes the number up to which all
    updates are settled, which means that the client will not send them again.
    """

    def __init__(self) -> None:
        self.client = new_incarnation()
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        self._loose: dict[int, StatusOrResult] = {}
        self._settled: deque[tuple[int, StatusOrResult | None]] = deque()
        """Calls of `settled` that `next` has not processed yet. A finalizer may append at any
        moment."""

    def next(self) -> tuple[int, int, int]:
        """Return (client, sequence number, settled) for a new update. All updates with numbers up
        to `settled` are settled."""
        with self._lock:
            self._last += 1
            while self._settled:
                number, call = self._settled.popleft()
                if call is None:
                    self._open.pop(number, None)
                else:
                    self._loose[number] = call
            for number in [number for number, call in self._loose.items() if call.done()]:
                del self._loose[number]
                self._open.pop(number, None)
            self._open[self._last] = None
            return self.client, self._last, next(iter(self._open)) - 1

    def settled(self, number: int, call: StatusOrResult | None) -> None:
        """Record that no caller waits for the result of this update any more. If the update's RPC
        call is still in flight, pass the call as `call`. The update is then settled when the call
        ends.

        This method takes no lock, because finalizers call it.
        """
        if number:
            self._settled.append((number, call))
