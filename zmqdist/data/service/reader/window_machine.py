"""Which tasks a reader asks next: some batches of each are asked for ahead, the one that was asked longest ago first.

Promises
    W1  A task that has ended, is gone, or failed to answer less than its pause ago, and has not answered since, is not asked.
    W2  At most AHEAD questions are with a task; questions and batches that wait for the consumer are never more than the window holds, so
        that a slow consumer makes no reader fill its memory. Where the consumer has nothing because a certain batch is not here, and the
        window is full of others, each task is asked once all the same: one of them has it. Where the user allows so many, one in all is.
    W3  A task with a new incarnation is asked anew, also one that had ended or failed before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Final

from zmqdist.data.service.reader.delivery import BATCH_BYTES, ELEMENTS_MAX, Ask, News, Wanted
from zmqdist.data.service.retry import longer

AHEAD: Final = 2
"""Batches asked for of each task."""

TURN_S: Final = 0.02
"""Where there are more tasks than questions allowed, one that has nothing is left for the next after so long."""

LONG_TURN_S: Final = 1.0
"""Where there are enough questions for all, there may be more tasks a moment later, and one that has nothing must not have the only one."""

PAUSE_S_MAX: Final = 0.01
"""A task that does not answer is asked again at least so often: the dispatcher lists tasks before their workers have begun them, so the
first questions of each iteration may fail, and a longer pause would delay its first elements."""


@dataclass(eq=False)
class TaskSource:
    """One task, in one incarnation of its worker.

    Attributes:
      asked, asked_at: questions that are with it; its place among those of which not all can be asked at once.
      gone: not to be asked any more; what was asked may still come.
      pause_s, paused_until: how long it is not asked after its last failure, and when that ends.
      in_hand: of portions: those that it had when it answered last; none after an answer that was lost, with which it may have lost them.
    """

    task: int
    address: str
    incarnation: int
    in_flight: int = 0
    turn: int = 0
    ended: bool = False
    dropped: bool = False
    pause_s: float = 0.0
    paused_until: float = -inf
    in_hand: tuple[int, ...] = ()


class TaskWindow:
    """See the module's docstring.

    Attributes:
      sources: by the numbers of tasks.
      held: questions asked, and batches that the consumer has not taken.
    """

    def __init__(self, reader: int, trainer: str, outstanding_max: int) -> None:
        """`outstanding_max`: elements that the user allows to be asked for; negative: as many as are good."""
        self.sources: dict[int, TaskSource] = {}
        self.held = 0
        self._reader = reader
        self._trainer = trainer
        self._limit = outstanding_max
        self._counter = itertools.count()
        self._for_others = self._awaits_worker = False

    def note(self, news: News) -> None:
        """Take over which tasks there are."""
        self._for_others = news.for_others
        self._awaits_worker = any(not place.where for place in news.tasks)
        listed = {place.task for place in news.tasks if place.where}
        for place in news.tasks:
            known = self.sources.get(place.task)
            if place.where and (known is None or known.incarnation != place.life):
                self.sources[place.task] = TaskSource(place.task, place.address, place.life)
        for task, source in self.sources.items():
            source.dropped = task not in listed

    @property
    def deadline(self) -> float:
        """When the next pause ends."""
        return min((each.paused_until for each in self.sources.values() if each.paused_until > -inf), default=inf)

    def resume(self, now: float) -> None:
        """End the pauses that are over."""
        for source in self.sources.values():
            if source.paused_until <= now:
                source.paused_until = -inf

    def askable(self) -> list[TaskSource]:
        """Tasks that could answer."""
        return [each for each in self.sources.values() if not (each.ended or each.dropped or each.paused_until > -inf)]

    def questions(self, sources: Sequence[TaskSource], starving: bool = False) -> list[Ask]:
        """As many as there is room for, to these.

        The room is for all that could answer: questions are out to others, too, and the consumer may wait for one of these alone.

        Args:
          starving: the consumer has nothing, though batches are here: those are not what comes next.
        """
        sources = sorted(sources, key=attrgetter("in_flight", "turn"))
        limit, count = self._limit, len(self.askable())
        if limit < 0:
            room, each_max, wait_s = AHEAD * (count + 1) - self.held, ELEMENTS_MAX, None
        else:
            each_max = max(1, limit // max(1, AHEAD * count))
            room, wait_s = limit // each_max - self.held, LONG_TURN_S if limit >= count else TURN_S
        asks: list[Ask] = []
        for _ in range(AHEAD):
            for source in sources:
                needed = starving and not source.in_flight and (limit < 0 or not self.has_in_flight)
                if needed or (room > 0 and source.in_flight < AHEAD):
                    room -= 1
                    self.held += 1
                    source.in_flight += 1
                    source.turn = next(self._counter)
                    wanted = Wanted(each_max, BATCH_BYTES, wait_s, self._reader, trainer=self._trainer)
                    asks.append(Ask(source, wanted))
        return asks

    def succeed(self, source: TaskSource) -> None:
        """It has answered: a question that failed before came too early, and the next need not wait."""
        source.pause_s, source.paused_until = 0.0, -inf

    def fail(self, source: TaskSource, now: float) -> None:
        """It did not answer: leave it alone for a while."""
        self.held -= 1
        source.in_hand = ()
        if source.paused_until == -inf:  # the second of two questions that fail together lengthens nothing
            source.pause_s = min(PAUSE_S_MAX, longer(source.pause_s))
            source.paused_until = now + source.pause_s

    @property
    def exhausted(self) -> bool:
        """Nothing more can come: no question is out, and all that this reader reads from has ended.

        A task may give its last batch, and the dispatcher drop it as finished, before it was asked once more and could say so itself.
        """
        if self.has_in_flight or not self._for_others or self._awaits_worker or not self.sources:
            return False
        return all(source.ended or source.dropped for source in self.sources.values())

    @property
    def has_in_flight(self) -> bool:
        """Whether a question is out to a task that there is."""
        return any(source.in_flight for source in self.sources.values())

    def awaited(self) -> str:
        """Of whom nothing has come, for the log."""
        names = sorted(each.address for each in list(self.sources.values()) if not each.ended)
        return f"nothing has come from {', '.join(names) or 'a worker'}"
