"""The first work of a coordinator begins at one worker after the other, where that is asked for: no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from zmqdist.messages import Leased


class Stagger:
    """When a worker may begin with what it has.

    Args:
      delay_s: worker i waits i times this with the first work of each coordinator; 0: none waits.
      delay_max_s: the most that one waits; 0: no bound.

    Attributes:
      until: work waits until then; None when it does not.
    """

    def __init__(self, delay_s: float = 0.0, delay_max_s: float = 0.0) -> None:
        self.until: float | None = None
        self._delay_s = delay_s
        self._delay_max_s = delay_max_s or inf
        self._seen: set[int] = set()

    def note_arrival(self, items: Iterable[Leased], index: int, now: float) -> None:
        """Work has come to worker `index`."""
        coordinators = {item[1] for item in items} if self._delay_s else self._seen
        if not coordinators <= self._seen:
            self._seen |= coordinators
            self.until = max(self.until or 0.0, now + min(index * self._delay_s, self._delay_max_s))

    def delays(self, now: float) -> bool:
        """Whether work waits."""
        if self.until is not None and now >= self.until:
            self.until = None
        return self.until is not None
