"""Sets of numbers, stored as sorted runs. The machine uses them for the finished steps of a long
sequence.

*Invariant*: a set is a sorted list of runs (start, stop), where `stop` is excluded, and no two runs
  overlap or touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TypeAlias

Runs: TypeAlias = list[tuple[int, int]]

_start, _stop = itemgetter(0), itemgetter(1)


def add(runs: Runs, start: int, stop: int) -> None:
    """Add start, ..., stop - 1 to a set."""
    if start >= stop:
        return
    low = bisect_left(runs, start, key=_stop)
    high = bisect_right(runs, stop, key=_start)
    if low < high:
        start, stop = min(start, runs[low][0]), max(stop, runs[high - 1][1])
    runs[low:high] = [(start, stop)]


def end_of(runs: Runs, number: int) -> int | None:
    """Return the `stop` of the run that contains `number`, or None if the set does not contain
    `number`."""
    index = bisect_right(runs, number, key=_start) - 1
    return runs[index][1] if index >= 0 and number < runs[index][1] else None


def without(runs: Runs, excluded: Runs) -> Runs:
    """Return the numbers that are in `runs` and not in `other`, as a set."""
    left: Runs = []
    for start, stop in runs:
        for from_, to in excluded[bisect_right(excluded, start, key=_stop) :]:
            if from_ >= stop:
                break
            add(left, start, from_)
            start = to
        add(left, start, stop)
    return left


def members(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the numbers of a set in order."""
    for start, stop in runs:
        yield from range(start, stop)
