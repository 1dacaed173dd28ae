"""The start delay: if it is configured, the workers begin a coordinator's first work one after the
other. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from zmqdist.messages import Leased


class Stagger:
    """The start delay of one worker, which decides when the worker may begin the work that it has
    received.

    Args:
      delay_s: worker i delays the first work of each coordinator by i * `delay_s`; 0 means no
        delay.
      delay_max_s: the longest delay; 0 means no bound.

    Attributes:
      until: the time at which the worker may begin work; None while no delay is in force.
    """

    def __init__(self, delay_s: float = 0.0, delay_max_s: float = 0.0) -> None:
        self.until: float | None = None
        self._delay_s = delay_s
        self._delay_max_s = delay_max_s or inf
        self._seen: set[int] = set()

    def note_arrival(self, items: Iterable[Leased], index: int, now: float) -> None:
        """Record that work has arrived at the worker with this index. The first work of a
        coordinator begins the delay."""
        coordinators = {item[1] for item in items} if self._delay_s else self._seen
        if not coordinators <= self._seen:
            self._seen |= coordinators
            self.until = max(self.until or 0.0, now + min(index * self._delay_s, self._delay_max_s))

    def delays(self, now: float) -> bool:
        """Return whether the worker must not begin work yet."""
        if self.until is not None and now >= self.until:
            self.until = None
        return self.until is not None
