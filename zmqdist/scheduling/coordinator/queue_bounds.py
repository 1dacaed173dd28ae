"""The bounds of a coordinator's queue: checks of the bounds that the program passes, and the count
of bytes held for unfinished work.

Rules
    The count includes packed arguments above SMALL_BYTES_MAX, and the large arrays held with the
    arguments or with a function's pickle. They count from `schedule` until the work has ended,
    because they take memory of this process even while the work runs. Data that several work items
    share counts once.
    A work item that is larger than the bound is scheduled when no other work item is counted,
    because otherwise it would wait for ever. Data that outlives its work is not counted: per-worker
    resources, and the inputs of work with a lineage.

The code of this module runs with the coordinator's lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from zmqdist import limits
from zmqdist.scheduling.coordinator.work import Extra
from zmqdist.transport.memory_limits import usable_bytes

SMALL_BYTES_MAX: Final = 256
"""Packed arguments up to this size are not counted, because the record of a work item takes as much
memory. `queue_max` bounds the number of these records."""


log = logging.getLogger("zmqdist.coordinator")


def checked_queue_max(queue_max: int) -> int:
    """Return the bound on waiting work items, or a very large number for 0. Raises ValueError if
    the bound is negative."""
    if queue_max < 0:
        raise ValueError(f"queue_max is {queue_max}, wants 1 or more, or 0 for no bound")
    if queue_max == 0:
        log.warning(
            "queue_max is 0: only queue_bytes_max makes schedule() wait, however many functions "
            "are queued for the workers"
        )
        return limits.QUEUE_UNBOUNDED
    return queue_max


def checked_bytes_max(bytes_max: int | None) -> int:
    """Return the bound in bytes. None means a share of the memory of this host or control group.
    Raises ValueError if `bytes_max` is negative."""
    if bytes_max is None:
        return usable_bytes() // limits.QUEUE_MEMORY_SHARE
    if bytes_max < 0:
        raise ValueError(
            f"queue_bytes_max is {bytes_max}, wants 1 or more bytes, or 0 for no bound"
        )
    if bytes_max == 0:
        log.warning(
            "queue_bytes_max is 0: the arguments of queued functions take memory without a bound"
        )
    return bytes_max


class QueueBounds:
    """The bounds of one coordinator's queue, and the bytes of arguments that it holds for unfinished
    work.

    Args:
      works_max: the bound of the number of work items that wait, which its user checks.
      bytes_max: the bound; 0 means no bound.
      size_of: returns the bytes of the large part with this number in the coordinator's store.

    Attributes:
      room: the number of work items that may be handed in before it must be counted again.
      counted_bytes: the bytes counted now: the packed bytes of all counted work, and the sizes of all its
        parts, each part once.
    """

    def __init__(self, works_max: int, bytes_max: int, size_of: Callable[[int], int]) -> None:
        self.works_max = works_max
        self.room = 0
        self.bytes_max = bytes_max
        self.counted_bytes = 0
        self._size_of = size_of
        self._parts: dict[int, tuple[int, int]] = {}
        """The size of each part, and the number of counted work items that share the part: part ->
        (size, count)."""
        self._warned_idle = False

    def fits(self, nbytes: int, parts: Sequence[int]) -> bool:
        """Return whether a work item with `nbytes` of packed arguments and these parts may be
        scheduled now."""
        if (
            not self.bytes_max
            or not self.counted_bytes
            or (nbytes <= SMALL_BYTES_MAX and not parts)
        ):
            return True
        return self.counted_bytes + self.needed(nbytes, parts) <= self.bytes_max

    def needed(self, nbytes: int, parts: Sequence[int]) -> int:
        """Return the number of bytes by which a work item with these packed arguments and parts
        would increase `counted_bytes`."""
        return nbytes + sum(self._size_of(part) for part in set(parts) if part not in self._parts)

    def begin(self, extra: Extra, nbytes: int, parts: Sequence[int]) -> None:
        """Count a scheduled work item, unless it is small."""
        if nbytes <= SMALL_BYTES_MAX and not parts:
            return
        self.counted_bytes += self.needed(nbytes, parts)
        for part in parts:
            size, users = self._parts.get(part) or (self._size_of(part), 0)
            self._parts[part] = size, users + 1
        extra.counted = nbytes, tuple(parts)

    def end(self, extra: Extra) -> None:
        """Remove a work item that has ended from the count, if it is counted."""
        if extra.counted is None:
            return
        (nbytes, parts), extra.counted = extra.counted, None
        self.counted_bytes -= nbytes
        for part in parts:
            size, users = self._parts[part]
            if users > 1:
                self._parts[part] = size, users - 1
            else:
                del self._parts[part]
                self.counted_bytes -= size

    def warn_if_workers_idle(self, idle: int, nbytes: int, parts: Sequence[int]) -> None:
        """Log that `schedule` waits because of `bytes_max` although `idle` workers have no work.
        Log this once, and not if `idle` is 0."""
        if self._warned_idle or idle <= 0 or self.fits(nbytes, parts):
            return
        self._warned_idle = True
        log.warning(
            "schedule() waits, and %d workers are idle: the arguments of unfinished work take %d "
            "bytes, the next ones take %d more, and"
            " queue_bytes_max is %d. Schedule smaller arguments, or raise queue_bytes_max if "
            "there is enough memory",
            idle,
            self.counted_bytes,
            self.needed(nbytes, parts),
            self.bytes_max,
        )
