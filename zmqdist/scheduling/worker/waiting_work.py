"""The queue of a worker: the work that waits for a slot, in the order in which it will begin.
Pinned work is first (P9 of machine.py).

Not here: the items that slots have, and when a slot gets more items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import takewhile

from zmqdist.messages import Leased


class WaitingWork(deque[Leased]):
    """A queue of leased work items.

    Attributes:
      pinned: the leases of pinned work, in the queue or at a slot. Some of these leases may have
        ended.
      report_before_start: the leases in the queue whose start must be reported before their items
        begin.
      announced: the latest lease whose start was reported while its item waited here. No item is
        put before this item, because it counts as begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.report_before_start: set[int] = set()
        self.announced = 0

    @property
    def pinned_is_next(self) -> bool:
        """Whether the next item is pinned work."""
        return bool(self.pinned) and bool(self) and self[0][0] in self.pinned

    @property
    def pinned_waiting(self) -> int:
        """The number of items of pinned work in the queue."""
        return sum(item[0] in self.pinned for item in self) if self.pinned else 0

    @property
    def figures(self) -> dict[str, int]:
        """The fields of a WorkerSnapshot about the queue."""
        return {"waiting": len(self), "waiting_pinned": self.pinned_waiting}

    def put(self, items: list[Leased], *, report_before_start: bool, pinned: bool) -> None:
        """Add items that the dispatcher has assigned."""
        if report_before_start:
            self.report_before_start.update(item[0] for item in items)
        if pinned:
            self.pinned.update(item[0] for item in items)
            self._put_pinned(items)
        else:
            self.extend(items)

    def put_back(self, items: list[Leased]) -> None:
        """Put back items that a slot has not begun; `items` begins with the oldest item. Pinned
        items are sorted by lease into the other pinned items. The rest come before all other items
        that are not pinned, because the slots got the older items first."""
        pinned = self.pinned and [item for item in items if item[0] in self.pinned]
        if pinned:
            self._put_pinned(pinned)
            items = [item for item in items if item[0] not in self.pinned]
        place = (
            sum(1 for _ in takewhile(self._goes_first, self))
            if self.pinned
            else self._head_is_announced()
        )
        self.rotate(-place)
        self.extendleft(reversed(items))
        self.rotate(place)

    def take_out(self, leases: Container[int]) -> list[int]:
        """Remove the items with these leases, and return the leases that were in the queue."""
        taken = [item[0] for item in self if item[0] in leases]
        if taken:
            kept = [item for item in self if item[0] not in leases]
            self.clear()
            self.extend(kept)
            self.report_before_start.difference_update(taken)
            self.pinned.difference_update(taken)
        return taken

    def empty(self) -> list[int]:
        """Remove all items, and return their leases."""
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
        # Lease numbers only rise, so this is the order of assignment.
        pinned = sorted([*items, *(item for item in self if item[0] in self.pinned)])
        rest = [item for item in self if item[0] not in self.pinned]
        self.clear()
        self.extend(head + pinned + rest)
