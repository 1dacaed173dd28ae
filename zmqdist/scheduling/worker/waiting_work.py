"""What waits at a worker for its slots, in the order in which it is to begin: work for this very worker first (worker.py).

Not here: what the slots have, and when they get more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import takewhile

from zmqdist.messages import Leased


class Waiting(deque[Leased]):
    """A queue of leased work.

    Attributes:
      own: leases of work for this very worker, here or at a slot, and perhaps some that have ended.
      care: leases in it that are careful work.
      begins: the careful lease whose start was reported last: nothing goes before it any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own: set[int] = set()
        self.care: set[int] = set()
        self.begins = 0

    @property
    def own_waits(self) -> bool:
        """Whether the next is work for this very worker."""
        return bool(self.own) and bool(self) and self[0][0] in self.own

    @property
    def own_waiting(self) -> int:
        """Work for this very worker in it."""
        return sum(item[0] in self.own for item in self) if self.own else 0

    def put(self, items: list[Leased], *, careful: bool, own: bool) -> None:
        """New work."""
        if careful:
            self.care.update(item[0] for item in items)
        if own:
            self.own.update(item[0] for item in items)
            self._put_own(items)
        else:
            self.extend(items)

    def put_back(self, items: list[Leased]) -> None:
        """What a slot had and has not begun, oldest first: before the rest of its kind."""
        own = self.own and [item for item in items if item[0] in self.own]
        if own:
            self._put_own(own)
            items = [item for item in items if item[0] not in self.own]
        place = sum(1 for _ in takewhile(self._goes_first, self)) if self.own else self._announced()
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
            self.care.difference_update(taken)
            self.own.difference_update(taken)
        return taken

    def empty(self) -> list[int]:
        """Remove all: their leases."""
        leases = [item[0] for item in self]
        self.clear()
        self.care.clear()
        self.own.difference_update(leases)
        return leases

    def _announced(self) -> int:
        return int(bool(self) and self[0][0] == self.begins)

    def _goes_first(self, item: Leased) -> bool:
        return item[0] in self.own or item[0] == self.begins

    def _put_own(self, items: Iterable[Leased]) -> None:
        head = [self.popleft()] if self._announced() else []
        own = self._in_order([*items, *(item for item in self if item[0] in self.own)])
        rest = [item for item in self if item[0] not in self.own]
        self.clear()
        self.extend(head + own + rest)

    @staticmethod
    def _in_order(items: list[Leased]) -> list[Leased]:
        """As they came: the dispatcher counts leases up."""
        return sorted(items)
