"""Decide which tasks get a reader's next requests. The reader requests some batches of each task ahead, and first from the task whose last
request is the oldest.

Promises
    W1  A task gets no request when it has ended, when the dispatcher no longer lists it, or during the pause after a failed request.
    W2  At most AHEAD requests to one task are in flight. Requests in flight and batches that wait for the consumer never exceed the
        window, so that a slow consumer does not fill the reader's memory. Exception: if the consumer needs one certain batch while the
        window is full of others, each task without a request in flight gets a request, because one of them has that batch. If the user
        limits the elements, only one task at a time gets such a request.
    W3  A task in a new incarnation starts afresh, even if it had ended or failed before. A task that is back at an incarnation whose
        requests are still in flight gets new requests after those, so that its batches keep their order.

Invariant: 0 <= in_flight <= AHEAD for each task, and `held` counts all requests in flight and all batches not yet taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Final

from zmqdist.data.service.reader.delivery import BATCH_BYTES, ELEMENTS_MAX, News, RequestElements, Wanted
from zmqdist.data.service.retry import next_pause_s

AHEAD: Final = 2
"""The number of batches that the reader requests ahead from each task."""

TURN_S: Final = 0.02
"""If fewer requests are allowed than there are tasks, a task without elements replies SKIP after this many seconds, and another task gets
the request.
"""

LONG_TURN_S: Final = 1.0
"""If there are enough requests for all tasks, a task without elements replies SKIP after this many seconds. It must not hold a request for
ever, because more tasks may appear."""

PAUSE_S_MAX: Final = 0.01
"""The longest pause before a task that did not reply gets another request, in seconds. The dispatcher lists tasks before their workers have
begun them, so that the first requests of each iteration may fail, and a longer pause would delay its first elements.
"""


@dataclass(eq=False)
class TaskSource:
    """One task, in one incarnation of its worker.

    Attributes:
      in_flight: requests sent and not replied to.
      turn: grows with each request; the task with the lowest turn comes first when there are too few requests for all tasks.
      dropped: the dispatcher no longer lists the task. It gets no further requests, but replies in flight still count.
      pause_s: length of the pause after the last failure, in seconds.
      paused_until: when the pause ends; negative infinity: not paused.
      in_hand: the portions that the task held at its last reply, where the reader reads by portions. Empty after a lost reply, because
        the portions may be lost with it.
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
    """The tasks of one reader, and the room for requests to them.

    Attributes:
      sources: the newest source of each task, by the task's number.
      held: requests in flight, and batches that the consumer has not taken.
    """

    def __init__(self, reader: int, trainer: str, outstanding_max: int) -> None:
        """Start without tasks. `outstanding_max`: how many elements may be requested ahead; negative: as many as the window allows."""
        self.sources: dict[int, TaskSource] = {}
        self._former: dict[tuple[int, int], TaskSource] = {}
        """(task, incarnation of its worker) -> the source of an earlier incarnation that still has requests in flight."""
        self.held = 0
        self._reader = reader
        self._trainer = trainer
        self._limit = outstanding_max
        self._counter = itertools.count()
        self._others_exist = self._awaits_worker = False

    def note(self, news: News) -> None:
        """Update the tasks from the dispatcher's list."""
        self._others_exist = news.others_exist
        self._awaits_worker = any(not place.location for place in news.tasks)
        listed = {place.task for place in news.tasks if place.location}
        for place in news.tasks:
            known = self.sources.get(place.task)
            if place.location and (known is None or known.incarnation != place.incarnation):
                if known is not None:
                    self._former[known.task, known.incarnation] = known
                source = self._former.pop((place.task, place.incarnation), None)
                if source is None or not source.in_flight:
                    source = TaskSource(place.task, place.address, place.incarnation)
                else:  # W3: replies to earlier requests still count, and replies to new requests come after them
                    source.address, source.ended, source.in_hand = place.address, False, ()
                    source.pause_s, source.paused_until = 0.0, -inf
                self.sources[place.task] = source
        for task, source in self.sources.items():
            source.dropped = task not in listed
        self._former = {key: each for key, each in self._former.items() if each.in_flight}

    @property
    def deadline(self) -> float:
        """Return when the next pause ends; infinite: no task is paused."""
        return min((each.paused_until for each in self.sources.values() if each.paused_until > -inf), default=inf)

    def resume(self, now: float) -> None:
        """End the pauses that are over."""
        for source in self.sources.values():
            if source.paused_until <= now:
                source.paused_until = -inf

    def available(self) -> list[TaskSource]:
        """Return the tasks that may get a request."""
        return [each for each in self.sources.values() if not (each.ended or each.dropped or each.paused_until > -inf)]

    def requests(self, sources: Sequence[TaskSource], starving: bool = False) -> list[RequestElements]:
        """Return as many requests to `sources` as there is room for, and count them as in flight.

        The room depends on all tasks that may get a request, not on `sources` alone: requests to the others are in flight as well, and the
        consumer may wait for one of `sources`.

        Args:
          starving: the consumer waits although batches have arrived, because none of them is the next one in order.
        """
        sources = sorted(sources, key=attrgetter("in_flight", "turn"))
        limit, count = self._limit, len(self.available())
        if limit < 0:
            room, each_max, wait_s = AHEAD * (count + 1) - self.held, ELEMENTS_MAX, None
        else:
            each_max = max(1, limit // max(1, AHEAD * count))
            room, wait_s = limit // each_max - self.held, LONG_TURN_S if limit >= count else TURN_S
        asks: list[RequestElements] = []
        for _ in range(AHEAD):
            for source in sources:
                # W2: send it although the window is full, because one of these tasks has the batch that the consumer waits for.
                needed = starving and not source.in_flight and (limit < 0 or not self.has_in_flight)
                if needed or (room > 0 and source.in_flight < AHEAD):
                    room -= 1
                    self.held += 1
                    source.in_flight += 1
                    source.turn = next(self._counter)
                    wanted = Wanted(each_max, BATCH_BYTES, wait_s, self._reader, trainer=self._trainer)
                    asks.append(RequestElements(source, wanted))
        return asks

    def succeed(self, source: TaskSource) -> None:
        """Note a reply with elements. It ends the pause after an earlier failure."""
        source.pause_s, source.paused_until = 0.0, -inf

    def fail(self, source: TaskSource, now: float) -> None:
        """Note a failed request: the task gets no request for a while."""
        self.held -= 1
        source.in_hand = ()
        if source.paused_until == -inf:  # two requests that fail together lengthen the pause once
            source.pause_s = min(PAUSE_S_MAX, next_pause_s(source.pause_s))
            source.paused_until = now + source.pause_s

    @property
    def exhausted(self) -> bool:
        """Whether nothing more can arrive: no request is in flight, and all tasks that this reader reads have ended.

        A dropped task counts as ended: the dispatcher may drop a task after its last batch, before a further request could get END from it.
        """
        if self.has_in_flight or not self._others_exist or self._awaits_worker or not self.sources:
            return False
        return all(source.ended or source.dropped for source in self.sources.values())

    @property
    def has_in_flight(self) -> bool:
        """Whether a request to any task is in flight."""
        return any(source.in_flight for source in self.sources.values())

    def describe_wait(self) -> str:
        """Return which workers have sent nothing, as a text for the log."""
        names = sorted(each.address for each in list(self.sources.values()) if not each.ended)
        return f"nothing has come from {', '.join(names) or 'a worker'}"
