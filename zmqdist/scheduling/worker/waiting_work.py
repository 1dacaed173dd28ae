"""What waits at a worker for its slots, in the order in which it is to begin: work for this very worker first (worker.py).

Not here: what the slots have, and when they get more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import takewhile

from zmqdist.messages import Leased


class WaitingWork(deque[Leased]):
    """A queue of leased work.

    Attributes:
      pinned: leases of work for this very worker, here or at a slot, and perhaps some that have ended.
      report_before_start: leases in it that are careful work.
      announced: the careful lease whose start was reported last: nothing goes before it any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.report_before_start: set[int] = set()
        self.announced = 0

    @property
    def pinned_is_next(self) -> bool:
        """Whether the next is work for this very worker."""
        return bool(self.pinned) and bool(self) and self[0][0] in self.pinned

    @property
    def pinned_waiting(self) -> int:
        """Work for this very worker in it."""
        return sum(item[0] in self.pinned for item in self) if self.pinned else 0

    def put(self, items: list[Leased], *, report_before_start: bool, pinned: bool) -> None:
        """New work."""
        if report_before_start:
            self.report_before_start.update(item[0] for item in items)
        if pinned:
            self.pinned.update(item[0] for item in items)
            self._put_pinned(items)
        else:
            self.extend(items)

    def put_back(self, items: list[Leased]) -> None:
        """What a slot had and has not begun, oldest first: before the rest of its kind."""
        pinned = self.pinned and [item for item in items if item[0] in self.pinned]
        if pinned:
            self._put_pinned(pinned)
            items = [item for item in items if item[0] not in self.pinned]
        place = sum(1 for _ in takewhile(self._goes_first, self)) if self.pinned else self._head_is_announced()
        self.rotate(-place)
        self.extendleft(reversed(items))
        self.rotate(place)

    def take_out(self, leases: Container[int]) -> list[int]:
        """Remove these; those that were here."""
        taken = [item[0] for item in self if item[0] in leases]
        if taken:
            kept = [item for item in self if item[0] not in leases]
            self.clear()
            self.extend(kept)
            self.report_before_start.difference_update(taken)
            self.pinned.difference_update(taken)
        return taken

    def empty(self) -> list[int]:
        """Remove all: their leases."""
        leases = [item[0] for item in self]
        self.clear()
        self.report_before_start.clear()
        self.pinned.difference_update(leases)
        return leases

    def _head_is_announced(self) -> int:
        return int(bool(self) and self[0][0] == self.announced)

    def _goes_first(self, item: Leased) -> bool:
        return item[0] in self.pinned or item[0] == self.announced

    def _put_pinned(self, items: Iterable[Leased]) -> None:
        head = [self.popleft()] if self._head_is_announced() else []
        pinned = self._in_order([*items, *(item for item in self if item[0] in self.pinned)])
        rest = [item for item in self if item[0] not in self.pinned]
        self.clear()
        self.extend(head + pinned + rest)

    @staticmethod
    def _in_order(items: list[Leased]) -> list[Leased]:
        """As they came: the dispatcher counts leases up."""
        return sorted(items)
