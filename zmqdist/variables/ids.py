"""Numbers of a client's updates, by which a ps knows one that it is asked for again (updates_machine.py)."""

from __future__ import annotations

import threading
from collections import deque

from zmqdist.rpc import StatusOrResult
from zmqdist.rpc.client import new_incarnation


class UpdateIds:
    """Numbers of updates, and up to which of them nobody will ask again."""

    def __init__(self) -> None:
        self.client = new_incarnation()
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, None] = {}
        self._loose: dict[int, StatusOrResult] = {}
        self._settled: deque[tuple[int, StatusOrResult | None]] = deque()
        """What `settled` was told, and `next` has not seen: a finalizer, too, may append to it at any moment."""

    def next(self) -> tuple[int, int, int]:
        """Client, number, and up to which number all is settled."""
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
        """Nobody waits for this one any more. One that is still on its way (`call`) is settled when it has ended. Takes no lock."""
        if number:
            self._settled.append((number, call))
