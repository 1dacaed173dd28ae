"""When the work of the timeline was submitted, came to the dispatcher and was handed out. No I/O.

Leases, and mostly work items too, have ascending numbers. So one entry has the time of all that came
or were handed out together, and costs the same however many these are. Work items that come
otherwise, because they waited for inputs or are retries, have entries of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from math import inf
from typing import Final

from zmqdist.limits import EVENTS_KEPT
from zmqdist.messages import SUBMISSION_SHIFT, Item

SPANS_MAX: Final = 10_000


class Spans:
    """Times by ascending numbers. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, float]] = []
        """The first number, the number after the last one, and their time."""

    def add(self, first: int, end: int, at: float) -> None:
        """Record the time of the numbers from `first` to `end` - 1, above those before."""
        if len(self._spans) >= SPANS_MAX:
            del self._spans[: SPANS_MAX // 2]
        self._spans.append((first, end, at))

    def is_above(self, first: int) -> bool:
        return not self._spans or first >= self._spans[-1][1]

    def time_of(self, number: int) -> float:
        """Return the time of a number, 0 if it is not known."""
        after = bisect_right(self._spans, (number, inf, 0.0))
        _, end, at = self._spans[after - 1] if after else (0, 0, 0.0)
        return at if number < end else 0.0


class RunTimes:
    """The times of work while a watcher asks for the timeline.

    Attributes:
      handed_out: by the numbers of leases.
    """

    def __init__(self) -> None:
        self.handed_out = Spans()
        self._came: dict[int, Spans] = {}
        self._alone: OrderedDict[tuple[int, int, int], tuple[float, float]] = OrderedDict()
        """By program, work item and submission."""

    def note_submitted(
        self,
        coordinator: int,
        items: list[Item],
        waited: dict[int, float],
        now: float,
        *,
        retried: int = 0,
    ) -> None:
        """Record items that have come, of which so many are retries. `waited` has the seconds that
        some have waited in their program."""
        first, end = items[0][0], items[-1][0] + 1
        spans = self._came.setdefault(coordinator, Spans())
        if end - first == len(items) and spans.is_above(first) and not (waited or retried):
            spans.add(first, end, now)
            return
        alone = self._alone
        for work, attempt, _, _, _ in items:
            key = coordinator, work, attempt >> SUBMISSION_SHIFT
            alone[key] = now - waited.get(work, 0.0), now
        while len(alone) > EVENTS_KEPT:
            alone.popitem(last=False)

    def submitted(self, coordinator: int, work: int, attempt: int) -> tuple[float, float]:
        """Return when the program submitted a work item, and when it came here, because its inputs
        were there; 0 if that is not known."""
        submission = attempt >> SUBMISSION_SHIFT
        spans = self._came.get(coordinator)
        # a span has first submissions only
        at = 0.0 if submission or spans is None else spans.time_of(work)
        return self._alone.get((coordinator, work, submission), (at, at))
