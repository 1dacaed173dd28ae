"""The bounds of a coordinator: what users may ask for, and how many bytes of arguments are held for work that has not ended.

Rules
    Counted are packed arguments, and the large arrays that lie beside them or beside a function's pickle, from `schedule` until the work
    has ended: so long they take memory here, also while the work runs. What several pieces of work share counts once.
    One piece of work that is larger than the whole bound fits when nothing else is counted; else it would wait for ever.
    Not counted is what does not end with its work: per-worker resources, and what a lineage remembers.

Everything here runs with the coordinator's lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from zmqdist import limits
from zmqdist.errors import InvalidArgumentError
from zmqdist.transport.memory_limits import usable_bytes

SMALL_BYTES_MAX: Final = 256
"""Packed arguments that are not larger are not counted: the record of a piece of work takes as much, and `queue_max` bounds these."""


log = logging.getLogger("zmqdist.coordinator")


def checked_queue_max(queue_max: int) -> int:
    """The bound on waiting pieces of work that a user means. Raises ValueError for what is none."""
    if queue_max < 0:
        raise ValueError(f"queue_max is {queue_max}, wants 1 or more, or 0 for no bound")
    if queue_max == 0:
        log.warning(
            "queue_max is 0: schedule() waits for queue_bytes_max only, however many pieces of work are ahead of the workers"
        )
        return limits.QUEUE_UNBOUNDED
    return queue_max


def check_seconds(**durations: float) -> None:
    """Raises InvalidArgumentError for a duration that is negative or no number."""
    for name, seconds in durations.items():
        if not seconds >= 0:  # so that NaN is refused, too
            raise InvalidArgumentError(f"{name} is {seconds}, wants 0 s or more")


def checked_bytes_max(bytes_max: int | None) -> int:
    """The bound that a user means; None: that of this machine or control group. Raises ValueError for what is none."""
    if bytes_max is None:
        return usable_bytes() // limits.QUEUE_MEMORY_SHARE
    if bytes_max < 0:
        raise ValueError(f"queue_bytes_max is {bytes_max}, wants 1 or more bytes, or 0 for no bound")
    if bytes_max == 0:
        log.warning(
            "queue_bytes_max is 0: arguments that are scheduled ahead of the workers take memory without a bound"
        )
    return bytes_max


class QueueBytes:
    """The count of one coordinator.

    Args:
      bytes_max: the bound; 0 for none.
      size_of: bytes of a large part, by its number in the coordinator's store.

    Attributes:
      held: bytes that are counted now.
      works: of each piece of work that is counted, its packed bytes and its parts.
    """

    def __init__(self, bytes_max: int, size_of: Callable[[int], int]) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._size_of = size_of
        self.works: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._parts: dict[int, tuple[int, int]] = {}
        """Bytes of a part, and how many pieces of work have it."""
        self._warned_idle = False

    def fits(self, nbytes: int, parts: Sequence[int]) -> bool:
        """Whether one more may be scheduled, with packed arguments of so many bytes and these parts."""
        if not self.bytes_max or not self.held or (nbytes <= SMALL_BYTES_MAX and not parts):
            return True
        return self.held + self.needed(nbytes, parts) <= self.bytes_max

    def needed(self, nbytes: int, parts: Sequence[int]) -> int:
        """By how much `held` would grow."""
        return nbytes + sum(self._size_of(part) for part in set(parts) if part not in self._parts)

    def begin(self, work: int, nbytes: int, parts: Sequence[int]) -> None:
        """This was scheduled."""
        if nbytes <= SMALL_BYTES_MAX and not parts:
            return
        self.held += self.needed(nbytes, parts)
        for part in parts:
            size, users = self._parts.get(part) or (self._size_of(part), 0)
            self._parts[part] = size, users + 1
        self.works[work] = nbytes, tuple(parts)

    def end(self, work: int) -> None:
        """This has ended; nothing where it is not counted."""
        nbytes, parts = self.works.pop(work, (0, ()))
        self.held -= nbytes
        for part in parts:
            size, users = self._parts[part]
            if users > 1:
                self._parts[part] = size, users - 1
            else:
                del self._parts[part]
                self.held -= size
        if not self.works:
            self.works = {}  # a dict keeps the room that it once needed

    def warn_if_workers_idle(self, idle: int, nbytes: int, parts: Sequence[int]) -> None:
        """Somebody waits while so many workers have nothing to do: say once that the reason is this bound, where it is."""
        if self._warned_idle or idle <= 0 or self.fits(nbytes, parts):
            return
        self._warned_idle = True
        log.warning(
            "schedule() waits, and %d workers are idle: the arguments of unfinished work take %d bytes, the next ones take %d more, and"
            " queue_bytes_max is %d. Schedule smaller pieces, or give the coordinator a larger queue_bytes_max where there is memory",
            idle,
            self.held,
            self.needed(nbytes, parts),
            self.bytes_max,
        )

    def clear(self) -> None:
        """Everything has ended."""
        self.works, self._parts, self.held = {}, {}, 0
