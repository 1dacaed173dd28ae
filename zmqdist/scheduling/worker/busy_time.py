"""The time for which a worker has work, which it reports to the dispatcher. No I/O."""

from __future__ import annotations


class BusyTime:
    """The time for which a worker has had work since its last report, measured in the worker for
    the dispatcher's `WorkWindow`."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None

    def note_arrival(self, now: float, held: int) -> None:
        """Record that work has arrived at a worker that held `held` items before."""
        if not held:
            self._since = now

    def take_us(self, now: float, held: int) -> int:
        """Return the busy microseconds since the last report, and begin to count anew. `held` is
        the number of items that the worker still has."""
        busy_s = 0.0 if self._since is None else now - self._since
        self._since = now if held else None
        return int(busy_s * 1e6)
